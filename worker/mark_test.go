package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/testenv"
)

// stagedWindows counts the records of each key by windows, adds up what was counted by
// the windows of groups in the second stage, and of all in a third one.
type stagedWindows struct {
	windowFlow
	// later are the windows of later stages, one behind the other.
	later []flow.Windows
}

// adding adds up counts.
func adding(s flow.Stream[windowCount], id string, w flow.Windows) flow.Stream[windowCount] {
	sums, late := flow.Window(s, id, w, flow.WindowAggregator[windowCount, int, windowCount]{
		State: flow.JSONState[int](1, nil),
		Add:   func(_ *flow.Meta, n *int, c windowCount) error { *n += c.N; return nil },
		Merge: func(into, from *int) error { *into += *from; return nil },
		Result: func(m *flow.Meta, w flow.Span, n *int) (windowCount, error) {
			return windowCount{m.Key, w.Start, *n}, nil
		},
	})
	flow.To(late, flow.Sink[windowCount]{Stream: "LATE", Subjects: []string{"late.*"}, Subject: flow.KeySubject[windowCount]("late."), Encode: flow.EncodeJSON[windowCount]()})
	return sums
}

// laterKey is the key of a stage.
func laterKey(key string, stage int) string {
	if stage == 1 {
		return groupOf(key, 1)
	}
	return "all"
}

func (w stagedWindows) build(tb testing.TB) *flow.Flow {
	tb.Helper()
	b := flow.New("count", w.options)
	src := flow.Source{Stream: "IN", PartitionBy: w.partitionBy}
	if w.clock != nil {
		clock := *w.clock
		clock.Of = func(_ *flow.Meta, v string) (time.Time, error) { return timeIn(v) }
		src.Time = clock
	}
	keyed := flow.KeyBy(flow.From(b, src, flow.DecodeText()), func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	})
	counts := adding(flow.Map(keyed, func(m *flow.Meta, _ string) (windowCount, error) { return windowCount{Key: m.Key, N: 1}, nil }), "count", w.windows)
	for i, later := range w.later {
		stage := i + 1
		counts = flow.Rekey(counts, func(_ *flow.Meta, c windowCount) (string, error) { return laterKey(c.Key, stage), nil }, flow.JSONCodec[windowCount]())
		counts = adding(counts, fmt.Sprintf("sum-%d", stage), later)
	}
	flow.To(counts, flow.Sink[windowCount]{Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[windowCount]("out."), Encode: flow.EncodeJSON[windowCount]()})
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// want is the naive model: the counts of the first windows, added up.
func (w stagedWindows) want(l *lab, through uint64) (want map[windowed]int, late int) {
	l.tb.Helper()
	want, late = l.wantWindows(w.windowFlow, through)
	size := w.windows.Size
	for i, later := range w.later {
		next := map[windowed]int{}
		for k, n := range want {
			at := k.start + int64(size) - 1 // the last moment of the window
			start := at - (at-int64(later.Offset))%int64(later.Size)
			next[windowed{laterKey(k.key, i+1), start}] += n
		}
		want, size = next, later.Size
	}
	return want, late
}

// judgeStaged says that the windows of the last stage have closed, once and with all
// that belongs into them, and that nothing came late but in the first stage.
func (l *lab) judgeStaged(w stagedWindows) {
	l.tb.Helper()
	want, late := w.want(l, l.seq)
	if diff := cmp.Diff(want, l.gotWindows(), cmp.AllowUnexported(windowed{})); diff != "" {
		l.tb.Fatalf("windows (-want +got):\n%s", diff)
	}
	if got := l.count("LATE"); got != late {
		l.tb.Fatalf("%d late records, want %d", got, late)
	}
}

// minutes counts by windows of 20 s, and by such of a minute behind that.
var minutes = stagedWindows{
	windowFlow: windowFlow{windows: flow.Tumbling(20 * time.Second), options: flow.Options{Partitions: 4}},
	later:      []flow.Windows{flow.Tumbling(time.Minute)},
}

