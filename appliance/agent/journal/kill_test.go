package journal_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/better-compute/site-appliance/appliance/agent/journal"
)

// killSteps makes the test binary the process that is killed.
const killSteps = "JOURNAL_KILL_STEPS"

func TestMain(m *testing.M) {
	if n, err := strconv.Atoi(os.Getenv(killSteps)); err == nil {
		j, err := journal.Open(os.Args[len(os.Args)-1])
		for _, step := range steps(j, "cmd_1")[:n] {
			if err == nil {
				err = step()
			}
		}
		fmt.Println(j.Epoch(), err)
		select {} // until it is killed
	}
	os.Exit(m.Run())
}

// TestKilledAtEachState kills a process with SIGKILL in every state.
func TestKilledAtEachState(t *testing.T) {
	for n := range 5 {
		path := filepath.Join(t.TempDir(), "journal")
		cmd := exec.Command(os.Args[0], path)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", killSteps, n))
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		line, err := bufio.NewReader(out).ReadString('\n')
		must(t, cmd.Process.Kill())
		cmd.Wait()
		must(t, err)
		j := open(t, path)
		if got, want := fmt.Sprintln(j.Epoch(), "<nil>"), line; got != want {
			t.Errorf("killed after %d steps: epoch and error %q, process said %q", n, got, want)
		}
		if e, _ := j.Get("cmd_1"); e.State != states[n] {
			t.Errorf("killed after %d steps: state %q, want %q", n, e.State, states[n])
		}
	}
}
