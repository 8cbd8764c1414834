// Package lab builds a small site on one computer, for the demo and the
// end-to-end tests: network namespaces for wires, the real programs, and
// virtual machines for the box and the bare metal.
//
//	gw ---- br-up ---- box (a virtual machine, or bcd site in a namespace)
//	         |          |
//	      neighbour   br-lan ---- bmc (the rig: IPMI and Redfish)
//	                    |
//	                  machine (a virtual machine that the rig starts and stops)
//
// It ends every process that it started, removes every namespace that it made,
// and touches nothing else. It needs root.
package lab
