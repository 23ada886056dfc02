package worker

// Faults that users of other stream processors, and of consumers that they wrote
// themselves, have reported, brought about here: late commits and results, slow steps,
// changes of the members, crashes in the middle of a commit. Each has a comment that
// says what went wrong for them.

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/kvsnap"
	"natsflow/testenv"
)

// notes say which workers' steps were called for which record of the source, and how
// long after it came at the most.
type notes struct {
	mu   sync.Mutex
	by   map[uint64][]string
	late time.Duration
}

// step notes the calls of one worker's step, before what it does.
func (n *notes) step(worker string, then func(*flow.Meta, string) error) func(*flow.Meta, string) error {
	return func(m *flow.Meta, v string) error {
		n.note(worker, m)
		if then == nil {
			return nil
		}
		return then(m, v)
	}
}

func (n *notes) note(worker string, m *flow.Meta) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.by == nil {
		n.by = map[uint64][]string{}
	}
	n.by[m.Seq] = append(n.by[m.Seq], worker)
	n.late = max(n.late, time.Since(m.Time()))
}

// of returns the records that a worker was given, ascending.
func (n *notes) of(worker string) []uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	var seqs []uint64
	for seq, by := range n.by {
		if slices.Contains(by, worker) {
			seqs = append(seqs, seq)
		}
	}
	slices.Sort(seqs)
	return seqs
}

// judgeOnce says that each record of the source has changed the state once: one step
// was called for it, once, and its result is there once.
func (n *notes) judgeOnce(l *lab) {
	l.tb.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	for seq := uint64(1); seq <= l.seq; seq++ {
		if by := n.by[seq]; len(by) != 1 {
			l.tb.Errorf("the step was called %d times for record %d, by %q", len(by), seq, by)
		}
	}
	l.judgeRecords()
}

// judgeRecords says that each record of the source has one result, and that those of
// a key count its records.
func (l *lab) judgeRecords() {
	l.tb.Helper()
	l.judge("OUT")
	results := map[uint64]int{}
	for _, m := range l.read("OUT") {
		var r counted
		if err := json.Unmarshal(m.data, &r); err != nil {
			l.tb.Fatal(err)
		}
		if l.keys[r.Seq-1] != r.Key {
			l.tb.Errorf("record %d is of key %s, its result of %s", r.Seq, l.keys[r.Seq-1], r.Key)
		}
		results[r.Seq]++
	}
	for seq := uint64(1); seq <= l.seq; seq++ {
		if results[seq] != 1 {
			l.tb.Errorf("record %d has %d results", seq, results[seq])
		}
	}
}

// cursorInfo is what the server says of the consumer that a worker reads the source
// with.
type cursorInfo struct {
	name      string
	delivered uint64 // messages so far, also those delivered again
}

func cursorOf(l *lab, admin *testenv.Admin, worker string) cursorInfo {
	l.tb.Helper()
	for _, c := range admin.Consumers("IN") {
		if strings.HasPrefix(c.Name, "natsflow-count-"+worker+"-") {
			return cursorInfo{c.Name, c.Delivered.Consumer}
		}
	}
	l.tb.Fatalf("worker %s has no cursor", worker)
	return cursorInfo{}
}

// entries lists the log of the first task.
func (l *lab) entries() []kvsnap.EntryInfo {
	l.tb.Helper()
	list, err := l.snapshots().Entries(l.ctx, kvsnap.TaskID{})
	if err != nil {
		l.tb.Fatal(err)
	}
	return list
}

// snapshots opens those of the flow "count".
func (l *lab) snapshots() *kvsnap.Store {
	l.tb.Helper()
	bucket, err := l.conn.OpenBucket(l.ctx, "natsflow_count")
	if err != nil {
		l.tb.Fatal(err)
	}
	return kvsnap.New(kvsnap.Config{Bucket: bucket, Flow: "count"})
}

// under feeds records until ok holds.
func (l *lab) under(what string, ok func() bool) {
	l.tb.Helper()
	for range 12_000 {
		if ok() {
			return
		}
		l.more(2)
		l.pass(20 * time.Millisecond)
	}
	l.tb.Fatalf("waited in vain under load: %s", what)
}

