package procstat

import (
	"os"
	"testing"
)

func TestParse(t *testing.T) {
	const good = "12 (a) b (c)) S 1 13 12 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1\n"
	if got, err := Parse([]byte(good)); err != nil || got != (Stat{12, 'S', 13, 4242}) {
		t.Errorf("Parse() = %+v, %v, want 12, S, 13 and 4242", got, err)
	}
	for _, bad := range []string{
		"", "12 (a", ") 1 (", "12 (a) S 1", "x (a) S 1 12 12 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 9 1",
		"12 (a) SS 1 12 12 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 9 1", "12 (a) S 1 12 12 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 x 1",
	} {
		if got, err := Parse([]byte(bad)); err == nil {
			t.Errorf("Parse(%q) = %+v, want an error", bad, got)
		}
	}
}

func TestRead(t *testing.T) {
	if got, err := Read(os.Getpid()); err != nil || got.PID != os.Getpid() || got.Start == 0 || got.Ended() {
		t.Errorf("Read(self) = %+v, %v", got, err)
	}
	if _, err := Read(-1); err == nil {
		t.Error("Read(-1) has no error")
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("12 (a) b (c)) S 1 12 12 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1"))
	f.Add([]byte(") 1 ("))
	f.Fuzz(func(t *testing.T, data []byte) { _, _ = Parse(data) })
}