// Windows of later stages close soon after their end though no record comes, by the
// server's clock: whatever the number of workers, and whoever has which tasks.
func TestMark_closesWithoutRecords(t *testing.T) {
	for _, test := range []struct {
		partitions, workers, stages int
		by                          []int
	}{{1, 2, 2, nil}, {1, 3, 3, nil}, {4, 1, 2, nil}, {4, 3, 3, nil}, {4, 3, 2, []int{2}}} {
		t.Run(fmt.Sprintf("%+v", test), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				w := minutes
				w.options.Partitions, w.partitionBy = test.partitions, test.by
				if test.stages == 3 {
					w.later = []flow.Windows{flow.Tumbling(30 * time.Second), flow.Tumbling(time.Minute)}
					w.windows = flow.Tumbling(10 * time.Second)
				}
				f := w.build(t)
				var all []*process
				for i := range test.workers {
					all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", i)}, nil))
				}
				tasks := test.partitions * test.stages
				l.await("all have tasks", func() bool {
					for _, p := range all {
						if n := p.at().Tasks; n == 0 || n > (tasks+test.workers-1)/test.workers {
							return false
						}
					}
					return true
				})
				l.sleepUntil(10 * time.Second)
				l.more(100)
				l.sleepUntil(59 * time.Second)
				if n := l.count("OUT"); n != 0 {
					t.Fatalf("%d windows have closed before their end", n)
				}
				l.sleepUntil(3 * time.Second)
				want, _ := w.want(l, l.seq)
				if diff := cmp.Diff(want, l.gotWindows(), cmp.AllowUnexported(windowed{})); diff != "" {
					t.Fatalf("three seconds after the end (-want +got):\n%s", diff)
				}
				for _, p := range all {
					if err := p.leave(); err != nil {
						t.Fatal(err)
					}
				}
				l.judgeStaged(w)
			})
		})
	}
}

