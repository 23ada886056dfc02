package flow_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// partial is a window that emits what it has at a drain.
func partial(w flow.Windows) flow.Windows {
	w.OnDrain = flow.EmitPartial
	return w
}

// wantSealed says what a task has to publish.
func wantSealed(t *testing.T, task *flow.Task, want ...string) {
	t.Helper()
	s, err := task.Seal()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	err = flow.Outputs(s.Outbox, func(_ int, o flow.Output) error {
		got = append(got, string(o.Data))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("results (-want +got):\n%s", diff)
	}
}

// crashed plays the lines with a crash behind each of them, before and after a commit:
// the results are the same.
func crashed(t *testing.T, w windowFlow, lines []string, want ...string) {
	t.Helper()
	wantData(t, streamTimed(t, w.build(t), lines...), "OUT", want...)
	for i := range lines {
		for _, disturbance := range [][]string{{"crash"}, {"commit", "crash"}} {
			wantData(t, streamTimed(t, w.build(t), slices.Concat(lines[:i+1], disturbance, lines[i+1:])...), "OUT", want...)
			if t.Failed() {
				t.Fatalf("%v behind %q", disturbance, lines[i])
			}
		}
	}
}

// What is open at the end of the input closes, in the order of the times, then of the
// keys. The flow goes on with new windows, and no watermark has moved.
func TestTask_DrainFinish(t *testing.T) {
	crashed(t, windowFlow{windows: flow.Tumbling(time.Hour)}, []string{
		"10:05 a 1", "11:10 b 2", "11:20 a 3", "finish", "11:30 a 4", "11:40 c 5", "finish", "finish", "12:10 c 6",
	},
		"a 10:00-11:00 1", "final a 11:00-12:00 3", "final b 11:00-12:00 2", "final a 11:00-12:00 4", "final c 11:00-12:00 5")
	crashed(t, windowFlow{windows: flow.Sliding(time.Hour, 30*time.Minute)}, []string{"10:05 b 1", "10:35 a 2", "finish", "10:40 a 3", "12:00 a 4"},
		"b 09:30-10:30 1", "final a 10:00-11:00 2", "final b 10:00-11:00 1", "final a 10:30-11:30 2", "a 10:00-11:00 3", "a 10:30-11:30 3")
	crashed(t, windowFlow{windows: flow.Sessions(30*time.Minute, 0)}, []string{"10:05 b 1", "10:10 a 2", "finish", "10:12 a 3", "10:50 b 4"},
		"final b 10:05-10:35 1", "final a 10:10-10:40 2", "a 10:12-10:42 3")
	crashed(t, windowFlow{windows: flow.CountWindows(2)}, []string{"10:05 b 1", "10:10 a 2", "10:11 a 3", "10:12 a 4", "finish", "10:13 a 5", "10:50 b 6", "10:51 b 7"},
		"a 10:10-10:11 23", "final a 10:12-10:12 4", "final b 10:05-10:05 1", "b 10:50-10:51 67")
}

// Late records of windows that were kept open for them have new windows then.
func TestTask_DrainFinishLateness(t *testing.T) {
	w := flow.Tumbling(time.Hour)
	w.AllowedLateness = time.Hour
	f := windowFlow{windows: w, clock: &flow.EventTime[string]{}}.build(t)
	r := eventTimed(t, f, "10:05 a 1", "11:10 a 2", "finish", "10:59 a 3", "12:01 b 4", "10:58 a 5")
	wantData(t, r, "OUT", "final a 10:00-11:00 1", "final a 11:00-12:00 2", "a 10:00-11:00 3")
	if r.Late() != 1 {
		t.Errorf("%d late", r.Late())
	}
}

// A window that emits for each record says at the end of the input that it is.
func TestTask_DrainFinishEmitEach(t *testing.T) {
	w := flow.Tumbling(time.Hour)
	w.Emit = flow.EmitEach
	crashed(t, windowFlow{windows: w}, []string{"10:05 a 1", "10:06 a 2", "finish", "11:06 a 3"},
		"a 10:00-11:00 1", "a 10:00-11:00 12", "final a 10:00-11:00 12", "a 11:00-12:00 3")
}

// Early results are none of the end.
func TestTask_DrainFinishEarly(t *testing.T) {
	for _, w := range []flow.Windows{flow.Tumbling(time.Hour), flow.CountWindows(5), flow.GlobalWindow()} {
		f := windowFlow{windows: early(w, 10*time.Minute)}.build(t)
		r := streamTimed(t, f, "10:05 a 1", "10:12 a 2", "finish", "pause 3h")
		got := r.Data("OUT")
		if len(got) != 2 || !strings.HasPrefix(got[0], "early a") || !strings.HasPrefix(got[1], "final a") || !strings.HasSuffix(got[1], "12") {
			t.Errorf("%v: %q", w, got)
		}
	}
}

func TestTask_DrainPartial(t *testing.T) {
	crashed(t, windowFlow{windows: partial(flow.Sliding(time.Hour, 30*time.Minute))}, []string{
		"10:05 b 1", "10:20 a 2", "drain", "10:25 a 3", "drain", "drain", "finish", "12:00 b 4", "drain",
	},
		"partial a 09:30-10:30 2", "partial a 10:00-11:00 2", "partial b 09:30-10:30 1", "partial b 10:00-11:00 1",
		"partial a 09:30-10:30 23", "partial a 10:00-11:00 23", "partial b 09:30-10:30 1", "partial b 10:00-11:00 1",
		"partial a 09:30-10:30 23", "partial a 10:00-11:00 23", "partial b 09:30-10:30 1", "partial b 10:00-11:00 1",
		"final a 09:30-10:30 23", "final b 09:30-10:30 1", "final a 10:00-11:00 23", "final b 10:00-11:00 1",
		"partial b 11:30-12:30 4", "partial b 12:00-13:00 4")
	crashed(t, windowFlow{windows: partial(flow.Sessions(30*time.Minute, 0))}, []string{"10:05 b 1", "10:10 a 2", "drain", "10:20 a 3", "11:30 a 4"},
		"partial a 10:10-10:40 2", "partial b 10:05-10:35 1", "b 10:05-10:35 1", "a 10:10-10:50 23")
	crashed(t, windowFlow{windows: partial(flow.CountWindows(3))}, []string{"10:05 b 1", "10:10 a 2", "drain", "10:20 a 3", "10:30 a 4", "drain"},
		"partial a 10:10-10:10 2", "partial b 10:05-10:05 1", "a 10:10-10:30 234", "partial b 10:05-10:05 1")
}

// One whose result fails costs none of the others.
func TestTask_DrainFailures(t *testing.T) {
	for _, line := range []string{"drain", "finish"} {
		f := windowFlow{windows: partial(flow.Sliding(time.Hour, 30*time.Minute))}.build(t)
		r := streamTimed(t, f, "10:05 a unlucky", "10:10 b 1", "10:35 a 2", line)
		wantErrors(t, r, "window: unlucky", "window: unlucky")
		kind := map[string]string{"drain": "partial", "finish": "final"}[line]
		want := []string{"b 09:30-10:30 1", kind + " a 10:30-11:30 2", kind + " b 10:00-11:00 1"}
		got := r.Data("OUT")
		slices.Sort(got)
		slices.Sort(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", line, diff)
		}
	}
	f := windowFlow{windows: partial(flow.Tumbling(time.Hour)), onError: flow.Stop}.build(t)
	r := start(t, f)
	if err := r.play(record{data: "a unlucky", nanos: 1}, record{data: "b 2", nanos: 2}); err != nil {
		t.Fatal(err)
	}
	_, err := r.tasks[0].Drain(flow.Drain{Mode: flow.Suspend, Epoch: 1}, 1<<20)
	var se *flow.StepError
	if !errors.As(err, &se) || se.Step != "window" || se.Key != "a" || se.Seq != 0 {
		t.Errorf("%v", err)
	}
}

// What a step emits at the end is a part of what the steps behind it have then.
func TestTask_DrainFinishChain(t *testing.T) {
	sums := func(s flow.Stream[int64], id string, w flow.Windows) flow.Stream[int64] {
		results, late := flow.Window(s, id, w, flow.WindowAggregator[int64, int64, int64]{
			State:  decimalState,
			Add:    func(_ *flow.Meta, s *int64, n int64) error { *s += n; return nil },
			Merge:  func(into, from *int64) error { *into += *from; return nil },
			Result: func(_ *flow.Meta, _ flow.Span, s *int64) (int64, error) { return *s, nil },
		})
		flow.To(flow.Map(late, func(*flow.Meta, int64) (string, error) { return "late for " + id, nil }), textSink("LATE"+strings.ToUpper(id)))
		return results
	}
	build := func() *flow.Flow {
		b := newFlow()
		ones := flow.Map(keyed(b), func(*flow.Meta, string) (int64, error) { return 1, nil })
		hours := sums(ones, "hours", flow.Tumbling(time.Hour))
		tens := sums(hours, "tens", flow.CountWindows(10))
		days := sums(tens, "days", flow.Tumbling(24*time.Hour))
		all := sums(days, "all", flow.GlobalWindow())
		total := flow.Aggregate(all, "total", flow.Aggregator[int64, int64, string]{
			State: decimalState,
			Add:   func(_ *flow.Meta, s *int64, n int64) error { *s += n; return nil },
			Result: func(m *flow.Meta, s *int64) (string, error) {
				return fmt.Sprintf("%s%s %d", paneText(m), m.Key, *s), nil
			},
			Emit: flow.EmitCommit,
		})
		flow.To(total, textSink("OUT"))
		return build(t, b)
	}
	r := streamTimed(t, build(), "10:05 a 1", "10:10 b 2", "13:00 a 3", "finish", "13:01 a 4", "15:00 b 5", "finish")
	wantData(t, r, "OUT", "a 2", "b 1", "final a 2", "final b 1", "a 3", "b 2", "final a 3", "final b 2")
	for _, id := range []string{"HOURS", "TENS", "DAYS", "ALL"} {
		wantData(t, r, "LATE"+id)
	}
}

// The end of a drain may take several commits. Whatever is committed when it dies, each
// result is there once, and in the same order.
func TestTask_DrainInParts(t *testing.T) {
	type made struct {
		data []string
		n    uint64
	}
	for name, b := range map[string]func() *flow.Flow{
		"windows": func() *flow.Flow { return windowFlow{windows: flow.Tumbling(1000)}.build(t) },
		"partial": func() *flow.Flow { return windowFlow{windows: partial(flow.Sliding(1000, 500))}.build(t) },
		"count":   func() *flow.Flow { return windowFlow{windows: partial(flow.CountWindows(5))}.build(t) },
		"global":  func() *flow.Flow { return windowFlow{windows: partial(flow.GlobalWindow())}.build(t) },
		"aggregate": func() *flow.Flow {
			b := newFlow()
			flow.To(countsOf(keyed(b), "count", flow.EmitUpdate), textSink("OUT"))
			return build(t, b)
		},
		"hook": func() *flow.Flow { return hookFlow(t) },
	} {
		for _, mode := range []flow.DrainMode{flow.Suspend, flow.Finish} {
			t.Run(fmt.Sprintf("%s/%s", name, mode), func(t *testing.T) {
				run := func(most int, dies func(part int) bool) made {
					r := start(t, b())
					r.feed("a 1", "c 2", "b 3", "f 4", "b 5", "e 6", "d 7")
					r.seal()
					d := flow.Drain{Mode: mode, Epoch: 7, Cut: map[string]uint64{"IN": 7}}
					var all []string
					for part, more := 0, true; more; part++ {
						var err error
						if more, err = r.tasks[0].Drain(d, most); err != nil {
							t.Fatal(err)
						}
						if dies(part) {
							r.crash()
							more = true
							continue
						}
						for _, out := range r.seal() {
							all = append(all, out.Data)
						}
						if dies(part + 100) {
							r.crash()
							more = true
						}
					}
					// Again, by one who does not know that it was done.
					r.crash()
					if more, err := r.tasks[0].Drain(d, most); more || err != nil || r.tasks[0].Dirty() {
						t.Fatalf("there is more: %v, %v", more, err)
					}
					return made{all, r.tasks[0].Drained(7)}
				}
				calm := run(1<<20, func(int) bool { return false })
				if uint64(len(calm.data)) != calm.n {
					t.Fatalf("%d results %q, the task says %d", len(calm.data), calm.data, calm.n)
				}
				if (calm.n == 0) != (mode == flow.Suspend && (name == "windows" || name == "aggregate")) {
					t.Fatalf("results %q", calm.data)
				}
				for i := range 8 {
					for _, dies := range []func(int) bool{
						func(part int) bool { return part == i },
						func(part int) bool { return part == i+100 },
						func(part int) bool { return part == i || part == i+102 },
					} {
						if diff := cmp.Diff(calm, run(1, dies), cmp.AllowUnexported(made{})); diff != "" {
							t.Fatalf("part %d (-calm +disturbed):\n%s", i, diff)
						}
					}
				}
			})
		}
	}
}

// countsOf counts the records of each key.
func countsOf(s flow.Stream[string], id string, emit flow.EmitMode) flow.Stream[string] {
	return flow.Aggregate(s, id, flow.Aggregator[string, int64, string]{
		State: decimalState,
		Add:   func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
		Result: func(m *flow.Meta, n *int64) (string, error) {
			if *n == 13 {
				return "", errors.New("unlucky")
			}
			return fmt.Sprintf("%s%s %d at %s", paneText(m), m.Key, *n, clockText(m.EventTime())), nil
		},
		Emit: emit,
	})
}

// An aggregate says at the end of the input what it has of each key, and goes on with
// that.
func TestTask_DrainFinishAggregate(t *testing.T) {
	for _, mode := range []flow.EmitMode{flow.EmitUpdate, flow.EmitCommit} {
		b := newFlow()
		flow.To(countsOf(keyed(b), "count", mode), textSink("OUT"))
		r := streamTimed(t, build(t, b), "10:05 b 1", "10:10 a 2", "finish", "10:15 b 3", "finish", "crash", "drain")
		wantData(t, r, "OUT",
			"b 1 at 10:05", "a 1 at 10:10", "final a 1 at 00:00", "final b 1 at 00:00",
			"b 2 at 10:15", "final a 1 at 00:00", "final b 2 at 00:00")
	}
}

// The results of an aggregate are its own, also where it aggregates early and final ones.
func TestTask_DrainPanesOfAnAggregate(t *testing.T) {
	for _, tc := range []struct {
		mode flow.EmitMode
		want []string
	}{
		{flow.EmitUpdate, []string{"a 1 at 10:59:59", "a 2 at 10:59:59", "final a 2 at 10:12", "a 3 at 10:59:59", "final a 3 at 10:13"}},
		{flow.EmitCommit, []string{"a 1 at 10:59:59", "a 2 at 10:59:59", "final a 2 at 10:12", "a 3 at 10:59:59", "final a 3 at 10:13"}},
	} {
		b := newFlow()
		results, _ := flow.Window(keyed(b), "window", early(flow.Tumbling(time.Hour), 10*time.Minute), listing)
		flow.To(countsOf(results, "count", tc.mode), textSink("OUT"))
		r := streamTimed(t, build(t, b), "10:05 a 1", "10:12 a 2", "finish", "10:13 a 3", "finish")
		wantData(t, r, "OUT", tc.want...)
	}
}

// A later stage ends when the one before has.
func TestTask_DrainFinishStages(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 4})
	results, _ := flow.Window(keyed(b), "window", flow.Tumbling(time.Hour), listing)
	crossed := flow.Rekey(results, func(*flow.Meta, string) (string, error) { return "all", nil }, flow.TextCodec())
	seen := flow.Map(crossed, func(m *flow.Meta, v string) (string, error) {
		if m.Pane() != flow.PaneNone {
			t.Errorf("%s is %v", v, m.Pane())
		}
		return v, nil
	})
	flow.To(countsOf(seen, "count", flow.EmitCommit), textSink("OUT"))
	r := streamTimed(t, build(t, b), "10:05 a 1", "10:10 b 2", "11:00 c 3", "commit", "finish", "11:01 c 4", "finish")
	wantData(t, r, "OUT", "all 2 at 10:59:59", "all 3 at 11:59:59", "final all 3 at 00:00", "all 4 at 11:59:59", "final all 4 at 00:00")
}

