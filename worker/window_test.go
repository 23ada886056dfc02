package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// counts is the result of a window.
type windowCount struct {
	Key   string    `json:"key"`
	Start time.Time `json:"start"`
	N     int       `json:"n"`
}

// windowFlow counts the records of each key by windows of the stream's timestamps, or
// of the times that the records bring, in milliseconds behind their key.
type windowFlow struct {
	windows     flow.Windows
	clock       *flow.EventTime[string]
	partitionBy []int
	options     flow.Options
	source      string
}

func (w windowFlow) build(tb testing.TB) *flow.Flow {
	tb.Helper()
	b := flow.New("count", w.options)
	if w.source == "" {
		w.source = "IN"
	}
	src := flow.Source{Stream: w.source, PartitionBy: w.partitionBy}
	if w.clock != nil {
		clock := *w.clock
		clock.Of = func(_ *flow.Meta, v string) (time.Time, error) { return timeIn(v) }
		src.Time = clock
	}
	records := flow.From(b, src, flow.DecodeText())
	keyed := flow.KeyBy(records, func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	})
	counts, late := flow.Window(keyed, "count", w.windows, flow.WindowAggregator[string, int, windowCount]{
		State: flow.JSONState[int](1, nil),
		Add:   func(_ *flow.Meta, n *int, _ string) error { *n++; return nil },
		Merge: func(into, from *int) error { *into += *from; return nil },
		Result: func(m *flow.Meta, w flow.Span, n *int) (windowCount, error) {
			return windowCount{m.Key, w.Start, *n}, nil
		},
	})
	flow.To(counts, flow.Sink[windowCount]{Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[windowCount]("out."), Encode: flow.EncodeJSON[windowCount]()})
	flow.To(late, flow.Sink[string]{Stream: "LATE", Subjects: []string{"late.*"}, Subject: flow.KeySubject[string]("late."), Encode: flow.EncodeText()})
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// timeIn reads the time of a record "k1 1735689600000". That of a record "k1 v17" is
// made of its number: they are 50 ms apart, and go back by up to 4 s.
func timeIn(v string) (time.Time, error) {
	var key string
	var ms int64
	if _, number, ok := strings.Cut(v, " v"); ok {
		if _, err := fmt.Sscan(number, &ms); err != nil {
			return time.Time{}, err
		}
		return time.Unix(900_000_000, 0).Add(50 * time.Millisecond * time.Duration(ms-ms*ms%7919%80)), nil
	}
	if _, err := fmt.Sscan(v, &key, &ms); err != nil {
		return time.Time{}, err
	}
	return time.UnixMilli(ms), nil
}

// windowed is what a window of a key is known by.
type windowed struct {
	key   string
	start int64
}

// wantWindows is the naive model: how many records of the source each window has, up
// to a sequence, and how many are late. Of event time, windows that are open there
// have no result.
func (l *lab) wantWindows(w windowFlow, through uint64) (want map[windowed]int, late int) {
	l.tb.Helper()
	want = map[windowed]int{}
	highest := int64(noTime)
	size := int64(w.windows.Size)
	l.each("IN", through, func(m *bus.Msg) {
		v := string(m.Data)
		key, _, _ := strings.Cut(v, " ")
		at, mark := m.Time, m.Time
		if w.clock != nil {
			t, err := timeIn(v)
			if err != nil {
				l.tb.Fatal(err)
			}
			at, mark = t.UnixNano(), highest
			if mark != noTime {
				mark -= int64(w.clock.Lateness)
			}
			highest = max(highest, at)
		}
		start := at - at%size
		if start+size+int64(w.windows.AllowedLateness) <= mark {
			late++
			return
		}
		want[windowed{key, start}]++
	})
	for k := range want {
		if w.clock != nil && k.start+size+int64(w.windows.AllowedLateness) > highest-int64(w.clock.Lateness) {
			delete(want, k)
		}
	}
	return want, late
}

// each calls fn with each message of a stream up to a sequence.
func (l *lab) each(stream string, through uint64, fn func(m *bus.Msg)) {
	l.tb.Helper()
	if through == 0 {
		return
	}
	cu, err := l.conn.OpenCursor(l.ctx, bus.CursorConfig{Stream: stream, From: 1, Name: "judge"})
	if err != nil {
		l.tb.Fatal(err)
	}
	done := errors.New("done")
	err = cu.Run(l.ctx, func(m *bus.Msg) error {
		if m.Seq <= through {
			fn(m)
		}
		if m.Seq >= through {
			return done
		}
		return nil
	})
	if !errors.Is(err, done) {
		l.tb.Fatal(err)
	}
	if err := cu.Close(l.ctx); err != nil {
		l.tb.Fatal(err)
	}
}

