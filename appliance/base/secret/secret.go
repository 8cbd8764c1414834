// Package secret is a value that prints as redacted wherever it is printed by mistake.
package secret

import "log/slog"

const redacted = "[redacted]"

// Value holds a secret in memory. Only Reveal gives it out.
type Value struct{ bytes []byte }

// New takes ownership of b.
func New(b []byte) Value { return Value{b} }

// Reveal returns the secret's bytes; the caller keeps them out of argv,
// environment, logs and files.
func (v Value) Reveal() []byte { return v.bytes }

// Empty reports whether there is no secret.
func (v Value) Empty() bool { return len(v.bytes) == 0 }

// Wipe overwrites the bytes.
func (v Value) Wipe() { clear(v.bytes) }

func (Value) String() string               { return redacted }
func (Value) GoString() string             { return redacted }
func (Value) LogValue() slog.Value         { return slog.StringValue(redacted) }
func (Value) MarshalText() ([]byte, error) { return []byte(redacted), nil }
func (Value) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }
