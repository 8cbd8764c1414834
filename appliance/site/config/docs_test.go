package config

import (
	"os"
	"reflect"
	"strings"
	"testing"
)

// Every key of site.toml stands in the table of docs/box.md.
func TestEveryKeyIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../docs/box.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "\n## site.toml\n")
	table, _, _ = strings.Cut(table, "\n## ")
	keys := keysOf(reflect.TypeFor[Site]())
	if len(keys) < 20 {
		t.Fatalf("keys of site.toml = %v: too few", keys)
	}
	for _, key := range append(keys, laneNames...) {
		if !strings.Contains(table, "`"+key+"`") && !strings.Contains(table, "["+key+"]") && !strings.Contains(table, "."+key+"]") {
			t.Errorf("docs/box.md does not explain %s", key)
		}
	}
}

func keysOf(t reflect.Type) []string {
	var keys []string
	for i := range t.NumField() {
		f := t.Field(i)
		if key := f.Tag.Get("toml"); key != "" {
			keys = append(keys, key)
		}
		inner := f.Type
		if inner.Kind() == reflect.Slice {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct && inner.PkgPath() == t.PkgPath() {
			keys = append(keys, keysOf(inner)...)
		}
	}
	return keys
}
