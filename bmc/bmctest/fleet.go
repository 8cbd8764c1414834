package bmctest

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Fleet is many Redfish BMCs, each in front of a Fake of its own.
type Fleet struct {
	BMCs []*Redfish
}

// StartFleet starts n BMCs, each on its own port of 127.0.0.1, until Close or
// the end of ctx. All show one certificate. latency, which may be nil, is asked
// for each request but those for the service root. The limit of open files is
// raised where that is needed and allowed.
func StartFleet(ctx context.Context, n int, user, password string, latency func() time.Duration, opts ...Option) (*Fleet, error) {
	if err := raiseFiles(uint64(4*n + 1024)); err != nil {
		return nil, fmt.Errorf("start fleet: raise the limit of open files: %w", err)
	}
	cert, err := selfSigned(ecdsaKey)
	if err != nil {
		return nil, fmt.Errorf("start fleet: %w", err)
	}
	opts = append([]Option{Certificate(cert)}, opts...)
	if latency != nil {
		opts = append(opts, Latency(latency))
	}
	f := &Fleet{}
	for range n {
		r, err := StartRedfish(ctx, "127.0.0.1:0", user, password, NewFake(), opts...)
		if err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("start fleet: %w", err)
		}
		f.BMCs = append(f.BMCs, r)
	}
	return f, nil
}

// raiseFiles lets this process open want files.
func raiseFiles(want uint64) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	if limit.Cur >= want {
		return nil
	}
	limit.Cur, limit.Max = want, max(limit.Max, want)
	return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)
}

// Slept is the sum of the latencies so far.
func (f *Fleet) Slept() time.Duration {
	var sum time.Duration
	for _, r := range f.BMCs {
		sum += r.Slept()
	}
	return sum
}

// Close ends all BMCs.
func (f *Fleet) Close() error {
	var all []error
	for _, r := range f.BMCs {
		all = append(all, r.Close())
	}
	return errors.Join(all...)
}
