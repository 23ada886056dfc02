package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// endFlow counts the records of each key by windows, for OUT; behind that the counts of
// each group in a stage of their own, for GROUPS; and all records of each key, for
// TOTALS.
type endFlow struct {
	windows flow.Windows
	options flow.Options
	// emit is that of the totals.
	emit flow.EmitMode
	// groups, if there are any, are windows in place of the counts of groups.
	groups flow.Windows
	// fails makes the result of a window an error.
	fails func(m *flow.Meta) bool
}

// endResult is a result of it.
type endResult struct {
	Key   string    `json:"key"`
	Start time.Time `json:"start,omitzero"`
	N     int       `json:"n"`
	Pane  string    `json:"pane"`
}

func (e endFlow) build(tb testing.TB) *flow.Flow {
	tb.Helper()
	b := flow.New("count", e.options)
	keyed := flow.KeyBy(flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText()), func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	})
	sink := func(s flow.Stream[endResult], stream string) {
		prefix := strings.ToLower(stream) + "."
		flow.To(s, flow.Sink[endResult]{Stream: stream, Subjects: []string{prefix + "*"}, Subject: flow.KeySubject[endResult](prefix), Encode: flow.EncodeJSON[endResult]()})
	}
	windows, _ := flow.Window(keyed, "windows", e.windows, flow.WindowAggregator[string, int, endResult]{
		State: flow.JSONState[int](1, nil),
		Add:   func(_ *flow.Meta, n *int, _ string) error { *n++; return nil },
		Merge: func(into, from *int) error { *into += *from; return nil },
		Result: func(m *flow.Meta, w flow.Span, n *int) (endResult, error) {
			if e.fails != nil && e.fails(m) {
				return endResult{}, errors.New("will not do")
			}
			return endResult{m.Key, w.Start, *n, m.Pane().String()}, nil
		},
	})
	sink(windows, "OUT")
	complete := flow.Filter(windows, func(_ *flow.Meta, r endResult) (bool, error) { return r.Pane == "none" || r.Pane == "final", nil })
	groups := flow.Rekey(complete, func(_ *flow.Meta, r endResult) (string, error) {
		return groupOf(r.Key, 1), nil
	}, flow.JSONCodec[endResult]())
	if e.groups == (flow.Windows{}) {
		sink(totals(groups, "groups", flow.EmitCommit, func(r endResult) int { return r.N }), "GROUPS")
	} else {
		windows, _ := flow.Window(groups, "groups", e.groups, flow.WindowAggregator[endResult, int, endResult]{
			State: flow.JSONState[int](1, nil),
			Add:   func(_ *flow.Meta, n *int, r endResult) error { *n += r.N; return nil },
			Result: func(m *flow.Meta, w flow.Span, n *int) (endResult, error) {
				return endResult{m.Key, w.Start, *n, m.Pane().String()}, nil
			},
		})
		sink(windows, "GROUPS")
	}
	sink(totals(keyed, "totals", e.emit, func(string) int { return 1 }), "TOTALS")
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

func totals[T any](s flow.Stream[T], id string, mode flow.EmitMode, of func(T) int) flow.Stream[endResult] {
	return flow.Aggregate(s, id, flow.Aggregator[T, int, endResult]{
		State: flow.JSONState[int](1, nil),
		Add:   func(_ *flow.Meta, n *int, v T) error { *n += of(v); return nil },
		Result: func(m *flow.Meta, n *int) (endResult, error) {
			return endResult{Key: m.Key, N: *n, Pane: m.Pane().String()}, nil
		},
		Emit: mode,
	})
}

// endResults returns the results in a stream.
func (l *lab) endResults(stream string) []endResult {
	l.tb.Helper()
	var all []endResult
	for _, m := range l.read(stream) {
		var r endResult
		if err := json.Unmarshal(m.data, &r); err != nil {
			l.tb.Fatalf("%s sequence %d: %v", m.subject, m.seq, err)
		}
		all = append(all, r)
	}
	return all
}

