package journal

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// ledger is what destructive commands used and counted for.
//
// Ages are the agent's running time: they go on from what the file says, so that a
// reboot takes nothing out of a window, and time that nobody measured lets nothing
// out of it either. No clock has a part in it.
type ledger struct {
	uses map[string]grants.Use // by command
	// counted and used are what uses come to: when each target was last touched
	// without a grant, and how often each grant was used for a target.
	counted map[string]time.Duration
	used    map[grantTarget]uint32
	age     time.Duration // as far as the file knows
	lost    time.Duration // until this age every window is taken for full
	// forgotten is the end of the longest grant whose uses are forgotten, in Unix
	// milliseconds; unsure says that it is to be set from the time of the day first.
	forgotten int64
	unsure    bool
}

type grantTarget struct{ grant, target string }

func newLedger() ledger {
	return ledger{uses: map[string]grants.Use{}, counted: map[string]time.Duration{}, used: map[grantTarget]uint32{}}
}

// The ledger's records beside a command's own: the running time, what a command
// that may be forgotten used, a memory that is gone, and grants that are.
const (
	ageRecord       = "age"
	useRecord       = "use"
	lostRecord      = "lost"
	forgottenRecord = "forgotten"
)

// replay applies a record of the ledger's own, and reports whether it was one.
func (l *ledger) replay(r record) bool {
	l.age = max(l.age, time.Duration(r.AgeMS)*time.Millisecond)
	switch r.Type {
	case ageRecord:
	case useRecord:
		if r.Use != nil {
			l.replace(r.ID, *r.Use)
		}
	case lostRecord:
		l.lost, l.unsure = l.age+grants.LongWindow, r.Unsure
	case forgottenRecord:
		l.forgotten, l.unsure = max(l.forgotten, r.NotAfterMS), false
	default:
		return false
	}
	return true
}

func (l *ledger) records() [][]byte {
	// What was decoded or is plain cannot fail to encode.
	line := func(r record) []byte { data, _ := json.Marshal(r); return data }
	var out [][]byte
	if l.lost > 0 {
		// Its age is that of the loss; the running time follows.
		out = append(out, line(record{Type: lostRecord, AgeMS: (l.lost - grants.LongWindow).Milliseconds(), Unsure: l.unsure}))
	}
	if l.forgotten > 0 {
		out = append(out, line(record{Type: forgottenRecord, NotAfterMS: l.forgotten}))
	}
	if l.unsure && l.forgotten > 0 {
		out = append(out, line(record{Type: lostRecord, AgeMS: (l.lost - grants.LongWindow).Milliseconds(), Unsure: true}))
	}
	for _, id := range slices.Sorted(maps.Keys(l.uses)) {
		use := l.uses[id]
		out = append(out, line(record{Type: useRecord, ID: id, Use: &use}))
	}
	if l.age > 0 {
		out = append(out, line(record{Type: ageRecord, AgeMS: l.age.Milliseconds()}))
	}
	return out
}

func (l *ledger) add(id string, use grants.Use) {
	l.uses[id] = use
	l.age = max(l.age, use.Age)
	l.count(use)
}

// replace is add for a command that may be known to use something else.
func (l *ledger) replace(id string, use grants.Use) {
	if _, known := l.uses[id]; known {
		l.drop(func(one string, _ grants.Use) bool { return one == id })
	}
	l.add(id, use)
}

func (l *ledger) count(use grants.Use) {
	if use.Grant != "" {
		for _, t := range use.Targets {
			l.used[grantTarget{use.Grant, t}]++
		}
	}
	for _, t := range use.InWindows() {
		l.counted[t] = max(l.counted[t], use.Age)
	}
}

// drop forgets the uses that gone names.
func (l *ledger) drop(gone func(id string, u grants.Use) bool) {
	before := len(l.uses)
	maps.DeleteFunc(l.uses, gone)
	if len(l.uses) == before {
		return
	}
	clear(l.counted)
	clear(l.used)
	for _, use := range l.uses {
		l.count(use)
	}
}

