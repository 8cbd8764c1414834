package addressbook

import "slices"

// BindAction tells apart, in grants, a rebinding that protects, one that leaves or
// takes the protection away, and one that forgets: who approved one of them did not
// approve the others.
func BindAction(protected, forget bool) string {
	switch {
	case forget:
		return "forget"
	case protected:
		return "protect"
	}
	return ""
}

// usualPort reports whether an address has one of the ports that Normalise gives to
// those without: forwarded BMCs, of which one host has many, are at others.
func usualPort(plain string) bool {
	_, port, err := split(plain)
	return err == nil && (port == "443" || port == "80" || port == "623")
}

// Protected reports whether the BMC at addr, an address in its plain form, is
// one whose destruction always needs people's grants. An address that nobody knows
// yet is what the others of its host are: it may be another port of the same BMC.
// A host name may be another name of any, and so may an address that is translated
// on the way: where one is protected all of these are. In a suspect book an
// address that nobody knows is protected, and so are all names and translated ones.
func (b *Book) Protected(addr string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if elsewhere(addr) {
		if b.suspect {
			return true
		}
		for _, e := range b.bindings {
			if e.Protected && hostOf(e.Address) != "" {
				return true
			}
		}
		return false
	}
	if have, known := b.bindings[addr]; known {
		return have.Protected
	}
	return b.protectedHost(addr)
}

// protectedHost reports whether any BMC at the host of addr is protected, or may
// have been; the caller holds mu.
func (b *Book) protectedHost(addr string) bool {
	host := hostOf(addr)
	return b.suspect || host != "" && slices.ContainsFunc(b.at(host, ""), func(e binding) bool { return e.Protected })
}
