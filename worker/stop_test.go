package worker

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/flow"
)

// slowStep takes its time and counts.
func slowStep(calls *atomic.Int64, d time.Duration) func(*flow.Meta, string) error {
	return func(*flow.Meta, string) error {
		t := time.NewTimer(d)
		<-t.C
		calls.Add(1)
		return nil
	}
}

// A stop in the middle of slow steps ends only after everything that was read has
// been processed, committed and published.
func TestRun_leaveWaitsForSlowSteps(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		var calls atomic.Int64
		f := countFlow{step: slowStep(&calls, 300*time.Millisecond)}.build(t)
		l.more(40)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.await("some records", func() bool { return calls.Load() >= 3 })
		p.cancel()
		l.awaitPhase(p, "leaving")
		if p.ended() {
			t.Error("ended before the steps")
		}
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		if n := l.count("OUT"); int64(n) != calls.Load() || n != 40 {
			t.Errorf("%d records were processed and %d results published, want all 40 that were read", calls.Load(), n)
		}
		if names := cursors(l, admin); len(names) != 0 {
			t.Errorf("the cursor %v is left behind", names)
		}
		l.more(10)
		l.drain(f, Config{})
		l.judge("OUT")
	})
}

// A worker leaves while the results of 500 messages are not published; the first record of its
// successor, which stood by, comes within two seconds.
func TestRun_successorStartsAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var first atomic.Pointer[time.Time]
		var calls atomic.Int64
		g := newGate("committed")
		g.skip.Store(1)
		a := l.start(countFlow{options: oneTask, step: slowStep(&calls, time.Millisecond)}.build(t), Config{Name: "a"}, g.probe)
		l.awaitPhase(a, "running")
		b := l.start(countFlow{options: oneTask, step: func(*flow.Meta, string) error {
			now := time.Now()
			first.CompareAndSwap(nil, &now)
			return nil
		}}.build(t), Config{Name: "b"}, nil)
		l.awaitPhase(b, "standing by")
		l.more(500)
		<-g.reached
		l.await("500 records", func() bool { return calls.Load() == 500 })
		a.cancel()
		l.awaitPhase(a, "leaving")
		l.pass(100 * time.Millisecond) // until its reader has stopped
		l.more(100)
		left := time.Now()
		close(g.open)
		if err := a.wait(); err != nil {
			t.Fatal(err)
		}
		l.awaitResults(b, 600)
		if took := first.Load().Sub(left); took > 2*time.Second {
			t.Errorf("the successor's first record came %v after the stop", took)
		}
		if calls.Load() != 500 {
			t.Errorf("%d records processed by the first worker", calls.Load())
		}
		if err := b.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// What waits for the end of a commit interval of an hour is committed and published
// at once by a stop.
func TestRun_stopFlushesLongInterval(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var calls atomic.Int64
		// The lane never runs dry, so that only the interval would commit.
		f := countFlow{step: slowStep(&calls, 10*time.Millisecond), options: flow.Options{Partitions: 1, CommitInterval: time.Hour}}.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		for range 40 {
			l.more(50)
			l.pass(20 * time.Millisecond)
		}
		l.await("half of the records", func() bool { return calls.Load() >= 500 })
		if n := l.count("OUT"); int64(n) > calls.Load()/2 {
			t.Errorf("%d results of %d records are out already: the test shows nothing", n, calls.Load())
		}
		p.cancel()
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		if n := l.count("OUT"); int64(n) != calls.Load() {
			t.Errorf("%d results of %d records after the stop", n, calls.Load())
		}
		l.drain(f, Config{})
		l.judge("OUT")
	})
}

// The sink's stream is gone when the worker is asked to stop: the stop is bounded,
// ends with an error, and the position is not beyond what is published. The next start
// makes the stream again and goes on exactly.
func TestRun_stopWithSinkGone(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(200)
		p := l.start(f, Config{StopTimeout: 3 * time.Second}, nil)
		l.awaitResults(p, 200)
		before := l.read("OUT")
		if err := l.conn.DeleteStream(l.ctx, "OUT"); err != nil {
			t.Fatal(err)
		}
		l.more(100)
		l.await("trouble", func() bool { return p.at().Trouble != "" })
		l.pass(3 * time.Second)
		if got := p.at().Sources["IN"].Committed; got > 200 {
			t.Errorf("committed up to %d, results are published up to 200", got)
		}
		began := time.Now()
		if err := p.leave(); !errors.Is(err, ErrStopTimeout) {
			t.Errorf("the stop ended with %v", err)
		}
		if took := time.Since(began); took > 8*time.Second {
			t.Errorf("the stop took %v", took)
		}
		l.drain(f, Config{})
		l.judgeResults(append(before, l.read("OUT")...), l.fed)
	})
}

