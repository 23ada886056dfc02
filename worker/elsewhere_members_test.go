package worker

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// holders counts the tasks that each worker holds by the task records, "" those that
// nobody does.
func (l *lab) holders() map[string]int {
	l.tb.Helper()
	tasks, err := l.control().Tasks(l.ctx)
	if err != nil {
		l.tb.Fatal(err)
	}
	n := map[string]int{}
	for _, rec := range tasks {
		n[rec.Owner]++
	}
	return n
}

// Two workers, three, and two again, under load. Elsewhere a partition that changed
// its owner goes on from the wrong place: messages are skipped, or processed twice.
// Here each record of each key changes the state once, whether the third worker
// leaves or dies.
func TestElsewhere_twoThreeTwo(t *testing.T) {
	for _, dies := range []bool{false, true} {
		t.Run(fmt.Sprintf("dies=%v", dies), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				var n notes
				crew := map[string]*process{}
				join := func(name string) *process {
					f := countFlow{step: n.step(name, nil), options: flow.Options{Partitions: 12}}
					crew[name] = l.start(f.build(t), Config{Name: name, LeaseTTL: 2 * time.Second}, nil)
					return crew[name]
				}
				shared := func(tasks int, names ...string) func() bool {
					return func() bool {
						for _, name := range names {
							if st := crew[name].at(); st.Phase != "running" || st.Tasks != tasks {
								return false
							}
						}
						return true
					}
				}
				join("a")
				join("b")
				l.under("two to share the tasks", shared(6, "a", "b"))
				l.under("a second", after(time.Second))
				c := join("c")
				l.under("three to share the tasks", shared(4, "a", "b", "c"))
				l.under("a second", after(time.Second))
				if dies {
					c.link.Cut()
				}
				c.cancel()
				l.under("the third to go", c.ended)
				if c.err != nil && !dies {
					t.Error(c.err)
				}
				l.under("two to share the tasks", shared(6, "a", "b"))
				l.under("a second", after(time.Second))
				l.awaitResults(crew["a"], len(l.keys))
				if got := len(n.of("c")); got < 20 {
					t.Errorf("the third worker had %d records: the test shows nothing", got)
				}
				for _, name := range []string{"a", "b"} {
					if err := crew[name].leave(); err != nil {
						t.Error(err)
					}
				}
				if dies {
					// What it had not committed was processed again, as it should be.
					l.judgeRecords()
				} else {
					n.judgeOnce(l)
				}
			})
		})
	}
}

// A worker is taken away for good, under load. Elsewhere its partitions stand still
// until the group notices that it has gone, 45 seconds later. Here it releases its
// tasks, and no record waits for a second, though the lease is that long.
func TestElsewhere_workerRemoved(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var n notes
		crew := map[string]*process{}
		for _, name := range []string{"a", "b", "c"} {
			f := countFlow{step: n.step(name, nil), options: flow.Options{Partitions: 12}}
			crew[name] = l.start(f.build(t), Config{Name: name, LeaseTTL: 45 * time.Second}, nil)
		}
		l.await("three to share the tasks", func() bool {
			return crew["a"].at().Tasks == 4 && crew["b"].at().Tasks == 4 && crew["c"].at().Tasks == 4
		})
		l.under("a second", after(time.Second))
		c := crew["c"]
		had := len(n.of("c"))
		c.cancel()
		l.under("it to go", c.ended)
		if c.err != nil {
			t.Error(c.err)
		}
		l.under("a second", after(time.Second))
		if got := l.holders(); got["a"] != 6 || got["b"] != 6 || len(got) != 2 {
			t.Errorf("a second later the tasks are held by %v", got)
		}
		l.under("two seconds", after(2*time.Second))
		l.awaitResults(crew["a"], len(l.keys))
		if n.late > time.Second {
			t.Errorf("a record waited for %v", n.late)
		}
		if had < 20 {
			t.Errorf("the worker had %d records: the test shows nothing", had)
		}
		for _, name := range []string{"a", "b"} {
			if err := crew[name].leave(); err != nil {
				t.Error(err)
			}
		}
		n.judgeOnce(l)
	})
}

