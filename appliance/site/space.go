package site

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

// spaceEvery is how often the disk of the state folder is looked at.
const spaceEvery = 5 * time.Second

// lowBytes is when data counts as full: less than what journal and events may
// still want (1 MiB set aside for each is beside this).
const lowBytes = 4 << 20

// watchSpace says once that data is full, and once that it has room again, in
// the log and as the state event data.full.
func (s *site) watchSpace(ctx context.Context) error {
	full := false
	for {
		free, err := freeBytes(s.scratch)
		if err != nil {
			return err
		}
		if now := free < lowBytes; now != full {
			full = now
			if full {
				s.Log.Error("data is full: the box serves on from what it set aside; make room", "folder", s.scratch, "free_bytes", free)
			} else {
				s.Log.Info("data has room again", "folder", s.scratch, "free_bytes", free)
			}
			s.emit("data.full", "state", "data", map[string]any{"full": full, "free_bytes": free})
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(spaceEvery):
		}
	}
}

// freeBytes is what may still be written to the file system that holds path.
func freeBytes(path string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, err
	}
	return st.Bavail * uint64(st.Bsize), nil
}