// gotWindows returns the results: each window once, those of a key in order.
func (l *lab) gotWindows() map[windowed]int {
	l.tb.Helper()
	got := map[windowed]int{}
	last := map[string]int64{}
	for _, m := range l.read("OUT") {
		var r windowCount
		if err := json.Unmarshal(m.data, &r); err != nil {
			l.tb.Fatalf("sequence %d: %v", m.seq, err)
		}
		w := windowed{r.Key, r.Start.UnixNano()}
		if _, twice := got[w]; twice {
			l.tb.Fatalf("sequence %d: a second result of the window of %s from %v", m.seq, r.Key, r.Start)
		}
		if at, ok := last[r.Key]; ok && at > w.start {
			l.tb.Fatalf("sequence %d: the window of %s from %v came after a later one", m.seq, r.Key, r.Start)
		}
		got[w], last[r.Key] = r.N, w.start
	}
	return got
}

// judgeWindows says that all windows have closed, with all their records, and that the
// late ones came out.
func (l *lab) judgeWindows(w windowFlow) {
	l.tb.Helper()
	want, late := l.wantWindows(w, l.seq)
	if diff := cmp.Diff(want, l.gotWindows(), cmp.AllowUnexported(windowed{})); diff != "" {
		l.tb.Fatalf("windows (-want +got):\n%s", diff)
	}
	if got := l.count("LATE"); got != late {
		l.tb.Fatalf("%d late records, want %d", got, late)
	}
}

// minute is the flow of most tests.
var minute = windowFlow{windows: flow.Tumbling(time.Minute), options: flow.Options{Partitions: 4}}

// sleepUntil lets time go by until so long after a full minute.
func (l *lab) sleepUntil(after time.Duration) {
	now := time.Now()
	next := now.Truncate(time.Minute).Add(after)
	if !next.After(now) {
		next = next.Add(time.Minute)
	}
	l.pass(time.Until(next))
}

// A window closes soon after its end though no record comes, by the server's clock.
func TestWindow_closesWithoutRecords(t *testing.T) {
	for _, by := range [][]int{nil, {2}} {
		t.Run(fmt.Sprintf("partition_by=%v", by), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				w := minute
				w.partitionBy = by
				l.sleepUntil(10 * time.Second)
				p := l.start(w.build(t), Config{}, nil)
				l.awaitPhase(p, "running")
				l.more(100)
				l.sleepUntil(59 * time.Second)
				if n := l.count("OUT"); n != 0 {
					t.Fatalf("%d windows have closed before their end", n)
				}
				l.sleepUntil(2 * time.Second)
				want, _ := l.wantWindows(w, l.seq)
				if diff := cmp.Diff(want, l.gotWindows(), cmp.AllowUnexported(windowed{})); diff != "" {
					t.Fatalf("two seconds after the end (-want +got):\n%s", diff)
				}
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				l.judgeWindows(w)
			})
		})
	}
}

// A mirror gets messages later than they are stamped, so that only a record tells
// what time it is.
func TestWindow_mirrorWaitsForRecords(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, _, err := l.conn.EnsureMirror(l.ctx, bus.MirrorConfig{Name: "COPY", Origin: "IN"}); err != nil {
			t.Fatal(err)
		}
		l.sleepUntil(10 * time.Second)
		w := minute
		w.source = "COPY"
		p := l.start(w.build(t), Config{}, nil)
		l.awaitPhase(p, "running")
		l.more(100)
		l.pass(2 * time.Minute)
		if n := l.count("OUT"); n != 0 {
			t.Fatalf("%d windows have closed without a record", n)
		}
		want, _ := l.wantWindows(w, l.seq)
		l.more(1)
		l.pass(time.Second)
		if diff := cmp.Diff(want, l.gotWindows(), cmp.AllowUnexported(windowed{})); diff != "" {
			t.Fatalf("windows (-want +got):\n%s", diff)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}

// A suspended flow closes nothing. The window goes on at the resume, and has one
// complete result, soon after the start if its end has passed.
func TestWindow_suspendAndResume(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.sleepUntil(10 * time.Second)
		f := minute.build(t)
		l.more(50)
		l.drain(f, Config{})
		l.more(50)
		l.drain(f, Config{Resume: true})
		if n := l.count("OUT"); n != 0 {
			t.Fatalf("%d windows were closed by a stop", n)
		}
		l.pass(10 * time.Minute)
		p := l.start(f, Config{Resume: true}, nil)
		l.awaitPhase(p, "running")
		l.pass(2 * time.Second)
		want, _ := l.wantWindows(minute, l.seq)
		if diff := cmp.Diff(want, l.gotWindows(), cmp.AllowUnexported(windowed{})); diff != "" {
			t.Fatalf("soon after the start (-want +got):\n%s", diff)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.drain(f, Config{})
		l.judgeWindows(minute)
	})
}