// after returns a condition that holds when a time has passed.
func after(d time.Duration) func() bool {
	end := time.Now().Add(d)
	return func() bool { return !time.Now().Before(end) }
}

// A step takes almost as long as the usual ack wait, so that the messages that were
// fetched ahead wait for longer, and nothing is committed for many ack waits.
// Elsewhere two workers process such messages both, again and again, and the position
// of their consumer never moves. Here each record is delivered to each worker once and
// changes the state once, and the positions reach the end.
func TestElsewhere_slowStep(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		var n notes
		var calls atomic.Int64
		crew := map[string]*process{}
		for _, name := range []string{"a", "b"} {
			f := countFlow{step: n.step(name, slowStep(&calls, 28*time.Second)), options: flow.Options{Partitions: 4, CommitInterval: 20 * time.Minute}}
			crew[name] = l.start(f.build(t), Config{Name: name, Lanes: 1, LeaseTTL: 30 * time.Second}, nil)
		}
		l.await("the share of both", func() bool { return crew["a"].at().Tasks == 2 && crew["b"].at().Tasks == 2 })
		for range 20 {
			// One by one, so that most of them wait behind the lanes.
			l.more(1)
			l.pass(time.Millisecond)
		}
		l.pass(2 * time.Minute)
		if got := l.count("OUT"); got > 0 || calls.Load() < 5 {
			t.Errorf("%d results of %d records are out: the test shows nothing", got, calls.Load())
		}
		l.pass(10 * time.Minute)
		l.awaitResults(crew["a"], 20)
		n.judgeOnce(l)
		for name, p := range crew {
			if got := cursorOf(l, admin, name).delivered; got != l.seq {
				t.Errorf("worker %s: %d messages were delivered, there are %d", name, got, l.seq)
			}
			l.await("the position of "+name, func() bool { return p.at().Sources["IN"].Committed == l.seq })
			if got := len(n.of(name)); got == 0 {
				t.Errorf("worker %s had no record", name)
			}
			if err := p.leave(); err != nil {
				t.Error(err)
			}
		}
	})
}

// A worker is cut off until another has taken over; then what it had sent last
// arrives. Elsewhere such a late commit or result, or a late ack, counts for the new
// owner, whose messages are lost by it. Here there are no acks, the others have no
// effect, and the late worker joins again.
func TestElsewhere_lateOwner(t *testing.T) {
	for point, late := range map[string]string{"processed": "commit", "committed": "results"} {
		t.Run(late, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				f := countFlow{options: oneTask}.build(t)
				var armed atomic.Bool
				link := testenv.NewLink(t)
				var sent atomic.Int64
				link.Sift(testenv.ToServer, func(subject string) bool {
					if !armed.Load() && strings.HasPrefix(subject, map[string]string{
						"commit": "$KV.natsflow_count.log.", "results": "out.",
					}[late]) {
						sent.Add(1)
					}
					return true
				})
				cfg := Config{LeaseTTL: 2 * time.Second}
				cfg.Name = "a"
				a := l.startOver(link, f, cfg, func(p *process, _ context.Context, at, _ string) error {
					if at == point && armed.CompareAndSwap(true, false) {
						p.link.Hold(testenv.ToServer)
					}
					return nil
				})
				l.awaitPhase(a, "running")
				g := newGate("committed")
				g.skip.Store(1) // the claim
				cfg.Name = "b"
				b := l.start(f, cfg, g.probe)
				l.awaitPhase(b, "standing by")
				armed.Store(true)
				l.more(1)
				l.awaitPhase(b, "running")
				l.more(399)
				<-g.reached
				l.pass(5 * time.Second)
				if sent.Load() == 0 {
					t.Errorf("no late %s is on its way: the test shows nothing", late)
				}
				entries, results := l.entries(), l.count("OUT")
				a.link.Release(testenv.ToServer)
				l.awaitPhase(a, "standing by")
				l.pass(time.Second)
				if diff := cmp.Diff(entries, l.entries()); diff != "" {
					t.Errorf("the log after the late %s:\n%s", late, diff)
				}
				if got := l.count("OUT"); got != results {
					t.Errorf("%d results before the late %s, %d after", results, late, got)
				}
				close(g.open)
				l.awaitResults(b, 400)
				if err := b.leave(); err != nil {
					t.Error(err)
				}
				l.more(100)
				l.awaitResults(a, 500)
				l.judgeRecords()
			})
		})
	}
}

