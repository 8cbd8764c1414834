package assign

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Changes are what a snapshot would do to machines as they are known now.
type Changes struct {
	// Machines are the ids of those that it changes to anything but their local
	// disk, that it takes a MAC from, or that it leaves out; sorted.
	Machines []string
	// Protected says that one of them is protected.
	Protected bool
	// Artifacts are what those may fetch that are to boot something.
	Artifacts []string
}

// Changes compares req with what is in force. MACs decide: a machine boots what
// its MACs are assigned, under whatever id.
func (s *Store) Changes(req *pxev1.AssignRequest) Changes {
	s.mu.RLock()
	present := s.snapshot
	s.mu.RUnlock()
	return changes(present, req, s.suspect)
}

func changes(present, next *pxev1.AssignRequest, suspect bool) Changes {
	before, after := byMAC(present), byMAC(next)
	touched, protected, artifacts := map[string]bool{}, protectedIDs(present), map[string]bool{}
	for mac, m := range after {
		was := before[mac]
		if was != nil && was.GetMachineId() != m.GetMachineId() {
			touched[was.GetMachineId()] = true
		}
		if m.GetAction() != pxev1.Action_ACTION_LOCAL_DISK && !same(was, m) {
			touched[m.GetMachineId()] = true
			for _, digest := range digests(m) {
				artifacts[digest] = true
			}
			// A MAC that nobody knows any more may be a protected machine's.
			if m.GetProtected() || suspect && was == nil {
				protected[m.GetMachineId()] = true
			}
		}
	}
	for mac, m := range before {
		if after[mac] == nil {
			touched[m.GetMachineId()] = true
		}
	}
	c := Changes{Machines: slices.Sorted(maps.Keys(touched)), Artifacts: slices.Sorted(maps.Keys(artifacts))}
	known := ids(present)
	c.Protected = slices.ContainsFunc(c.Machines, func(id string) bool { return protected[id] || suspect && !known[id] })
	return c
}

// digests are the artifacts that a machine may ask for.
func digests(m *pxev1.Machine) []string {
	all := append([]string{m.GetIso().GetSha256(), m.GetKernel().GetSha256(), m.GetKernel().GetInitrdSha256()}, m.GetArtifacts()...)
	return slices.DeleteFunc(all, func(digest string) bool { return digest == "" })
}

// same reports whether a machine boots the same as before.
func same(was, m *pxev1.Machine) bool {
	if was == nil {
		return false
	}
	a, b := proto.CloneOf(was), proto.CloneOf(m)
	for _, one := range []*pxev1.Machine{a, b} {
		// Another key may have signed the assignment, which says the same as the rest.
		// Which of the box's programs comes first, and what is known of its memory,
		// change nothing that it boots from.
		one.Name, one.Protected, one.Assignment, one.RamBytes, one.Loader = "", false, nil, 0, ""
		slices.Sort(one.Macs)
	}
	return proto.Equal(a, b)
}

func byMAC(req *pxev1.AssignRequest) map[string]*pxev1.Machine {
	out := map[string]*pxev1.Machine{}
	for _, m := range req.GetMachines() {
		for _, mac := range m.GetMacs() {
			out[mac] = m
		}
	}
	return out
}

func protectedIDs(req *pxev1.AssignRequest) map[string]bool {
	out := map[string]bool{}
	for _, m := range req.GetMachines() {
		if m.GetProtected() {
			out[m.GetMachineId()] = true
		}
	}
	return out
}

func ids(req *pxev1.AssignRequest) map[string]bool {
	out := map[string]bool{}
	for _, m := range req.GetMachines() {
		out[m.GetMachineId()] = true
	}
	return out
}

// keepProtected is a copy of req in which what is protected now stays it, or may
// be.
func (s *Store) keepProtected(present, req *pxev1.AssignRequest, unprotect []string) *pxev1.AssignRequest {
	protected, known := protectedIDs(present), ids(present)
	req = proto.CloneOf(req)
	for _, m := range req.GetMachines() {
		if (protected[m.GetMachineId()] || s.suspect && !known[m.GetMachineId()]) && !slices.Contains(unprotect, m.GetMachineId()) {
			m.Protected = true
		}
	}
	return req
}

// Protected reports whether a machine is one whose destruction always needs
// people's grants.
func (s *Store) Protected(machineID string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, m := range s.snapshot.GetMachines() {
		if m.GetMachineId() == machineID {
			return m.GetProtected()
		}
	}
	return s.suspect
}
