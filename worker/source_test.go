package worker

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// cursors returns the names of the consumers of the source that worker w1 of the flow
// reads with.
func cursors(l *lab, admin *testenv.Admin) (names []string) {
	l.tb.Helper()
	for _, c := range admin.Consumers("IN") {
		if strings.HasPrefix(c.Name, "natsflow-count-w1-") {
			names = append(names, c.Name)
		}
	}
	return names
}

// A consumer with another ack policy is there under the name that natsflow's
// cursors begin with: the worker neither uses nor touches it.
func TestRun_foreignConsumer(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		admin.CreateConsumer("IN", "natsflow-count-w1", 50)
		l.more(200)
		l.drain(countFlow{}.build(t), Config{})
		l.judge("OUT")
		all := admin.Consumers("IN")
		if len(all) != 1 || all[0].Name != "natsflow-count-w1" || all[0].Delivered.Consumer != 0 {
			t.Fatalf("consumers afterwards: %+v", all)
		}
	})
}

// Far more messages than a consumer usually allows without an ack, 1,000, are not
// committed, for longer than any ack wait: the source goes on, and nothing is
// delivered again.
func TestRun_manyUncommitted(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		var calls atomic.Int64
		f := countFlow{step: func(*flow.Meta, string) error { calls.Add(1); return nil }}.build(t)
		g := newGate("committed")
		// The claims of the 16 tasks pass.
		g.skip.Store(16)
		p := l.start(f, Config{}, g.probe)
		l.awaitPhase(p, "running")
		l.more(5000)
		l.await("5000 records", func() bool { return p.at().Sources["IN"].Read == 5000 })
		l.pass(10 * time.Minute)
		if got := p.at().Sources["IN"].Committed; got > 1000 {
			t.Errorf("committed up to %d: the test shows nothing", got)
		}
		if got := cursorOf(l, admin, "w1").delivered; got != 5000 {
			t.Errorf("%d messages were delivered, there are 5000", got)
		}
		close(g.open)
		l.awaitResults(p, 5000)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		if calls.Load() != 5000 {
			t.Errorf("the step was called %d times for 5000 records", calls.Load())
		}
		l.judge("OUT")
	})
}

// The cursor is deleted, or replaced by another consumer of its name that begins
// anew, while the flow runs and while it is stopped for longer than a consumer is
// kept: the positions are the snapshots'.
func TestRun_cursorDeletedAndRecreated(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		var calls atomic.Int64
		f := countFlow{step: func(*flow.Meta, string) error { calls.Add(1); return nil }}.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		for _, recreate := range []bool{false, true, false, true} {
			l.more(300)
			l.awaitResults(p, len(l.keys))
			names := cursors(l, admin)
			if len(names) == 0 {
				t.Fatal("no cursor")
			}
			for _, name := range names {
				admin.DeleteConsumer("IN", name)
				if recreate {
					admin.CreateConsumer("IN", name, 1)
				}
			}
			l.more(300)
			l.awaitResults(p, len(l.keys))
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		admin.CreateConsumer("IN", "natsflow-count-w1-0123456789ab", 1)
		l.pass(time.Hour)
		l.more(100)
		l.drain(f, Config{})
		l.judge("OUT")
		if int(calls.Load()) != len(l.keys) {
			t.Errorf("the step was called %d times for %d records", calls.Load(), len(l.keys))
		}
	})
}

// A worker sends no acks: its positions are the snapshots', which also idle tasks
// record after a while.
func TestRun_noAcks(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var acks, published atomic.Int64
		link := testenv.NewLink(t)
		link.Sift(testenv.ToServer, func(subject string) bool {
			if strings.HasPrefix(subject, "$JS.ACK.") {
				acks.Add(1)
			}
			if strings.HasPrefix(subject, "out.") {
				published.Add(1)
			}
			return true
		})
		f := countFlow{}.build(t)
		p := l.startOver(link, f, Config{}, nil)
		for range 10 {
			l.more(300)
			l.awaitResults(p, len(l.keys))
		}
		l.await("committed up to 3000", func() bool { return p.at().Sources["IN"].Committed == 3000 })
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		if acks.Load() != 0 || published.Load() != 3000 {
			t.Errorf("%d acks and %d results were sent, want none and 3000", acks.Load(), published.Load())
		}
		l.judge("OUT")
	})
}

// A source that is not there is named, with the command that makes it.
func TestRun_sourceMissing(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		err := l.start(countFlow{sources: []string{"ORDERS"}}.build(t), Config{}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "nats stream add ORDERS") {
			t.Fatalf("got %v", err)
		}
	})
}

// Messages that the flow has not processed are gone from the source: the start
// refuses and tells how many at the most; with AcceptGap it goes on without them.
func TestRun_gap(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 100)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.more(100)
		l.srv.Admin().Purge("IN", 151)
		err := l.start(f, Config{}, nil).wait()
		if !errors.Is(err, ErrGap) || !strings.Contains(err.Error(), "50 messages") || !strings.Contains(err.Error(), "151") {
			t.Fatalf("got %v", err)
		}
		if n := l.count("OUT"); n != 100 {
			t.Errorf("%d results after the refusal, want 100", n)
		}
		l.drain(f, Config{AcceptGap: true})
		for _, key := range l.keys[100:150] {
			l.fed[key]--
		}
		l.judge("OUT")
	})
}