func TestWindow_Global(t *testing.T) {
	crashed(t, windowFlow{windows: flow.GlobalWindow()}, []string{"10:05 b 1", "10:10 a 2", "drain", "22:00 a 3", "pause 99h", "finish", "22:00 a 4", "finish"},
		"final a 23", "final b 1", "final a 4")
	undisturbed(t, windowFlow{windows: early(flow.GlobalWindow(), time.Hour)}, streamTimed, []string{"10:05 b 1", "10:10 a 2", "22:00 a 3", "pause 99h"},
		"early a 2", "early b 1", "early a 23")
	w := flow.GlobalWindow()
	w.Emit = flow.EmitEach
	undisturbed(t, windowFlow{windows: w}, streamTimed, []string{"10:05 b 1", "10:10 a 2", "22:00 a bad", "23:00 a 3"}, "b 1", "a 2", "a 23")
	crashed(t, windowFlow{windows: partial(flow.GlobalWindow())}, []string{"10:05 b 1", "drain", "22:00 a 3", "drain", "finish", "drain"},
		"partial b 1", "partial a 3", "partial b 1", "final a 3", "final b 1")
}

// The times of what has none is the watermark, or the last record.
func TestWindow_GlobalTimes(t *testing.T) {
	b := newFlow()
	results, _ := flow.Window(keyed(b), "window", early(partial(flow.GlobalWindow()), time.Hour), listing)
	flow.To(flow.Map(results, func(m *flow.Meta, _ string) (string, error) {
		return fmt.Sprintf("%v at %s", m.Pane(), clockText(m.EventTime())), nil
	}), textSink("OUT"))
	r := streamTimed(t, build(t, b), "10:05 a 1", "pause 3h", "13:10 a 2", "drain", "finish")
	wantData(t, r, "OUT", "early at 11:00", "partial at 13:10", "final at 13:10")
}