// The state of the tasks that a worker gets is large, and loads for a while, under
// load. Elsewhere the records that come meanwhile are dropped, or meet an empty state.
// Here they wait for the state, and the other tasks go on.
func TestElsewhere_largeStateUnderLoad(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var n notes
		const keys = 10_000
		options := flow.Options{Partitions: 4}
		a := l.start(countFlow{step: n.step("a", nil), options: options}.build(t), Config{Name: "a", LeaseTTL: 30 * time.Second}, nil)
		l.awaitPhase(a, "running")
		l.feed(l.rng, keys, keys)
		l.awaitResults(a, len(l.keys))
		// The claims of b are in the logs, and nothing of them is loaded.
		g := newGate("committed")
		b := l.start(countFlow{step: n.step("b", nil), options: options}.build(t), Config{Name: "b", LeaseTTL: 30 * time.Second}, g.probe)
		load := func(what string, ok func() bool) {
			for !ok() {
				l.feed(l.rng, 10, keys)
				l.pass(10 * time.Millisecond)
			}
		}
		load("the claims", func() bool { return isClosed(g.reached) })
		before := len(n.of("a"))
		load("five seconds", after(5*time.Second))
		if st := b.at(); st.Phase != "starting" || len(n.of("b")) > 0 {
			t.Errorf("b says %+v and had %d records before it had its state", st, len(n.of("b")))
		}
		if got := len(n.of("a")) - before; got < 1000 {
			t.Errorf("a had %d records meanwhile", got)
		}
		if got := l.count("OUT"); got > len(l.keys)-1000 {
			t.Errorf("%d results of %d records are out: the test shows nothing", got, len(l.keys))
		}
		close(g.open)
		load("a second", after(time.Second))
		l.awaitResults(b, len(l.keys))
		if st := b.at(); st.StateKeys < keys/4 {
			t.Errorf("b has the state of %d keys", st.StateKeys)
		}
		for _, p := range []*process{a, b} {
			if err := p.leave(); err != nil {
				t.Error(err)
			}
		}
		n.judgeOnce(l)
	})
}

// doomed is a worker that dies at a point of the protocol, when it is told to.
type doomed struct {
	point   string
	armed   atomic.Bool
	reached chan struct{}
	die     chan struct{}
}

func newDoomed(point string) *doomed {
	return &doomed{point: point, reached: make(chan struct{}), die: make(chan struct{})}
}

func (d *doomed) probe(p *process, _ context.Context, point, _ string) error {
	if point != d.point || !d.armed.CompareAndSwap(true, false) {
		return nil
	}
	close(d.reached)
	select {
	case <-d.die:
	case <-p.tb.Context().Done():
	}
	p.link.Cut()
	return errCrash
}

// besideDoomed starts the worker a, and b, which is doomed, and waits until each has one
// of the two tasks of the flow.
func (l *lab) besideDoomed(f *flow.Flow, cfg Config, d *doomed) (a, b *process) {
	l.tb.Helper()
	cfg.Name = "a"
	a = l.start(f, cfg, nil)
	l.awaitPhase(a, "running")
	cfg.Name = "b"
	b = l.start(f, cfg, d.probe)
	l.await("the share of both", func() bool { return a.at().Tasks == 1 && b.at().Tasks == 1 })
	return a, b
}

// One of two workers dies in its very first commit, when the other one has written its
// part of what has been read. Elsewhere the resume takes the half snapshot for a whole
// one, and skips the messages of the worker that died. Here each task goes on from
// what it has itself committed, whether the other worker lives or everything is
// started again.
func TestElsewhere_firstCommit(t *testing.T) {
	for _, point := range []string{"processed", "entry-appended-unacked", "committed", "half-published", "published"} {
		for _, all := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,all=%v", point, all), func(t *testing.T) {
				bubble(t, func(t *testing.T, l *lab) {
					f := countFlow{options: flow.Options{Partitions: 2}}.build(t)
					cfg := Config{LeaseTTL: 2 * time.Second}
					d := newDoomed(point)
					a, b := l.besideDoomed(f, cfg, d)
					d.armed.Store(true)
					l.more(200)
					<-d.reached
					l.await("a to commit its part", func() bool { return a.at().Sources["IN"].Committed == l.seq })
					if got := l.count("OUT"); point != "published" && got == 200 || got < 50 {
						t.Errorf("%d results are out: the test shows nothing", got)
					}
					if all {
						a.link.Cut()
					}
					close(d.die)
					if err := b.leave(); err == nil {
						t.Error("b did not die")
					}
					if all {
						_ = a.leave()
						cfg.Name = "c"
						a = l.start(f, cfg, nil)
					}
					l.awaitResults(a, 200)
					l.more(100)
					l.awaitResults(a, 300)
					if err := a.leave(); err != nil {
						t.Error(err)
					}
					l.judgeRecords()
				})
			})
		}
	}
}

