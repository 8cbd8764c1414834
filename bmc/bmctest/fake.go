package bmctest

import (
	"context"
	"fmt"
	"sync"
)

// Fake is a Machine without a machine: it keeps its state and what was asked of it.
type Fake struct {
	mu    sync.Mutex
	on    bool
	calls []string
	err   error
}

// NewFake is a machine that is off.
func NewFake() *Fake { return &Fake{} }

// Fail makes every action fail with err until it is nil again.
func (f *Fake) Fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

// Calls are the actions so far, such as "PowerOn pxe efi once".
func (f *Fake) Calls() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.calls...)
}

func (f *Fake) do(on bool, format string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return f.err
	}
	f.calls = append(f.calls, fmt.Sprintf(format, args...))
	f.on = on
	return nil
}

// PowerOn implements Machine.
func (f *Fake) PowerOn(_ context.Context, dev BootDevice) error { return f.do(true, "PowerOn %s", dev) }

// PowerOff implements Machine.
func (f *Fake) PowerOff(context.Context) error { return f.do(false, "PowerOff") }

// Soft implements Machine: the machine goes off at once.
func (f *Fake) Soft(context.Context) error { return f.do(false, "Soft") }

// Reset implements Machine.
func (f *Fake) Reset(context.Context) error { return f.do(true, "Reset") }

// NMI implements Interrupter; nothing comes of it.
func (f *Fake) NMI(context.Context) error {
	return f.do(f.Running(), "NMI")
}

// Running implements Machine.
func (f *Fake) Running() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.on
}
