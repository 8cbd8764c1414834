// Package wire keeps the wire types compatible: what wire.txt lists stays as it
// is. bettercompute.driver.v1 is a draft and exempt.
package wire

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

var update = flag.Bool("update", false, "add what is new to wire.txt")

const file = "wire.txt"

func TestCompatible(t *testing.T) {
	now := describe(
		agentv1.File_appliance_api_agentv1_agent_proto, computev1.File_appliance_api_computev1_compute_proto, computev1.File_appliance_api_computev1_discovery_proto, computev1.File_appliance_api_computev1_iso_proto,
		bmcv1.File_bmc_bmcv1_bmc_proto, imagev1.File_image_imagev1_image_proto, pxev1.File_pxe_pxev1_pxe_proto,
	)
	data, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Fatal(err)
	}
	committed := strings.FieldsFunc(string(data), func(r rune) bool { return r == '\n' })
	for _, line := range committed {
		if !slices.Contains(now, line) {
			t.Errorf("gone or changed: %s", line)
		}
	}
	if *update && !t.Failed() {
		if err := os.WriteFile(file, []byte(strings.Join(now, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	for _, line := range now {
		if !slices.Contains(committed, line) {
			t.Errorf("not in %s yet (go test ./scripts/wire -update): %s", file, line)
		}
	}
}

// describe lists every field, enum value and method, a line each, sorted.
func describe(files ...protoreflect.FileDescriptor) []string {
	var out []string
	var messages func(protoreflect.MessageDescriptors)
	enums := func(es protoreflect.EnumDescriptors) {
		for i := range es.Len() {
			for j := range es.Get(i).Values().Len() {
				v := es.Get(i).Values().Get(j)
				out = append(out, fmt.Sprintf("enum %s: %s = %d", es.Get(i).FullName(), v.Name(), v.Number()))
			}
		}
	}
	messages = func(ms protoreflect.MessageDescriptors) {
		for i := range ms.Len() {
			m := ms.Get(i)
			if m.IsMapEntry() {
				continue
			}
			for j := range m.Fields().Len() {
				f := m.Fields().Get(j)
				out = append(out, fmt.Sprintf("message %s: %d %s %s", m.FullName(), f.Number(), kind(f), f.Name()))
			}
			messages(m.Messages())
			enums(m.Enums())
		}
	}
	for _, f := range files {
		messages(f.Messages())
		enums(f.Enums())
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				out = append(out, fmt.Sprintf("rpc %s: %s%s -> %s%s", m.FullName(), stream(m.IsStreamingClient()), m.Input().FullName(), stream(m.IsStreamingServer()), m.Output().FullName()))
			}
		}
	}
	slices.Sort(out)
	return out
}

func kind(f protoreflect.FieldDescriptor) string {
	switch {
	case f.IsMap():
		return fmt.Sprintf("map<%s,%s>", kind(f.MapKey()), kind(f.MapValue()))
	case f.IsList():
		return "repeated " + scalar(f)
	}
	return scalar(f)
}

func scalar(f protoreflect.FieldDescriptor) string {
	switch {
	case f.Message() != nil:
		return string(f.Message().FullName())
	case f.Enum() != nil:
		return string(f.Enum().FullName())
	}
	return f.Kind().String()
}

func stream(is bool) string {
	if is {
		return "stream "
	}
	return ""
}
