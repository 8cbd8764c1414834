package host

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/procstat"
	"github.com/better-compute/site-appliance/plugins/bcx"
)

// sweep ends and removes what hosts that are gone left below root: processes,
// control groups, folders. What belongs to a host that lives is left alone, and
// so is every process that is not surely one of a recorded run.
func sweep(root string, log *slog.Logger) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return // there is none yet
	}
	boot, space := bootID(), pidSpace()
	for _, e := range entries {
		if half, ok := strings.CutSuffix(e.Name(), recordSuffix+unfinished); ok && folderName.MatchString(half) {
			// Writing one takes no time: nobody is still at it.
			if i, err := e.Info(); err == nil && time.Since(i.ModTime()) > time.Minute {
				_ = os.Remove(filepath.Join(root, e.Name()))
			}
			continue
		}
		name, ok := strings.CutSuffix(e.Name(), recordSuffix)
		if !ok || !folderName.MatchString(name) {
			continue
		}
		left := &run{dir: filepath.Join(root, name)}
		data, err := readBounded(left.dir+recordSuffix, maxRecord+1)
		if err == nil {
			left.record, err = parseRecord(data)
		}
		switch {
		case err != nil:
			// A host writes its records whole: this one is nobody's.
			log.Warn("record of a plugin's run is thrown away", "file", e.Name(), "reason", err.Error())
		case left.record.Boot == boot && (left.record.Space != space || left.record.Host.alive()):
			continue
		default:
			killed := 0
			if left.record.Boot == boot {
				killed = killLeft(left)
			}
			if c := left.record.Cgroup; strings.HasPrefix(filepath.Clean(c), cgroupRoot+"/") && strings.HasPrefix(filepath.Base(c), leafPrefix) {
				if err := removeCgroup(c); err != nil {
					log.Error("plugin's cgroup is left", "reason", err.Error())
				}
			}
			log.Warn("swept what a host that is gone had left", "plugin", left.record.Plugin, "processes", killed)
		}
		left.remove()
	}
}

// killLeft ends the processes of a run, and answers how many there were.
func killLeft(r *run) (killed int) {
	// What is killed may be forking at this moment.
	for range 20 {
		victims := members(r)
		if len(victims) == 0 {
			break
		}
		for _, m := range victims {
			if m.kill() {
				killed++
			}
		}
	}
	return killed
}

// members finds the processes of a run: the plugin itself, what has its socket
// folder in the environment, and what is in its process group. All of them have
// the plugin's uid.
func members(r *run) []mark {
	uid := r.record.UID
	if uid < 0 {
		uid = os.Geteuid()
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	variable := []byte(bcx.SocketDirVariable + "=" + r.dir)
	leader := r.record.Process
	// The number of a group is free only once the group is empty: a leader with
	// another start means that this group is another one by now.
	grouped := leader.PID > 0 && r.record.UID >= 0
	if s, err := procstat.Read(leader.PID); err == nil && s.Start != leader.Start {
		grouped = false
	}
	var list []mark
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		s, err := procstat.Read(pid)
		if err != nil || s.Ended() || s.Start < leader.Start || ownerOf(pid) != uid {
			continue
		}
		environ, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		switch own := (mark{s.PID, s.Start}); {
		case own == leader,
			grouped && s.Group == leader.PID,
			containsVariable(environ, variable):
			list = append(list, own)
		}
	}
	return list
}

func containsVariable(environ, variable []byte) bool {
	for v := range bytes.SplitSeq(environ, []byte{0}) {
		if bytes.Equal(v, variable) {
			return true
		}
	}
	return false
}

// ownerOf is the real uid of a process; -1: it is gone.
func ownerOf(pid int) int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return -1
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "Uid:"); ok {
			if f := strings.Fields(rest); len(f) > 0 {
				if uid, err := strconv.Atoi(f[0]); err == nil {
					return uid
				}
			}
		}
	}
	return -1
}

// processMark is the mark of a process that runs now.
func processMark(pid int) mark {
	s, err := procstat.Read(pid)
	if err != nil {
		return mark{PID: pid}
	}
	return mark{s.PID, s.Start}
}

func (m mark) alive() bool {
	s, err := procstat.Read(m.PID)
	return err == nil && m == (mark{s.PID, s.Start}) && !s.Ended()
}

// kill ends the process and waits until it is gone. It goes by a descriptor that
// was opened before the process was looked at, so that the signal cannot reach
// another one that got its number.
func (m mark) kill() bool {
	fd, err := unix.PidfdOpen(m.PID, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	if !m.alive() || unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) != nil {
		return false
	}
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
		// Readable once it has ended.
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100); err == nil && n > 0 {
			break
		}
	}
	return true
}

func bootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(data))
}

// pidSpace names the namespace of process numbers that this process is in.
func pidSpace() string {
	name, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return ""
	}
	return name
}

func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() >= limit {
		return nil, fmt.Errorf("%s is not a file of less than %d bytes", path, limit)
	}
	return os.ReadFile(path)
}