// What is due in a later stage is due at a time at which nothing else is, and in another
// worker than the task whose source is quiet.
func TestMark_dueElsewhere(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		w := minutes
		w.options.Partitions = 1
		w.later = []flow.Windows{flow.Tumbling(time.Minute), flow.Tumbling(time.Minute)}
		w.later[0].Offset, w.later[1].Offset = 30*time.Second, 45*time.Second
		f := w.build(t)
		var all []*process
		for i := range 3 {
			all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", i)}, nil))
		}
		l.await("each has a task", func() bool { return all[0].at().Tasks == 1 && all[1].at().Tasks == 1 && all[2].at().Tasks == 1 })
		l.sleepUntil(5 * time.Second)
		l.more(100)
		l.sleepUntil(44 * time.Second)
		if n := l.count("OUT"); n != 0 {
			t.Fatalf("%d windows have closed before their end", n)
		}
		l.sleepUntil(48 * time.Second)
		l.judgeStaged(w)
		for _, p := range all {
			if err := p.leave(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// A flow at rest commits nothing, though windows are open in its second stage.
func TestMark_rests(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		w := minutes
		w.later = []flow.Windows{flow.Tumbling(24 * time.Hour)}
		f := w.build(t)
		var commits atomic.Int64
		count := func(_ *process, _ context.Context, point, _ string) error {
			if point == "committed" {
				commits.Add(1)
			}
			return nil
		}
		var all []*process
		for i := range 2 {
			all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", i)}, count))
		}
		l.await("both have tasks", func() bool { return all[0].at().Tasks == 4 && all[1].at().Tasks == 4 })
		l.more(100)
		l.pass(2 * time.Minute)
		if n := commits.Load(); n < 8 {
			t.Fatalf("%d commits of a flow with records", n)
		}
		commits.Store(0)
		l.pass(10 * time.Minute)
		if n := commits.Load(); n > 0 {
			t.Errorf("%d commits of a flow at rest", n)
		}
		for _, p := range all {
			if err := p.leave(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// The watermarks of empty partitions cross as well, and not more often than they are
// waited for.
func TestMark_emptyPartitions(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		w := minutes
		w.options = flow.Options{Partitions: 16, CommitInterval: 20 * time.Millisecond}
		f := w.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.sleepUntil(time.Second)
		before, err := l.conn.Stream(l.ctx, crossCount)
		if err != nil {
			t.Fatal(err)
		}
		// One key, so that 15 of 16 partitions have none.
		for range 1000 {
			l.feed(l.rng, 1, 1)
			l.pass(10 * time.Millisecond)
		}
		l.sleepUntil(15 * time.Second)
		after, err := l.conn.Stream(l.ctx, crossCount)
		if err != nil {
			t.Fatal(err)
		}
		if n := after.LastSeq - before.LastSeq; n < 16*10 || n > 16*30 {
			t.Errorf("%d messages have crossed in 14 s, with 16 partitions", n)
		}
		l.sleepUntil(3 * time.Second)
		want, _ := w.want(l, l.seq)
		if diff := cmp.Diff(want, l.gotWindows(), cmp.AllowUnexported(windowed{})); diff != "" {
			t.Fatalf("three seconds after the end (-want +got):\n%s", diff)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}

// A suspended flow closes nothing, in no stage. Windows go on at the resume.
func TestMark_suspendAndResume(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := minutes.build(t)
		l.sleepUntil(10 * time.Second)
		l.more(50)
		l.sleepUntil(25 * time.Second)
		l.more(50)
		l.drain(f, Config{})
		l.pass(time.Second)
		l.more(50)
		l.drain(f, Config{Resume: true})
		if n := l.count("OUT"); n != 0 {
			t.Fatalf("%d windows were closed by a stop", n)
		}
		l.judgeExchange()
		l.pass(10 * time.Minute)
		var all []*process
		for i := range 2 {
			all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", i), Resume: true}, nil))
		}
		for _, p := range all {
			l.awaitPhase(p, "running")
		}
		l.pass(4 * time.Second)
		want, _ := minutes.want(l, l.seq)
		if diff := cmp.Diff(want, l.gotWindows(), cmp.AllowUnexported(windowed{})); diff != "" {
			t.Fatalf("soon after the start (-want +got):\n%s", diff)
		}
		for _, p := range all {
			if err := p.leave(); err != nil {
				t.Fatal(err)
			}
		}
		l.drain(f, Config{})
		l.judgeStaged(minutes)
		l.judgeExchange()
	})
}

// A drain of an idle flow takes no time, also when its watermarks are to cross.
func TestMark_emptyDrain(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		w := minutes
		w.later = []flow.Windows{flow.Tumbling(time.Minute), flow.Tumbling(time.Hour)}
		f := w.build(t)
		var all []*process
		for i := range 3 {
			all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", i), LeaseTTL: 2 * time.Second}, nil))
		}
		for _, p := range all {
			l.awaitPhase(p, "running")
		}
		l.more(1) // so that there is a watermark
		l.pass(3 * time.Second)
		began := time.Now()
		l.send("control.drain.count", "")
		l.awaitRecord("the drain", drained)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the drain of an idle flow took %v", took)
		}
		for _, p := range all {
			if err := p.wait(); err != nil {
				t.Error(err)
			}
		}
	})
}

// A crash around the closing of windows in the second stage, of the worker that has all
// tasks or of one of two, neither loses nor repeats one.
func TestMark_crash(t *testing.T) {
	for _, point := range []string{"read", "processed", "entry-appended-unacked", "committed", "half-published", "published", "noted", "trim", "trimmed"} {
		for _, left := range []int{1, 4} {
			if left > 1 && strings.HasPrefix(point, "trim") {
				continue // there are not so many of them
			}
			t.Run(fmt.Sprintf("%s/%d", point, left), func(t *testing.T) {
				bubble(t, func(t *testing.T, l *lab) {
					l.sleepUntil(51 * time.Second)
					c := &crasher{}
					w := minutes
					w.windows, w.later = flow.Tumbling(2*time.Second), []flow.Windows{flow.Tumbling(6 * time.Second)}
					f := w.build(t)
					cfg := Config{LeaseTTL: 2 * time.Second, trimEvery: 100 * time.Millisecond, idleCommit: 200 * time.Millisecond}
					p := l.start(f, cfg, c.probe)
					l.awaitPhase(p, "running")
					l.more(100)
					l.sleepUntil(59 * time.Second)
					c.mu.Lock()
					c.point, c.left = point, left
					c.mu.Unlock()
					for range 20 {
						l.more(10)
						l.pass(100 * time.Millisecond)
					}
					c.mu.Lock()
					struck := c.struck
					c.mu.Unlock()
					if !struck {
						t.Fatal("it did not crash")
					}
					p.cancel()
					_ = p.wait()
					cfg.Name = "w2"
					q := l.start(f, cfg, (&crasher{}).probe)
					l.awaitPhase(q, "running")
					l.pass(8 * time.Second)
					if err := q.leave(); err != nil {
						t.Fatal(err)
					}
					l.judgeStaged(w)
				})
			})
		}
	}
}

// A task of the second stage dies when it has heard watermarks, and committed a position
// at some time between: those that are not read again are in its state.
func TestMark_heardWithoutRecords(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		w := minutes
		w.options.Partitions = 2
		w.windows, w.later = flow.Tumbling(2*time.Second), []flow.Windows{flow.Tumbling(2 * time.Minute)}
		f := w.build(t)
		cfg := Config{LeaseTTL: 2 * time.Second, trimEvery: 100 * time.Millisecond, idleCommit: 100 * time.Millisecond}
		p := l.start(f, cfg, nil)
		l.awaitPhase(p, "running")
		// One key: the other partitions hear of the time and have nothing else to do.
		for range 30 {
			l.feed(l.rng, 2, 1)
			l.pass(time.Second)
		}
		l.pass(3 * time.Second)
		if n := len(l.read(crossCount)); n > 8 {
			t.Errorf("%d messages are left in the exchange", n)
		}
		for range 3 {
			p.link.Cut()
			p.cancel()
			_ = p.wait()
			p = l.start(f, cfg, nil)
			l.awaitPhase(p, "running")
			l.pass(time.Second)
		}
		l.pass(2*time.Minute + 3*time.Second)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judgeStaged(w)
	})
}

