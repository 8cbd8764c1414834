// Package procstat reads what the kernel says of a process.
package procstat

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Stat is a part of /proc/PID/stat, as proc(5) has it.
type Stat struct {
	PID   int
	State byte // one letter
	Group int
	// Start is in clock ticks since the boot: with the PID it means one process.
	Start uint64
}

// Ended is true of a zombie and of what is even less.
func (s Stat) Ended() bool { return s.State == 'Z' || s.State == 'X' }

// Read looks at a process.
func Read(pid int) (Stat, error) {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return Stat{}, err
	}
	return Parse(data)
}

// Positions after the name, whose next field is number 3.
const (
	stateField = 0
	groupField = 5 - 3
	startField = 22 - 3
)

// Parse reads a line of /proc/PID/stat. The name in it may hold anything, so
// fields count from its last parenthesis.
func Parse(data []byte) (s Stat, err error) {
	name := bytes.LastIndexByte(data, ')')
	first, _, ok := bytes.Cut(data, []byte(" ("))
	if name < 0 || !ok {
		return s, errors.New("process status has no name")
	}
	fields := strings.Fields(string(data[name+1:]))
	if len(fields) <= startField || len(fields[stateField]) != 1 {
		return s, fmt.Errorf("process status has %d fields after the name", len(fields))
	}
	s.State = fields[stateField][0]
	if s.PID, err = strconv.Atoi(string(first)); err == nil {
		if s.Group, err = strconv.Atoi(fields[groupField]); err == nil {
			s.Start, err = strconv.ParseUint(fields[startField], 10, 64)
		}
	}
	if err != nil {
		return Stat{}, fmt.Errorf("process status: %w", err)
	}
	return s, nil
}
