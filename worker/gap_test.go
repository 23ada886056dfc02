package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
)

func TestGaps_pass(t *testing.T) {
	for _, c := range []struct {
		name string
		g    gaps
		// first is what the stream says when it is asked; 0: it must not be.
		first, last, seq uint64
		gap              bool
	}{
		{name: "next", g: gaps{whole: true}, last: 7, seq: 8},
		{name: "first ever", g: gaps{whole: true}, last: 0, seq: 100},
		{name: "all kept", g: gaps{whole: true}, last: 7, seq: 10, first: 1},
		{name: "kept from there on", g: gaps{whole: true}, last: 7, seq: 10, first: 8},
		{name: "dropped up to it", g: gaps{whole: true}, last: 7, seq: 10, first: 10, gap: true},
		{name: "dropped beyond it", g: gaps{whole: true}, last: 7, seq: 10, first: 99, gap: true},
		{name: "filter, kept", last: 7, seq: 10, first: 3},
		{name: "filter, quiet subject", last: 7, seq: 10, first: 10},
		{name: "filter, overtaken", last: 7, seq: 10, first: 11, gap: true},
		{name: "latest of each subject", g: gaps{whole: true, compacts: true}, last: 7, seq: 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, accept := range []bool{false, true} {
				g, asked, warned := c.g, 0, uint64(0)
				g.stream, g.last, g.accept = "IN", c.last, accept
				g.first = func(context.Context) (uint64, bool, error) { asked++; return c.first, true, nil }
				g.warn = func(missing, _ uint64) { warned = missing }
				err := g.pass(t.Context(), c.seq)
				if errors.Is(err, ErrGap) != (c.gap && !accept) || (warned > 0) != (c.gap && accept) {
					t.Errorf("accept %v: warned of %d, %v", accept, warned, err)
				}
				if c.gap && accept && warned != c.seq-c.last-1 {
					t.Errorf("%d missing, want %d", warned, c.seq-c.last-1)
				}
				if c.gap && !accept && !strings.Contains(err.Error(), "up to 2 messages") {
					t.Errorf("error %v", err)
				}
				if (asked > 0) != (c.first > 0) {
					t.Errorf("asked %d times", asked)
				}
				if err := g.pass(t.Context(), c.seq+1); err != nil {
					t.Errorf("the next one: %v", err)
				}
			}
		})
	}
}

// Asking costs a reader whose source has a jump at every message a small part of
// its time, and a jump that is larger than the others is asked about all the same.
func TestGaps_asksNowAndThen(t *testing.T) {
	bubble(t, func(t *testing.T, _ *lab) {
		asked, first := 0, uint64(1)
		g := &gaps{stream: "IN", last: 1}
		g.first = func(context.Context) (uint64, bool, error) {
			time.Sleep(time.Millisecond)
			asked++
			return first, true, nil
		}
		began := time.Now()
		seq := uint64(1)
		for range 2000 {
			time.Sleep(100 * time.Microsecond) // what a message costs otherwise
			if seq += 10; g.pass(t.Context(), seq) != nil {
				t.Fatal("a gap")
			}
		}
		if took := time.Since(began); asked < 5 || took > 230*time.Millisecond {
			t.Errorf("asked %d times, took %v instead of 200ms", asked, took)
		}
		first = seq + 500
		if err := g.pass(t.Context(), seq+100); !errors.Is(err, ErrGap) {
			t.Errorf("a large jump: %v", err)
		}
	})
}

// ringed makes the source drop messages that are older than the last n.
func ringed(l *lab, n int) {
	l.srv.Admin().Edit("IN", map[string]any{"max_msgs": n})
}

// overtake starts a worker whose steps wait from record 10 on, feeds n records in
// parts so that the limit of the source drops some that were never read, and lets
// the worker go on.
func overtake(l *lab, cfg Config, subjects []string, n int) *process {
	l.tb.Helper()
	open, reached := make(chan struct{}), make(chan struct{})
	var once sync.Once
	c := countFlow{options: flow.Options{Partitions: 4}, subjects: subjects, step: func(m *flow.Meta, _ string) error {
		if m.Seq >= 10 {
			once.Do(func() { close(reached) })
			<-open
		}
		return nil
	}}
	p := l.start(c.build(l.tb), cfg, nil)
	l.more(20)
	<-reached
	for range n / 1000 {
		l.more(1000)
		l.pass(10 * time.Millisecond) // what is sent ahead is sent before more comes
	}
	close(open)
	return p
}

