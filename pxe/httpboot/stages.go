package httpboot

const (
	// perMinute is how many stages of one MAC are told of in a minute, and how many
	// refusals of one client are logged: several boots' worth. A machine in a loop must
	// not fill the box's events, the line and the gateway's disk.
	perMinute = 64
	// mostMACs bounds what is remembered: more than an assignment's machines use.
	mostMACs = 8192
)