// A request to stop that comes of the end of a drain would ask for what is done.
func TestTask_DrainStopWhen(t *testing.T) {
	b := newFlow()
	results, _ := flow.Window(keyed(b), "window", partial(flow.Tumbling(time.Hour)), listing)
	flow.StopWhen(results, func(*flow.Meta, string) (bool, error) { return true, nil })
	r := start(t, build(t, b))
	r.feed("a 1")
	for _, mode := range []flow.DrainMode{flow.Suspend, flow.Finish} {
		if _, err := r.tasks[0].Drain(flow.Drain{Mode: mode, Epoch: uint64(len(mode))}, 1<<20); err != nil {
			t.Fatal(err)
		}
		diffOutputs(t, r.seal())
	}
}

func TestTask_OpenWindows(t *testing.T) {
	r := start(t, windowFlow{windows: flow.Sliding(time.Hour, 20*time.Minute)}.build(t))
	r.feed("a 1", "a 2", "b 3")
	if n := r.tasks[0].OpenWindows(); n != 6 {
		t.Errorf("%d windows are open", n)
	}
}

// The marks of a drain are no keys of the user.
func TestTask_DrainKeys(t *testing.T) {
	b := newFlow()
	flow.To(countsOf(keyed(b), "count", flow.EmitUpdate), textSink("OUT"))
	r := flowtest.New(t, build(t, b))
	r.Push(flowtest.Record{Data: "a 1"}, flowtest.Record{Data: "b 1"})
	r.Finish()
	if n := r.Keys(); n != 2 {
		t.Errorf("%d keys", n)
	}
}
