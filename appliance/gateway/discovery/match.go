package discovery

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/metal"
	"github.com/better-compute/site-appliance/pxe/productuuid"
)

// By what a found machine seems to be an enrolled one.
const (
	ByUUID    = "product-uuid"
	BySwapped = "product-uuid-swapped"
	ByMAC     = "mac"
)

// Proposal is an enrolled machine that a found one seems to be.
type Proposal struct {
	Machine store.Machine
	By      string
	Reason  string // for people
}

// Match is what is known of a found machine.
type Match struct {
	store.Found
	// Hardware is what its ramdisk reported, and MACs all of its ports that boot may come by.
	Hardware metal.Inspection
	MACs     []string
	// UUID is empty where it tells nothing.
	UUID      string
	Proposals []Proposal
	// Notes say what stands in the way of a proposal.
	Notes []string
}

// Matches says of each found machine of a site which of the site's enrolled ones
// it seems to be. What is told twice is never matched: a person decides.
func Matches(found []store.Found, machines []store.Machine) []Match {
	out := make([]Match, len(found))
	for i, f := range found {
		out[i] = read(f)
	}
	byUUID, byMAC := map[string][]store.Machine{}, map[string]store.Machine{}
	for _, m := range machines {
		if key := productuuid.Key(m.ProductUUID); key != "" {
			byUUID[key] = append(byUUID[key], m)
		}
		for _, mac := range m.MACs {
			byMAC[mac] = m
		}
	}
	for _, m := range machines {
		if mac := woken(m); mac != "" && byMAC[mac].ID == "" {
			byMAC[mac] = m
		}
	}
	same := groups(out)
	claims := map[string]map[int][]string{} // UUID -> machine by group -> its MACs
	for i, m := range out {
		if key := productuuid.Key(m.UUID); key != "" {
			if claims[key] == nil {
				claims[key] = map[int][]string{}
			}
			claims[key][same[i]] = append(claims[key][same[i]], m.MAC)
		}
	}
	for i := range out {
		m := &out[i]
		if key := productuuid.Key(m.UUID); key != "" {
			m.byUUID(byUUID[key], claims[key])
		}
		m.byMAC(byMAC)
	}
	return out
}

// woken is the MAC that switches a machine of driver wol on: one of its ports.
func woken(m store.Machine) string {
	text, _, _ := strings.Cut(m.BMC.Address, "@")
	mac, err := net.ParseMAC(text)
	if m.BMC.Driver != "wol" || err != nil {
		return ""
	}
	return mac.String()
}

// maxPorts bounds the ports that a machine is believed to have.
const maxPorts = 64

// read takes a row apart. Two UUIDs that are not one in two byte orders count as none.
func read(f store.Found) Match {
	m := Match{Found: f, MACs: []string{f.MAC}}
	if f.Inspection != "" && json.Unmarshal([]byte(f.Inspection), &m.Hardware) != nil {
		m.Hardware = metal.Inspection{}
		m.Notes = append(m.Notes, "what its ramdisk reported cannot be read")
	}
	for _, text := range []*string{&m.Hardware.Manufacturer, &m.Hardware.Model, &m.Hardware.Serial, &m.Hardware.ProductUUID} {
		*text = short(*text)
	}
	for _, n := range m.Hardware.NICs {
		if mac, err := net.ParseMAC(n.MAC); err == nil && len(mac) == 6 && mac[0]&1 == 0 && len(m.MACs) < maxPorts {
			m.MACs = append(m.MACs, mac.String())
		}
	}
	slices.Sort(m.MACs)
	m.MACs = slices.Compact(m.MACs)
	said, inspected := f.ProductUUID, m.Hardware.ProductUUID
	switch {
	case !productuuid.None(said) && !productuuid.None(inspected):
		m.UUID = strings.ToLower(inspected)
		if same, _ := productuuid.Same(said, inspected); !same {
			m.UUID = ""
			m.Notes = append(m.Notes, fmt.Sprintf("its firmware says product UUID %s, and its ramdisk read %s", said, inspected))
		}
	case !productuuid.None(inspected):
		m.UUID = strings.ToLower(inspected)
	case !productuuid.None(said):
		m.UUID = strings.ToLower(said)
	case said != "" || inspected != "":
		m.Notes = append(m.Notes, fmt.Sprintf("its product UUID %s tells it from no other machine", cmp.Or(inspected, said)))
	}
	return m
}

// groups numbers rows, the same for those that are ports of one machine by an
// inspection's word, which that of the other port's must not deny.
func groups(all []Match) []int {
	of := make([]int, len(all))
	at := map[string]int{}
	for i, m := range all {
		of[i] = i
		at[m.MAC] = i
	}
	for i, m := range all {
		for _, mac := range m.MACs {
			if j, ok := at[mac]; ok && of[j] != of[i] && (len(all[j].Hardware.NICs) == 0 || slices.Contains(all[j].MACs, m.MAC)) {
				from, to := of[j], of[i]
				for k := range of {
					if of[k] == from {
						of[k] = to
					}
				}
			}
		}
	}
	return of
}

func (m *Match) byUUID(enrolled []store.Machine, claims map[int][]string) {
	switch {
	case len(enrolled) == 0 && len(claims) < 2:
		return
	case len(enrolled) > 1:
		m.Notes = append(m.Notes, fmt.Sprintf("%s are enrolled with its product UUID %s", names(enrolled), m.UUID))
		return
	case len(claims) > 1:
		var macs []string
		for _, some := range claims {
			macs = append(macs, some...)
		}
		slices.Sort(macs)
		m.Notes = append(m.Notes, fmt.Sprintf("%s were found with one product UUID, %s: machines whose maker gave them one, or ports of one that was not inspected", some(macs), m.UUID))
		return
	}
	machine := enrolled[0]
	p := Proposal{Machine: machine, By: ByUUID, Reason: fmt.Sprintf("it is enrolled with product UUID %s", m.UUID)}
	if strings.ToLower(machine.ProductUUID) != m.UUID {
		p.By, p.Reason = BySwapped, fmt.Sprintf("it is enrolled with product UUID %s, which is %s with its first three fields in the other byte order", machine.ProductUUID, m.UUID)
	}
	m.Proposals = append(m.Proposals, p)
}

// byMAC takes a port that an enrolled machine has for that machine's word. Where
// UUID or ports name several machines, none is proposed.
func (m *Match) byMAC(owners map[string]store.Machine) {
	named := map[string]store.Machine{}
	port := map[string]string{}
	for _, p := range m.Proposals {
		named[p.Machine.ID] = p.Machine
	}
	for _, mac := range m.MACs {
		if owner, ok := owners[mac]; ok {
			named[owner.ID], port[owner.ID] = owner, mac
		}
	}
	if len(named) > 1 {
		m.Proposals = nil
		m.Notes = append(m.Notes, fmt.Sprintf("its product UUID and its ports are those of %s", names(slices.Collect(maps.Values(named)))))
		return
	}
	for id, machine := range named {
		if mac := port[id]; mac != "" && len(m.Proposals) == 0 {
			m.Proposals = []Proposal{{Machine: machine, By: ByMAC, Reason: fmt.Sprintf("it has its port %s", mac)}}
		}
	}
}

// mostNamed bounds a note: whoever is on the LAN makes MACs up.
const mostNamed = 8

func some(macs []string) string {
	if more := len(macs) - mostNamed; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(macs[:mostNamed], ", "), more)
	}
	return strings.Join(macs, ", ")
}

func names(machines []store.Machine) string {
	var out []string
	for _, m := range machines {
		out = append(out, m.Name)
	}
	slices.Sort(out)
	return strings.Join(out, " and ")
}
