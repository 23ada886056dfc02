package worker

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// oneTask is for flows whose second worker stands by.
var oneTask = flow.Options{Partitions: 1}

// pair starts an active worker a and b, which stands by: the flow has one task.
func pair(l *lab, f *flow.Flow, cfg Config, probe probe) (a, b *process) {
	l.tb.Helper()
	ca, cb := cfg, cfg
	ca.Name, cb.Name = "a", "b"
	a = l.start(f, ca, probe)
	l.awaitPhase(a, "running")
	b = l.start(f, cb, nil)
	l.awaitPhase(b, "standing by")
	return a, b
}

// A worker that stands by takes over at once when the active one leaves.
func TestTakeover_leave(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		a, b := pair(l, countFlow{options: oneTask}.build(t), Config{}, nil)
		l.more(200)
		l.awaitResults(a, 200)
		if err := a.leave(); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		l.awaitPhase(b, "running")
		if took := time.Since(began); took > time.Second {
			t.Errorf("took over after %v", took)
		}
		l.more(200)
		l.awaitResults(b, 400)
		if err := b.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// It takes over after the lease when the active one dies, or hangs, which is the same
// to everybody else; one that wakes up stands by in its turn.
func TestTakeover_lease(t *testing.T) {
	for _, kind := range []string{"dies", "hangs"} {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				a, b := pair(l, countFlow{options: oneTask}.build(t), Config{LeaseTTL: 2 * time.Second}, nil)
				l.more(200)
				l.awaitResults(a, 200)
				began := time.Now()
				if kind == "dies" {
					a.link.Cut()
				} else {
					a.link.Hold(testenv.Both)
				}
				l.more(100)
				l.awaitResults(b, 300)
				if took := time.Since(began); took < time.Second || took > 5*time.Second {
					t.Errorf("took over after %v, the lease is 2s", took)
				}
				if kind == "dies" {
					_ = a.leave()
				} else {
					l.pass(5 * time.Second)
					a.link.Release(testenv.Both)
					l.awaitPhase(a, "standing by")
					l.more(100)
					l.awaitResults(b, 400)
					if err := b.leave(); err != nil {
						t.Error(err)
					}
					l.more(100)
					l.awaitResults(a, 500)
				}
				l.judge("OUT")
			})
		})
	}
}

// A process that is started under the name of one that died takes its place at once
// when its sinks keep out what that one may still have sent.
func TestTakeover_sameNameAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		cfg := Config{LeaseTTL: 20 * time.Second}
		a := l.start(f, cfg, nil)
		l.more(200)
		l.awaitResults(a, 200)
		a.link.Cut()
		began := time.Now()
		b := l.start(f, cfg, nil)
		l.more(100)
		l.awaitResults(b, 300)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("took its place after %v", took)
		}
		_ = a.leave()
		if err := b.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// Of two alive under one name the older one stops, and says why.
