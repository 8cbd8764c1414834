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

func TestLogin(t *testing.T) {
	for _, tt := range []struct {
		in, username, password string
		ok                     bool
	}{
		{`{"username":"admin","password":"pw","realm":"x"}`, "admin", "pw", true},
		{`{"username":"admin"}`, "admin", "", true},
		{`{"username":"admin","password":7}`, "", "", false},
		{`["admin","pw"]`, "", "", false},
		{`pw`, "", "", false},
		{``, "", "", false},
	} {
		username, password, ok := Login(New([]byte(tt.in)))
		if string(username.Reveal()) != tt.username || string(password.Reveal()) != tt.password || ok != tt.ok {
			t.Errorf("Login(%s) = %q, %q, %t, want %q, %q, %t", tt.in, username.Reveal(), password.Reveal(), ok, tt.username, tt.password, tt.ok)
		}
	}
}