// settle gives back what a command used that never started.
func (l *ledger) settle(id string, from, to State) {
	if _, has := l.uses[id]; has && from == Received && (to == Done || to == Cancelled) {
		l.drop(func(one string, _ grants.Use) bool { return one == id })
	}
}

// lose notes that records are gone: for LongWindow of running time nothing
// destructive goes without a grant, and no grant that may have been used then holds.
func (l *ledger) lose() { l.lost, l.unsure = l.age+grants.LongWindow, true }

// Lost is lose for an agent that had a journal before, and has it no more.
func (j *Journal) Lost() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lose()
	return j.note(record{Type: lostRecord, AgeMS: j.age.Milliseconds(), Unsure: true})
}

// note appends a record of the ledger's own. The caller holds mu.
func (j *Journal) note(r record) error {
	if j.log == nil {
		return nil
	}
	data, err := json.Marshal(r)
	if err == nil {
		err = j.log.Append(data, true)
	}
	if err != nil {
		return errs.Retry(errs.NoSpace, "journal: %v", err)
	}
	return nil
}

// Age is the running time that the journal knows of: where this process goes on
// counting.
func (j *Journal) Age() time.Duration {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.age
}

// KeepAge keeps the running time while something depends on it, and forgets what
// has left every window.
func (j *Journal) KeepAge(age time.Duration) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if age <= j.age || len(j.uses) == 0 && j.lost <= j.age {
		return nil
	}
	if err := j.note(record{Type: ageRecord, AgeMS: age.Milliseconds()}); err != nil {
		return err
	}
	j.age = age
	j.drop(func(_ string, u grants.Use) bool { return !u.Keep(age, j.forgotten) })
	return nil
}

// Past is what grants are judged by at a running time. latest is the latest time
// that is known to have been.
func (j *Journal) Past(age time.Duration, latest time.Time) (grants.Past, error) {
	return j.PastBut("", age, latest)
}

// PastBut is Past as if the command of that id had used nothing: it is judged again
// when its turn comes.
func (j *Journal) PastBut(id string, age time.Duration, latest time.Time) (grants.Past, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.unsure {
		// A grant that ends later began after the loss.
		if err := j.forget(latest.Add(grants.MaxLife).UnixMilli()); err != nil {
			return grants.Past{}, err
		}
	}
	counted := maps.Clone(j.counted)
	own, has := j.uses[id]
	if has && len(own.InWindows()) > 0 {
		clear(counted)
		for one, use := range j.uses {
			if one == id {
				continue
			}
			for _, t := range use.InWindows() {
				counted[t] = max(counted[t], use.Age)
			}
		}
	}
	used := func(grant, target string) uint32 {
		j.mu.Lock()
		defer j.mu.Unlock()
		n := j.used[grantTarget{grant, target}]
		if has && own.Grant == grant && slices.Contains(own.Targets, target) {
			n--
		}
		return n
	}
	return grants.Past{Age: age, Counted: counted, Used: used, Lost: j.lost, Forgotten: j.forgotten}, nil
}

// UseOf is what a command uses.
func (j *Journal) UseOf(id string) (grants.Use, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	use, ok := j.uses[id]
	return use, ok
}

// forget notes that uses of grants that end by then are not known any more.
func (j *Journal) forget(ends int64) error {
	ends = max(ends, j.forgotten)
	if err := j.note(record{Type: forgottenRecord, NotAfterMS: ends}); err != nil {
		return err
	}
	j.forgotten, j.unsure = ends, false
	return nil
}

// forgetGrants forgets the uses of grants that ended long ago. No cut may leave
// neither them nor the note that they are gone.
func (j *Journal) forgetGrants(now time.Time) error {
	var ends int64
	for _, u := range j.uses {
		if u.Grant != "" && now.After(time.UnixMilli(u.Ends).Add(tombstoneLife)) {
			ends = max(ends, u.Ends)
		}
	}
	if ends <= j.forgotten {
		return nil
	}
	if err := j.forget(ends); err != nil {
		return fmt.Errorf("compact journal: %w", err)
	}
	// By running time what they count for beside: no clock takes that out of a window.
	j.drop(func(_ string, u grants.Use) bool { return u.Grant != "" && !u.Keep(j.age, ends) })
	return nil
}
