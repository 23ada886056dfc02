package worker

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
)

// timerFlow counts the records of each key and has timers: "quiet" fires when a key has
// had no record for the gap, by the stream's time, and "event" by the time of the
// records. With every, "tick" sets itself again at that distance for ever.
type timerFlow struct {
	gap, every, ttl time.Duration
	clock           *flow.EventTime[string]
	options         flow.Options
	// staged: the records have the key of their group, in a second stage.
	staged bool
}

func (w timerFlow) build(tb testing.TB) *flow.Flow {
	tb.Helper()
	b := flow.New("count", w.options)
	src := flow.Source{Stream: "IN"}
	if w.clock != nil {
		clock := *w.clock
		clock.Of = func(_ *flow.Meta, v string) (time.Time, error) { return timeIn(v) }
		src.Time = clock
	}
	keyed := flow.KeyBy(flow.From(b, src, flow.DecodeText()), func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	})
	if w.staged {
		keyed = flow.Rekey(keyed, func(m *flow.Meta, _ string) (string, error) { return groupOf(m.Key, 1), nil }, flow.TextCodec())
	}
	out := flow.StatefulWith(keyed, "count", flow.StatefulConfig[string, int, string]{
		State: flow.JSONState[int](1, nil), TTL: w.ttl,
		On: func(m *flow.Meta, n *int, _ string, _ func(string)) error {
			if *n++; w.every > 0 && *n == 1 {
				m.SetTimer("tick", m.EventTime().Add(w.every))
			}
			if w.gap > 0 {
				m.SetStreamTimer("quiet", m.Time().Add(w.gap))
			}
			if w.clock != nil {
				m.SetTimer("event", m.EventTime().Add(w.gap))
			}
			return nil
		},
		OnTimer: func(m *flow.Meta, n *int, name string, emit func(string)) error {
			emit(fmt.Sprintf("%s %s %d %d %d", m.Key, name, m.EventTime().UnixNano(), m.UnixNano(), *n))
			if name == "tick" {
				m.SetTimer(name, m.EventTime().Add(w.every))
			}
			return nil
		},
	})
	flow.To(out, flow.Sink[string]{Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."), Encode: flow.EncodeText()})
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// wantTimers is what a flow makes of the source up to a sequence when it plays one record
// after the other, and then is quiet up to a time.
func (l *lab) wantTimers(f *flow.Flow, through uint64, until time.Time) map[string][]string {
	l.tb.Helper()
	router := f.Router(0)
	var tasks []*flow.Task
	for p := range f.Options().Partitions {
		tasks = append(tasks, f.Task(p))
	}
	check := func(err error) {
		if err != nil {
			l.tb.Fatal(err)
		}
	}
	last := int64(0)
	l.each("IN", through, func(m *bus.Msg) {
		check(router.Route(m.Subject, m.Seq, m.Time, m.Data))
		router.Take(func(b *flow.Batch) { check(tasks[b.Partition].Play(b)) })
		ticks, stream := router.TakeTicks()
		for _, t := range tasks {
			check(t.AdvanceStream(0, stream, ticks))
			check(t.Advance(0, router.Watermark()))
		}
		last = m.Time
	})
	want := map[string][]string{}
	for _, t := range tasks {
		if now := until.UnixNano(); now > last {
			check(t.Advance(0, router.QuietWatermark(now, last)))
			check(t.AdvanceStream(0, now, nil))
		}
		s, err := t.Seal()
		check(err)
		check(flow.Outputs(s.Outbox, func(_ int, o flow.Output) error {
			want[string(o.Subject)] = append(want[string(o.Subject)], string(o.Data))
			return nil
		}))
	}
	return want
}

// judgeTimers says that the results are those of the flow that plays all records up to
// now, in the order of each key.
func (l *lab) judgeTimers(f *flow.Flow, until time.Time) {
	l.tb.Helper()
	got := map[string][]string{}
	for _, m := range l.read("OUT") {
		got[m.subject] = append(got[m.subject], string(m.data))
	}
	want := l.wantTimers(f, l.seq, until)
	if diff := cmp.Diff(want, got); diff != "" {
		l.tb.Fatalf("results (-want +got):\n%s", diff)
	}
	if len(want) == 0 {
		l.tb.Fatal("there are no results to compare")
	}
}

var gapFlow = timerFlow{gap: 30 * time.Second, options: flow.Options{Partitions: 4}}

// A timer fires soon after its time though no record comes, by the server's clock; that
// of the stream's time also where the records bring another one.
func TestTimer_firesWithoutRecords(t *testing.T) {
	for name, clock := range map[string]*flow.EventTime[string]{"stream time": nil, "event time": {}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				w := gapFlow
				w.clock = clock
				f := w.build(t)
				p := l.start(f, Config{}, nil)
				l.awaitPhase(p, "running")
				l.more(100)
				began := time.Now()
				l.pass(29 * time.Second)
				if n := l.count("OUT"); clock == nil && n != 0 {
					t.Fatalf("%d timers have fired before their time", n)
				}
				l.pass(3 * time.Second)
				l.judgeTimers(f, began.Add(31*time.Second))
				l.pass(5 * time.Minute)
				l.more(10)
				l.pass(time.Minute)
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				l.judgeTimers(f, time.Now())
			})
		})
	}
}

