package site

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/bmc/addressbook"
)

// problemsEvery is how often init's list is looked at.
const problemsEvery = 5 * time.Second

// reportProblems sends each line of init's list home once, as the event
// box.problem. A line is "<step>: <what went wrong>". What was sent is noted
// beside the list, which lasts as long as the boot: a service that starts again
// and again must not say it again and again.
func (s *site) reportProblems(ctx context.Context) error {
	sent := map[string]bool{}
	sentFile := s.ProblemsFile + ".sent"
	if data, err := os.ReadFile(sentFile); err == nil && s.ProblemsFile != "" {
		for line := range strings.Lines(string(data)) {
			sent[strings.TrimSpace(line)] = true
		}
	}
	for {
		data, err := os.ReadFile(s.ProblemsFile)
		if err != nil && s.ProblemsFile != "" && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("read init's list of problems: %w", err)
		}
		for line := range strings.Lines(string(data)) {
			line = strings.TrimSpace(line)
			if line == "" || sent[line] {
				continue
			}
			sent[line] = true
			step, text, _ := strings.Cut(line, ": ")
			s.emit("box.problem", "audit", step, map[string]string{"step": step, "message": text})
			if err := note(sentFile, line); err != nil {
				s.Log.Error("a problem that was sent is not noted", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(problemsEvery):
		}
	}
}

// lost notes which protections a damaged file took with it.
func (s *site) lost(book *addressbook.Book) {
	if book.Suspect() {
		s.unprotected = append(s.unprotected, "address-book: it was damaged: every BMC counts as protected until it is bound anew")
	}
	if s.assign.Suspect() {
		s.unprotected = append(s.unprotected, "boot-assignments: they were damaged: every machine counts as protected until a granted command says otherwise")
	}
	for _, line := range s.unprotected {
		s.Log.Error("protections were lost", "problem", line)
	}
}

// tellLost sends home what lost noted.
func (s *site) tellLost(ctx context.Context) error {
	for _, line := range s.unprotected {
		step, text, _ := strings.Cut(line, ": ")
		s.emit("box.problem", "state", step, map[string]string{"step": step, "message": text})
	}
	<-ctx.Done()
	return nil
}

// note appends a line to a file in memory.
func note(path, line string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("note problem: %w", err)
	}
	_, err = fmt.Fprintln(f, line)
	return errors.Join(err, f.Close())
}