// A worker leaves when 500 messages were delivered to it, most of which it has not
// even looked at. Elsewhere the server keeps them for it until an
// ack wait of minutes is over. Here the others read on at once.
func TestElsewhere_leaveWithMuchDelivered(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		var n notes
		var first atomic.Pointer[time.Time]
		g := newGate("read")
		g.skip.Store(100)
		a := l.start(countFlow{options: oneTask, step: n.step("a", nil)}.build(t), Config{Name: "a", LeaseTTL: time.Minute}, g.probe)
		l.awaitPhase(a, "running")
		b := l.start(countFlow{options: oneTask, step: n.step("b", func(*flow.Meta, string) error {
			now := time.Now()
			first.CompareAndSwap(nil, &now)
			return nil
		})}.build(t), Config{Name: "b", LeaseTTL: time.Minute}, nil)
		l.awaitPhase(b, "standing by")
		l.more(500)
		<-g.reached
		l.await("500 delivered messages", func() bool { return cursorOf(l, admin, "a").delivered == 500 })
		left := time.Now()
		a.cancel()
		l.awaitPhase(a, "leaving")
		l.pass(100 * time.Millisecond) // until its reader was told to stop
		close(g.open)
		if err := a.wait(); err != nil {
			t.Fatal(err)
		}
		l.awaitResults(b, 500)
		if took := first.Load().Sub(left); took > 2*time.Second {
			t.Errorf("the successor's first record came %v after the stop", took)
		}
		if got := len(n.of("b")); got < 300 {
			t.Errorf("%d records were left for the successor: the test shows nothing", got)
		}
		if err := b.leave(); err != nil {
			t.Fatal(err)
		}
		n.judgeOnce(l)
	})
}

// loser loses what a worker publishes on subjects with a prefix: n messages, or as
// many as come until it is told to stop.
type loser struct {
	prefix     string
	left, lost atomic.Int64
	// first is when the first one was lost.
	first atomic.Pointer[time.Time]
}

func (s *loser) keep(subject string) bool {
	if !strings.HasPrefix(subject, s.prefix) || s.left.Add(-1) < 0 {
		return true
	}
	s.lost.Add(1)
	now := time.Now()
	s.first.CompareAndSwap(nil, &now)
	return false
}

// cursorCreation is where the server is asked for a consumer of the source.
const cursorCreation = "$JS.API.CONSUMER.CREATE.IN."

