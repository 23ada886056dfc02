package flow_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// clockText prints a time on the days of the tests.
func clockText(t time.Time) string {
	t = t.UTC()
	day := ""
	if d := int(t.Sub(flowtest.Start).Hours() / 24); d > 0 {
		day = fmt.Sprintf("%d ", d+1)
	}
	return day + strings.TrimSuffix(t.Format("15:04:05"), ":00")
}

// listing is an aggregator that lists the values of a window, so that a result
// shows which records it has, in which order. "bad" is an error, "panic" panics
// after the value.
var listing = flow.WindowAggregator[string, []string, string]{
	State: flow.JSONState[[]string](1, nil),
	Add: func(_ *flow.Meta, s *[]string, v string) error {
		if v == "bad" {
			return errors.New("is bad")
		}
		*s = append(*s, v)
		if v == "panic" {
			panic("as told")
		}
		return nil
	},
	Merge: func(into, from *[]string) error {
		*into = append(*into, *from...)
		if slices.Contains(*into, "apart") {
			*into = (*into)[:len(*into)-len(*from)]
			return errors.New("stay apart")
		}
		return nil
	},
	Result: func(m *flow.Meta, w flow.Span, s *[]string) (string, error) {
		if slices.Contains(*s, "unlucky") {
			return "", errors.New("unlucky")
		}
		return fmt.Sprintf("%s%s%s", paneText(m), spanText(m.Key, w), strings.Join(*s, "")), nil
	},
}

// paneText says what kind of result it is that a function makes, if not an ordinary one.
func paneText(m *flow.Meta) string {
	if m.Pane() == flow.PaneNone {
		return ""
	}
	return m.Pane().String() + " "
}

// spanText names a window of a key.
func spanText(key string, w flow.Span) string {
	if w == (flow.Span{}) {
		return key + " "
	}
	return fmt.Sprintf("%s %s-%s ", key, clockText(w.Start), clockText(w.End))
}

// windowFlow lists the values of records such as "a x", by key and window. With a
// clock, a record has its time in front, such as "10:05 a x".
type windowFlow struct {
	windows    flow.Windows
	clock      *flow.EventTime[string]
	partitions int
	onError    flow.OnError
	late       bool
	sources    []string
}

func (w windowFlow) build(tb fataler) *flow.Flow {
	tb.Helper()
	if w.partitions == 0 {
		w.partitions = 1
	}
	if w.sources == nil {
		w.sources = []string{"IN"}
	}
	b := flow.New("test", flow.Options{Partitions: w.partitions, OnError: w.onError})
	var all []flow.Stream[string]
	for _, name := range w.sources {
		src := flow.Source{Stream: name}
		if w.clock != nil {
			clock := *w.clock
			clock.Of = func(_ *flow.Meta, v string) (time.Time, error) { return clockTime(v) }
			src.Time = clock
		}
		s := flow.From(b, src, flow.DecodeText())
		if w.clock != nil {
			s = flow.Map(s, func(_ *flow.Meta, v string) (string, error) {
				_, rest, _ := strings.Cut(v, " ")
				return rest, nil
			})
		}
		all = append(all, flow.KeyBy(s, func(_ *flow.Meta, v string) (string, error) {
			key, _, _ := strings.Cut(v, " ")
			return key, nil
		}))
	}
	values := flow.Map(flow.Merge(all[0], all[1:]...), func(_ *flow.Meta, v string) (string, error) {
		_, v, _ = strings.Cut(v, " ")
		return v, nil
	})
	results, late := flow.Window(values, "window", w.windows, listing)
	flow.To(results, textSink("OUT"))
	if w.late {
		flow.To(late, textSink("LATE"))
	}
	return build(tb, b)
}

func textSink(stream string) flow.Sink[string] {
	prefix := strings.ToLower(stream) + "."
	return flow.Sink[string]{Stream: stream, Subjects: []string{prefix + "*"}, Subject: flow.KeySubject[string](prefix), Encode: flow.EncodeText()}
}