// The limits of a source drop messages that the worker has not read, since its
// steps hold it up: the session ends with the reason as soon as the reader comes to
// the gap. What it has read before is in the results, and the next start refuses
// the same gap.
func TestRun_gapWhileRunning(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		ringed(l, 1000)
		p := overtake(l, Config{}, nil, 60_000)
		err := p.wait()
		if !errors.Is(err, ErrGap) || !strings.Contains(err.Error(), "stream IN") || !strings.Contains(err.Error(), "begins at sequence 59021") {
			t.Fatalf("got %v", err)
		}
		results := uint64(l.count("OUT"))
		if results < 1000 || results > 50_000 {
			t.Fatalf("%d results", results)
		}
		l.judgeThrough("OUT", results)
		again := l.start(countFlow{options: flow.Options{Partitions: 4}}.build(t), Config{}, nil).wait()
		if !errors.Is(again, ErrGap) || !strings.Contains(again.Error(), "begins at sequence 59021") {
			t.Fatalf("the next start: %v", again)
		}
		l.drain(countFlow{options: flow.Options{Partitions: 4}}.build(t), Config{AcceptGap: true})
		for _, key := range l.keys[results:59020] {
			l.fed[key]--
		}
		l.judge("OUT")
	})
}

// With AcceptGap it goes on, and says how many messages are missing.
func TestRun_gapWhileRunningAccepted(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var log record
		l.log = slog.New(slog.NewTextHandler(&log, nil))
		ringed(l, 1000)
		p := overtake(l, Config{AcceptGap: true}, nil, 60_000)
		l.await("all read", func() bool { return p.at().Sources["IN"].Committed == l.seq })
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		missing := l.seq - uint64(l.count("OUT"))
		if text := fmt.Sprintf("missing=%d ", missing); missing < 1000 || !strings.Contains(log.String(), text) {
			t.Errorf("no %q in the log:\n%s", text, log.String())
		}
	})
}

// A drain to a cut behind the gap does not end as if nothing were missing.
func TestDrain_gap(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		ringed(l, 1000)
		open, reached := make(chan struct{}), make(chan struct{})
		var once sync.Once
		p := l.start(countFlow{options: flow.Options{Partitions: 4}, step: func(m *flow.Meta, _ string) error {
			if m.Seq >= 10 {
				once.Do(func() { close(reached) })
				<-open
			}
			return nil
		}}.build(t), Config{}, nil)
		l.more(20)
		<-reached
		for range 60 {
			l.more(1000)
			l.pass(10 * time.Millisecond)
		}
		l.send("control.drain.count", `{"at":"head"}`)
		l.awaitRecord("the drain", func(rec control.Record) bool { return rec.State == control.StateDraining })
		close(open)
		if err := p.wait(); !errors.Is(err, ErrGap) {
			t.Fatalf("got %v", err)
		}
		if rec := l.record(); drained(rec) {
			t.Error("drained")
		}
	})
}

// A filter leaves most messages out, and the stream keeps few: jumps all the time,
// and the first sequence moves on. A reader that keeps up has no gap.
func TestRun_jumpsAreNoGap(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		ringed(l, 200)
		p := l.start(countFlow{subjects: []string{"in.k3"}}.build(t), Config{}, nil)
		for range 40 {
			l.more(100)
			l.await("all read", func() bool { return l.count("OUT") == l.fed["k3"] || p.ended() })
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.fed = map[string]int{"k3": l.fed["k3"]}
		l.judge("OUT")
	})
}

// Messages deleted one by one, which the reader has not come to, are no gap either,
// though the first sequence moves on later.
func TestRun_deletedMessagesAreNoGap(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if err := l.conn.DeleteStream(l.ctx, "IN"); err != nil {
			t.Fatal(err)
		}
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN", Subjects: []string{"in.>"}}); err != nil {
			t.Fatal(err)
		}
		// The latest of each subject only: the others go while they wait.
		l.srv.Admin().Edit("IN", map[string]any{"max_msgs_per_subject": 1})
		p := overtake(l, Config{}, nil, 40_000)
		l.await("all read", func() bool {
			if p.ended() {
				t.Fatalf("ended with %v", p.err)
			}
			return p.at().Sources["IN"].Committed == l.seq
		})
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}
