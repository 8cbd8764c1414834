package site

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"
)

// problemsEvery is how often init's list is looked at.
const problemsEvery = 5 * time.Second

// reportProblems sends each line of init's list home once, as the event
// box.problem. A line is "<step>: <what went wrong>".
func (s *site) reportProblems(ctx context.Context) error {
	sent := map[string]bool{}
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
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(problemsEvery):
		}
	}
}
