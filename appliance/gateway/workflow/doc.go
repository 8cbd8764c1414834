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
// One process runs one engine over a store.
package workflow