// clockTime reads a time such as 10:05 or 10:05:30 in front of a text; "2T10:05" is
// that of the second day.
func clockTime(v string) (time.Time, error) {
	word, _, _ := strings.Cut(v, " ")
	day := 1
	if d, rest, ok := strings.Cut(word, "T"); ok {
		if _, err := fmt.Sscan(d, &day); err != nil {
			return time.Time{}, err
		}
		word = rest
	}
	layout := "15:04"
	if strings.Count(word, ":") == 2 {
		layout = "15:04:05"
	}
	t, err := time.Parse(layout, word)
	if err != nil {
		return time.Time{}, err
	}
	return flowtest.Start.AddDate(0, 0, day-1).Add(time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute + time.Duration(t.Second())*time.Second), nil
}

// eventTimed plays lines such as "10:05 a x" (a record; the time is also that of the
// stream), "pause 1h", "crash", "drain", "finish" and "commit".
func eventTimed(tb flowtest.TB, f *flow.Flow, lines ...string) *flowtest.Runner {
	tb.Helper()
	r := flowtest.New(tb, f)
	for _, line := range lines {
		playLine(tb, r, line, true)
	}
	return r
}

func playLine(tb flowtest.TB, r *flowtest.Runner, line string, timed bool) {
	tb.Helper()
	word, rest, _ := strings.Cut(line, " ")
	stream := ""
	if name, ok := strings.CutSuffix(word, ":"); ok {
		stream = name
		line = rest
		word, rest, _ = strings.Cut(rest, " ")
	}
	switch word {
	case "pause":
		d, err := time.ParseDuration(rest)
		if err != nil {
			tb.Fatalf("%v", err)
		}
		r.Pause(d)
	case "crash":
		r.Crash()
	case "drain":
		r.Drain()
	case "finish":
		r.Finish()
	case "commit":
		r.Commit()
	default:
		rec := flowtest.Record{Stream: stream, Data: line}
		if at, err := clockTime(line); err == nil && timed {
			rec.Time = at
		} else if timed {
			tb.Fatalf("%v", err)
		}
		r.Push(rec)
	}
}

// streamTimed takes the time away from the records of a script, for a flow that goes
// by the timestamps of the stream.
func streamTimed(tb flowtest.TB, f *flow.Flow, lines ...string) *flowtest.Runner {
	tb.Helper()
	r := flowtest.New(tb, f)
	for _, line := range lines {
		at, err := clockTime(line)
		if err != nil {
			playLine(tb, r, line, false)
			continue
		}
		_, data, _ := strings.Cut(line, " ")
		r.Push(flowtest.Record{Time: at, Data: data})
	}
	return r
}

func wantData(t *testing.T, r *flowtest.Runner, sink string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, r.Data(sink)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", sink, diff)
	}
}

func wantErrors(t *testing.T, r *flowtest.Runner, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, r.Errors()); diff != "" {
		t.Errorf("dead letters (-want +got):\n%s", diff)
	}
}

// undisturbed plays the lines as they are, and with a stop or a crash behind each of
// them, and with several partitions: the results of each key are the same.
func undisturbed(t *testing.T, w windowFlow, play func(flowtest.TB, *flow.Flow, ...string) *flowtest.Runner, lines []string, want ...string) {
	t.Helper()
	calm := play(t, w.build(t), lines...)
	wantData(t, calm, "OUT", want...)
	failed := calm.Errors()
	for i := range lines {
		for _, disturbance := range [][]string{{"crash"}, {"drain"}, {"commit", "crash"}, {"drain", "drain", "crash"}} {
			r := play(t, w.build(t), slices.Concat(lines[:i+1], disturbance, lines[i+1:])...)
			wantData(t, r, "OUT", want...)
			wantErrors(t, r, failed...)
			if t.Failed() {
				t.Fatalf("%v behind %q", disturbance, lines[i])
			}
		}
	}
	w.partitions = 5
	spread := play(t, w.build(t), lines...)
	got := spread.Data("OUT")
	wanted := slices.Clone(want)
	slices.SortStableFunc(got, byKey)
	slices.SortStableFunc(wanted, byKey)
	if diff := cmp.Diff(wanted, got); diff != "" {
		t.Errorf("in 5 partitions (-want +got):\n%s", diff)
	}
}

func byKey(a, b string) int {
	return strings.Compare(keyOf(a), keyOf(b))
}

// keyOf returns the key of a result.
func keyOf(result string) string {
	for _, pane := range []flow.Pane{flow.PaneEarly, flow.PanePartial, flow.PaneFinal} {
		result = strings.TrimPrefix(result, pane.String()+" ")
	}
	key, _, _ := strings.Cut(result, " ")
	return key
}

