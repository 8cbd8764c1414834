package host

import (
	"fmt"
	"hash/fnv"
	"os/user"
	"strconv"
)

// The uids of plugins: reserved for local use by Debian and systemd alike.
const (
	firstUID = 61000
	uidCount = 184
)

// UIDs is the range that the uids of plugins come from: of those with one of
// their own, or, with a shared user (a name or a number), that one.
func UIDs(user string) (first, last int, err error) {
	if user == "" {
		return firstUID, firstUID + uidCount - 1, nil
	}
	uid, _, err := lookupUser(user)
	return uid, uid, err
}

// assignUIDs gives each name a uid of its own. It depends on the names alone,
// so that a plugin keeps its uid over restarts.
func assignUIDs(names []string) (map[string]int, error) {
	if len(names) > uidCount {
		return nil, fmt.Errorf("%d plugins: at most %d have a uid of their own", len(names), uidCount)
	}
	uids, taken := map[string]int{}, map[int]bool{}
	for _, name := range names {
		h := fnv.New32a()
		h.Write([]byte(name))
		slot := int(h.Sum32() % uidCount)
		for taken[slot] {
			slot = (slot + 1) % uidCount
		}
		taken[slot] = true
		uids[name] = firstUID + slot
	}
	return uids, nil
}

// lookupUser finds the shared user of the configuration, by name or number.
func lookupUser(name string) (uid, gid int, err error) {
	if n, err := strconv.ParseUint(name, 10, 31); err == nil {
		return int(n), int(n), nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return 0, 0, fmt.Errorf("plugins' user: %w", err)
	}
	if uid, err = strconv.Atoi(u.Uid); err == nil {
		gid, err = strconv.Atoi(u.Gid)
	}
	return uid, gid, err
}
