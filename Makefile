# Two commands do all set-up on a fresh Debian 12 with git, make, Go 1.26 and root:
#   make demo   and   make test

BOARD ?= qemu-amd64
VERSION ?= 0.1.0
# The time that builds carry: the newest commit's, so that two builds of one commit are equal.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1767225600)
export SOURCE_DATE_EPOCH
export CGO_ENABLED = 0

LDFLAGS = -s -w -buildid= -X main.version=$(VERSION) -X main.buildTime=$(SOURCE_DATE_EPOCH)
GOBUILD = go build -trimpath -buildvcs=false -ldflags "$(LDFLAGS)"

.PHONY: help demo test check image bench soak spec conformance generate deps build clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

deps: ## install the Debian packages that are missing
	@scripts/deps

build: ## out/bin: bcd, better-compute, bcx-ipmi, bcx-bmclib, bcx-containerd
	@mkdir -p out/bin
	$(GOBUILD) -o out/bin/ ./appliance/cmd/bcd ./appliance/cmd/better-compute ./plugins/cmd/bcx-ipmi ./plugins/cmd/bcx-bmclib ./plugins/cmd/bcx-containerd

image: deps build ## out/BOARD: site.img, site.efi, node.raw.zst, manifest.json
	out/bin/better-compute image build --board $(BOARD) --version $(VERSION) --out out/$(BOARD)

demo: image ## the main job on real parts, with a timeline; KEEP=1 leaves it running
	@$(GOBUILD) -o out/bin/demo ./scripts/demo
	@out/bin/demo

test: image ## every test, the QEMU ones included
	@go run ./scripts/testrun

check: deps ## format, vet, staticcheck, layering, generated code up to date
	@scripts/check

bench: image ## peers side by side; writes out/bench.tsv (ONLY=prefix)
	@go run ./scripts/bench -only "$(ONLY)"

soak: image ## the long tests: kill loops, 10,000 operations on faulty BMCs, every way of network boot, and the fuzzing of every parser (SECONDS_EACH=600)
	@scripts/soak

spec: ## hold the map of the specification against the tests; SPEC_TEXT=file wants every line of it mapped
	@go run ./scripts/spec

conformance: deps build ## every rule of bcx, on the Go SDK's plugin and on Node's
	@scripts/conformance

generate: deps ## regenerate the wire types
	@scripts/generate

clean: ## remove what builds made; the cache of packages stays
	rm -rf out
