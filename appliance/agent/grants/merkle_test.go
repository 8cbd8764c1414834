package grants

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"
)

// The leaves and roots that Certificate Transparency's implementations share.
var (
	ctLeaves = []string{"", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"}
	ctRoots  = []string{
		"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
		"6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
		"fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
		"aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
		"d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
		"4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
		"76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
		"ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
		"5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
	}
)

func TestRoot(t *testing.T) {
	var leaves []string
	for n := range ctRoots {
		if n > 0 {
			raw, err := hex.DecodeString(ctLeaves[n-1])
			if err != nil {
				t.Fatal(err)
			}
			leaves = append(leaves, string(raw))
		}
		if got := hex.EncodeToString(Root(leaves)); got != ctRoots[n] {
			t.Errorf("Root of %d leaves = %s, want %s", n, got, ctRoots[n])
		}
	}
}

// TestProofs proves every leaf of trees of all small sizes, and nothing else by
// those proofs.
func TestProofs(t *testing.T) {
	var leaves []string
	for n := 1; n <= 40; n++ {
		leaves = append(leaves, fmt.Sprintf("machine:%02d", n))
		root := Root(leaves)
		for i := range leaves {
			p := Prove(leaves, i)
			if !Proven(p, uint32(n), root) {
				t.Fatalf("Proven(leaf %d of %d) = false", i, n)
			}
			q := proto.CloneOf(p)
			if q.Target = "machine:other"; Proven(q, uint32(n), root) {
				t.Errorf("another target is proven by the proof of leaf %d of %d", i, n)
			}
			for j := range n + 2 {
				if q = proto.CloneOf(p); j != i {
					if q.Index = uint32(j); Proven(q, uint32(n), root) {
						t.Errorf("leaf %d of %d is proven at %d", i, n, j)
					}
				}
			}
			for k := range p.Path {
				q = proto.CloneOf(p)
				q.Path[k] = bytes.Clone(q.Path[k])
				if q.Path[k][k%32] ^= 1; Proven(q, uint32(n), root) {
					t.Errorf("leaf %d of %d is proven by a path with a flipped bit", i, n)
				}
			}
			q = proto.CloneOf(p)
			if q.Path = append(q.Path, root); Proven(q, uint32(n), root) {
				t.Errorf("leaf %d of %d is proven by a longer path", i, n)
			}
			if len(p.Path) > 0 {
				q = proto.CloneOf(p)
				if q.Path = q.Path[:len(q.Path)-1]; Proven(q, uint32(n), root) {
					t.Errorf("leaf %d of %d is proven by a shorter path", i, n)
				}
				// An inner node cannot pass for a leaf.
				q = proto.CloneOf(p)
				q.Target = string(append(append([]byte{}, leaf(p.Target)...), p.Path[0]...))
				if q.Path, q.Index = q.Path[1:], q.Index/2; Proven(q, uint32((n+1)/2), root) {
					t.Errorf("an inner node above leaf %d of %d is proven as a target", i, n)
				}
			}
		}
	}
}
