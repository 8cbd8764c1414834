// Package workflow runs procedures on machines as persisted steps that a
// restarted gateway takes up again where they were.
//
// A step's row holds what a restart needs: which attempt runs, and the command
// of that attempt as it was (or is about to be) submitted. The command's id is
// <workflow>.<step>.<attempt>, so submitting it again after a restart is the
// same command, and its outcome is waited for as if nothing had happened. A
// step without a stored command has had no effect yet and starts over.
//
// What may be repeated: a command whose error says so, one that never ran, and
// one that does no harm when it runs twice. Anything else fails the workflow,
// which gives the machine back to its own disk.
//
// A profile of a module is a workflow too. A step of it that a module registered
// relays a typed command; any other is <concern>.<operation> of the driver that
// the profile binds to the concern, and goes out as one driver.invoke. What the
// profile said when the workflow began is kept with it, so that a change of the
// profile changes no procedure half way. A driver.invoke is tried again only where
// it surely did not run, or where its operation is retry-safe and its error may pass.
//
// The engine is our own on the store instead of a job queue such as River: a
// step's row, with the signed command that it stands for, is all that a restart
// needs, in the same transaction as the machine's and the site's rows. A queue
// would bring a second schema and a worker model beside it, and its retries, which
// know nothing of what a command may have done, would have to be turned off.
//
// One process runs one engine over a store.
package workflow
