package schema

import (
	"regexp"
	"strings"
)

// matcher is what a pattern is judged by.
type matcher interface {
	MatchString(string) bool
	String() string
}

// What the two formats that JSON Schema has no exact word for look like. They
// stand in the schema that goes out, so that any validator agrees. Here they
// are matched by hand: compiling their counted repetitions would be a good part
// of a plugin's start.
const (
	urlPattern = `^[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#\\ :@][^/?#\\ ]*([/?#].*)?$`
	// The digits are bounded so that every match fits a time.Duration.
	durationPattern = `^([0-9]{1,9}(\.[0-9]{1,9})?(ns|us|ms|s)|[0-9]{1,6}(\.[0-9]{1,9})?m|[0-9]{1,5}(\.[0-9]{1,9})?h){1,4}$`
)

type urlMatcher struct{}

func (urlMatcher) String() string { return urlPattern }

func (urlMatcher) MatchString(text string) bool {
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok || scheme == "" || !isLetter(scheme[0]) {
		return false
	}
	for i := range len(scheme) {
		if c := scheme[i]; !isLetter(c) && !strings.ContainsRune(digits+"+.-", rune(c)) {
			return false
		}
	}
	end := strings.IndexAny(rest, `/?#`)
	if end < 0 {
		end = len(rest)
	}
	host := rest[:end]
	return host != "" && host[0] != ':' && host[0] != '@' && !strings.ContainsAny(host, `\ `) && !strings.Contains(rest[end:], "\n")
}

type durationMatcher struct{}

func (durationMatcher) String() string { return durationPattern }

func (durationMatcher) MatchString(text string) bool {
	parts := 0
	for ; text != ""; parts++ {
		whole, part, point := leading(text), 0, 0
		if rest := text[whole:]; strings.HasPrefix(rest, ".") {
			if point, part = 1, leading(rest[1:]); part == 0 || part > 9 {
				return false
			}
		}
		text = text[whole+point+part:]
		most, unit := 9, ""
		for _, u := range []string{"ns", "us", "ms", "s", "m", "h"} {
			if strings.HasPrefix(text, u) {
				unit = u
				break
			}
		}
		switch unit {
		case "":
			return false
		case "m":
			most = 6
		case "h":
			most = 5
		}
		if whole == 0 || whole > most {
			return false
		}
		text = text[len(unit):]
	}
	return parts >= 1 && parts <= 4
}

const digits = "0123456789"

func isLetter(c byte) bool { return c|0x20 >= 'a' && c|0x20 <= 'z' }

// leading counts the digits that text begins with.
func leading(text string) int { return len(text) - len(strings.TrimLeft(text, digits)) }

// isoForm is ISO 8601's duration, which JSON Schema's format means.
var isoForm = regexp.MustCompile(`^P([0-9]+W|([0-9]+Y)?([0-9]+M)?([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9]+S)?)?)$`)

func validISO(text string) bool {
	return isoForm.MatchString(text) && text != "P" && !strings.HasSuffix(text, "T")
}