// Three workers join at the same time, under load, and what makes their consumers
// fails, once or for a while. Elsewhere such a member stays in the group, holds
// partitions and consumes nothing, and looks healthy. Here it tries again, and says
// that it is not consuming until it is.
func TestElsewhere_joinWithoutCursor(t *testing.T) {
	for name, away := range map[string]time.Duration{"once": 0, "for half a minute": 30 * time.Second} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				var n notes
				crew := map[string]*process{"a": l.start(countFlow{step: n.step("a", nil)}.build(t), Config{Name: "a"}, nil)}
				l.awaitPhase(crew["a"], "running")
				l.more(100)
				losers := map[string]*loser{}
				for _, name := range []string{"b", "c", "d"} {
					link, lose := testenv.NewLink(t), &loser{prefix: cursorCreation}
					lose.left.Store(1)
					if away > 0 {
						lose.left.Store(1 << 40)
					}
					link.Sift(testenv.ToServer, lose.keep)
					losers[name] = lose
					crew[name] = l.startOver(link, countFlow{step: n.step(name, nil)}.build(t), Config{Name: name}, nil)
				}
				// A request is given up and repeated after five seconds.
				looked := map[string]bool{}
				l.under("the failures", func() bool {
					for name, lose := range losers {
						first := lose.first.Load()
						if first == nil || time.Since(*first) < 2*time.Second || looked[name] {
							continue
						}
						looked[name] = true
						if st := crew[name].at(); st.Phase != "starting" || len(n.of(name)) > 0 {
							t.Errorf("worker %s has no cursor and says %+v, with %d records", name, st, len(n.of(name)))
						}
					}
					return len(looked) == 3
				})
				if away > 0 {
					l.under("the time", after(away))
					for name := range losers {
						if st := crew[name].at(); st.Phase != "starting" || st.Trouble == "" || len(n.of(name)) > 0 {
							t.Errorf("worker %s after %v without a cursor: %+v, %d records", name, away, st, len(n.of(name)))
						}
					}
				}
				for _, lose := range losers {
					lose.left.Store(0)
				}
				l.under("all to share the tasks", func() bool {
					for _, p := range crew {
						if st := p.at(); st.Phase != "running" || st.Tasks != 4 || st.Trouble != "" {
							return false
						}
					}
					return true
				})
				l.under("a second", after(time.Second))
				l.awaitResults(crew["a"], len(l.keys))
				for name, p := range crew {
					if len(n.of(name)) == 0 {
						t.Errorf("worker %s consumed nothing", name)
					}
					if err := p.leave(); err != nil {
						t.Error(err)
					}
				}
				n.judgeOnce(l)
			})
		})
	}
}

// The same to a worker that runs: its consumer is gone, or it has to have another one
// for tasks that it gets, and the server does not make it.
func TestElsewhere_runWithoutCursor(t *testing.T) {
	for name, lack := range map[string]func(l *lab, b *process){
		"its cursor is deleted": func(l *lab, _ *process) {
			admin := l.srv.Admin()
			admin.DeleteConsumer("IN", cursorOf(l, admin, "a").name)
		},
		"it gets tasks": func(l *lab, b *process) {
			if err := b.leave(); err != nil {
				l.tb.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				link, lose := testenv.NewLink(t), &loser{prefix: cursorCreation}
				link.Sift(testenv.ToServer, lose.keep)
				f := countFlow{}.build(t)
				a := l.startOver(link, f, Config{Name: "a"}, nil)
				l.awaitPhase(a, "running")
				b := l.start(f, Config{Name: "b"}, nil)
				l.await("the share of both", func() bool { return a.at().Tasks == 8 && b.at().Tasks == 8 })
				l.more(100)
				l.awaitResults(a, 100)
				// Its own consumer is made anew behind these, so that it has to go back for b's tasks.
				lose.left.Store(1 << 40)
				lack(l, b)
				l.more(100)
				began := time.Now()
				l.await("trouble", func() bool { return strings.Contains(a.at().Trouble, "not consuming source IN") })
				if took := time.Since(began); took > 4*time.Second {
					t.Errorf("it said so after %v", took)
				}
				l.pass(30 * time.Second)
				if got := a.at(); got.Trouble == "" {
					t.Errorf("after half a minute: %+v", got)
				}
				lose.left.Store(0)
				l.awaitResults(a, 200)
				l.await("no trouble", func() bool { return a.at().Trouble == "" })
				if err := a.leave(); err != nil {
					t.Error(err)
				}
				l.judgeRecords()
			})
		})
	}
}

