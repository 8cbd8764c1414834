package external

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// errPin marks a file that is not the pinned one.
var errPin = errors.New("pin mismatch")

// pinError is a mismatch: it is about the configuration, and final.
type pinError struct{ err *errs.Error }

func (e *pinError) Error() string        { return e.err.Error() }
func (e *pinError) Unwrap() error        { return e.err }
func (e *pinError) Is(target error) bool { return target == errPin }

// runsCode are interpreter options that name what runs, or take their value
// from the next argument: with them, the first file of the line is not the one
// that runs.
var runsCode = []string{
	"-", "-e", "--eval", "-p", "--print", "-pe", "-r", "--require", "--import", "--loader", "--experimental-loader",
	"--run", "--preload", "-C", "--conditions", "--env-file", "--input-type", "--eval-file", "-c", "--config", "--cwd",
}

// PinnedFile is the file of argv that a pin is about: the program, or the
// script when node, nodejs or bun runs it. The script is the first argument
// that does not begin with "-", after bun's optional run; so options of the
// interpreter need the form --name=value. Only that file is pinned, not what it
// loads.
func PinnedFile(argv []string) (string, error) {
	if len(argv) == 0 || argv[0] == "" {
		return "", errs.New(errs.InvalidConfig, "the plugin's command is empty")
	}
	for _, a := range argv {
		if strings.Contains(a, "\x00") {
			return "", errs.New(errs.InvalidConfig, "the plugin's command holds a zero byte")
		}
	}
	name := interpreter(argv[0])
	if name == "" {
		if !strings.ContainsAny(argv[0], `/\`) {
			return "", errs.New(errs.InvalidConfig, "plugin %q: give a path, not a name to look up", argv[0])
		}
		return argv[0], nil
	}
	ran := false
	for _, a := range argv[1:] {
		switch {
		case a == "":
			return "", errs.New(errs.InvalidConfig, "%s gets an empty argument before the script", name)
		case slices.Contains(runsCode, a) || strings.HasPrefix(a, "--eval=") || strings.HasPrefix(a, "--print=") || strings.HasPrefix(a, "--run="):
			return "", errs.New(errs.InvalidConfig, "%s %s: options of the interpreter must have the form --name=value and leave the script to be run", name, a)
		case strings.HasPrefix(a, "-"):
		case name == "bun" && a == "run" && !ran:
			ran = true
		case !strings.ContainsAny(a, `/\.`):
			// A word is a subcommand, or the value of the option before it.
			return "", errs.New(errs.InvalidConfig, "%s %s: want the path of a script, and options as --name=value", name, a)
		default:
			return a, nil
		}
	}
	return "", errs.New(errs.InvalidConfig, "%s gets no script", name)
}

// interpreter is node, nodejs or bun if that is the program, else empty.
func interpreter(program string) string {
	base := filepath.Base(program)
	if ext := filepath.Ext(base); strings.EqualFold(ext, ".exe") {
		base = strings.TrimSuffix(base, ext)
	}
	if slices.Contains([]string{"node", "nodejs", "bun"}, base) {
		return base
	}
	return ""
}

// SHA256File is the digest of a file, in hex, as a pin has it.
func SHA256File(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum, err := digest(f, io.Discard)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return sum, nil
}

// digest reads f from its start, and gives also its bytes to w.
func digest(f *os.File, w io.Writer) (string, error) {
	st, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !st.Mode().IsRegular() {
		return "", errors.New("not a regular file")
	}
	sum := sha256.New()
	if _, err := io.Copy(io.MultiWriter(sum, w), io.NewSectionReader(f, 0, 1<<62)); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// judge compares a digest with its pin.
func judge(path, got, pin string) error {
	if strings.EqualFold(got, pin) {
		return nil
	}
	return &pinError{errs.New(errs.InvalidConfig, "%s has SHA-256 %s, its pin is %s", path, got, strings.ToLower(pin))}
}
