package printable

import (
	"strings"
	"testing"
)

func TestText(t *testing.T) {
	for in, want := range map[string]string{
		"S/N 42": "S/N 42", "Müller Ω": "Müller Ω", "\x1b[2J\x1b]0;owned\x07gone": ".[2J.]0;owned.gone", "a\x00b\r\nc\td": "a.b..c.d", "\u202eevil": ".evil",
		"\x9b31m": "?31m", "\u009b31m": ".31m", "bad\xff\xfe": "bad?", "\ufffd": "?", "\u2028": ".", "\u0085": ".", "": "",
	} {
		if got := Text(in, '.'); got != want {
			t.Errorf("Text(%q) = %q, want %q", in, got, want)
		}
	}
}

// The bound counts signs, not bytes, and what fits is whole.
func TestExcerpt(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "fits": "fits", "ééééé": "ééééé", "éééééé": "ééééé…", "\x1b[2Jxx": " [2Jx…", strings.Repeat("\xff", 50): "?",
	} {
		if got := Excerpt(in, ' ', 5); got != want {
			t.Errorf("Excerpt(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestASCII(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "PXE": "PXE", "\x1b[2Jab\r\n\x00": "[2Jab", "Müller\xff": "Mller", " ~\x7f": " ~", strings.Repeat("é", 9) + "123456": "12345",
	} {
		if got := ASCII(in, 5); got != want {
			t.Errorf("ASCII(%q) = %q, want %q", in, got, want)
		}
	}
}