// The answers of the server are lost for a while, under load: those to commits, to
// results, to whatever a worker asks. It cannot know what has been stored then, and
// elsewhere sends it twice, or gives up. Here it finds out, and goes on.
func TestElsewhere_answersLostForAWhile(t *testing.T) {
	for _, kind := range sinkKinds {
		t.Run(kind.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				kind.make(l)
				link, lose := testenv.NewLink(t), &loser{prefix: "_INBOX."}
				link.Sift(testenv.ToClient, lose.keep)
				var armed atomic.Bool
				p := l.startOver(link, countFlow{}.build(t), Config{LeaseTTL: 30 * time.Second}, func(_ *process, _ context.Context, point, _ string) error {
					if point == "committed" && armed.CompareAndSwap(true, false) {
						lose.left.Store(1 << 40)
					}
					return nil
				})
				l.awaitPhase(p, "running")
				for _, away := range []struct {
					time time.Duration // a request waits for 5s
					// committed: from between a commit and its results on.
					committed bool
				}{{4 * time.Second, false}, {4 * time.Second, true}, {8 * time.Second, false}, {8 * time.Second, true}} {
					l.under("two seconds", after(2*time.Second)) // until the status is known
					began := p.at().Since
					if armed.Store(away.committed); !away.committed {
						lose.left.Store(1 << 40)
					}
					l.under("the loss", func() bool { return lose.left.Load() > 0 })
					l.under("the time", after(away.time))
					lose.left.Store(0)
					l.awaitResults(p, len(l.keys))
					l.under("two seconds", after(2*time.Second))
					if st := p.at(); st.Phase != "running" || away.time < 5*time.Second && !st.Since.Equal(began) {
						t.Errorf("the session began at %v, after %+v the status is %+v", began, away, st)
					}
				}
				l.awaitResults(p, len(l.keys))
				if lose.lost.Load() == 0 {
					t.Error("nothing was lost")
				}
				if st := p.at(); st.Phase != "running" {
					t.Errorf("status %+v", st)
				}
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				l.judgeRecords()
			})
		})
	}
}

// A worker is asked to stop while something that it waits for never comes: its sink is
// gone, its server is away, or does not answer. Elsewhere such a shutdown hangs for
// ever, or pretends to be a clean one. Here it ends in time, with an error, its position
// is not beyond what is published, and the next start goes on exactly.
func TestElsewhere_stopThatCannotEnd(t *testing.T) {
	const patience = 4 * time.Second
	for name, tc := range map[string]struct{ away, back func(l *lab, p *process) }{
		"sink gone": {
			func(l *lab, _ *process) {
				if err := l.conn.DeleteStream(l.ctx, "OUT"); err != nil {
					l.tb.Fatal(err)
				}
			}, func(*lab, *process) {},
		},
		"server stopped": {
			func(l *lab, _ *process) { l.srv.Stop() }, func(l *lab, _ *process) { l.srv.Restart() },
		},
		"server silent": {
			func(_ *lab, p *process) { p.link.Hold(testenv.ToClient) }, func(_ *lab, p *process) { p.link.Cut() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				link := testenv.NewLink(t)
				var calls atomic.Int64
				f := countFlow{step: slowStep(&calls, 5*time.Millisecond)}.build(t)
				p := l.startOver(link, f, Config{StopTimeout: patience, LeaseTTL: time.Minute}, nil)
				l.more(200)
				l.awaitResults(p, 200)
				l.await("the position", func() bool { return p.at().Sources["IN"].Committed == 200 })
				before := l.read("OUT")
				l.more(100)
				l.await("some records", func() bool { return calls.Load() > 200 })
				tc.away(l, p)
				l.await("the others", func() bool { return calls.Load() == 300 })
				began := time.Now()
				if err := p.leave(); !errors.Is(err, ErrStopTimeout) {
					t.Errorf("the stop ended with %v", err)
				}
				if took := time.Since(began); took < patience || took > patience+2*time.Second {
					t.Errorf("the stop took %v, its timeout is %v", took, patience)
				}
				tc.back(l, p)
				published := before
				if name != "sink gone" {
					l.await("the connection", l.conn.Connected)
					published = l.read("OUT")
				}
				if got := p.at().Sources["IN"].Committed; got > uint64(len(published)) {
					t.Errorf("committed up to %d, %d results are published", got, len(published))
				}
				l.drain(f, Config{})
				if name == "sink gone" {
					l.judgeResults(append(before, l.read("OUT")...), l.fed)
				} else {
					l.judgeRecords()
				}
			})
		})
	}
}
