package button

import "testing"

func TestPressed(t *testing.T) {
	event := func(typ, code, value byte) []byte {
		b := make([]byte, eventSize)
		b[16], b[18], b[20] = typ, code, value
		return b
	}
	for _, tt := range []struct {
		in   []byte
		want bool
	}{
		{event(1, 116, 1), true}, {event(1, 116, 0), false}, {event(1, 30, 1), false}, {event(0, 116, 1), false}, {nil, false},
	} {
		if got := Pressed(tt.in); got != tt.want {
			t.Errorf("Pressed(%v) = %v, want %v", tt.in, got, tt.want)
		}
	}
}
