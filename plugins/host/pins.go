package host

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// pinsName is the file that lists the plugins of a directory.
const pinsName = "pins"

// Pin is one line of a pins file.
type Pin struct {
	Name   string
	SHA256 [32]byte
}

// ParsePins reads a pins file in sha256sum's format. A line that cannot be read
// is an error of its own, and the others still count; a name listed twice
// counts not at all, since nobody can tell which line is meant.
func ParsePins(data []byte) ([]Pin, []error) {
	var pins []Pin
	var bad []error
	seen := map[string]int{}
	number := 0
	for line := range bytes.Lines(data) {
		number++
		text := strings.TrimSpace(string(line))
		if text == "" || strings.HasPrefix(text, "#") {
			continue
		}
		pin, err := parsePin(text)
		if err != nil {
			bad = append(bad, fmt.Errorf("pins line %d: %w", number, err))
			continue
		}
		if first, twice := seen[pin.Name]; twice {
			bad = append(bad, fmt.Errorf("pins line %d: %s is listed on line %d too", number, pin.Name, first))
			pins = slices.DeleteFunc(pins, func(p Pin) bool { return p.Name == pin.Name })
			continue
		}
		seen[pin.Name] = number
		pins = append(pins, pin)
	}
	return pins, bad
}

func parsePin(text string) (Pin, error) {
	fields := strings.Fields(text)
	if len(fields) != 2 {
		return Pin{}, fmt.Errorf("%d fields: want a SHA-256 and a file name", len(fields))
	}
	// sha256sum marks files read in binary mode with a star.
	pin := Pin{Name: strings.TrimPrefix(fields[1], "*")}
	digest, err := hex.DecodeString(fields[0])
	if err != nil || len(digest) != len(pin.SHA256) {
		return Pin{}, fmt.Errorf("%.80q is not the hex of a SHA-256", fields[0])
	}
	copy(pin.SHA256[:], digest)
	if pin.Name == "" || len(pin.Name) > 100 || pin.Name[0] == '.' || pin.Name[0] == '-' || pin.Name == pinsName ||
		filepath.Base(pin.Name) != pin.Name || strings.ContainsAny(pin.Name, "\x00\\") {
		return Pin{}, fmt.Errorf("%.80q is not a plain file name", pin.Name)
	}
	return pin, nil
}