// TestRun_markHistories is TestRun_windowHistories for flows of two and of three stages:
// each window of the last one has one complete result, and no result of a window is late
// in the next stage.
func TestRun_markHistories(t *testing.T) {
	runHistories(t, sinkKinds[:2], 2, 10, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 17))
		l := newLab(t, srv)
		kind.make(l)
		w := stagedWindows{windowFlow: windowFlow{windows: flow.Tumbling(time.Second), options: flow.Options{Partitions: 1 + rng.IntN(5), CommitInterval: 20 * time.Millisecond}}}
		w.later = []flow.Windows{flow.Tumbling(2 * time.Second), flow.Tumbling(4 * time.Second)}[:1+rng.IntN(2)]
		if seed%2 == 0 {
			w.windows.AllowedLateness = 500 * time.Millisecond
		}
		if seed%3 == 0 {
			w.clock = &flow.EventTime[string]{Lateness: time.Second}
		}
		f := w.build(t)
		l.throughDrains(rng, f, func() {})
		if w.clock != nil {
			l.putAt("k0", time.Unix(900_000_000, 0).Add(time.Duration(l.seq)*50*time.Millisecond+time.Hour))
		}
		last := l.start(f, Config{Name: "last"}, nil)
		l.awaitPhase(last, "running")
		l.pass(20 * time.Second)
		if err := last.leave(); err != nil {
			t.Fatal(err)
		}
		l.judgeStaged(w)
	})
}

// TestSession_hints: what a worker says is due counts for a while, and each of several
// is looked at by itself.
func TestSession_hints(t *testing.T) {
	var d dueElsewhere
	say := func(worker string, due int64, stream ...int64) {
		h := dueHint{Worker: worker}
		if due != 0 {
			h.Due = &due
		}
		for _, at := range stream {
			h.Stream = &at
		}
		data, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		d.hear(data, "me")
	}
	wantBy := func(by int, mark, due int64) {
		t.Helper()
		if got := d.after(by, mark); got != due {
			t.Errorf("behind %d something is due at %d, want %d", mark, got, due)
		}
	}
	want := func(mark, due int64) {
		t.Helper()
		wantBy(byMark, mark, due)
	}
	want(0, 1<<63-1)
	say("me", 5)
	say("a", 30)
	say("b", 20)
	d.hear([]byte("not JSON"), "me")
	want(0, 20)
	want(20, 30)
	want(30, 1<<63-1)
	say("b", 0, 40)
	want(0, 30)
	wantBy(byStream, 0, 40)
	say("b", 0)
	want(0, 30)
	wantBy(byStream, 0, 1<<63-1)
	d.mu.Lock()
	d.by["a"] = heardDue{dueTimes{30, 1<<63 - 1}, time.Now().Add(-time.Nanosecond)}
	d.mu.Unlock()
	d.forget()
	want(0, 1<<63-1)
}