// A timer that is set when the flow stops fires once, soon after the next start, though
// no record of its key comes.
func TestTimer_suspendAndResume(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := gapFlow.build(t)
		l.more(50)
		l.drain(f, Config{})
		l.pass(10 * time.Minute)
		if n := l.count("OUT"); n != 0 {
			t.Fatalf("%d timers have fired while the flow was stopped", n)
		}
		p := l.start(f, Config{Resume: true}, nil)
		l.awaitPhase(p, "running")
		began := time.Now()
		l.awaitResults(p, len(l.wantTimers(f, l.seq, began)))
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("the timers fired %v after the start", took)
		}
		l.judgeTimers(f, began)
		l.pass(10 * time.Minute)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.drain(f, Config{Resume: true})
		l.judgeTimers(f, time.Now())
	})
}

// A timer that sets itself again for ever does not keep a drain from ending, and goes on
// where it was.
func TestTimer_setsItselfAgain(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		w := timerFlow{every: 10 * time.Millisecond, options: flow.Options{Partitions: 4}}
		f := w.build(t)
		for round := range 3 {
			p := l.start(f, Config{Resume: true}, nil)
			l.awaitPhase(p, "running")
			l.more(20)
			l.pass(time.Duration(round+1) * time.Second)
			began := time.Now()
			l.send("control.drain.count", `{}`)
			if err := p.wait(); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("the drain took %v", took)
			}
			if rec := l.record(); rec.State != control.StateDrained {
				t.Fatalf("the record says %s", rec.State)
			}
			l.pass(time.Minute)
		}
		// How far the clock of the server was followed before the cut is not known: up to
		// there each has fired, once and in order.
		want := l.wantTimers(f, l.seq, time.Now())
		n := 0
		got := map[string][]string{}
		for _, m := range l.read("OUT") {
			got[m.subject] = append(got[m.subject], string(m.data))
			n++
		}
		for key, all := range got {
			if diff := cmp.Diff(want[key][:len(all)], all); diff != "" {
				t.Fatalf("%s (-want +got):\n%s", key, diff)
			}
		}
		if n < 1000 {
			t.Errorf("timers have fired %d times only", n)
		}
	})
}

// A crash around the firing of timers neither loses nor repeats one.
func TestTimer_crashWhileFiring(t *testing.T) {
	for _, point := range []string{"processed", "entry-appended-unacked", "committed", "half-published", "published", "noted"} {
		t.Run(point, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				c := &crasher{}
				f := gapFlow.build(t)
				p := l.start(f, Config{}, c.probe)
				l.awaitPhase(p, "running")
				l.more(100)
				l.pass(29 * time.Second)
				c.mu.Lock()
				c.point, c.left = point, 1
				c.mu.Unlock()
				l.pass(2 * time.Second)
				l.more(10)
				_ = p.wait()
				if !c.struck {
					t.Fatal("it did not crash")
				}
				p = l.start(f, Config{}, nil)
				l.awaitPhase(p, "running")
				l.pass(3 * time.Minute)
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				l.judgeTimers(f, time.Now())
			})
		})
	}
}

