package discovery

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Processors tells the sockets, such as "2 x Xeon (32 cores)".
func (m Match) Processors() string {
	var models []string
	count, cores := map[string]int{}, map[string]int{}
	for _, p := range m.Hardware.Processors {
		model := cmp.Or(short(p.Model), "processor")
		if !slices.Contains(models, model) {
			models = append(models, model)
		}
		count[model]++
		cores[model] += p.Cores
	}
	var out []string
	for _, model := range models {
		out = append(out, fmt.Sprintf("%d x %s (%d cores)", count[model], model, cores[model]))
	}
	return short(strings.Join(out, ", "))
}

// Memory is the sum of the modules, in bytes.
func (m Match) Memory() uint64 {
	var n uint64
	for _, module := range m.Hardware.Memory {
		n += module.SizeBytes
	}
	return n
}