// The sink's stream is deleted and made again, with other settings, while the flow
// runs: it goes on with it, also through a crash.
func TestRun_sinkRecreated(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(500)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 500)
		before := l.read("OUT")
		if err := l.conn.DeleteStream(l.ctx, "OUT"); err != nil {
			t.Fatal(err)
		}
		l.more(50)
		l.await("trouble", func() bool { return p.at().Trouble != "" })
		sink := bus.StreamConfig{Name: "OUT", Subjects: []string{"out.>"}, Duplicates: time.Second}
		if _, err := l.conn.CreateStream(l.ctx, sink); err != nil {
			t.Fatal(err)
		}
		l.awaitResults(p, 50)
		l.await("no trouble", func() bool { return p.at().Trouble == "" })
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		// A part of an outbox is in the new stream, whose sequences are lower than
		// those of the old one, and the duplicate window is over.
		l.more(50)
		c := &crasher{point: "half-published", left: 2}
		if err := l.start(f, Config{}, c.probe).wait(); !errors.Is(err, errCrash) {
			t.Fatalf("got %v", err)
		}
		l.pass(5 * time.Second)
		l.drain(f, Config{})
		l.judgeResults(append(before, l.read("OUT")...), l.fed)
	})
}

// The same while the flow has nothing to publish, so that it does not notice, and with
// the settings that natsflow gives: it does at the first sequence that comes back.
func TestRun_sinkRecreatedUnnoticed(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.more(500)
		p := l.start(countFlow{}.build(t), Config{}, nil)
		l.awaitResults(p, 500)
		l.pass(10 * time.Second)
		before := l.read("OUT")
		if err := l.conn.DeleteStream(l.ctx, "OUT"); err != nil {
			t.Fatal(err)
		}
		sink := bus.SinkConfig{Stream: "OUT", Subjects: []string{"out.*"}, Flow: "count"}
		if _, _, err := l.conn.EnsureSink(l.ctx, sink); err != nil {
			t.Fatal(err)
		}
		l.more(50)
		l.awaitResults(p, 50)
		l.more(50)
		l.awaitResults(p, 100)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judgeResults(append(before, l.read("OUT")...), l.fed)
	})
}

// The server is away when the worker is asked to stop: bounded as well, and if the
// lease is lost before, that is not a clean end either.
func TestRun_stopWithServerAway(t *testing.T) {
	for name, lease := range map[string]time.Duration{"bounded": time.Minute, "lease lost before": 2 * time.Second} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				f := countFlow{}.build(t)
				l.more(100)
				p := l.start(f, Config{StopTimeout: 4 * time.Second, LeaseTTL: lease}, nil)
				l.awaitResults(p, 100)
				l.more(100)
				l.srv.Stop()
				began := time.Now()
				err := p.leave()
				if err == nil || lease == time.Minute && !errors.Is(err, ErrStopTimeout) {
					t.Errorf("the stop ended with %v", err)
				}
				if took := time.Since(began); took > 10*time.Second {
					t.Errorf("the stop took %v", took)
				}
				l.srv.Restart()
				l.drain(f, Config{})
				l.judge("OUT")
			})
		})
	}
}

// The server goes away for longer than a lease while the flow runs, and comes back:
// no error, and exact results.
func TestRun_serverAwayWhileRunning(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		p := l.start(f, Config{}, nil)
		for _, away := range []time.Duration{2 * time.Second, 20 * time.Second, 2 * time.Minute} {
			l.more(200)
			l.pass(10 * time.Millisecond)
			l.srv.Stop()
			l.pass(away)
			l.srv.Restart()
			l.await("the connection", func() bool { return l.conn.Connected() })
			l.awaitResults(p, len(l.keys))
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// A worker that is asked to stop while it starts ends at once and without an error,
// with and without a server.
func TestRun_stopWhileStarting(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		for i := range 15 {
			p := l.start(f, Config{}, nil)
			l.pass(time.Duration(i) * time.Millisecond)
			began := time.Now()
			if err := p.leave(); err != nil {
				t.Errorf("stopped after %d ms: %v", i, err)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("stopped after %d ms: took %v", i, took)
			}
		}
		l.drain(f, Config{})
		l.judge("OUT")
		l.srv.Stop()
		p := l.start(f, Config{}, nil)
		l.pass(5 * time.Second)
		if err := p.leave(); err != nil {
			t.Errorf("without a server: %v", err)
		}
		l.srv.Restart()
	})
}

// A crash during a stop, at every point of it: the next start finishes what was
// committed and never goes behind it.
func TestRun_crashDuringStop(t *testing.T) {
	for _, kind := range sinkKinds {
		for _, point := range []string{"processed", "entry-appended-unacked", "committed", "half-published", "published", "noted", "released"} {
			t.Run(kind.name+"/"+point, func(t *testing.T) {
				bubble(t, func(t *testing.T, l *lab) {
					kind.make(l)
					var calls atomic.Int64
					f := countFlow{step: slowStep(&calls, 5*time.Millisecond), options: flow.Options{Partitions: 4}}.build(t)
					l.more(100)
					c := &crasher{point: point, left: 2}
					p := l.start(f, Config{}, func(p *process, ctx context.Context, at, task string) error {
						if p.at().Phase != "leaving" {
							return nil
						}
						return c.probe(p, ctx, at, task)
					})
					l.await("some records", func() bool { return calls.Load() >= 20 })
					if err := p.leave(); !errors.Is(err, errCrash) {
						t.Fatalf("got %v, want a crash", err)
					}
					l.pass(2 * time.Second)
					l.more(20)
					l.drain(f, Config{})
					l.judge("OUT")
				})
			})
		}
	}
}