func TestWindow_Tumbling(t *testing.T) {
	undisturbed(t, windowFlow{windows: flow.Tumbling(time.Hour)}, streamTimed, []string{
		"10:05 a 1", "10:10 b 2", "10:59:59 a 3",
		"11:00 a 4", // the first window is closed before it
		"11:30 b 5", "11:40 a bad",
		"13:10 c 6",                           // nothing between
		"pause 40m", "pause 10m", "13:30 b 7", // the clock of the server closes the last window
	},
		"a 10:00-11:00 13", "b 10:00-11:00 2", "a 11:00-12:00 4", "b 11:00-12:00 5", "c 13:00-14:00 6")
}

func TestWindow_TumblingOffset(t *testing.T) {
	w := flow.Tumbling(time.Hour)
	w.Offset = -20 * time.Minute
	undisturbed(t, windowFlow{windows: w}, streamTimed, []string{"10:39 a 1", "10:40 a 2", "11:39:59 a 3", "pause 1h"},
		"a 09:40-10:40 1", "a 10:40-11:40 23")
}

func TestWindow_Sliding(t *testing.T) {
	undisturbed(t, windowFlow{windows: flow.Sliding(time.Hour, 20*time.Minute)}, streamTimed, []string{
		"10:05 a 1", "10:25 a 2", "10:59 b 3", "11:05 a 4", "pause 30m", "11:40 a 5", "pause 3h",
	},
		"a 09:20-10:20 1", "a 09:40-10:40 12", "a 10:00-11:00 12", "b 10:00-11:00 3",
		"a 10:20-11:20 24", "b 10:20-11:20 3", "a 10:40-11:40 4", "b 10:40-11:40 3",
		"a 11:00-12:00 45", "a 11:20-12:20 5", "a 11:40-12:40 5")
}

// Size need not be a multiple of every.
func TestWindow_SlidingUneven(t *testing.T) {
	undisturbed(t, windowFlow{windows: flow.Sliding(50*time.Minute, 20*time.Minute)}, streamTimed, []string{
		"10:05 a 1", "10:15 a 2", "10:31 a 3", "pause 3h",
	},
		"a 09:20-10:10 1", "a 09:40-10:30 12", "a 10:00-10:50 123", "a 10:20-11:10 3")
}

func TestWindow_EventTime(t *testing.T) {
	w := windowFlow{windows: flow.Tumbling(time.Hour), clock: &flow.EventTime[string]{Lateness: 10 * time.Minute}}
	undisturbed(t, w, eventTimed, []string{
		"10:05 a 1", "11:05 a 2", "10:40 a 3", // late by less than the lateness of the source
		"10:55 b 4",
		"11:10 b 5",             // the watermark is 11:00
		"10:59 a 6",             // late
		"11:20 a 7", "pause 5h", // no record: the watermark waits
		"14:00 c 8",
	},
		"a 10:00-11:00 13", "b 10:00-11:00 4", "a 11:00-12:00 27", "b 11:00-12:00 5")
	r := eventTimed(t, w.build(t), "10:05 a 1", "11:10 b 5", "10:59 a 6", "10:01 b 7")
	wantErrors(t, r,
		"window: late: its time is 2026-01-01T10:59:00Z, its last window ended at 2026-01-01T11:00:00Z and is closed, the watermark is 2026-01-01T11:00:00Z",
		"window: late: its time is 2026-01-01T10:01:00Z, its last window ended at 2026-01-01T11:00:00Z and is closed, the watermark is 2026-01-01T11:00:00Z")
	if r.Late() != 2 {
		t.Errorf("%d late", r.Late())
	}
}

// A record moves the watermark for those behind it, not for itself.
func TestWindow_RecordBeforeItsWatermark(t *testing.T) {
	w := windowFlow{windows: flow.Tumbling(time.Hour), clock: &flow.EventTime[string]{}}
	r := flowtest.New(t, w.build(t))
	r.Push(flowtest.Record{Data: "10:05 a 1", Time: flowtest.Start.Add(20 * time.Hour)}, flowtest.Record{Data: "12:00 b 2"}, flowtest.Record{Data: "10:06 a 3"})
	wantData(t, r, "OUT", "a 10:00-11:00 1")
	if r.Late() != 1 {
		t.Errorf("%d late", r.Late())
	}
}