// judgeFinished says what is there when a flow is finished for the n-th time: each record
// up to the cut is in one window, that of the windows in one count of a group; and each
// key has had n results that were final, one for each time, the last one with all.
func (l *lab) judgeFinished(cut uint64, finishes int) {
	l.tb.Helper()
	fed := l.through(cut)
	groups := map[string]int{}
	for key, n := range fed {
		groups[groupOf(key, 1)] += n
	}
	windows := map[string]int{}
	for _, r := range l.endResults("OUT") {
		if r.Pane == "none" || r.Pane == "final" {
			windows[r.Key] += r.N
		}
	}
	if diff := cmp.Diff(fed, windows); diff != "" {
		l.tb.Fatalf("records in windows (-want +got):\n%s", diff)
	}
	for stream, want := range map[string]map[string]int{"TOTALS": fed, "GROUPS": groups} {
		last, finals, updates := map[string]int{}, map[string]int{}, map[string]int{}
		for _, r := range l.endResults(stream) {
			if r.N < last[r.Key] {
				l.tb.Fatalf("%s: %+v behind %d", stream, r, last[r.Key])
			}
			last[r.Key] = r.N
			switch r.Pane {
			case "final":
				finals[r.Key]++
			case "none":
				updates[r.Key]++
			default:
				l.tb.Fatalf("%s: %+v", stream, r)
			}
		}
		if diff := cmp.Diff(want, last); diff != "" {
			l.tb.Fatalf("%s: last results (-want +got):\n%s", stream, diff)
		}
		for key, n := range finals {
			if n > finishes || stream == "TOTALS" && updates[key] != fed[key] {
				l.tb.Fatalf("%s: key %s has %d updates and %d final results", stream, key, updates[key], n)
			}
		}
		if len(finals) != len(want) {
			l.tb.Fatalf("%s: %d keys have final results, want %d", stream, len(finals), len(want))
		}
	}
}

func finished(r control.Record) bool { return r.State == control.StateFinished }

// finishAt finishes the flow at the head with the workers that run, and waits until they
// have ended.
func (l *lab) finishAt(at string, workers ...*process) control.Record {
	l.tb.Helper()
	l.send("control.drain.count", fmt.Sprintf(`{"mode":"finish","at":%q}`, at))
	for _, p := range workers {
		if err := p.wait(); err != nil {
			l.tb.Fatalf("finish: %v", err)
		}
	}
	rec := l.record()
	if !finished(rec) {
		l.tb.Fatalf("the flow is %s, %s", rec.State, rec.LastError)
	}
	return rec
}

// days are windows that do not close by themselves in these tests.
var days = endFlow{windows: flow.Tumbling(24 * time.Hour), options: flow.Options{Partitions: 4}}

// TestFinish ends the input with one worker and with three: open windows close, in both
// stages; and goes on with new ones after a resume.
func TestFinish(t *testing.T) {
	for _, workers := range []int{1, 3} {
		t.Run(fmt.Sprint(workers, " workers"), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				f := days.build(t)
				start := func(resume bool) (all []*process) {
					for i := range workers {
						all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", i), Resume: resume}, nil))
					}
					for _, p := range all {
						l.awaitPhase(p, "running")
					}
					return all
				}
				all := start(false)
				l.more(100)
				rec := l.finishAt("head", all...)
				l.judgeFinished(100, 1)
				// 8 windows and 8 totals, and what the groups have.
				if want := uint64(8 + 8 + len(l.groups())); rec.Report.AtEnd != want || rec.Report.OpenWindows != 0 {
					t.Errorf("%d results at the end, %d windows are open; want %d and none", rec.Report.AtEnd, rec.Report.OpenWindows, want)
				}
				all = start(true)
				l.more(50)
				if rec := l.finishAt("head", all...); rec.Report.AtEnd != uint64(8+8+len(l.groups())) {
					t.Errorf("%d results at the end", rec.Report.AtEnd)
				}
				l.judgeFinished(150, 2)
				// Nothing new: the totals again, and no window.
				all = start(true)
				if rec := l.finishAt("now", all...); rec.Report.AtEnd != uint64(8+len(l.groups())) {
					t.Errorf("%d results at the end", rec.Report.AtEnd)
				}
				l.judgeFinished(150, 3)
			})
		})
	}
}