// A finish fires each timer that is set, once, also when a worker crashes over it; those
// that are set then fire after the resume, when their time comes.
func TestTimer_finish(t *testing.T) {
	for _, point := range []string{"", "entry-appended-unacked", "half-published", "published"} {
		t.Run("crash at "+point, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				f := timerFlow{gap: 2 * time.Minute, every: 2 * time.Minute, staged: true, options: flow.Options{Partitions: 4}}.build(t)
				c := &crasher{}
				p := l.start(f, Config{}, c.probe)
				l.awaitPhase(p, "running")
				l.more(100)
				l.pass(2 * time.Second)
				c.mu.Lock()
				c.point, c.left = point, 2
				c.mu.Unlock()
				l.send("control.drain.count", `{"mode":"finish"}`)
				err := p.wait()
				if c.struck != (point != "") {
					t.Fatalf("it crashed: %v; %v", c.struck, err)
				}
				if c.struck {
					p = l.start(f, Config{}, nil)
					err = p.wait()
				}
				if err != nil {
					t.Fatal(err)
				}
				if rec := l.record(); rec.State != control.StateFinished {
					t.Fatalf("the record says %s", rec.State)
				}
				fired := func() map[string]int {
					got := map[string]int{}
					for _, m := range l.read("OUT") {
						got[strings.Join(strings.Fields(string(m.data))[:2], " ")]++
					}
					return got
				}
				want := map[string]int{}
				for _, group := range []string{"g0", "g1", "g2", "g3"} {
					want[group+" quiet"], want[group+" tick"] = 1, 1
				}
				if diff := cmp.Diff(want, fired()); diff != "" {
					t.Fatalf("finished (-want +got):\n%s", diff)
				}
				p = l.start(f, Config{Resume: true}, nil)
				l.awaitPhase(p, "running")
				l.pass(3 * time.Minute) // the ticks were set for two minutes later than the first ones
				if diff := cmp.Diff(want, fired()); diff != "" {
					t.Fatalf("three minutes after the resume (-want +got):\n%s", diff)
				}
				l.pass(2 * time.Minute)
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				for group := range want {
					if strings.HasSuffix(group, "tick") {
						want[group] = 2
					}
				}
				if diff := cmp.Diff(want, fired()); diff != "" {
					t.Fatalf("later (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// Timers by both times are the same over stops, crashes and moves, whoever plays the
// records in whatever pieces.
func TestTimer_twoTimesOverRestarts(t *testing.T) {
	w := timerFlow{gap: 30 * time.Second, ttl: 3 * time.Minute, clock: &flow.EventTime[string]{Lateness: 10 * time.Second}, options: flow.Options{Partitions: 4}}
	bubble(t, func(t *testing.T, l *lab) {
		f := w.build(t)
		rng := rand.New(rand.NewPCG(7, 8))
		at := time.Now().Add(-time.Hour)
		for round := range 12 {
			for range 40 {
				at = at.Add(time.Duration(rng.Int64N(int64(4 * time.Second))))
				l.putAt(fmt.Sprintf("k%d", rng.IntN(8)), at.Add(-time.Duration(rng.Int64N(int64(20*time.Second)))))
				if rng.IntN(8) == 0 {
					l.pass(time.Duration(rng.IntN(40)) * time.Second)
				}
			}
			switch round % 4 {
			case 0:
				l.drain(f, Config{Resume: true})
			case 1:
				p := l.start(f, Config{Resume: true}, nil)
				l.awaitPhase(p, "running")
				l.pass(time.Duration(rng.IntN(300)) * time.Millisecond)
				p.link.Cut()
				p.cancel()
				_ = p.wait()
			case 2:
				a := l.start(f, Config{Resume: true, Name: "a"}, nil)
				l.awaitPhase(a, "running")
				b := l.start(f, Config{Resume: true, Name: "b"}, nil)
				l.await("two workers", func() bool { return a.at().Tasks == 2 && b.at().Tasks == 2 })
				l.pass(time.Minute)
				if err := a.leave(); err != nil {
					t.Fatal(err)
				}
				if err := b.leave(); err != nil {
					t.Fatal(err)
				}
			}
		}
		p := l.start(f, Config{Resume: true}, nil)
		l.awaitPhase(p, "running")
		l.pass(5 * time.Minute)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judgeTimers(f, time.Now())
		if n := l.count("OUT"); n < 100 {
			t.Errorf("timers have fired %d times only", n)
		}
	})
}

// Timers and a TTL of a later stage go by the server's clock as well, whoever has the tasks
// there and whoever those that read the source.
func TestTimer_laterStage(t *testing.T) {
	for _, tc := range []struct {
		clock               *flow.EventTime[string]
		workers, partitions int
	}{{nil, 2, 1}, {&flow.EventTime[string]{}, 2, 1}, {&flow.EventTime[string]{}, 3, 4}} {
		t.Run(fmt.Sprintf("event time %v, %d workers", tc.clock != nil, tc.workers), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				w := timerFlow{gap: 30 * time.Second, ttl: 5 * time.Minute, clock: tc.clock, options: flow.Options{Partitions: tc.partitions}, staged: true}
				f := w.build(t)
				var all []*process
				for i := range tc.workers {
					all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", i)}, nil))
				}
				l.await("all have tasks", func() bool {
					for _, p := range all {
						if n := p.at().Tasks; n == 0 || n > (2*tc.partitions+tc.workers-1)/tc.workers {
							return false
						}
					}
					return true
				})
				keys := func() (n int) {
					for _, p := range all {
						n += p.at().StateKeys
					}
					return n
				}
				for i := range 8 {
					l.putAt(fmt.Sprintf("k%d", i), time.Now().Add(-time.Hour))
				}
				l.pass(29 * time.Second)
				if n := l.count("OUT"); n != 0 {
					t.Fatalf("%d timers have fired before their time", n)
				}
				l.pass(5 * time.Second)
				got := map[string]int{}
				for _, m := range l.read("OUT") {
					got[strings.Join(strings.Fields(string(m.data))[:2], " ")]++
				}
				if diff := cmp.Diff(map[string]int{"g0 quiet": 1, "g1 quiet": 1, "g2 quiet": 1, "g3 quiet": 1}, got); diff != "" {
					t.Fatalf("timers (-want +got):\n%s", diff)
				}
				if n := keys(); n != 4 {
					t.Fatalf("%d groups have state", n)
				}
				l.pass(6 * time.Minute)
				if n := keys(); n != 0 {
					t.Fatalf("%d groups have state when the TTL is over", n)
				}
				for _, p := range all {
					if err := p.leave(); err != nil {
						t.Fatal(err)
					}
				}
			})
		})
	}
}

// State that nobody touches is dropped by the server's clock, also when that has gone on
// while the flow was stopped.
func TestTTL_withoutRecords(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		w := timerFlow{ttl: 10 * time.Minute, options: flow.Options{Partitions: 4}}
		f := w.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.more(100)
		l.await("the keys", func() bool { return p.at().StateKeys == 8 })
		l.pass(9 * time.Minute)
		if n := p.at().StateKeys; n != 8 {
			t.Fatalf("%d keys have state before the TTL is over", n)
		}
		l.pass(3 * time.Minute)
		if n := p.at().StateKeys; n != 0 {
			t.Fatalf("%d keys have state when the TTL is over", n)
		}
		l.more(100)
		l.pass(time.Second)
		l.send("control.drain.count", `{}`)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		l.pass(9 * time.Minute)
		p = l.start(f, Config{Resume: true}, nil)
		l.awaitPhase(p, "running")
		l.await("the keys", func() bool { return p.at().StateKeys == 8 })
		l.pass(2 * time.Minute)
		if n := p.at().StateKeys; n != 0 {
			t.Fatalf("%d keys have state when the TTL was over during a stop", n)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}
