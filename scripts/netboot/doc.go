// Package netboot boots virtual machines from one box, the flashed image, by
// every way that it serves: each cell of the matrix is a test of its own.
//
//	gateway ---- up ---- box
//	                      | | |
//	                      | | `-- relay: answers what the router passes on from "far"
//	                      | `---- proxy: beside a server that only leases
//	                      `------ lan: authoritative
//
// All of it is in one network namespace, which the test's process has for itself.
package netboot
