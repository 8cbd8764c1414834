package peer

import (
	"fmt"
	"os"
	"os/exec"
)

// Pipes are the host's ends of a plugin's three streams.
type Pipes struct {
	Stdin, Stdout, Stderr *os.File

	plugin [3]*os.File
}

// NewPipes makes them. Started must be called.
func NewPipes() (p *Pipes, err error) {
	p = new(Pipes)
	for _, ends := range [][2]**os.File{{&p.plugin[0], &p.Stdin}, {&p.Stdout, &p.plugin[1]}, {&p.Stderr, &p.plugin[2]}} {
		if *ends[0], *ends[1], err = os.Pipe(); err != nil {
			err = fmt.Errorf("make pipe: %w", err)
			p.Started(err)
			return nil, err
		}
	}
	return p, nil
}

// Attach gives the plugin's ends to cmd, which is not started yet.
func (p *Pipes) Attach(cmd *exec.Cmd) {
	cmd.Stdin, cmd.Stdout, cmd.Stderr = p.plugin[0], p.plugin[1], p.plugin[2]
}

// Started closes the plugin's ends, and the host's as well where the plugin did
// not start.
func (p *Pipes) Started(err error) {
	files := p.plugin[:]
	if err != nil {
		files = append(files, p.Stdin, p.Stdout, p.Stderr)
	}
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}