// Messages that are gone but were processed are no gap.
func TestRun_processedMessagesMayGo(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 100)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.srv.Admin().Purge("IN", 101)
		l.more(50)
		l.drain(f, Config{})
		l.judge("OUT")
	})
}

func recreateSource(l *lab) {
	l.tb.Helper()
	if err := l.conn.DeleteStream(l.ctx, "IN"); err != nil {
		l.tb.Fatal(err)
	}
	if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN", Subjects: []string{"in.>"}}); err != nil {
		l.tb.Fatal(err)
	}
}

// The source was deleted and created again while the flow was stopped: refused,
// and, when the operator vouches for the new one, refused still as long as it is
// shorter than the position.
func TestRun_sourceRecreatedWhileStopped(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 100)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		recreateSource(l)
		l.more(10)
		if err := l.start(f, Config{}, nil).wait(); !errors.Is(err, control.ErrSourceRecreated) {
			t.Fatalf("got %v", err)
		}
		err := l.start(f, Config{AcceptGap: true}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "ends at 10") {
			t.Fatalf("got %v", err)
		}
		if n := l.count("OUT"); n != 100 {
			t.Errorf("%d results, want 100", n)
		}
	})
}

// The source is deleted and created again while the flow reads it: the worker ends
// instead of waiting for sequences that come late or never.
func TestRun_sourceRecreatedWhileRunning(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.more(100)
		p := l.start(countFlow{}.build(t), Config{}, nil)
		l.awaitResults(p, 100)
		began := time.Now()
		recreateSource(l)
		l.more(10)
		if err := p.wait(); !errors.Is(err, ErrSource) && !errors.Is(err, bus.ErrNotFound) {
			t.Fatalf("got %v", err)
		}
		if took := time.Since(began); took > 15*time.Second {
			t.Errorf("noticed after %v", took)
		}
		if n := l.count("OUT"); n != 100 {
			t.Errorf("%d results, want 100", n)
		}
	})
}

// Two sources, many partitions, two lanes: each record once, also over a restart,
// and a drain cuts both.
func TestRun_twoSources(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN2", Subjects: []string{"two.>"}}); err != nil {
			t.Fatal(err)
		}
		f := countFlow{sources: []string{"IN", "IN2"}, options: flow.Options{Partitions: 32}}.build(t)
		for range 3 {
			l.feedTo("in.", l.rng, 300, 50)
			l.feedTo("two.", l.rng, 200, 50)
			p := l.start(f, Config{Lanes: 2}, nil)
			l.awaitResults(p, len(l.keys)/2)
			if err := p.leave(); err != nil {
				t.Fatal(err)
			}
		}
		l.drain(f, Config{Lanes: 2})
		l.judge("OUT")
		rec := l.record()
		if got := control.FormatCut(rec.Report.Cut); got != "IN:900 IN2:600" {
			t.Errorf("cut %s", got)
		}
	})
}

// Two workers, and a source that is created anew and soon has more than the flow has
// processed: none of them goes on from the former position, also not the one that
// takes over from the one that noticed first.
func TestRun_sourceRecreatedForAll(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		a := l.start(f, Config{Name: "a"}, nil)
		b := l.start(f, Config{Name: "b"}, nil)
		l.await("the share of both", func() bool { return a.at().Tasks == 8 && b.at().Tasks == 8 })
		l.awaitResults(a, 100)
		l.pass(time.Second) // or it would have been created at the same time
		recreateSource(l)
		l.more(300)
		for _, p := range []*process{a, b} {
			if err := p.wait(); !errors.Is(err, ErrSource) && !errors.Is(err, bus.ErrNotFound) {
				t.Errorf("got %v", err)
			}
		}
		if n := l.count("OUT"); n != 100 {
			t.Errorf("%d results, want 100", n)
		}
	})
}

// A source loses its end, while the flow reads it or not: what comes gets sequences that
// the flow has passed. It is not read on from there.
func TestRun_sourceShorter(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running=%v", running), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				f := countFlow{}.build(t)
				l.more(100)
				p := l.start(f, Config{}, nil)
				l.awaitResults(p, 100)
				if !running {
					if err := p.leave(); err != nil {
						t.Fatal(err)
					}
				}
				l.srv.LoseMessages("IN")
				l.more(10)
				if !running {
					p = l.start(f, Config{}, nil)
				}
				err := p.wait()
				if !errors.Is(err, ErrSource) && !errors.Is(err, bus.ErrNotFound) || !strings.Contains(err.Error(), "ends at") {
					t.Fatalf("got %v", err)
				}
				if n := l.count("OUT"); n != 100 {
					t.Errorf("%d results, want 100", n)
				}
			})
		})
	}
}

// The control stream loses its end: a command that gets the sequence of one that was
// looked at before counts.
func TestControlStream_shorter(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 100)
		for range 3 {
			l.send("control.resume.count", "")
		}
		l.awaitRecord("the last command", func(r control.Record) bool { return r.LastCommand >= 3 })
		l.srv.LoseMessages("NATSFLOW_CONTROL")
		l.awaitRecord("the loss in the record", func(r control.Record) bool { return strings.Contains(r.LastError, "has lost its end") })
		l.send("control.drain.count", "")
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}
