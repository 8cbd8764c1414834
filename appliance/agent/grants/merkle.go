package grants

import (
	"bytes"
	"crypto/sha256"
	"math/bits"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

// leaf and node hash as RFC 9162, 2.1.1 has it: with a prefix each, so that no
// inner node can pass for a target.
func leaf(target string) []byte {
	sum := sha256.Sum256(append([]byte{0}, target...))
	return sum[:]
}

func node(left, right []byte) []byte {
	h := sha256.New()
	h.Write([]byte{1})
	h.Write(left)
	h.Write(right)
	return h.Sum(nil)
}

// half is the largest power of two below n, which is 2 or more.
func half(n int) int { return 1 << (bits.Len(uint(n-1)) - 1) }

// Root is the tree's root over targets, which are sorted and distinct.
func Root(targets []string) []byte {
	switch len(targets) {
	case 0:
		sum := sha256.Sum256(nil)
		return sum[:]
	case 1:
		return leaf(targets[0])
	}
	k := half(len(targets))
	return node(Root(targets[:k]), Root(targets[k:]))
}

// Prove places targets[index] in the tree over targets (RFC 9162, 2.1.3.1).
func Prove(targets []string, index int) *agentv1.TargetProof {
	return &agentv1.TargetProof{Target: targets[index], Index: uint32(index), Path: path(targets, index)}
}

func path(targets []string, index int) [][]byte {
	if len(targets) == 1 {
		return nil
	}
	k := half(len(targets))
	if index < k {
		return append(path(targets[:k], index), Root(targets[k:]))
	}
	return append(path(targets[k:], index-k), Root(targets[:k]))
}

// Proven reports whether p places its target in a tree of count targets with
// this root (RFC 9162, 2.1.3.2).
func Proven(p *agentv1.TargetProof, count uint32, root []byte) bool {
	if p.GetIndex() >= count {
		return false
	}
	at, last := p.GetIndex(), count-1
	hash := leaf(p.GetTarget())
	for _, sibling := range p.GetPath() {
		if last == 0 || len(sibling) != sha256.Size {
			return false
		}
		if at&1 == 1 || at == last {
			hash = node(sibling, hash)
			for at&1 == 0 && at != 0 {
				at, last = at>>1, last>>1
			}
		} else {
			hash = node(hash, sibling)
		}
		at, last = at>>1, last>>1
	}
	return last == 0 && bytes.Equal(hash, root)
}