func TestWindow_LateStream(t *testing.T) {
	w := windowFlow{windows: flow.Tumbling(time.Hour), clock: &flow.EventTime[string]{}, late: true, onError: flow.Stop}
	r := eventTimed(t, w.build(t), "10:05 a 1", "11:10 b 5", "10:59 a 6", "commit", "crash", "10:01 b 7", "drain", "12:00 a 8")
	wantData(t, r, "LATE", "6", "7")
	wantData(t, r, "OUT", "a 10:00-11:00 1", "b 11:00-12:00 5")
	if r.Late() != 2 {
		t.Errorf("%d late", r.Late())
	}
}

func TestWindow_AllowedLateness(t *testing.T) {
	w := flow.Tumbling(time.Hour)
	w.AllowedLateness = 30 * time.Minute
	undisturbed(t, windowFlow{windows: w, clock: &flow.EventTime[string]{}}, eventTimed, []string{
		"10:05 a 1", "11:29 b 2", "10:59 a 3", "11:30 b 4", "10:58 a 5", "12:40 a 6",
	},
		"a 10:00-11:00 13", "b 11:00-12:00 24")
}

func TestWindow_EmitEach(t *testing.T) {
	w := flow.Sliding(time.Hour, 30*time.Minute)
	w.Emit = flow.EmitEach
	undisturbed(t, windowFlow{windows: w}, streamTimed, []string{"10:05 a 1", "10:35 a 2", "pause 5h", "15:50 a 3"},
		"a 09:30-10:30 1", "a 10:00-11:00 1", "a 10:00-11:00 12", "a 10:30-11:30 2", "a 15:00-16:00 3", "a 15:30-16:30 3")
}

func TestWindow_Count(t *testing.T) {
	undisturbed(t, windowFlow{windows: flow.CountWindows(2)}, streamTimed, []string{
		"10:05 a 1", "10:06 b 2", "pause 48h", "3T11:00 a 3", "3T12:00 a 4", "3T12:01 a bad", "3T12:02 a 5",
	},
		"a 10:05-3 11:00 13", "a 3 12:00-3 12:02 45")
}

// Windows of whole days follow the clocks of the place: a day in March has 23 hours
// and one in October 25.
func TestWindow_Days(t *testing.T) {
	paris, err := time.LoadLocation("Europe/Paris")
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name    string
		windows flow.Windows
		offset  time.Duration
		at      string
		want    []string
	}{
		{"spring", flow.TumblingDays(1, paris), 0, "2026-03-29T12:00:00Z", []string{"2026-03-28T23:00:00Z 23h0m0s"}},
		{"autumn", flow.TumblingDays(1, paris), 0, "2026-10-25T22:59:59Z", []string{"2026-10-24T22:00:00Z 25h0m0s"}},
		{"the day after", flow.TumblingDays(1, paris), 0, "2026-10-25T23:00:00Z", []string{"2026-10-25T23:00:00Z 24h0m0s"}},
		{"from six o'clock", flow.TumblingDays(1, paris), 6 * time.Hour, "2026-03-29T03:59:59Z", []string{"2026-03-28T05:00:00Z 23h0m0s"}},
		{"the same day", flow.TumblingDays(1, paris), 6 * time.Hour, "2026-03-29T04:00:00Z", []string{"2026-03-29T04:00:00Z 24h0m0s"}},
		{"weeks from Monday", flow.TumblingDays(7, paris), 4 * 24 * time.Hour, "2026-03-29T12:00:00Z", []string{"2026-03-22T23:00:00Z 167h0m0s"}},
		{"sliding", flow.SlidingDays(2, 1, paris), 0, "2026-03-29T12:00:00Z", []string{"2026-03-27T23:00:00Z 47h0m0s", "2026-03-28T23:00:00Z 47h0m0s"}},
		{"UTC", flow.TumblingDays(1, nil), 0, "2026-03-29T12:00:00Z", []string{"2026-03-29T00:00:00Z 24h0m0s"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.windows.Offset = tc.offset
			tc.windows.Emit = flow.EmitEach
			b := newFlow()
			results, _ := flow.Window(keyed(b), "window", tc.windows, flow.WindowAggregator[string, int64, string]{
				State: decimalState,
				Add:   func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
				Result: func(_ *flow.Meta, w flow.Span, _ *int64) (string, error) {
					return fmt.Sprintf("%s %v", w.Start.Format(time.RFC3339), w.End.Sub(w.Start)), nil
				},
			})
			flow.To(results, textSink("OUT"))
			at, err := time.Parse(time.RFC3339, tc.at)
			if err != nil {
				t.Fatal(err)
			}
			r := flowtest.New(t, build(t, b))
			r.Push(flowtest.Record{Time: at, Data: "a x"})
			wantData(t, r, "OUT", tc.want...)
		})
	}
}

