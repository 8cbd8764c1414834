//go:build !linux

package external

// endLeft finds nothing where there is no /proc.
func endLeft(string) int { return 0 }
