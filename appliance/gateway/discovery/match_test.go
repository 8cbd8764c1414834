package discovery

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/metal"
)

const (
	uuid1, swapped1 = "4c4c4544-0042-3010-8056-b4c04f303232", "44454c4c-4200-1030-8056-b4c04f303232"
	uuid2           = "564d9ac5-0a2d-4b6e-9c1d-0c2b3f4a5e6d"
	mac1            = "52:54:00:00:00:01"
	mac2            = "52:54:00:00:00:02"
	mac3            = "52:54:00:00:00:03"
)

func seen(mac, uuid string) store.Found { return store.Found{MAC: mac, ProductUUID: uuid} }

func inspected(mac, dhcp, uuid string, macs ...string) store.Found {
	i := metal.Inspection{Source: "ramdisk", ProductUUID: uuid}
	for _, m := range macs {
		i.NICs = append(i.NICs, metal.NIC{MAC: m})
	}
	data, _ := json.Marshal(i) // strings always encode
	return store.Found{MAC: mac, ProductUUID: dhcp, Inspection: string(data)}
}

func enrolled(name, uuid string, macs ...string) store.Machine {
	return store.Machine{ID: "node_" + name, Name: name, ProductUUID: uuid, MACs: macs}
}

func TestMatches(t *testing.T) {
	for _, tt := range []struct {
		title    string
		found    []store.Found
		machines []store.Machine
		want     string // of each found machine: MAC, proposal and how, notes
	}{
		{"seen by DHCP alone", []store.Found{seen(mac1, uuid1)}, []store.Machine{enrolled("a", uuid1)}, "01: a by product-uuid"},
		{"in capitals", []store.Found{seen(mac1, strings.ToUpper(uuid1))}, []store.Machine{enrolled("a", uuid1)}, "01: a by product-uuid"},
		{"in the other byte order", []store.Found{seen(mac1, swapped1)}, []store.Machine{enrolled("a", uuid1)}, "01: a by product-uuid-swapped"},
		{"inspected", []store.Found{inspected(mac1, "", uuid1, mac1)}, []store.Machine{enrolled("a", uuid1)}, "01: a by product-uuid"},
		{"firmware and ramdisk differ in the byte order", []store.Found{inspected(mac1, swapped1, uuid1, mac1)}, []store.Machine{enrolled("a", swapped1)}, "01: a by product-uuid-swapped"},
		{"firmware and ramdisk differ", []store.Found{inspected(mac1, uuid2, uuid1, mac1)}, []store.Machine{enrolled("a", uuid1), enrolled("b", uuid2)}, "01: its firmware says"},
		{"enrolled with another", []store.Found{seen(mac1, uuid2)}, []store.Machine{enrolled("a", uuid1)}, "01: "},
		{"enrolled with none", []store.Found{seen(mac1, "")}, []store.Machine{enrolled("a", "")}, "01: "},
		{"zeros", []store.Found{seen(mac1, "00000000-0000-0000-0000-000000000000")}, []store.Machine{enrolled("a", "00000000-0000-0000-0000-000000000000")}, "01: tells it from no other"},
		{"ones", []store.Found{seen(mac1, "ffffffff-ffff-ffff-ffff-ffffffffffff")}, []store.Machine{enrolled("a", "ffffffff-ffff-ffff-ffff-ffffffffffff")}, "01: tells it from no other"},
		{"what a maker gave to many", []store.Found{seen(mac1, "03000200-0400-0500-0006-000700080009")}, []store.Machine{enrolled("a", "03000200-0400-0500-0006-000700080009")}, "01: tells it from no other"},
		{"two enrolled with one", []store.Found{seen(mac1, uuid1)}, []store.Machine{enrolled("a", uuid1), enrolled("b", swapped1)}, "01: a and b are enrolled with"},
		{"two found with one", []store.Found{seen(mac1, uuid1), seen(mac2, swapped1)}, []store.Machine{enrolled("a", uuid1)}, "01: were found with one product UUID; 02: were found with one product UUID"},
		{"two found with one that nobody has", []store.Found{seen(mac1, uuid1), seen(mac2, uuid1)}, nil, "01: were found with one product UUID; 02: were found with one product UUID"},
		{"two ports of one machine", []store.Found{inspected(mac1, uuid1, uuid1, mac1, mac2), seen(mac2, uuid1)}, []store.Machine{enrolled("a", uuid1)}, "01: a by product-uuid; 02: a by product-uuid"},
		{"two ports, the second inspected", []store.Found{seen(mac1, uuid1), inspected(mac2, uuid1, uuid1, mac1, mac2)}, []store.Machine{enrolled("a", uuid1)}, "01: a by product-uuid; 02: a by product-uuid"},
		{"two ports and another machine", []store.Found{inspected(mac1, uuid1, uuid1, mac1, mac2), seen(mac2, uuid1), seen(mac3, uuid1)}, []store.Machine{enrolled("a", uuid1)},
			"01: were found with one product UUID; 02: were found with one product UUID; 03: were found with one product UUID"},
		{"who claims another's port", []store.Found{inspected(mac1, uuid1, uuid1, mac1), inspected(mac2, uuid1, uuid1, mac1, mac2)}, []store.Machine{enrolled("a", uuid1)},
			"01: were found with one product UUID; 02: were found with one product UUID"},
		{"one more port of a machine that has others", []store.Found{inspected(mac2, "", "", mac1, mac2)}, []store.Machine{enrolled("a", "", mac1)}, "02: a by mac"},
		{"port and UUID agree", []store.Found{inspected(mac2, "", uuid1, mac1, mac2)}, []store.Machine{enrolled("a", uuid1, mac1)}, "02: a by product-uuid"},
		{"port and UUID disagree", []store.Found{inspected(mac2, "", uuid1, mac1, mac2)}, []store.Machine{enrolled("a", uuid1), enrolled("b", "", mac1)}, "02: are those of a and b"},
		{"ports of two machines", []store.Found{inspected(mac3, "", "", mac1, mac2, mac3)}, []store.Machine{enrolled("a", "", mac1), enrolled("b", "", mac2)}, "03: are those of a and b"},
		{"woken by its port", []store.Found{seen(mac1, "")}, []store.Machine{{ID: "node_w", Name: "w", BMC: store.BMC{Driver: "wol", Address: "52-54-00-00-00-01@lan0"}}}, "01: w by mac"},
		{"a damaged report", []store.Found{{MAC: mac1, ProductUUID: uuid1, Inspection: `{"nics":1}`}}, []store.Machine{enrolled("a", uuid1)}, "01: a by product-uuid, what its ramdisk reported cannot be read"},
	} {
		var got []string
		for _, m := range Matches(tt.found, tt.machines) {
			var said []string
			for _, p := range m.Proposals {
				said = append(said, p.Machine.Name+" by "+p.By)
				if p.Reason == "" {
					t.Errorf("%s: a proposal without a reason", tt.title)
				}
			}
			got = append(got, fmt.Sprintf("%s: %s", m.MAC[15:], strings.Join(append(said, m.Notes...), ", ")))
		}
		wants := strings.Split(tt.want, "; ")
		if len(got) != len(wants) {
			t.Errorf("%s: Matches = %q, want %q", tt.title, got, wants)
			continue
		}
		for i, want := range wants {
			mac, text, _ := strings.Cut(want, ": ")
			if rest, ok := strings.CutPrefix(got[i], mac+": "); !ok || !strings.Contains(rest, text) || (text == "") != (rest == "") || strings.Contains(text, " by ") != strings.Contains(rest, " by ") {
				t.Errorf("%s: Matches = %q, want %q", tt.title, got[i], want)
			}
		}
	}
}

// TestReadBounds: what one machine says of itself fits into a list.
func TestReadBounds(t *testing.T) {
	long := strings.Repeat("x", 10_000)
	macs := []string{"01:00:5e:00:00:01", "52:54:00:00:00:00:00:01", "no MAC", "52-54-00-00-00-AA"}
	for i := range 200 {
		macs = append(macs, fmt.Sprintf("52:54:00:00:01:%02x", i))
	}
	f := inspected(mac1, "", "", macs...)
	f.Inspection = strings.Replace(f.Inspection, `"source"`, `"serial":"`+long+`","model":"\u001b`+long+`","manufacturer":"`+long+`","productUuid":"`+long+`","processors":[{"model":"`+long+`"}],"source"`, 1)
	m := Matches([]store.Found{f}, nil)[0]
	if len(m.MACs) > maxPorts || !slices.Contains(m.MACs, mac1) || !slices.Contains(m.MACs, "52:54:00:00:00:aa") || slices.Contains(m.MACs, macs[0]) || slices.Contains(m.MACs, macs[1]) {
		t.Errorf("%d MACs: %q", len(m.MACs), m.MACs)
	}
	for _, text := range append(m.Notes, m.Hardware.Serial, m.Hardware.Model, m.Hardware.Manufacturer, m.Processors()) {
		if len(text) > 300 || strings.Contains(text, "\x1b") {
			t.Errorf("%.80q… has %d bytes", text, len(text))
		}
	}
}

func FuzzMatches(f *testing.F) {
	f.Add(uuid1, `{"productUuid":"x","nics":[{"mac":"52:54:00:00:00:01"}],"processors":[{"cores":1}],"memory":[{"size_bytes":1}]}`)
	f.Fuzz(func(t *testing.T, uuid, inspection string) {
		found := []store.Found{{MAC: mac1, ProductUUID: uuid, Inspection: inspection}, seen(mac2, uuid1)}
		for _, m := range Matches(found, []store.Machine{enrolled("a", uuid1), enrolled("b", uuid2, mac3)}) {
			if len(m.Proposals) > 1 || len(m.MACs) > maxPorts+1 {
				t.Errorf("Matches(%q, %q) = %+v", uuid, inspection, m)
			}
			m.Processors()
			m.Memory()
		}
	})
}

func TestSummary(t *testing.T) {
	m := Match{Hardware: metal.Inspection{
		Processors: []metal.Processor{{Model: "Xeon", Cores: 16}, {Model: "Xeon", Cores: 16}, {Cores: 2}},
		Memory:     []metal.Memory{{SizeBytes: 1 << 34}, {SizeBytes: 1 << 34}},
	}}
	if got, want := m.Processors(), "2 x Xeon (32 cores), 1 x processor (2 cores)"; got != want || m.Memory() != 1<<35 {
		t.Errorf("Processors() = %q, want %q; Memory() = %d", got, want, m.Memory())
	}
}

// TestNotesAreBounded: who makes up machines with one UUID makes up short notes.
func TestNotesAreBounded(t *testing.T) {
	var all []store.Found
	for i := range 200 {
		all = append(all, seen(fmt.Sprintf("52:54:00:00:01:%02x", i), uuid1))
	}
	for _, m := range Matches(all, nil) {
		if len(m.Notes) != 1 || len(m.Notes[0]) > 400 || !strings.Contains(m.Notes[0], "and 192 more") {
			t.Fatalf("notes = %q, want one that names 8 of 200", m.Notes)
		}
	}
}