// Every time is in just the windows that hold it, whatever was asked before.
func TestWindow_Assigned(t *testing.T) {
	paris, err := time.LoadLocation("Europe/Paris")
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []flow.Windows{
		flow.Tumbling(time.Hour), flow.Sliding(50*time.Minute, 20*time.Minute), flow.Sliding(time.Hour, 7*time.Minute),
		flow.TumblingDays(1, paris), flow.SlidingDays(7, 2, paris), flow.SlidingDays(3, 3, nil),
	} {
		w.Emit = flow.EmitEach
		b := newFlow()
		type each struct{ at, start, end time.Time }
		var got []each
		results, _ := flow.Window(keyed(b), "window", w, flow.WindowAggregator[string, int64, string]{
			State: decimalState,
			Add:   func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
			Result: func(m *flow.Meta, w flow.Span, _ *int64) (string, error) {
				got = append(got, each{m.Time(), w.Start, w.End})
				return "", nil
			},
		})
		flow.To(results, textSink("OUT"))
		r := flowtest.New(t, build(t, b))
		rng := rand.New(rand.NewPCG(1, 2))
		at := time.Date(2026, 3, 20, 0, 0, 0, 0, paris)
		var step, overlap time.Duration
		if w.Days == 0 {
			step, overlap = w.Every, (w.Size+w.Every-1)/w.Every
		} else {
			step, overlap = time.Duration(w.EveryDays)*24*time.Hour, time.Duration(w.Days+w.EveryDays-1)/time.Duration(w.EveryDays)
		}
		starts := map[time.Time]time.Time{}
		for range 2000 {
			at = at.Add(time.Duration(rng.Int64N(int64(step) / 4)))
			got = nil
			r.Push(flowtest.Record{Time: at, Data: "a x"})
			n := time.Duration(len(got))
			if n != overlap && n != overlap-1 {
				t.Fatalf("%v: %v is in %d windows: %v", w, at, n, got)
			}
			for i, g := range got {
				if g.at.Before(g.start) || !g.at.Before(g.end) {
					t.Fatalf("%v: %v is in the window %v", w, at, g)
				}
				if i > 0 && !got[i-1].start.Before(g.start) {
					t.Fatalf("%v: windows are not in order: %v", w, got)
				}
				if end, there := starts[g.start]; there && !end.Equal(g.end) {
					t.Fatalf("%v: the window from %v ends at %v and at %v", w, g.start, end, g.end)
				}
				starts[g.start] = g.end
			}
		}
	}
}

func TestWindow_Failures(t *testing.T) {
	w := windowFlow{windows: flow.Tumbling(time.Hour)}
	r := streamTimed(t, w.build(t), "10:05 a bad", "10:06 a unlucky", "10:07 b 1", "10:08 b panic", "pause 1h", "drain", "11:10 a 2", "pause 1h")
	wantData(t, r, "OUT", "b 10:00-11:00 1panic", "a 11:00-12:00 2")
	var got []string
	for _, d := range r.DeadLetters() {
		text := d.Headers[flow.HeaderDeadError]
		if i := strings.Index(text, " (at "); i > 0 {
			text = text[:i]
		}
		got = append(got, fmt.Sprintf("%s|%s|%s|%s", text, d.Headers[flow.HeaderDeadSeq], d.Headers[flow.HeaderDeadKey], d.Data))
	}
	want := []string{"is bad|1||a bad", "step panicked: as told|4||b panic", "unlucky||a|"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("dead letters (-want +got):\n%s", diff)
	}
	if r.Keys() != 0 {
		t.Errorf("%d keys have state", r.Keys())
	}
}