// One of two workers dies in the first drain of a flow, after the other one has
// written its part. Elsewhere the half snapshot counts as one. Here the flow is
// drained only when the tasks of the worker that died have come to the cut as well, by
// the other worker or by the next to start, and goes on from exactly there.
func TestElsewhere_firstEpoch(t *testing.T) {
	for _, point := range []string{"processed", "committed", "published", "released"} {
		for _, all := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,all=%v", point, all), func(t *testing.T) {
				bubble(t, func(t *testing.T, l *lab) {
					f := countFlow{options: flow.Options{Partitions: 2}}.build(t)
					cfg := Config{LeaseTTL: 10 * time.Second}
					d := newDoomed(point)
					a, b := l.besideDoomed(f, cfg, d)
					l.more(100)
					l.awaitResults(a, 100)
					cut := uint64(150)
					l.send("control.drain.count", fmt.Sprintf(`{"at":{"seq":{"IN":%d}}}`, cut))
					l.awaitRecord("the cut", func(r control.Record) bool { return draining(r) && r.Drain.Cut != nil })
					d.armed.Store(true)
					l.more(100)
					<-d.reached
					l.await("the part of a", func() bool { return a.at().Done == 1 })
					l.pass(2 * time.Second)
					if all {
						a.link.Cut()
					}
					close(d.die)
					_ = b.leave()
					if all {
						_ = a.leave()
					}
					l.pass(2 * time.Second)
					if rec := l.record(); !draining(rec) || rec.Report != nil {
						t.Errorf("the record says %s with one of two parts", rec.State)
					}
					if all {
						cfg.Name = "c"
						a = l.start(f, cfg, nil)
					}
					if err := a.wait(); err != nil {
						t.Fatal(err)
					}
					rec := l.record()
					if !drained(rec) || rec.Epoch != 1 || rec.Report.Tasks != 2 || rec.Report.Cut["IN"] != cut || rec.Report.Results != cut {
						t.Errorf("record %+v, report %+v", rec, rec.Report)
					}
					l.judgeThrough("OUT", cut)
					l.drain(f, Config{Resume: true})
					l.judgeRecords()
				})
			})
		}
	}
}

// A worker dies while it stops: after a commit and before its results are published,
// in the middle of that, and after it. Elsewhere the next start goes back to an
// older snapshot, and does again what has been published. Here it finishes what was
// committed, and no record up to there comes to a step again.
func TestElsewhere_resumeNotBehindCommit(t *testing.T) {
	for _, kind := range sinkKinds {
		for _, point := range []string{"committed", "half-published", "published", "released"} {
			t.Run(kind.name+"/"+point, func(t *testing.T) {
				bubble(t, func(t *testing.T, l *lab) {
					kind.make(l)
					var calls atomic.Int64
					options := flow.Options{Partitions: 4}
					l.more(100)
					c := &crasher{point: point, left: 1}
					p := l.start(countFlow{step: slowStep(&calls, 5*time.Millisecond), options: options}.build(t), Config{}, func(p *process, ctx context.Context, at, task string) error {
						if p.at().Phase != "leaving" {
							return nil
						}
						return c.probe(p, ctx, at, task)
					})
					l.await("some records", func() bool { return calls.Load() >= 20 })
					_ = p.leave()
					if !c.struck {
						t.Fatal("it did not die")
					}
					l.pass(2 * time.Second) // beyond the duplicate window of one of the sinks
					tasks, err := l.snapshots().Tasks(l.ctx)
					if err != nil {
						t.Fatal(err)
					}
					committed := map[int]uint64{}
					for _, info := range tasks {
						committed[info.Task.Partition] = info.Head.Offsets["IN"]
					}
					if len(committed) != 4 || !slices.Contains([]uint64{committed[0], committed[1], committed[2], committed[3]}, 100) {
						t.Errorf("committed up to %v: the test shows nothing", committed)
					}
					l.more(20)
					var n notes
					l.drain(countFlow{step: n.step("next", nil), options: options}.build(t), Config{})
					var want []uint64
					for i, key := range l.keys {
						if seq := uint64(i) + 1; seq > committed[flow.Partition(key, 4)] {
							want = append(want, seq)
						}
					}
					if got := n.of("next"); !slices.Equal(got, want) {
						t.Errorf("the next start processed %v, committed was up to %v", got, committed)
					}
					l.judgeRecords()
				})
			})
		}
	}
}

