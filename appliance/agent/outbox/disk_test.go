package outbox

import (
	"path/filepath"
	"testing"
	"time"
)

// TestBadDiskEndsOneSession takes the disk away under an open outbox: one
// session ends, and the next one sends everything under another epoch.
func TestBadDiskEndsOneSession(t *testing.T) {
	for name, lose := range map[string]func(o *Outbox){
		"at a sync":  func(*Outbox) {},
		"at an ack":  func(o *Outbox) { _ = o.Acked(0) },
		"at a write": func(o *Outbox) { _ = o.Emit("command.finished", Audit, "b", 1) },
	} {
		o, err := Open(filepath.Join(t.TempDir(), "events"), DefaultLimit, time.Now)
		if err != nil {
			t.Fatal(err)
		}
		if err := o.Emit("pxe.stage", Telemetry, "a", 1); err != nil {
			t.Fatal(err)
		}
		first := o.Epoch()
		o.log.Close()
		if o.log.Sync() == nil {
			t.Fatal("the disk is still there")
		}
		lose(o)
		if _, err := o.Events(10); err == nil {
			t.Errorf("%s: the session goes on under an epoch whose numbers may come again", name)
		}
		if second := o.Epoch(); second == first {
			t.Errorf("%s: the epoch is still %s", name, first)
		}
		o.Rewind(0)
		if err := o.Emit("command.finished", Audit, "c", 1); err != nil {
			t.Errorf("%s: Emit without a disk = %v, want nil", name, err)
		}
		events, err := o.Events(10)
		if err != nil || len(events) < 2 {
			t.Errorf("%s: the next session gets %d events, %v, want all", name, len(events), err)
		}
		if err := o.Acked(events[len(events)-1].GetSeq()); err != nil {
			t.Errorf("%s: Acked = %v, want nil", name, err)
		}
		if o.Durable() {
			t.Errorf("%s: Durable() = true, want false", name)
		}
		if err := o.Close(); err != nil {
			t.Errorf("%s: Close = %v", name, err)
		}
	}
}
