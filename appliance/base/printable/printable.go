// Package printable makes what a far end says fit to be shown: a terminal would
// obey some of it.
package printable

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text is s with instead for each sign that does not print, a line's end among
// them, and "?" for what is no UTF-8.
func Text(s string, instead rune) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == utf8.RuneError:
			return '?'
		case !unicode.IsPrint(r):
			return instead
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

// Excerpt is Text, and of more than most signs the first most and "…".
func Excerpt(s string, instead rune, most int) string {
	s = Text(s, instead)
	if utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s)[:most]) + "…"
}

// ASCII is the first most bytes of what prints in s and is ASCII.
func ASCII(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s)
	return s[:min(len(s), most)]
}
