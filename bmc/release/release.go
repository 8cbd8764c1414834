// Package release lets a driver's call give up its place in its BMC's queue and
// its lane while it goes on, so that a wait of hours holds up nobody.
package release

import "context"

type key struct{}

// With lends f, which gives the place up, to a call.
func With(ctx context.Context, f func()) context.Context { return context.WithValue(ctx, key{}, f) }

// Place gives it up, where the call has one.
func Place(ctx context.Context) {
	if f, ok := ctx.Value(key{}).(func()); ok {
		f()
	}
}