// TestFinish_laterWindows: windows of a later stage have what the windows before them
// have at the end, and close behind them. Some have closed by themselves before, and some
// have had early results.
func TestFinish_laterWindows(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.sleepUntil(0)
		e := endFlow{windows: flow.Tumbling(10 * time.Second), options: flow.Options{Partitions: 4}, groups: flow.Tumbling(time.Minute)}
		e.groups.Early = 20 * time.Second
		e.groups.OnDrain = flow.EmitPartial
		f := e.build(t)
		for i := range 3 {
			var all []*process
			for k := range 2 {
				all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", k), Resume: true}, nil))
				l.awaitPhase(all[k], "running")
			}
			for range 7 {
				l.more(20)
				l.pass(11 * time.Second)
			}
			l.more(20)
			if i == 1 {
				l.send("control.drain.count", `{"at":"head"}`)
				for _, p := range all {
					if err := p.wait(); err != nil {
						t.Fatal(err)
					}
				}
				continue
			}
			l.finishAt("head", all...)
			panes, sum := map[string]int{}, map[string]int{}
			for _, r := range l.endResults("GROUPS") {
				panes[r.Pane]++
				if r.Pane == "none" || r.Pane == "final" {
					sum[r.Key] += r.N
				}
			}
			want := map[string]int{}
			for key, n := range l.fed {
				want[groupOf(key, 1)] += n
			}
			if diff := cmp.Diff(want, sum); diff != "" {
				t.Fatalf("%d: records in windows of groups (-want +got):\n%s", i, diff)
			}
			if panes["none"] == 0 || panes["early"] == 0 || panes["final"] == 0 || (panes["partial"] > 0) != (i == 2) {
				t.Errorf("%d: results %v", i, panes)
			}
			if n := l.count("NATSFLOW_DLQ"); n > 0 {
				t.Errorf("%d dead letters", n)
			}
		}
	})
}

// groups are those of the keys.
func (l *lab) groups() map[string]bool {
	groups := map[string]bool{}
	for key := range l.fed {
		groups[groupOf(key, 1)] = true
	}
	return groups
}

// TestFinish_parts: the end of a task takes several commits, and whenever the worker
// dies, the next one goes on from there.
func TestFinish_parts(t *testing.T) {
	for _, point := range []string{"drained-in-part", "committed", "half-published", "published", "released", "handed-over", "stage-ends", "drained-unrecorded"} {
		t.Run(point, func(t *testing.T) {
			struck := 0
			for _, left := range []int{1, 2, 5, 11} {
				bubble(t, func(t *testing.T, l *lab) {
					e := days
					e.options.Partitions = 2
					f := e.build(t)
					l.feed(l.rng, 300, 60)
					c := &crasher{}
					p := l.start(f, Config{MaxPending: 300, LeaseTTL: 2 * time.Second}, c.probe)
					l.await("the totals", func() bool { return l.count("TOTALS") == 300 })
					l.pass(3 * time.Second)
					c.mu.Lock()
					c.point, c.left = point, left
					c.mu.Unlock()
					l.send("control.drain.count", `{"mode":"finish"}`)
					l.await("the end of the worker", p.ended)
					if c.struck {
						struck++
					} else if p.err != nil {
						t.Fatal(p.err)
					}
					rec := l.record()
					if rec.State == control.StateDraining {
						if err := l.start(f, Config{Name: "next", MaxPending: 300}, nil).wait(); err != nil {
							t.Fatal(err)
						}
						rec = l.record()
					}
					if !finished(rec) {
						t.Fatalf("the flow is %s", rec.State)
					}
					l.judgeFinished(300, 1)
					if want := uint64(2*len(l.fed) + len(l.groups())); rec.Report.AtEnd != want {
						t.Errorf("%d results at the end, want %d", rec.Report.AtEnd, want)
					}
					last := l.start(f, Config{Resume: true}, nil)
					l.awaitPhase(last, "running")
					l.finishAt("now", last)
					l.judgeFinished(300, 2)
				})
			}
			if struck == 0 {
				t.Error("no worker died there")
			}
		})
	}
}

