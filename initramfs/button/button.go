// Package button waits for the power button, which reaches Linux as a key of
// an input device.
package button

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/initramfs/survive"
)

// A struct input_event on a 64-bit kernel: two words of time, then type, code, value.
const eventSize = 24

const (
	typeKey  = 1
	keyPower = 116
)

// Pressed reports whether one event is the power key going down.
func Pressed(e []byte) bool {
	return len(e) == eventSize && binary.LittleEndian.Uint16(e[16:]) == typeKey &&
		binary.LittleEndian.Uint16(e[18:]) == keyPower && binary.LittleEndian.Uint32(e[20:]) == 1
}

// Wait calls pressed at each press, until ctx is done. sys is
// /sys/class/input, dev is /dev/input. say hears of panics.
func Wait(ctx context.Context, sys, dev string, say func(format string, args ...any), pressed func()) {
	var wg sync.WaitGroup
	defer wg.Wait()
	open := map[string]bool{}
	for {
		names, _ := filepath.Glob(filepath.Join(sys, "event*", "device", "name"))
		for _, n := range names {
			event := filepath.Base(filepath.Dir(filepath.Dir(n)))
			data, err := os.ReadFile(n)
			if err != nil || open[event] || !strings.Contains(string(data), "Power Button") {
				continue
			}
			f, err := os.Open(filepath.Join(dev, event))
			if err != nil {
				continue
			}
			open[event] = true
			wg.Go(func() { survive.Run(ctx, "button", say, func() { read(ctx, f, pressed) }) })
		}
		t := time.NewTimer(5 * time.Second)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

// read follows one input device until it goes away or ctx is done.
func read(ctx context.Context, f *os.File, pressed func()) {
	stop := context.AfterFunc(ctx, func() { _ = survive.Once(func() { f.Close() }) })
	defer stop()
	b := make([]byte, eventSize)
	for {
		n, err := f.Read(b)
		if err != nil {
			f.Close()
			return
		}
		if Pressed(b[:n]) {
			pressed()
		}
	}
}
