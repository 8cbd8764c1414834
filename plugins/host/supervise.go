package host

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/better-compute/site-appliance/plugins/driver"
)

// steady is how long a run lasts before its end counts as the first again.
const steady = time.Minute

// attempt is which repeat follows a run: the n-th, or the first after a steady run.
func attempt(n int, ran time.Duration) int {
	if ran >= steady {
		return 0
	}
	return n
}

// supervise owns the plugin's processes, one after the other, until life ends.
func (p *plugin) supervise(starting, life context.Context, first chan<- error) {
	// The death signal follows the thread that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	log := p.launch.log
	bound, release := context.WithCancel(starting)
	defer release()
	defer context.AfterFunc(life, release)()
	proc, err := start(bound, p.launch)
	if err != nil {
		p.set(nil, "failed", err.Error())
		first <- err
		return
	}
	p.first, p.addresses = proc.peer.Manifests(), map[string][]string{}
	for _, m := range p.first {
		p.addresses[m.ID] = addresses(m.ConfigSchema)
	}
	p.set(proc, "running", "")
	log.Info("plugin runs", "pid", proc.cmd.Process.Pid, "version", proc.peer.PluginVersion(), "uid", p.launch.uid)
	first <- nil
	for n := 0; ; n++ {
		if proc != nil {
			began := time.Now()
			select {
			case <-life.Done():
				p.set(nil, "stopped", "")
				proc.stop()
				proc.hangUp()
				return
			case <-proc.exited:
				proc.hangUp()
			}
			n = attempt(n, time.Since(began))
			err = fmt.Errorf("process ended: %w", proc.err)
		}
		p.set(nil, "restarting", err.Error())
		log.Warn("plugin is down", "reason", err.Error(), "restart_in", p.backoff.Delay(n).String())
		if p.backoff.Wait(life, n, nil) != nil {
			p.set(nil, "stopped", "")
			return
		}
		if proc, err = start(life, p.launch); err != nil {
			proc = nil
			continue
		}
		p.mu.Lock()
		p.status.Restarts++
		p.mu.Unlock()
		if !sameDrivers(p.first, proc.peer.Manifests()) {
			log.Warn("plugin came back with other drivers: what was advertised stays", "version", proc.peer.PluginVersion())
		}
		p.set(proc, "running", "")
		log.Info("plugin runs again", "pid", proc.cmd.Process.Pid, "version", proc.peer.PluginVersion())
	}
}

func sameDrivers(a, b []driver.Manifest) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(m driver.Manifest) bool {
		return !slices.ContainsFunc(b, m.Same)
	})
}
