package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/plugins/instance"
)

// record is what is kept of one instance: enough to find its process again, and
// to say how it ended.
type record struct {
	Spec instance.Spec `json:"spec"`
	// Run is the run at hand, Ended how the last one went; one of them at most.
	Run   *run   `json:"run,omitempty"`
	Ended *ended `json:"ended,omitempty"`
}

// run is one start of an instance.
type run struct {
	identity
	Mark   string `json:"mark"`
	Cgroup string `json:"cgroup,omitempty"`
}

// ended is how a run went.
type ended struct {
	// Known is false where the process was not this agent's child when it ended.
	Known  bool   `json:"known"`
	Code   int    `json:"code"`
	Signal string `json:"signal,omitempty"`
	// OutOfMemory says that the kernel killed something of the run for its limit.
	OutOfMemory bool `json:"out_of_memory,omitempty"`
	// Reason replaces the above where nothing ran.
	Reason string `json:"reason,omitempty"`
}

func (e ended) String() string {
	if e.OutOfMemory {
		return e.end() + "; its memory limit was reached"
	}
	return e.end()
}

func (e ended) end() string {
	switch {
	case e.Reason != "":
		return e.Reason
	case !e.Known:
		return "the process ended; how is not known, since an earlier agent had started it"
	case e.Signal != "":
		return "the process was killed by " + e.Signal
	}
	return fmt.Sprintf("the process ended with exit code %d", e.Code)
}

// state is what an ended run means under a restart policy: failed asks for
// another start, stopped is how it should be.
func (e ended) state(restart string) string {
	good := e.Known && e.Reason == "" && e.Code == 0 && e.Signal == ""
	if restart == never || restart == onFailure && good {
		return instance.Stopped
	}
	return instance.Failed
}

var idForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`)

const recordSuffix = ".json"

func (r *Runtime) recordPath(id string) string { return filepath.Join(r.o.Dir, id+recordSuffix) }

func (r *Runtime) save(rec record) error {
	data, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	return atomicfile.Write(r.recordPath(rec.Spec.ID), data, 0o600)
}

func (r *Runtime) forget(id string) error {
	for _, path := range []string{r.recordPath(id), r.outputPath(id), r.outputPath(id) + ".1"} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return atomicfile.SyncDir(r.o.Dir)
}

// records reads what an earlier agent left. A damaged file is set aside: its
// process, if one runs, shows up as an orphan.
func (r *Runtime) records() ([]record, error) {
	names, err := filepath.Glob(filepath.Join(r.o.Dir, "*"+recordSuffix))
	if err != nil {
		return nil, err
	}
	var all []record
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read record: %w", err)
		}
		rec, err := parseRecord(data)
		if err == nil && rec.Spec.ID+recordSuffix != filepath.Base(name) {
			err = errors.New("it is another instance's")
		}
		if err != nil {
			r.o.Log.Error("an instance's record is damaged: it is set aside", "file", name, "reason", err.Error())
			if err := os.Rename(name, strings.TrimSuffix(name, recordSuffix)+".damaged"); err != nil {
				return nil, err
			}
			continue
		}
		all = append(all, rec)
	}
	return all, nil
}

func parseRecord(data []byte) (record, error) {
	var rec record
	if err := json.Unmarshal(data, &rec); err != nil {
		return rec, err
	}
	if !idForm.MatchString(rec.Spec.ID) {
		return rec, errors.New("it names no instance")
	}
	if rec.Run != nil && (rec.Run.PID <= 1 || rec.Run.Mark == "") {
		return rec, errors.New("it names no process")
	}
	return rec, nil
}