// TestFinish_cancelled: a finish that is cancelled when the first stage has ended keeps
// what it has closed. The next one has the rest.
func TestFinish_cancelled(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := days.build(t)
		g := newGate("stage-ends")
		p := l.start(f, Config{LeaseTTL: time.Minute}, g.probe)
		l.more(100)
		l.await("the totals", func() bool { return l.count("TOTALS") == 100 })
		l.send("control.drain.count", `{"mode":"finish"}`)
		<-g.reached
		l.send("control.resume.count", "")
		l.awaitRecord("the resume", func(r control.Record) bool { return r.State == control.StateRunning })
		close(g.open)
		l.more(100)
		l.await("all totals", func() bool { return l.count("TOTALS") == 208 })
		l.await("the groups", func() bool { return l.count("GROUPS") > 0 })
		for _, r := range l.endResults("GROUPS") {
			if r.Pane != "none" {
				t.Errorf("%+v though the drain was cancelled", r)
			}
		}
		l.finishAt("head", p)
		l.judgeFinished(200, 2)
	})
}

// TestFinish_resumed says that the flow goes on behind an end.
func TestFinish_resumed(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var logged lines
		f := days.build(t)
		l.more(10)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.finishAt("head", p)
		keys := len(l.fed)
		l.log = slog.New(slog.NewTextHandler(&logged, nil))
		p = l.start(f, Config{Resume: true}, nil)
		l.awaitPhase(p, "running")
		if n := logged.count("resumed after finish: "); n != 1 {
			t.Errorf("it says so %d times", n)
		}
		l.more(10)
		l.await("the totals", func() bool { return l.count("TOTALS") == 20+keys })
		l.pass(5 * time.Second)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		p = l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.drain(f, Config{Name: "other"})
		p = l.start(f, Config{Resume: true}, nil)
		l.awaitPhase(p, "running")
		if n := logged.count("resumed after finish: "); n != 1 {
			t.Errorf("it says so %d times in the end", n)
		}
	})
}

// lines is a log.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), s)
}

// TestFinish_failing: with on_error stop a result that fails at the end stops the
// worker, and the drain is not over: a resume cancels it.
func TestFinish_failing(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		e := days
		e.options.OnError = flow.Stop
		e.fails = func(m *flow.Meta) bool { return m.Pane() == flow.PaneFinal && m.Key == "k3" }
		f := e.build(t)
		l.more(100)
		p := l.start(f, Config{}, nil)
		l.await("the totals", func() bool { return l.count("TOTALS") == 100 })
		l.send("control.drain.count", `{"mode":"finish"}`)
		var step *flow.StepError
		if err := p.wait(); !errors.As(err, &step) || step.Step != "windows" || step.Key != "k3" || !strings.Contains(err.Error(), "at the end of the drain") {
			t.Fatalf("error %v", err)
		}
		if err := l.start(f, Config{}, nil).wait(); !errors.As(err, &step) {
			t.Fatalf("error %v", err)
		}
		e.fails = nil
		if err := l.start(e.build(t), Config{}, nil).wait(); err != nil {
			t.Fatal(err)
		}
		l.judgeFinished(100, 1)
	})
}

