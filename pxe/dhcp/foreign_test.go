package dhcp

import (
	"context"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSendUp: what a link says that comes or goes is no end of the question.
func TestSendUp(t *testing.T) {
	for name, tt := range map[string]struct {
		says  []error
		want  error
		tries int
	}{
		"the link takes it":          {[]error{nil}, nil, 1},
		"it is going down":           {[]error{unix.ENETDOWN, nil}, nil, 2},
		"it is down, unseen so far":  {[]error{unix.ENOBUFS, unix.ENOBUFS, nil}, nil, 3},
		"the interface is not there": {[]error{unix.ENXIO}, unix.ENXIO, 1},
	} {
		tries := 0
		err := sendUp(t.Context(), "lo", func() error {
			tries++
			return os.NewSyscallError("sendto", tt.says[tries-1])
		})
		if !errors.Is(err, tt.want) || tries != tt.tries {
			t.Errorf("%s: %v after %d tries, want %v after %d", name, err, tries, tt.want, tt.tries)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := sendUp(ctx, "lo", func() error { cancel(); return unix.ENETDOWN })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled = %v, want context.Canceled", err)
	}
}
