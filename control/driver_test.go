package control

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/testenv"
)

// site is a server and what runs against it, mostly in virtual time.
type site struct {
	t   testing.TB
	ctx context.Context
	srv *testenv.Server
	log *lines
}

// lines collects what is logged.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
	tee io.Writer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = l.tee.Write(b)
	return l.buf.Write(b)
}

func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buf.String(), text)
}

func newSite(t testing.TB, srv *testenv.Server) *site {
	return &site{t: t, ctx: t.Context(), srv: srv, log: &lines{tee: t.Output()}}
}

func bubble(t *testing.T, fn func(s *site)) {
	t.Helper()
	testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) { fn(newSite(t, srv)) })
}

// connect opens a connection, behind a link if there is one.
func (s *site) connect(link *testenv.Link) *bus.Conn {
	s.t.Helper()
	dial := s.srv.InProcess
	if link != nil {
		dial = link.Dialer(dial)
	}
	conn, err := bus.Connect(s.ctx, bus.Config{InProcess: dial})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(conn.Close)
	return conn
}

// open opens the control of flow "f" on a connection of its own.
func (s *site) open(change ...func(*Config)) *Control {
	s.t.Helper()
	cfg := Config{Flow: "f", Logger: slog.New(slog.NewTextHandler(s.log, nil))}
	for _, c := range change {
		c(&cfg)
	}
	if cfg.Conn == nil {
		cfg.Conn = s.connect(nil)
	}
	c, err := Open(s.ctx, cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

func named(name string) func(*Config) { return func(c *Config) { c.Name = name } }

func (s *site) linked(link *testenv.Link) func(*Config) {
	return func(c *Config) { c.Conn = s.connect(link) }
}

// define creates flow f with source IN.
func (s *site) define(c *Control) Record {
	s.t.Helper()
	return s.must(c.Define(s.ctx, Definition{
		Partitions: 16, Hash: "h1", Steps: []StepRecord{{ID: "count", Kind: "aggregate"}},
		Sources: map[string]SourceRecord{"IN": {Created: scriptTime(0)}},
	}))
}

func (s *site) must(rec Record, err error) Record {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
	return rec
}

// pub publishes a command as anybody could.
func (s *site) pub(c *Control, subject, body string) uint64 {
	s.t.Helper()
	seq, err := c.cfg.Conn.Publish(s.ctx, subject, nil, []byte(body))
	if err != nil {
		s.t.Fatal(err)
	}
	return seq
}

// running is a Run in a goroutine.
type running struct {
	s    *site
	stop context.CancelFunc
	done chan error

	mu      sync.Mutex
	records []Record
	changed chan struct{}
}

func (s *site) run(c *Control) *running {
	ctx, stop := context.WithCancel(s.ctx)
	r := &running{s: s, stop: stop, done: make(chan error, 1), changed: make(chan struct{}, 1)}
	go func() {
		r.done <- c.Run(ctx, func(rec Record) {
			r.mu.Lock()
			r.records = append(r.records, rec)
			r.mu.Unlock()
			select {
			case r.changed <- struct{}{}:
			default:
			}
		})
		close(r.done)
	}()
	s.t.Cleanup(func() {
		stop()
		for range r.done {
		}
	})
	return r
}

// until waits until the record, as the callback has it, is as wanted.
func (r *running) until(what string, ok func(Record) bool) Record {
	r.s.t.Helper()
	limit := time.NewTimer(2 * time.Minute)
	defer limit.Stop()
	for {
		r.mu.Lock()
		var rec Record
		if n := len(r.records); n > 0 {
			rec = r.records[n-1]
		}
		r.mu.Unlock()
		if rec.Version != 0 && ok(rec) {
			return rec
		}
		select {
		case <-r.changed:
		case err := <-r.done:
			r.s.t.Fatalf("waiting until %s: Run ended: %v", what, err)
		case <-limit.C:
			r.s.t.Fatalf("waiting until %s: the record is %+v", what, rec)
		}
	}
}

func (r *running) untilState(want State) Record {
	r.s.t.Helper()
	return r.until(string(want), func(rec Record) bool { return rec.State == want })
}

func (r *running) untilCommand(seq uint64) Record {
	r.s.t.Helper()
	return r.until("the command was looked at", func(rec Record) bool { return rec.LastCommand >= seq })
}

// wantErr waits for Run's end.
func (r *running) wantErr(want error) {
	r.s.t.Helper()
	select {
	case err := <-r.done:
		if !errors.Is(err, want) {
			r.s.t.Fatalf("Run ended with %v, want %v", err, want)
		}
	case <-time.After(2 * time.Minute):
		r.s.t.Fatalf("Run did not end with %v", want)
	}
}
