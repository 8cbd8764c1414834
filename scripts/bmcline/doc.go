// Package bmcline proves what is asked of BMCs, from the API's call to the
// machine of the rig, with every part in between as it is: gateway, line, agent,
// relay and driver, in one process.
package bmcline
