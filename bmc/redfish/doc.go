// Package redfish drives a machine over Redfish through a bmclib client whose
// registry holds our own provider, which speaks to the enrolled BMC alone.
//
// # Trust
//
// The pin of the certificate's key decides, or without one the site's
// authorities. Only the enrolled host and port is dialled, only https paths below
// /redfish/ are asked for, and no redirect or link leads anywhere else; a whole URL
// of the very BMC counts as its path. A BMC with nothing but RSA key exchange or
// TLS before 1.2 is tls-unsupported with the cause named, unless the site allows
// it for that one address. Answers are bounded in size and depth, and what a BMC
// says goes home printable.
//
// # Sessions
//
// Calls with one credential share a session, which ends a minute after the last
// one, or earlier where more than 256 are idle. A session that the BMC has
// forgotten is opened once again; a refused password is not tried a second time.
// Without sessions, or without a free one where the BMC offers it (RFC 9110),
// basic authentication stands in; otherwise session-limit. An account that must
// change its password first is password-change-required.
//
// # What is sent twice
//
// Reads: while the BMC is busy (429, 503). Writes that do no harm twice: while it is
// busy or in POST, and after a lost answer. Any write: after an answer that it has
// the wrong If-Match, or that its path lacks a slash or has one too many. A power
// action is sent again for these last two alone, both of which say that nothing was
// done. A lost answer to on, off and soft is told by the machine's state; to another
// action it is interrupted.
//
// # What counts as done
//
// What was read again afterwards: a power state within the call's time (soft ends
// in an error before the deadline, where the operating system ignores it), a boot
// device, a drive's medium, secure boot. A reset and an interrupt show nothing and
// are done when they are accepted. A BMC that has no persistent boot device gets one
// for the next boot, and the call ends in boot-once-only, so that nobody takes it for
// more. Without efi a BMC that has no choice of boot mode keeps its own. A machine
// whose persistent device a power action turns into one for a single boot gets it
// back. An image goes into the first CD drive, in place of what is there; eject
// empties all of them. media-untrusted is a BMC that does not know the authority of
// the image's server, and verification is never asked to be left out.
package redfish