// A result that fails when a window closes stops a flow that stops on errors.
func TestWindow_Stop(t *testing.T) {
	w := windowFlow{windows: flow.Tumbling(time.Hour), onError: flow.Stop}
	r := streamTimed(t, w.build(t), "10:06 a unlucky")
	r.Commit()
	err := r.Try(flowtest.Record{Time: flowtest.Start.Add(12 * time.Hour), Data: "b 1"})
	var se *flow.StepError
	if !errors.As(err, &se) || se.Key != "a" || se.Error() != `step "window", key "a", of no single record: unlucky` {
		t.Errorf("error %v", err)
	}
}

// Windows of windows: the results of the inner ones are in the outer one that they
// belong to, also when both are due at once, and with an allowed lateness.
func TestWindow_Chain(t *testing.T) {
	for _, lateness := range []time.Duration{0, 7 * time.Minute} {
		b := newFlow()
		inner := flow.Tumbling(10 * time.Minute)
		inner.AllowedLateness = lateness
		first, _ := flow.Window(keyed(b), "inner", inner, flow.WindowAggregator[string, int64, int64]{
			State:  decimalState,
			Add:    func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
			Result: func(_ *flow.Meta, _ flow.Span, n *int64) (int64, error) { return *n, nil },
		})
		outer, late := flow.Window(first, "outer", flow.Tumbling(time.Hour), flow.WindowAggregator[int64, []int64, string]{
			State: flow.JSONState[[]int64](1, nil),
			Add:   func(_ *flow.Meta, s *[]int64, n int64) error { *s = append(*s, n); return nil },
			Result: func(m *flow.Meta, w flow.Span, s *[]int64) (string, error) {
				return fmt.Sprintf("%s %s-%s %v", m.Key, clockText(w.Start), clockText(w.End), *s), nil
			},
		})
		flow.To(outer, textSink("OUT"))
		flow.To(flow.Map(late, func(_ *flow.Meta, n int64) (string, error) { return fmt.Sprint(n), nil }), textSink("LATE"))
		f := build(t, b)
		r := streamTimed(t, f, "10:01 a x", "10:02 a x", "10:55 a x", "15:00 b x", "15:59 b x", "16:00 b x", "crash", "drain", "pause 2h")
		wantData(t, r, "OUT", "a 10:00-11:00 [2 1]", "b 15:00-16:00 [1 1]", "b 16:00-17:00 [1]")
		wantData(t, r, "LATE")
	}
}

// A task waits for the slower of its sources.
func TestWindow_TwoSources(t *testing.T) {
	w := windowFlow{windows: flow.Tumbling(time.Hour), clock: &flow.EventTime[string]{}, sources: []string{"A", "B"}}
	r := eventTimed(t, w.build(t), "A: 10:05 a 1", "A: 12:00 a 2")
	wantData(t, r, "OUT")
	for _, line := range []string{"B: 10:30 a 3", "drain", "B: 11:00 b 4"} {
		playLine(t, r, line, true)
	}
	wantData(t, r, "OUT", "a 10:00-11:00 13")
	playLine(t, r, "B: 13:00 b 5", true)
	wantData(t, r, "OUT", "a 10:00-11:00 13", "b 11:00-12:00 4")
}

// Without records a watermark of event time waits, or goes on after Idle.
func TestWindow_Idle(t *testing.T) {
	w := windowFlow{windows: flow.Tumbling(time.Hour), clock: &flow.EventTime[string]{Lateness: time.Minute, Idle: 30 * time.Minute}, sources: []string{"A", "B"}}
	r := eventTimed(t, w.build(t), "A: 10:45 a 1", "pause 14m")
	wantData(t, r, "OUT")
	playLine(t, r, "pause 17m", true) // 11:16, less a minute; B has never had a record
	wantData(t, r, "OUT", "a 10:00-11:00 1")
	// What comes then with an earlier time is late, also after a restart.
	for _, line := range []string{"drain", "A: 10:50 a 2", "B: 11:01 a 3"} {
		playLine(t, r, line, true)
	}
	if r.Commit(); r.Late() != 1 {
		t.Errorf("%d late", r.Late())
	}
	wantData(t, r, "OUT", "a 10:00-11:00 1")
}