// Windows go over to another worker, that of one that dies as that of one that
// leaves.
func TestWindow_takeover(t *testing.T) {
	for _, kind := range []string{"dies", "leaves"} {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				l.sleepUntil(10 * time.Second)
				w := minute
				w.options = oneTask
				a, b := pair(l, w.build(t), Config{LeaseTTL: 2 * time.Second}, nil)
				l.more(50)
				l.pass(5 * time.Second)
				if kind == "dies" {
					a.link.Cut()
				}
				a.cancel()
				l.awaitPhase(b, "running")
				l.more(50)
				l.pass(2 * time.Minute)
				if err := b.leave(); err != nil {
					t.Fatal(err)
				}
				_ = a.wait()
				l.judgeWindows(w)
			})
		})
	}
}

// A crash around the closing of windows neither loses nor repeats one.
func TestWindow_crashWhileClosing(t *testing.T) {
	for _, point := range []string{"processed", "entry-appended-unacked", "committed", "half-published", "published", "noted"} {
		t.Run(point, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				l.sleepUntil(10 * time.Second)
				c := &crasher{}
				f := minute.build(t)
				p := l.start(f, Config{}, c.probe)
				l.awaitPhase(p, "running")
				l.more(100)
				l.sleepUntil(59 * time.Second)
				c.mu.Lock()
				c.point, c.left = point, 1
				c.mu.Unlock()
				l.pass(time.Second)
				l.more(10) // closes what the clock has not
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
				l.judgeWindows(minute)
			})
		})
	}
}

// A worker that goes back for the task of another one, which is far behind, takes its
// clock back, too: what it reads for that task is not late.
func TestWindow_goesBackForATask(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.sleepUntil(10 * time.Second)
		w := minute
		w.options = flow.Options{Partitions: 2}
		f := w.build(t)
		cfg := Config{Name: "a", LeaseTTL: 2 * time.Minute}
		a := l.start(f, cfg, nil)
		l.awaitPhase(a, "running")
		cfg.Name = "b"
		b := l.start(f, cfg, nil)
		l.await("two workers with a task each", func() bool { return a.at().Tasks == 1 && b.at().Tasks == 1 })
		b.link.Cut()
		b.cancel()
		_ = b.wait()
		// More than a reader gives to the lanes at once, in two minutes.
		l.more(3 * batchRecords)
		l.sleepUntil(5 * time.Second)
		l.more(3 * batchRecords)
		l.await("the other task", func() bool { return a.at().Tasks == 2 })
		l.pass(2 * time.Minute)
		if err := a.leave(); err != nil {
			t.Fatal(err)
		}
		l.judgeWindows(w)
	})
}

// putAt puts a record with a time of its own into the source.
func (l *lab) putAt(key string, at time.Time) {
	l.tb.Helper()
	if _, err := l.conn.Publish(l.ctx, "in."+key, nil, fmt.Appendf(nil, "%s %d", key, at.UnixMilli())); err != nil {
		l.tb.Fatal(err)
	}
	l.seq++
}

// The clock of a source of event time goes on where a task stands, also when that is
// in the middle of the stream: what was late stays late, and what was not is not.
func TestWindow_eventTimeOverRestarts(t *testing.T) {
	w := windowFlow{windows: flow.Tumbling(time.Minute), clock: &flow.EventTime[string]{Lateness: 30 * time.Second}, options: flow.Options{Partitions: 4}}
	bubble(t, func(t *testing.T, l *lab) {
		f := w.build(t)
		rng := rand.New(rand.NewPCG(5, 6))
		at := time.Now().Add(-time.Hour)
		for round := range 12 {
			for range 40 {
				at = at.Add(time.Duration(rng.Int64N(int64(4 * time.Second))))
				l.putAt(fmt.Sprintf("k%d", rng.IntN(8)), at.Add(-time.Duration(rng.Int64N(int64(100*time.Second)))))
			}
			switch round % 3 {
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
				l.pass(time.Minute)
			}
		}
		l.putAt("end", at.Add(time.Hour))
		l.drain(f, Config{Resume: true})
		want, late := l.wantWindows(w, l.seq)
		if diff := cmp.Diff(want, l.gotWindows(), cmp.AllowUnexported(windowed{})); diff != "" {
			t.Fatalf("windows (-want +got):\n%s", diff)
		}
		if got := l.count("LATE"); got != late || late < 10 {
			t.Fatalf("%d late records, want %d", got, late)
		}
		if got := l.record().Report.Late; got != uint64(late) {
			t.Fatalf("the report says %d late records, want %d", got, late)
		}
	})
}

