package errs

import (
	"context"
	"errors"
	"fmt"
	"testing"
)

func TestFrom(t *testing.T) {
	bmc := Retry(BmcError, "no answer")
	for _, tt := range []struct {
		in   error
		want *Error
	}{
		{nil, nil},
		{bmc, bmc},
		{fmt.Errorf("read power: %w", bmc), &Error{BmcError, "read power: no answer", true}},
		{fmt.Errorf("dial: %w", context.DeadlineExceeded), &Error{Timeout, "dial: context deadline exceeded", true}},
		{context.Canceled, &Error{Cancelled, "context canceled", false}},
		{errors.New("boom"), &Error{Internal, "boom", false}},
	} {
		got := From(tt.in)
		if (got == nil) != (tt.want == nil) || got != nil && *got != *tt.want {
			t.Errorf("From(%v) = %+v, want %+v", tt.in, got, tt.want)
		}
	}
}
