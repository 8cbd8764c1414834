// Package boxtest proves in the box's own image what its kernel has to enforce
// on plugins: limits, the filter of system calls, the wall around files.
package boxtest
