package qemutest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

// maxQMPLine bounds one answer; query-qmp-schema is the longest at about 200 KiB.
const maxQMPLine = 4 << 20

// keepEvents bounds the memory of events; the oldest goes first.
const keepEvents = 256

var errQMPClosed = errors.New("the QMP connection is closed")

// Event is what QEMU tells by itself, such as SHUTDOWN or RESET.
type Event struct {
	Name string
	Data json.RawMessage
}

// qmp is one QMP connection. Commands run one at a time.
type qmp struct {
	conn  net.Conn
	turn  chan struct{} // holds one token: the right to send
	greet chan struct{} // closed by the greeting
	done  chan struct{} // closed when the reader ends

	mu      sync.Mutex
	last    uint64 // id of the newest call
	answer  chan qmpMessage
	events  []Event
	changed chan struct{} // closed and replaced when events grow
}

type qmpMessage struct {
	QMP    json.RawMessage `json:"QMP"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	ID    *uint64         `json:"id"`
	Event string          `json:"event"`
	Data  json.RawMessage `json:"data"`
}

func dialQMP(ctx context.Context, f *os.File) (*qmp, error) {
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return nil, fmt.Errorf("open QMP: %w", err)
	}
	q := &qmp{conn: conn, turn: make(chan struct{}, 1), changed: make(chan struct{}), greet: make(chan struct{}), done: make(chan struct{})}
	go q.read()
	select {
	case <-q.greet:
	case <-q.done:
		err = fmt.Errorf("open QMP: %w", errQMPClosed)
	case <-ctx.Done():
		err = fmt.Errorf("open QMP: %w", ctx.Err())
	}
	if err == nil {
		q.turn <- struct{}{}
		_, err = q.call(ctx, "qmp_capabilities", nil)
	}
	if err != nil {
		q.close()
		return nil, err
	}
	return q, nil
}

func (q *qmp) read() {
	defer close(q.done)
	lines := bufio.NewScanner(q.conn)
	lines.Buffer(nil, maxQMPLine)
	for lines.Scan() {
		var m qmpMessage
		if json.Unmarshal(lines.Bytes(), &m) != nil {
			continue
		}
		q.mu.Lock()
		switch {
		case m.QMP != nil && q.last == 0:
			select {
			case <-q.greet:
			default:
				close(q.greet)
			}
		case m.Event != "":
			q.events = append(q.events, Event{m.Event, m.Data})
			if len(q.events) > keepEvents {
				q.events = q.events[1:]
			}
			close(q.changed)
			q.changed = make(chan struct{})
		case m.ID != nil && *m.ID == q.last && q.answer != nil:
			q.answer <- m // it has room for the one answer
			q.answer = nil
		}
		// The rest answers calls that were given up.
		q.mu.Unlock()
	}
}

func (q *qmp) call(ctx context.Context, command string, args any) (json.RawMessage, error) {
	select {
	case <-q.turn:
		defer func() { q.turn <- struct{}{} }()
	case <-q.done:
		return nil, fmt.Errorf("%s: %w", command, errQMPClosed)
	case <-ctx.Done():
		return nil, fmt.Errorf("%s: %w", command, ctx.Err())
	}
	answer := make(chan qmpMessage, 1)
	q.mu.Lock()
	q.last++
	id := q.last
	q.answer = answer
	q.mu.Unlock()
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, args, id})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	deadline, _ := ctx.Deadline() // the zero time is no deadline
	q.conn.SetWriteDeadline(deadline)
	if _, err := q.conn.Write(append(line, '\n')); err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	select {
	case m := <-answer:
		if m.Error != nil {
			return nil, fmt.Errorf("%s: %s: %s", command, m.Error.Class, m.Error.Desc)
		}
		return m.Return, nil
	case <-q.done:
		return nil, fmt.Errorf("%s: %w", command, errQMPClosed)
	case <-ctx.Done():
		return nil, fmt.Errorf("%s: %w", command, ctx.Err())
	}
}

func (q *qmp) close() {
	q.conn.Close()
	<-q.done
}

// QMP runs one command and gives its "return" value.
func (vm *VM) QMP(ctx context.Context, command string, args any) (json.RawMessage, error) {
	q := vm.connection()
	if q == nil {
		return nil, fmt.Errorf("%s: %s: %w", vm.name, command, errQMPClosed)
	}
	out, err := q.call(ctx, command, args)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", vm.name, err)
	}
	return out, nil
}

// WaitEvent waits for an event that has come since the start or still comes.
func (vm *VM) WaitEvent(ctx context.Context, name string, quiet time.Duration) (Event, error) {
	q := vm.connection()
	if q == nil {
		return Event{}, fmt.Errorf("%s: event %s: %w", vm.name, name, errQMPClosed)
	}
	limit := time.NewTimer(Slack * quiet)
	defer limit.Stop()
	for {
		event, changed, found := q.event(name)
		if found {
			return event, nil
		}
		select {
		case <-changed:
		case <-q.done:
			if event, _, found := q.event(name); found {
				return event, nil
			}
			return Event{}, fmt.Errorf("%s: event %s: %w", vm.name, name, errQMPClosed)
		case <-limit.C:
			return Event{}, fmt.Errorf("%s: no event %s within %v", vm.name, name, Slack*quiet)
		case <-ctx.Done():
			return Event{}, fmt.Errorf("%s: event %s: %w", vm.name, name, ctx.Err())
		}
	}
}

func (q *qmp) event(name string) (Event, <-chan struct{}, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, e := range q.events {
		if e.Name == name {
			return e, q.changed, true
		}
	}
	return Event{}, q.changed, false
}

func (vm *VM) connection() *qmp {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	return vm.qmp
}

func (vm *VM) qmpClose() {
	if q := vm.connection(); q != nil {
		q.close()
	}
}