func TestTakeover_replaced(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		a := l.start(f, Config{}, nil)
		l.more(200)
		l.awaitResults(a, 200)
		b := l.start(f, Config{}, nil)
		l.more(200)
		err := a.wait()
		if !errors.Is(err, control.ErrReplaced) || !strings.Contains(err.Error(), "w1") {
			t.Errorf("the older one ended with %v", err)
		}
		l.awaitResults(b, 400)
		if err := b.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// A worker is frozen between a commit and its publishing for long after its successor
// has taken over: when it wakes, nothing of what it had left to publish leaves it, by
// the guard of its connection, whatever the sink can do.
func TestTakeover_frozenBeforePublishing(t *testing.T) {
	for _, kind := range sinkKinds {
		for _, half := range []bool{false, true} {
			name, point, skip := kind.name, "committed", int64(1)
			if half {
				name, point, skip = name+", half published", "half-published", 0
			}
			t.Run(name, func(t *testing.T) {
				bubble(t, func(t *testing.T, l *lab) {
					kind.make(l)
					g := newGate(point)
					g.skip.Store(skip)
					var freeze sync.Once
					f := countFlow{options: oneTask}.build(t)
					a, b := pair(l, f, Config{LeaseTTL: 2 * time.Second}, func(p *process, ctx context.Context, point, task string) error {
						if point == g.point && g.skip.Load() <= 0 {
							// A frozen process sends nothing at all, renewals included.
							freeze.Do(func() { p.link.Hold(testenv.ToServer) })
						}
						return g.probe(p, ctx, point, task)
					})
					l.more(300)
					<-g.reached
					l.awaitResults(b, 300)
					l.pass(time.Minute)
					before := l.count("OUT")
					close(g.open)
					l.pass(time.Second)
					a.link.Release(testenv.ToServer)
					l.pass(10 * time.Second)
					if n := l.count("OUT"); n != before {
						t.Errorf("%d results before it woke, %d after", before, n)
					}
					l.more(100)
					l.awaitResults(b, 400)
					if err := b.leave(); err != nil {
						t.Error(err)
					}
					l.more(100)
					l.awaitResults(a, 500)
					l.judge("OUT")
				})
			})
		}
	}
}

// A worker's results have left it when it is cut off, and are held by the network until
// long after its successor has published them: the sink refuses them, by the fence.
func TestTakeover_lateBytes(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var claims atomic.Int64
		var cut sync.Once
		a, b := pair(l, countFlow{bucket: "LATEST", options: oneTask}.build(t), Config{LeaseTTL: 2 * time.Second}, func(p *process, _ context.Context, point, _ string) error {
			if point == "committed" && claims.Add(1) > 1 {
				cut.Do(func() { p.link.Hold(testenv.ToServer) })
			}
			return nil
		})
		l.more(300)
		l.awaitResults(b, 300)
		l.pass(time.Minute)
		before := l.count("OUT")
		a.link.Release(testenv.ToServer)
		l.pass(10 * time.Second)
		if n := l.count("OUT"); n != before {
			t.Errorf("%d results before the late bytes, %d after", before, n)
		}
		l.more(100)
		l.awaitResults(b, 400)
		if err := b.leave(); err != nil {
			t.Error(err)
		}
		l.more(100)
		l.awaitResults(a, 500)
		if err := a.leave(); err != nil {
			t.Error(err)
		}
		l.judge("OUT")
		l.judgeLatest("KV_LATEST")
	})
}

// A worker is frozen when a drain has been decided and the cut is not yet written; it
// wakes when its successor has read on. Its cut is too low by then: the successor has
// fixed its own, or takes the late one back.
func TestTakeover_lateCut(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{options: oneTask}.build(t)
		g := newGate("cut-chosen")
		var freeze sync.Once
		a, b := pair(l, f, Config{LeaseTTL: 2 * time.Second}, func(p *process, ctx context.Context, point, task string) error {
			if point == g.point {
				freeze.Do(func() { p.link.Hold(testenv.ToServer) })
			}
			return g.probe(p, ctx, point, task)
		})
		l.more(100)
		l.awaitResults(a, 100)
		l.send("control.drain.count", "")
		<-g.reached
		l.more(100)
		if err := b.wait(); err != nil {
			t.Fatal(err)
		}
		cut := l.record().Report.Cut["IN"]
		close(g.open)
		a.link.Release(testenv.ToServer)
		if err := a.wait(); err != nil {
			t.Errorf("the frozen one ended with %v", err)
		}
		if rec := l.record(); !drained(rec) || rec.Report.Cut["IN"] != cut {
			t.Errorf("record %+v", rec)
		}
		l.judgeThrough("OUT", cut)
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
	})
}

// The older one has lost its lease when it hears that another has its name: it does
// not join again and take the name from the younger.
func TestTakeover_replacedWhileFrozen(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		cfg := Config{LeaseTTL: 2 * time.Second}
		a := l.start(f, cfg, nil)
		l.more(200)
		l.awaitResults(a, 200)
		a.link.Hold(testenv.Both)
		b := l.start(f, cfg, nil)
		l.more(200)
		l.awaitResults(b, 400)
		l.pass(5 * time.Second)
		a.link.Release(testenv.Both)
		if err := a.wait(); !errors.Is(err, control.ErrReplaced) {
			t.Errorf("the older one ended with %v", err)
		}
		l.more(100)
		l.awaitResults(b, 500)
		if err := b.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}