// Event time waits for records, or follows the clock when the source is idle.
func TestWindow_idle(t *testing.T) {
	for _, idle := range []time.Duration{0, 20 * time.Second} {
		t.Run(idle.String(), func(t *testing.T) {
			w := windowFlow{windows: flow.Tumbling(time.Minute), clock: &flow.EventTime[string]{Lateness: 10 * time.Second, Idle: idle}, options: flow.Options{Partitions: 4}}
			bubble(t, func(t *testing.T, l *lab) {
				f := w.build(t)
				p := l.start(f, Config{}, nil)
				l.awaitPhase(p, "running")
				day := time.Now().AddDate(0, 0, -1).Truncate(time.Minute)
				l.putAt("a", day.Add(55*time.Second))
				l.pass(10 * time.Second) // 65 s of its day, less the lateness
				if n := l.count("OUT"); n != 0 {
					t.Fatalf("%d windows have closed", n)
				}
				// Also over a restart: the source counts, not how long somebody looked at it.
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				p = l.start(f, Config{}, nil)
				l.awaitPhase(p, "running")
				l.pass(15 * time.Second)
				want := 0
				if idle > 0 {
					want = 1
				}
				if n := l.count("OUT"); n != want {
					t.Fatalf("%d windows have closed, want %d", n, want)
				}
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				p = l.start(f, Config{}, nil)
				l.awaitPhase(p, "running")
				// A window that is closed stays closed, and its record is late; the next
				// one is open, as long as that is not over by the time that has passed.
				l.putAt("a", day.Add(50*time.Second))
				l.putAt("a", day.Add(65*time.Second))
				l.pass(time.Second)
				if n := l.count("LATE"); n != want {
					t.Fatalf("%d records are late, want %d", n, want)
				}
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
			})
		})
	}
}

// A drain to a cut before the end of the source closes what is due at the cut and no
// more, though the server's clock is beyond it.
func TestWindow_drainBehindTheClock(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.sleepUntil(10 * time.Second)
		f := minute.build(t)
		l.more(20)
		cut := l.seq
		l.pass(5 * time.Minute)
		l.more(20)
		g := newGate("adopted")
		p := l.start(f, Config{}, g.probe)
		<-g.reached
		l.send("control.drain.count", fmt.Sprintf(`{"at":{"seq":{"IN":%d}}}`, cut))
		l.pass(time.Second)
		close(g.open)
		rec := l.awaitRecord("the drain", func(rec control.Record) bool { return rec.State == control.StateDrained || rec.LastError != "" })
		_ = p.wait()
		if rec.State != control.StateDrained || rec.Report.Cut["IN"] != cut {
			t.Fatalf("the flow had read on: %s", rec.LastError)
		}
		if n := l.count("OUT"); n != 0 {
			t.Fatalf("%d windows were closed at a cut before their end", n)
		}
		p = l.start(f, Config{Resume: true}, nil)
		l.awaitPhase(p, "running")
		l.pass(3 * time.Minute)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judgeWindows(minute)
	})
}

// TestRun_windowHistories is TestRun_manyWorkers with windows: workers come, leave,
// die and freeze, the flow is drained and resumed, and each window has one complete
// result.
func TestRun_windowHistories(t *testing.T) {
	runHistories(t, sinkKinds[:2], 2, 15, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 13))
		l := newLab(t, srv)
		kind.make(l)
		w := windowFlow{windows: flow.Tumbling(2 * time.Second), options: flow.Options{Partitions: 8, CommitInterval: 20 * time.Millisecond}}
		if seed%2 == 0 {
			w.windows.AllowedLateness = 500 * time.Millisecond
		}
		if seed%3 > 0 {
			// Some of the records are late, the same ones whoever reads them.
			w.clock = &flow.EventTime[string]{Lateness: time.Second}
		}
		f := w.build(t)
		l.throughDrains(rng, f, func() {})
		last := l.start(f, Config{Name: "last"}, nil)
		l.awaitPhase(last, "running")
		l.pass(10 * time.Second)
		if err := last.leave(); err != nil {
			t.Fatal(err)
		}
		l.judgeWindows(w)
	})
}
