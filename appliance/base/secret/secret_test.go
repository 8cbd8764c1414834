package secret

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

func TestNeverPrints(t *testing.T) {
	v := New([]byte("hunter2"))
	holder := struct{ Password Value }{v}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "v", v, "holder", holder)
	js, _ := json.Marshal(holder)
	for name, got := range map[string]string{
		"%v": fmt.Sprintf("%v", holder), "%+v": fmt.Sprintf("%+v", v), "%#v": fmt.Sprintf("%#v", v),
		"%s": fmt.Sprintf("in %s", v), "slog": log.String(), "json": string(js),
	} {
		if strings.Contains(got, "hunter2") || !strings.Contains(got, redacted) {
			t.Errorf("%s printed %q", name, got)
		}
	}
	if got := string(v.Reveal()); got != "hunter2" {
		t.Errorf("Reveal() = %q", got)
	}
}
