// Command probe takes the agent's place in a box image, whose kernel has cgroup
// v2 alone: it runs instances with limits, has them exceed these, and says on
// the console how each check went.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/node"
	"github.com/better-compute/site-appliance/appliance/node/process"
	"github.com/better-compute/site-appliance/plugins/instance"
)

const dir = "/run/instances"

func main() {
	if len(os.Args) > 2 {
		switch os.Args[1] {
		case node.GateWord:
			os.Exit(process.GateMain(os.Args[2:]))
		case "eat":
			eat(number(os.Args[2]))
			return
		case "spawn":
			os.Exit(spawn(number(os.Args[2])))
		case "wait":
			time.Sleep(time.Hour)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	for _, c := range []struct {
		name string
		run  func(*process.Runtime) error
	}{
		{"memory_max_bytes is enforced and named", memory},
		{"pids_max is enforced", tasks},
		{"cpu_max is set", cpu},
		{"nothing is left", left},
	} {
		if err := with(c.run); err != nil {
			fmt.Printf("instances: FAIL %s: %s\n", c.name, strings.ReplaceAll(err.Error(), "\n", "; "))
			continue
		}
		fmt.Printf("instances: ok %s\n", c.name)
	}
	fmt.Println("instances: done")
	<-ctx.Done()
}

func number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}

// eat touches so many MiB.
func eat(mib int) {
	var all [][]byte
	for range mib {
		page := make([]byte, 1<<20)
		for i := 0; i < len(page); i += 4096 {
			page[i] = 1
		}
		all = append(all, page)
	}
	fmt.Println(len(all))
}

// spawn starts so many processes: 3 where that is refused.
func spawn(n int) int {
	for range n {
		if err := exec.Command("/proc/self/exe", "wait", "x").Start(); err != nil {
			fmt.Println(err)
			return 3
		}
	}
	return 0
}

func with(f func(*process.Runtime) error) error {
	r, err := process.Open(process.Options{
		Dir: dir, Cgroup: process.DefaultCgroup(), Gate: []string{"/proc/self/exe", node.GateWord},
		Log: slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return err
	}
	defer r.Close()
	return f(r)
}

// ends runs this program to its end and gives what the runtime says of it.
func ends(r *process.Runtime, id string, limits process.Limits, args ...string) (string, error) {
	if err := apply(r, id, limits, args...); err != nil {
		return "", err
	}
	for range 6000 {
		s, err := find(r, id)
		if err != nil {
			return "", err
		}
		if s.State == instance.Stopped {
			return s.Message, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return "", fmt.Errorf("%s does not end", id)
}

func apply(r *process.Runtime, id string, limits process.Limits, args ...string) error {
	config, err := json.Marshal(process.Config{Argv: append([]string{"/bin/bcd"}, args...), Restart: "never", StopTimeout: "1s", Limits: limits})
	if err != nil {
		return err
	}
	return r.Apply(context.Background(), instance.Spec{ID: id, Name: id, Generation: 1, Config: config})
}

func find(r *process.Runtime, id string) (instance.Status, error) {
	all, err := r.List(context.Background())
	for _, s := range all {
		if s.ID == id {
			return s, nil
		}
	}
	return instance.Status{}, err
}

func expect(r *process.Runtime, id, want string, limits process.Limits, args ...string) error {
	got, err := ends(r, id, limits, args...)
	if err != nil {
		return err
	}
	if !strings.Contains(got, want) {
		return fmt.Errorf("%s: %q, want %q", id, got, want)
	}
	return r.Remove(context.Background(), id)
}

func memory(r *process.Runtime) error {
	if err := expect(r, "free", "exit code 0", process.Limits{}, "eat", "128"); err != nil {
		return err
	}
	if err := expect(r, "roomy", "exit code 0", process.Limits{MemoryMaxBytes: 512 << 20}, "eat", "128"); err != nil {
		return err
	}
	return expect(r, "tight", "its memory limit was reached", process.Limits{MemoryMaxBytes: 48 << 20}, "eat", "128")
}

func tasks(r *process.Runtime) error {
	if err := expect(r, "roomy", "exit code 0", process.Limits{PidsMax: 4096}, "spawn", "10"); err != nil {
		return err
	}
	return expect(r, "tight", "exit code 3", process.Limits{PidsMax: 30}, "spawn", "30")
}

func cpu(r *process.Runtime) error {
	if err := apply(r, "half", process.Limits{CPUMax: 0.5}, "wait", "x"); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(process.DefaultCgroup(), "half.*", "cpu.max"))
	if err != nil || len(files) != 1 {
		return fmt.Errorf("cgroups of the instance: %v, %v", files, err)
	}
	got, err := os.ReadFile(files[0])
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(got)) != "50000 100000" {
		return fmt.Errorf("cpu.max = %q", got)
	}
	return r.Remove(context.Background(), "half")
}

func left(*process.Runtime) error {
	groups, err := filepath.Glob(filepath.Join(process.DefaultCgroup(), "*.*"))
	if err != nil {
		return err
	}
	for _, g := range groups {
		if st, err := os.Stat(g); err == nil && st.IsDir() {
			return fmt.Errorf("cgroup %s is left", g)
		}
	}
	files, err := filepath.Glob(dir + "/*")
	if err != nil || len(files) != 0 {
		return fmt.Errorf("files are left: %v, %v", files, err)
	}
	return nil
}