// TestScenario17: a stop is not the end of the input. Drains in the middle of a window
// emit nothing; or what there is so far, if that is asked for, and the window goes on.
func TestScenario17(t *testing.T) {
	for _, partial := range []bool{false, true} {
		t.Run(fmt.Sprint("partial=", partial), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				l.sleepUntil(time.Second)
				e := endFlow{windows: flow.Tumbling(time.Minute), options: flow.Options{Partitions: 4}}
				if partial {
					e.windows.OnDrain = flow.EmitPartial
				}
				f := e.build(t)
				want := []endResult(nil)
				for i := range 3 {
					p := l.start(f, Config{Resume: true}, nil)
					l.awaitPhase(p, "running")
					l.put(fmt.Sprintf("a %d", i))
					l.put(fmt.Sprintf("b %d", i))
					// A worker that leaves has nothing to say, nor one that dies.
					l.await("the records", func() bool { return l.count("TOTALS") == 2*(i+1) })
					if err := p.leave(); err != nil {
						t.Fatal(err)
					}
					l.drain(f, Config{})
					rec := l.record()
					if partial {
						want = append(want, endResult{Key: "a", N: i + 1, Pane: "partial"}, endResult{Key: "b", N: i + 1, Pane: "partial"})
					}
					if rec.Report.OpenWindows != 2 || rec.Report.AtEnd != uint64(len(want)-2*i*len(want)/(2*i+2)) {
						t.Errorf("%d windows are open, %d results were made at the end", rec.Report.OpenWindows, rec.Report.AtEnd)
					}
				}
				p := l.start(f, Config{Resume: true}, nil)
				l.awaitPhase(p, "running")
				l.pass(2 * time.Minute)
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				want = append(want, endResult{Key: "a", N: 3, Pane: "none"}, endResult{Key: "b", N: 3, Pane: "none"})
				got := map[string][]endResult{}
				for _, r := range l.endResults("OUT") {
					r.Start = time.Time{}
					got[r.Key] = append(got[r.Key], r)
				}
				wanted := map[string][]endResult{}
				for _, r := range want {
					wanted[r.Key] = append(wanted[r.Key], r)
				}
				if diff := cmp.Diff(wanted, got); diff != "" {
					t.Errorf("windows (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestScenario31: what a long commit interval keeps back is flushed at once by a stop.
func TestScenario31(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		e := days
		e.options.CommitInterval = time.Hour
		e.emit = flow.EmitCommit
		e.windows = flow.GlobalWindow()
		e.windows.Early = time.Hour
		f := e.build(t)
		for i, mode := range []string{"suspend", "finish"} {
			p := l.start(f, Config{Resume: true}, nil)
			l.awaitPhase(p, "running")
			l.more(200)
			began := time.Now()
			l.send("control.drain.count", fmt.Sprintf(`{"mode":%q,"at":"head"}`, mode))
			if err := p.wait(); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("the stop took %v", took)
			}
			last := map[string]int{}
			for _, r := range l.endResults("TOTALS") {
				last[r.Key] = r.N
			}
			if diff := cmp.Diff(l.fed, last); diff != "" {
				t.Errorf("%d: totals (-want +got):\n%s", i, diff)
			}
		}
	})
}

// TestFinish_atLeastOnce publishes before the commit; without a crash each result is
// there once.
func TestFinish_atLeastOnce(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		e := days
		e.options.Delivery = flow.AtLeastOnce
		f := e.build(t)
		p := l.start(f, Config{MaxPending: 100}, nil)
		l.awaitPhase(p, "running")
		l.more(100)
		l.finishAt("head", p)
		l.judgeFinished(100, 1)
	})
}

// TestRun_finishHistories lets workers come, leave, die and freeze while the flow is
// finished and resumed.
func TestRun_finishHistories(t *testing.T) {
	runHistories(t, sinkKinds[:1], 2, 15, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 19))
		l := newLab(t, srv)
		kind.make(l)
		e := endFlow{windows: flow.Tumbling(2 * time.Second), options: flow.Options{Partitions: 4, CommitInterval: 20 * time.Millisecond}}
		switch seed % 3 {
		case 0:
			e.windows = flow.CountWindows(7)
		case 1:
			e.windows.Early = time.Second
		}
		c := &crew{lab: l, rng: rng, f: e.build(t)}
		first := c.start(c.f, Config{Name: "first", LeaseTTL: 2 * time.Second, MaxPending: 1000}, nil)
		c.alive, c.all = []*process{first}, []*process{first}
		l.awaitPhase(first, "running")
		finishes := 0
		for range 3 {
			for range 3 + rng.IntN(6) {
				c.event()
			}
			mode := "suspend"
			if rng.IntN(3) > 0 {
				mode = "finish"
				finishes++
			}
			rec, _ := c.untilDrained(c.send("control.drain.count", fmt.Sprintf(`{"mode":%q}`, mode)))
			c.release()
			c.end()
			if mode == "finish" && rec.Report.Cut["IN"] > 0 {
				l.judgeFinished(rec.Report.Cut["IN"], finishes)
			}
			c.join(Config{Resume: true})
			c.awaitRecord("the resume", func(rec control.Record) bool {
				if rec.State == control.StateRunning {
					return true
				}
				if c.all[len(c.all)-1].ended() {
					c.join(Config{Resume: true})
				}
				return false
			})
		}
		c.release()
		c.end()
		last := c.start(c.f, Config{Name: "last"}, nil)
		l.awaitPhase(last, "running")
		l.finishAt("head", last)
		l.judgeFinished(l.seq, finishes+1)
	})
}
