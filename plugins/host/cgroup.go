package host

import (
	"bytes"
	"fmt"
	"path/filepath"
	"strconv"
)

// leafPrefix begins the name of a plugin's own group.
const leafPrefix = "plugin-"

func leafPath(dir, plugin string) string { return filepath.Join(dir, leafPrefix+plugin) }

// limits are what each plugin's cgroup gets; 0: none.
type limits struct{ memoryMax, pidsMax int64 }

func (l limits) any() bool { return l.memoryMax > 0 || l.pidsMax > 0 }

func (l limits) controllers() []string {
	var list []string
	if l.memoryMax > 0 {
		list = append(list, "memory")
	}
	if l.pidsMax > 0 {
		list = append(list, "pids")
	}
	return list
}

func refusedTask(l limits) string {
	return fmt.Sprintf("the kernel refused the plugin a new task: limit %d", l.pidsMax)
}

// parseEvent reads a counter of a control group's events file; 0: not there.
func parseEvent(data []byte, name string) uint64 {
	for line := range bytes.Lines(data) {
		if f := bytes.Fields(line); len(f) == 2 && string(f[0]) == name {
			n, err := strconv.ParseUint(string(f[1]), 10, 64)
			if err != nil {
				return 0
			}
			return n
		}
	}
	return 0
}