func TestEventTime_Refused(t *testing.T) {
	w := windowFlow{windows: flow.Tumbling(time.Hour), clock: &flow.EventTime[string]{MaxAhead: time.Hour}}
	r := flowtest.New(t, w.build(t))
	at := flowtest.Start.Add(10 * time.Hour)
	r.Push(
		flowtest.Record{Time: at, Data: "10:05 a 1"},
		flowtest.Record{Time: at, Data: "noon a 2"},
		flowtest.Record{Time: at, Data: "11:00:01 a 3"}, // too far ahead: the watermark does not move
		flowtest.Record{Time: at, Data: "10:10 a 4"},
		flowtest.Record{Time: at, Data: "11:00 a 5"},
	)
	wantErrors(t, r,
		`source-1: time of the record: parsing time "noon" as "15:04": cannot parse "noon" as "15"`,
		"window: ahead: its time is 2026-01-01T11:00:01Z, 1h0m1s ahead of the timestamp that the stream gave the record, more than its source allows (max_ahead)")
	wantData(t, r, "OUT", "a 10:00-11:00 14")
}

func TestWindow_Mistakes(t *testing.T) {
	paris := time.FixedZone("x", 3600)
	for _, tc := range []struct {
		w    flow.Windows
		want string
	}{
		{flow.Windows{}, "windows have one of Size, Days, Gap, Count and Global"},
		{flow.Windows{Size: 1, Count: 2}, "windows have one of Size, Days, Gap, Count and Global"},
		{flow.Tumbling(-1), "sizes, gaps and lateness are positive and at most 7300 days"},
		{flow.Tumbling(1 << 62), "sizes, gaps and lateness are positive and at most 7300 days"},
		{flow.Sliding(time.Hour, 2*time.Hour), "windows begin every so often, at most their size: otherwise there are records in none of them"},
		{flow.Sliding(time.Hour, 0), "windows begin every so often, at most their size: otherwise there are records in none of them"},
		{flow.Sliding(time.Hour, time.Millisecond), "each record would be in more than 10000 windows"},
		{flow.Windows{Size: 1, Every: 1, Location: paris}, "a time zone belongs to windows of whole days"},
		{flow.Windows{Gap: 1, Offset: 1}, "an offset belongs to tumbling and sliding windows"},
		{flow.Sessions(time.Hour, time.Minute), "the longest session is at least the gap of the sessions"},
		{flow.CountWindows(-1), "a negative number of records"},
		{flow.Windows{Count: 1, AllowedLateness: 1}, "windows of a number of records, or of all, know no lateness"},
		{flow.Windows{Global: true, AllowedLateness: 1}, "windows of a number of records, or of all, know no lateness"},
		{flow.Windows{Global: true, Gap: 1}, "windows have one of Size, Days, Gap, Count and Global"},
		{flow.Windows{Global: true, Early: -1}, "early results come every so often, by a positive time of at most 7300 days"},
		{flow.Windows{Global: true, Early: 1, Emit: flow.EmitEach}, "a window that emits a result for each record has no early ones"},
		{flow.Windows{Global: true, OnDrain: 2}, "there is no WindowOnDrain 2"},
		{flow.Windows{Count: 1, Emit: 7}, "there is no WindowEmit 7"},
	} {
		got := ""
		if err := tc.w.Validate(); err != nil {
			got = err.Error()
		}
		if got != tc.want {
			t.Errorf("%v: %s, want %s", tc.w, got, tc.want)
		}
	}
	b := newFlow()
	src := flow.From(b, flow.Source{Stream: "IN", PartitionBy: []int{1}, Time: flow.EventTime[string]{Lateness: -1}}, flow.DecodeText())
	flow.From(b, flow.Source{Stream: "OTHER", Time: flow.EventTime[int]{}}, flow.DecodeText())
	flow.From(b, flow.Source{Stream: "THIRD", PartitionBy: []int{1}, Time: flow.EventTime[string]{Of: func(*flow.Meta, string) (time.Time, error) { return time.Time{}, nil }}}, flow.DecodeText())
	results, _ := flow.Window(src, "w", flow.Sessions(time.Hour, 0), flow.WindowAggregator[string, int64, string]{})
	flow.To(results, textSink("OUT"))
	_, err := b.Build()
	for _, want := range []string{
		`source "IN": its time has no function Of`, `source "OTHER": its time is an flow.EventTime[int], its decoder makes string`,
		`source "THIRD": with PartitionBy a worker does not see the times of all records`,
		`step "w": window keeps state for each key`, `step "w": there is no Add`, `step "w": there is no Merge, which sessions need`,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("there is no %q in %v", want, err)
		}
	}
}