// A flow is drained while some of its tasks, or all, have no owner, or have one that
// has died. Elsewhere such a drain never ends. Here whoever is there takes them to the
// cut, at once if they are free, when the lease of the dead is over otherwise.
func TestElsewhere_drainWithoutOwners(t *testing.T) {
	const lease = 3 * time.Second
	for name, tc := range map[string]struct {
		records int
		// die: the workers of these names die before the drain, leave: they leave.
		die, leave []string
		// late: one more is started when the drain has been asked for.
		late bool
		most time.Duration
	}{
		"empty stream":                {most: time.Second},
		"idle":                        {records: 200, most: time.Second},
		"one left":                    {records: 200, leave: []string{"b"}, most: time.Second},
		"one dead":                    {records: 200, die: []string{"b"}, most: lease + 2*time.Second},
		"one dead, empty stream":      {die: []string{"b"}, most: lease + 2*time.Second},
		"all left":                    {records: 200, leave: []string{"a", "b"}, late: true, most: time.Second},
		"all left, empty stream":      {leave: []string{"a", "b"}, late: true, most: time.Second},
		"all dead":                    {records: 200, die: []string{"a", "b"}, late: true, most: lease + 2*time.Second},
		"one dead, one more to start": {records: 200, die: []string{"b"}, late: true, most: lease + 2*time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				f := countFlow{}.build(t)
				crew := map[string]*process{}
				for _, name := range []string{"a", "b"} {
					crew[name] = l.start(f, Config{Name: name, LeaseTTL: lease}, nil)
				}
				l.await("the share of both", func() bool { return crew["a"].at().Tasks == 8 && crew["b"].at().Tasks == 8 })
				l.more(tc.records)
				l.awaitResults(crew["a"], tc.records)
				l.pass(10 * time.Second)
				for _, name := range tc.die {
					crew[name].link.Cut()
					_ = crew[name].leave()
					delete(crew, name)
				}
				for _, name := range tc.leave {
					if err := crew[name].leave(); err != nil {
						t.Error(err)
					}
					delete(crew, name)
				}
				began := time.Now()
				l.send("control.drain", "")
				if tc.late {
					crew["c"] = l.start(f, Config{Name: "c", LeaseTTL: lease}, nil)
				}
				for name, p := range crew {
					if err := p.wait(); err != nil {
						t.Errorf("worker %s: %v", name, err)
					}
				}
				if took := time.Since(began); took > tc.most {
					t.Errorf("the drain took %v, want at most %v", took, tc.most)
				}
				rec := l.record()
				if !drained(rec) || rec.Report.Cut["IN"] != uint64(tc.records) || rec.Report.Tasks != 16 {
					t.Errorf("record %+v, report %+v", rec, rec.Report)
				}
				tasks, err := l.snapshots().Tasks(l.ctx)
				if err != nil {
					t.Fatal(err)
				}
				if i := slices.IndexFunc(tasks, func(i kvsnap.TaskInfo) bool { return !i.Head.Final || i.Head.Epoch != rec.Epoch }); len(tasks) != 16 || i >= 0 {
					t.Errorf("%d tasks have a log, the one of index %d has no final entry", len(tasks), i)
				}
				l.drain(f, Config{Resume: true})
				l.judge("OUT")
			})
		})
	}
}
