package flow_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// joinFlow joins the streams L and R, whose records are such as "10:05 a x": a time, a
// key and a value. Without a clock the time is left out of them. The result of a pair
// is "a x+y", that of a record alone "a x+-" or "a -+y". "bad" fails with any other,
// "boom" panics, "no" meets none.
type joinFlow struct {
	cfg        flow.JoinConfig[string, string, string]
	clock      *flow.EventTime[string]
	partitions int
	onError    flow.OnError
	late       bool
	// rekeyed lets both streams cross to another stage before.
	rekeyed bool
}

// joinValues makes the result of a pair.
func joinValues(m *flow.Meta, l, r *string) (string, bool, error) {
	text := func(v *string) string {
		if v == nil {
			return "-"
		}
		return *v
	}
	both := text(l) + "+" + text(r)
	switch {
	case strings.Contains(both, "bad"):
		return "", false, errors.New("is bad: " + both)
	case strings.Contains(both, "boom"):
		panic("as told")
	case strings.Contains(both, "no") && !strings.Contains(both, "-"):
		return "", false, nil
	}
	return m.Key + " " + both, true, nil
}

// timedKeyed reads a stream of records such as "10:05 a x", with their time or without.
func timedKeyed(b *flow.Builder, stream string, clock *flow.EventTime[string]) flow.Stream[string] {
	src := flow.Source{Stream: stream}
	if clock != nil {
		c := *clock
		c.Of = func(_ *flow.Meta, v string) (time.Time, error) { return clockTime(v) }
		src.Time = c
	}
	s := flow.From(b, src, flow.DecodeText())
	if clock != nil {
		s = flow.Map(s, func(_ *flow.Meta, v string) (string, error) {
			_, rest, _ := strings.Cut(v, " ")
			return rest, nil
		})
	}
	return flow.Map(flow.KeyBy(s, func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	}), func(_ *flow.Meta, v string) (string, error) {
		_, v, _ = strings.Cut(v, " ")
		return v, nil
	})
}

// crossed gives records another key and back: those of a key are in one of two
// partitions or so between, and come from there.
func crossed(s flow.Stream[string]) flow.Stream[string] {
	under := flow.Map(s, func(m *flow.Meta, v string) (string, error) { return m.Key + " " + v, nil })
	other := flow.Rekey(under, func(_ *flow.Meta, v string) (string, error) { return v[len(v)-1:], nil }, flow.TextCodec())
	back := flow.Rekey(other, func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	}, flow.TextCodec())
	return flow.Map(back, func(_ *flow.Meta, v string) (string, error) {
		_, v, _ = strings.Cut(v, " ")
		return v, nil
	})
}

func (j joinFlow) builder() *flow.Builder {
	if j.partitions == 0 {
		j.partitions = 1
	}
	b := flow.New("test", flow.Options{Partitions: j.partitions, OnError: j.onError})
	if j.cfg.Join == nil {
		j.cfg.Join = joinValues
	}
	if j.cfg.Left.Decode == nil {
		j.cfg.Left = flow.TextCodec()
	}
	j.cfg.Right = flow.TextCodec()
	left, right := timedKeyed(b, "L", j.clock), timedKeyed(b, "R", j.clock)
	if j.rekeyed {
		left, right = crossed(left), crossed(right)
	}
	results, lateLeft, lateRight := flow.Join(left, right, "join", j.cfg)
	flow.To(results, textSink("OUT"))
	if j.late {
		flow.To(lateLeft, textSink("LATEL"))
		flow.To(lateRight, textSink("LATER"))
	}
	return b
}

func (j joinFlow) build(tb fataler) *flow.Flow {
	tb.Helper()
	return build(tb, j.builder())
}

// timed plays lines such as "L: 10:05 a x", with the time in front also as that of the
// stream; of a flow without a clock only so.
func timed(tb flowtest.TB, f *flow.Flow, lines ...string) *flowtest.Runner {
	tb.Helper()
	r := flowtest.New(tb, f)
	for _, line := range lines {
		playTimed(tb, r, f, line)
	}
	return r
}

func playTimed(tb flowtest.TB, r *flowtest.Runner, f *flow.Flow, line string) {
	tb.Helper()
	stream, data, isRecord := strings.Cut(line, ": ")
	if !isRecord || f.Sources()[0].Clock != nil {
		playLine(tb, r, line, true)
		return
	}
	at, err := clockTime(data)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	_, data, _ = strings.Cut(data, " ")
	r.Push(flowtest.Record{Stream: stream, Time: at, Data: data})
}

// alwaysJoined plays the lines as they are, and with a stop or a crash behind each of
// them, and with several partitions: the results are the same. After a crash the
// sources are read one after the other, so that their order may be another.
func alwaysJoined(t *testing.T, flowOf func(partitions int) *flow.Flow, lines []string, want ...string) {
	t.Helper()
	calm := timed(t, flowOf(1), lines...)
	wantData(t, calm, "OUT", want...)
	failed := calm.Errors()
	wanted := slices.Sorted(slices.Values(want))
	for i := range lines {
		for _, disturbance := range [][]string{{"crash"}, {"drain"}, {"commit", "crash"}, {"drain", "drain", "crash"}} {
			r := timed(t, flowOf(1), slices.Concat(lines[:i+1], disturbance, lines[i+1:])...)
			got := r.Data("OUT")
			if disturbance[0] == "drain" {
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("OUT (-want +got):\n%s", diff)
				}
			}
			if diff := cmp.Diff(wanted, slices.Sorted(slices.Values(got))); diff != "" {
				t.Errorf("OUT (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(slices.Sorted(slices.Values(failed)), slices.Sorted(slices.Values(r.Errors()))); diff != "" {
				t.Errorf("dead letters (-want +got):\n%s", diff)
			}
			if t.Failed() {
				t.Fatalf("%v behind %q", disturbance, lines[i])
			}
		}
	}
	spread := timed(t, flowOf(5), lines...).Data("OUT")
	if diff := cmp.Diff(wanted, slices.Sorted(slices.Values(spread))); diff != "" {
		t.Errorf("in 5 partitions (-want +got):\n%s", diff)
	}
}

func (j joinFlow) always(t *testing.T, lines []string, want ...string) {
	t.Helper()
	alwaysJoined(t, func(partitions int) *flow.Flow { j.partitions = partitions; return j.build(t) }, lines, want...)
}

// anHourAndTen meets from ten minutes before to an hour after.
func anHourAndTen(kind flow.JoinKind) flow.JoinConfig[string, string, string] {
	return flow.JoinConfig[string, string, string]{Kind: kind, Before: 10 * time.Minute, After: time.Hour}
}

var joinLines = []string{
	"R: 09:50 a first", // just within Before
	"L: 10:00 a 1",
	"R: 10:00 b other",
	"R: 10:30 a second",
	"L: 10:40 a 2",         // the first is too early for it, the second just not
	"R: 11:00 a third",     // just within After of 1
	"R: 11:00:01 a fourth", // not
	"L: 11:30 c 3",
	"pause 3h",
	"L: 15:00 a 4", "R: 17:00 a fifth",
	"pause 3h",
}

func TestJoin_Inner(t *testing.T) {
	joinFlow{cfg: anHourAndTen(flow.InnerJoin)}.always(t, joinLines,
		"a 1+first", "a 1+second", "a 2+second", "a 1+third", "a 2+third", "a 2+fourth")
}

func TestJoin_Left(t *testing.T) {
	joinFlow{cfg: anHourAndTen(flow.LeftJoin)}.always(t, joinLines,
		"a 1+first", "a 1+second", "a 2+second", "a 1+third", "a 2+third", "a 2+fourth", "c 3+-", "a 4+-")
}

func TestJoin_Outer(t *testing.T) {
	joinFlow{cfg: anHourAndTen(flow.OuterJoin)}.always(t, joinLines,
		"a 1+first", "a 1+second", "b -+other", "a 2+second", "a 1+third", "a 2+third", "a 2+fourth", "c 3+-", "a 4+-", "a -+fifth")
}

// The bounds are included, to the nanosecond, and a record that met none goes when the
// watermark is behind the last moment at which one could come.
func TestJoin_Bounds(t *testing.T) {
	ns := func(n int) time.Time { return flowtest.Start.Add(time.Duration(n)) }
	cfg := flow.JoinConfig[string, string, string]{Kind: flow.OuterJoin, Before: 3, After: 5}
	for _, tc := range []struct {
		left, right int
		meet        bool
	}{{100, 97, true}, {100, 96, false}, {100, 105, true}, {100, 106, false}, {100, 100, true}} {
		for _, leftFirst := range []bool{true, false} {
			r := flowtest.New(t, joinFlow{cfg: cfg, clock: &flow.EventTime[string]{}}.nanos(t))
			left := flowtest.Record{Stream: "L", Time: ns(200), Data: fmt.Sprint(tc.left, " a l")}
			right := flowtest.Record{Stream: "R", Time: ns(200), Data: fmt.Sprint(tc.right, " a r")}
			if leftFirst {
				r.Push(left, right)
			} else {
				r.Push(right)
				r.Push(left)
			}
			want := []string(nil)
			if tc.meet {
				want = []string{"a l+r"}
			}
			wantData(t, r, "OUT", want...)
			end := max(tc.left+5, tc.right+3)
			advance := func(to int) {
				for _, s := range []string{"L", "R"} {
					r.Push(flowtest.Record{Stream: s, Data: fmt.Sprint(to, " z z")})
				}
			}
			advance(end)
			if n := r.Keys(); n < 3 { // the last one, and those of z
				t.Errorf("%+v: at the watermark %d nothing is kept of a", tc, end)
			}
			advance(end + 1)
			got := slices.DeleteFunc(r.Data("OUT"), func(s string) bool { return strings.HasPrefix(s, "z") })
			if !tc.meet {
				want = []string{"a l+-", "a -+r"}
			}
			slices.Sort(got)
			slices.Sort(want)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%+v (-want +got):\n%s", tc, diff)
			}
		}
	}
}

// nanos builds the flow with times that are nanoseconds since the start.
func (j joinFlow) nanos(tb fataler) *flow.Flow {
	tb.Helper()
	b := flow.New("test", flow.Options{Partitions: 1})
	read := func(name string) flow.Stream[string] {
		c := *j.clock
		c.Of = func(_ *flow.Meta, v string) (time.Time, error) {
			var n int
			_, err := fmt.Sscan(v, &n)
			return flowtest.Start.Add(time.Duration(n)), err
		}
		s := flow.From(b, flow.Source{Stream: name, Time: c}, flow.DecodeText())
		keyed := flow.KeyBy(s, func(_ *flow.Meta, v string) (string, error) { return strings.Fields(v)[1], nil })
		return flow.Map(keyed, func(_ *flow.Meta, v string) (string, error) { return strings.Fields(v)[2], nil })
	}
	j.cfg.Join, j.cfg.Left, j.cfg.Right = joinValues, flow.TextCodec(), flow.TextCodec()
	results, _, _ := flow.Join(read("L"), read("R"), "join", j.cfg)
	flow.To(results, textSink("OUT"))
	return build(tb, b)
}

func TestJoin_Windows(t *testing.T) {
	cfg := flow.JoinConfig[string, string, string]{Kind: flow.OuterJoin, Windows: flow.Tumbling(time.Hour)}
	joinFlow{cfg: cfg}.always(t, []string{
		"L: 10:00 a 1", "R: 10:59:59 a x", "R: 11:00 a y", "L: 11:05 b 2", "L: 11:59:59 a 3", "R: 12:00 b z", "pause 3h",
	},
		"a 1+x", "a 3+y", "b 2+-", "b -+z")
	paris, err := time.LoadLocation("Europe/Paris")
	if err != nil {
		t.Fatal(err)
	}
	cfg.Windows = flow.TumblingDays(1, paris)
	joinFlow{cfg: cfg}.always(t, []string{"L: 10:00 a 1", "R: 22:59:59 a x", "R: 23:00 a y", "pause 30h"}, "a 1+x", "a -+y")
}

func TestJoin_Forever(t *testing.T) {
	cfg := flow.JoinConfig[string, string, string]{Before: flow.Forever, After: flow.Forever}
	lines := []string{"L: 10:00 a 1", "R: 10:01 b x", "pause 3000h", "R: 126T11:00 a y", "L: 126T12:00 a 2", "L: 126T12:00 b 3"}
	joinFlow{cfg: cfg}.always(t, lines, "a 1+y", "a 2+y", "b 3+x")
	// One bound: what came earlier, however long ago.
	cfg.After = 0
	r := timed(t, joinFlow{cfg: cfg}.build(t), lines...)
	wantData(t, r, "OUT", "a 2+y", "b 3+x")
	cfg.Kind = flow.LeftJoin
	r = timed(t, joinFlow{cfg: cfg}.build(t), append(lines, "pause 1h")...)
	wantData(t, r, "OUT", "a 1+-", "a 2+y", "b 3+x")
	if r.Keys() != 2 {
		t.Errorf("%d records are kept", r.Keys())
	}
}

// A record that says no has met none.
func TestJoin_NoMatch(t *testing.T) {
	joinFlow{cfg: anHourAndTen(flow.OuterJoin)}.always(t, []string{
		"L: 10:00 a no", "R: 10:01 a x", "R: 10:02 b y", "L: 10:03 b no", "L: 10:04 b 1", "pause 3h",
	},
		"b 1+y", "a -+x", "a no+-", "b no+-")
}

// What an allowed lateness keeps, and what comes later than that.
func TestJoin_Late(t *testing.T) {
	j := joinFlow{cfg: anHourAndTen(flow.OuterJoin), clock: &flow.EventTime[string]{}, late: true}
	j.cfg.AllowedLateness = 20 * time.Minute
	// At 13:00, left records are kept from 11:40 on, right ones from 12:30 on.
	lines := []string{
		"L: 11:39 a 0", "R: 12:35 a r", "L: 13:00 z z", "R: 13:00 z z",
		"L: 11:40 a 1", // meets r, which is kept
		"L: 11:39:59 a 2", "R: 12:30 a x", "R: 12:29:59 a y",
		"L: 12:45 a 3", // within the lateness: it finds all of its partners
	}
	r := timed(t, j.build(t), lines...)
	wantData(t, r, "OUT", "a 0+r", "z z+z", "a 1+r", "a 1+x", "a 3+r")
	wantData(t, r, "LATEL", "2")
	wantData(t, r, "LATER", "y")
	if r.Late() != 2 {
		t.Errorf("%d late", r.Late())
	}
	j.late = false
	wantErrors(t, timed(t, j.build(t), lines...),
		"join: late: its time is 2026-01-01T11:39:59Z, it would have been kept until the watermark 2026-01-01T12:59:59.000000001Z, the watermark is 2026-01-01T13:00:00Z",
		"join: late: its time is 2026-01-01T12:29:59Z, it would have been kept until the watermark 2026-01-01T12:59:59.000000001Z, the watermark is 2026-01-01T13:00:00Z")
}

// A finish ends the waiting, once; what has no bound stays.
func TestJoin_Finish(t *testing.T) {
	cfg := anHourAndTen(flow.OuterJoin)
	cfg.Join = func(m *flow.Meta, l, r *string) (string, bool, error) {
		v, ok, err := joinValues(m, l, r)
		return fmt.Sprintf("%s %v at %s", v, m.Pane(), clockText(m.EventTime())), ok, err
	}
	j := joinFlow{cfg: cfg}
	r := timed(t, j.build(t), "R: 09:30 b old", "L: 10:00 a 1", "R: 10:10 a x", "R: 10:20 c y", "L: 10:30 d 2")
	r.Finish()
	r.Crash()
	if r.Keys() != 0 {
		t.Errorf("%d records are kept", r.Keys())
	}
	r.Finish()
	for _, line := range []string{"R: 10:40 d z", "L: 10:45 d 3", "crash", "pause 3h"} {
		playTimed(t, r, j.build(t), line)
	}
	wantData(t, r, "OUT", "b -+old none at 09:30", "a 1+x none at 10:10", "c -+y final at 10:20", "d 2+- final at 10:30", "d 3+z none at 10:45")
	j.cfg = flow.JoinConfig[string, string, string]{Before: flow.Forever, After: 0}
	r = timed(t, j.build(t), "R: 09:30 b old", "L: 10:00 a 1")
	r.Finish()
	playTimed(t, r, j.build(t), "L: 11:00 b 2")
	wantData(t, r, "OUT", "b 2+old")
}

// Behind a change of key the watermark is that which crosses.
func TestJoin_BehindRekey(t *testing.T) {
	j := joinFlow{cfg: anHourAndTen(flow.OuterJoin), rekeyed: true, partitions: 3}
	r := timed(t, j.build(t), joinLines...)
	got := r.Data("OUT")
	slices.Sort(got)
	want := []string{"a -+fifth", "a 1+first", "a 1+second", "a 1+third", "a 2+fourth", "a 2+second", "a 2+third", "a 4+-", "b -+other", "c 3+-"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("OUT (-want +got):\n%s", diff)
	}
	wantErrors(t, r)
}

// A pair that fails costs the pair: the record at hand is one dead letter, whatever
// the number of its pairs, and none of those is said to have met none.
func TestJoin_Failures(t *testing.T) {
	lines := []string{
		"L: 10:00 a bad", "L: 10:01 a 1", "L: 10:02 a boom", "R: 10:03 a x", "R: 10:04 b bad", "R: 10:05 c bad", "L: 10:06 c 2", "pause 3h",
	}
	j := joinFlow{cfg: anHourAndTen(flow.OuterJoin)}
	r := timed(t, j.build(t), lines...)
	wantData(t, r, "OUT", "a 1+x")
	wantErrors(t, r,
		"join: 2 of its 3 pairs failed, this is the first: is bad: bad+x",
		"join: is bad: 2+bad",
		"join: is bad: -+bad")
	letters := r.DeadLetters()
	if h := letters[0].Headers; h[flow.HeaderDeadStream] != "R" || h[flow.HeaderDeadSeq] != "1" || letters[0].Data != "a x" {
		t.Errorf("dead letter %v", letters[0])
	}
	// What failed when it went has its own position, and the bytes that were kept.
	if h := letters[2].Headers; h[flow.HeaderDeadStream] != "R" || h[flow.HeaderDeadSeq] != "2" || letters[2].Data != "bad" {
		t.Errorf("dead letter %v", letters[2])
	}
	j.onError = flow.Stop
	r = timed(t, j.build(t), lines[:3]...)
	err := r.Try(flowtest.Record{Stream: "R", Data: "a x"})
	wantStepError(t, err, "join", 1)
}

// A panic behind the join ends the way of the record: its other pairs are lost, and it
// is kept.
func TestJoin_PanicBehind(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 1})
	cfg := anHourAndTen(flow.LeftJoin)
	cfg.Join, cfg.Left, cfg.Right = joinValues, flow.TextCodec(), flow.TextCodec()
	results, _, _ := flow.Join(timedKeyed(b, "L", nil), timedKeyed(b, "R", nil), "join", cfg)
	flow.To(flow.Map(results, func(_ *flow.Meta, v string) (string, error) {
		if strings.Contains(v, "1+x") || strings.Contains(v, "3+-") {
			panic("as told")
		}
		return v, nil
	}, flow.ID("behind")), textSink("OUT"))
	r := timed(t, build(t, b), "L: 10:00 a 1", "L: 10:00 a 2", "R: 10:01 a x", "L: 10:02 a 4", "L: 10:03 b 3", "L: 10:04 c 5", "pause 3h")
	wantData(t, r, "OUT", "a 4+x", "a 2+-", "c 5+-")
	for i, e := range r.Errors() {
		if !strings.HasPrefix(e, "behind: step panicked: as told") || i > 1 {
			t.Errorf("dead letter %s", e)
		}
	}
}

// Results have the later time and the position of the left record; what met none has
// its own.
func TestJoin_Meta(t *testing.T) {
	cfg := anHourAndTen(flow.OuterJoin)
	cfg.Join = func(m *flow.Meta, l, r *string) (string, bool, error) {
		v, ok, err := joinValues(m, l, r)
		return fmt.Sprintf("%s %s %s#%d %s at %s stream %s", v, m.Raw(), m.Stream, m.Seq, m.Subject, clockText(m.EventTime()), clockText(m.Time())), ok, err
	}
	f := joinFlow{cfg: cfg, clock: &flow.EventTime[string]{}}.build(t)
	r := flowtest.New(t, f)
	push := func(stream, at, data string) {
		when, err := clockTime(at)
		if err != nil {
			t.Fatal(err)
		}
		r.Push(flowtest.Record{Stream: stream, Subject: strings.ToLower(stream) + "." + at, Time: when, Data: data})
	}
	push("L", "12:00", "10:00 a 1")
	push("R", "12:01", "10:05 a x")
	push("L", "12:02", "10:06 a 2")
	push("R", "12:03", "10:20 b y")
	r.Drain()
	push("L", "12:04", "15:00 z z")
	push("R", "12:05", "15:00 z z")
	want := []string{
		"a 1+x 1 L#1 l.12:00 at 10:05 stream 12:00", "a 2+x 2 L#2 l.12:02 at 10:06 stream 12:02",
		"z z+z z L#3 l.12:04 at 15:00 stream 12:04", "b -+y y R#2 r.12:03 at 10:20 stream 12:03",
	}
	got := r.Data("OUT")
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
}

// What a record is, is fixed when it comes, though it may be a part of state that
// changes.
func TestJoin_ValueIsFixed(t *testing.T) {
	type total struct{ N int }
	b := newFlow()
	totals := flow.Stateful(timedKeyed(b, "L", nil), "total", flow.JSONState[total](1, nil),
		func(_ *flow.Meta, s *total, _ string, emit func(*total)) error {
			s.N++
			emit(s)
			return nil
		})
	results, _, _ := flow.Join(totals, timedKeyed(b, "R", nil), "join", flow.JoinConfig[*total, string, string]{
		Before: time.Hour, After: time.Hour, Left: flow.JSONCodec[*total](), Right: flow.TextCodec(),
		Join: func(_ *flow.Meta, l **total, r *string) (string, bool, error) {
			return fmt.Sprint((*l).N, *r), true, nil
		},
	})
	flow.To(results, textSink("OUT"))
	r := timed(t, build(t, b), "L: 10:00 a -", "L: 10:01 a -", "R: 10:02 a x", "L: 10:03 a -", "R: 10:04 a y")
	wantData(t, r, "OUT", "1x", "2x", "3x", "1y", "2y", "3y")
}

// A pair is made of what is kept, whichever of the two comes first: here a codec that
// loses something.
func TestJoin_PairOfKept(t *testing.T) {
	for _, lines := range [][]string{{"L: 10:00 a left", "R: 10:00 a right"}, {"R: 10:00 a right", "L: 10:00 a left"}} {
		b := newFlow()
		cfg := anHourAndTen(flow.InnerJoin)
		cfg.Join = joinValues
		cfg.Left = flow.Codec[string]{Encode: flow.EncodeText(), Decode: func(m *flow.Meta, data []byte) (string, error) {
			return fmt.Sprintf("%s %s#%d %s", data[:2], m.Stream, m.Seq, m.Key), nil
		}}
		cfg.Right = cfg.Left
		results, _, _ := flow.Join(timedKeyed(b, "L", nil), timedKeyed(b, "R", nil), "join", cfg)
		flow.To(results, textSink("OUT"))
		wantData(t, timed(t, build(t, b), lines...), "OUT", "a le L#1 a+ri R#1 a")
	}
}

// A stream can be joined with itself: a record is first the one, then the other.
func TestJoin_Itself(t *testing.T) {
	b := newFlow()
	s := timedKeyed(b, "L", nil)
	cfg := anHourAndTen(flow.InnerJoin)
	cfg.Join, cfg.Left, cfg.Right = joinValues, flow.TextCodec(), flow.TextCodec()
	results, _, _ := flow.Join(s, s, "join", cfg)
	flow.To(results, textSink("OUT"))
	wantData(t, timed(t, build(t, b), "L: 10:00 a 1", "L: 10:10 a 2"), "OUT", "a 1+1", "a 2+1", "a 1+2", "a 2+2")
}

// Windows behind a join wait for what it gives late.
func TestJoin_WindowBehind(t *testing.T) {
	for _, kind := range []flow.JoinKind{flow.InnerJoin, flow.LeftJoin, flow.OuterJoin} {
		b := newFlow()
		cfg := anHourAndTen(kind)
		cfg.AllowedLateness = 5 * time.Minute
		cfg.Join, cfg.Left, cfg.Right = joinValues, flow.TextCodec(), flow.TextCodec()
		results, _, _ := flow.Join(timedKeyed(b, "L", nil), timedKeyed(b, "R", nil), "join", cfg)
		counts, _ := flow.Window(results, "count", flow.Tumbling(10*time.Minute), flow.WindowAggregator[string, int64, string]{
			State: decimalState,
			Add:   func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
			Result: func(m *flow.Meta, w flow.Span, n *int64) (string, error) {
				return fmt.Sprint(m.Key, " ", clockText(w.Start), " ", *n), nil
			},
		})
		flow.To(counts, textSink("OUT"))
		r := timed(t, build(t, b), "L: 10:00 a 1", "R: 10:09:59 b x", "L: 10:10 a 2", "R: 11:10 a y", "pause 5h")
		want := map[flow.JoinKind][]string{
			flow.InnerJoin: {"a 11:10 1"},
			flow.LeftJoin:  {"a 10:00 1", "a 11:10 1"},
			flow.OuterJoin: {"a 10:00 1", "b 10:00 1", "a 11:10 1"},
		}[kind]
		wantData(t, r, "OUT", want...)
		wantErrors(t, r)
	}
}

// joinRecord is a record of a generated test.
type joinRecord struct {
	left bool
	at   int // seconds
	key  string
	id   int
}

func (r joinRecord) String() string {
	stream := "R"
	if r.left {
		stream = "L"
	}
	return fmt.Sprintf("%s: %02d:%02d:%02d %s %d", stream, r.at/3600, r.at/60%60, r.at%60, r.key, r.id)
}

// naiveJoin says what comes of the records, whatever their order.
func naiveJoin(cfg flow.JoinConfig[string, string, string], all []joinRecord) []string {
	out := []string{}
	met := map[int]bool{}
	for _, l := range all {
		for _, r := range all {
			if !l.left || r.left || l.key != r.key {
				continue
			}
			if after := time.Duration(r.at-l.at) * time.Second; after >= -cfg.Before && after <= cfg.After {
				met[l.id], met[r.id] = true, true
				out = append(out, fmt.Sprintf("%s %d+%d", l.key, l.id, r.id))
			}
		}
	}
	for _, r := range all {
		switch {
		case met[r.id]:
		case r.left && cfg.Kind != flow.InnerJoin:
			out = append(out, fmt.Sprintf("%s %d+-", r.key, r.id))
		case !r.left && cfg.Kind == flow.OuterJoin:
			out = append(out, fmt.Sprintf("%s -+%d", r.key, r.id))
		}
	}
	slices.Sort(out)
	return out
}

// drawRecords draws records whose times are never more than 20 seconds behind those of
// the same stream.
func drawRecords(t *rapid.T, keys ...string) []joinRecord {
	var all []joinRecord
	now := map[bool]int{true: 3600, false: 3600}
	for i := range rapid.IntRange(0, 40).Draw(t, "records") {
		left := rapid.Bool().Draw(t, "left")
		now[left] += rapid.IntRange(0, 30).Draw(t, "seconds")
		at := now[left] - rapid.IntRange(0, 20).Draw(t, "late")
		all = append(all, joinRecord{left, at, rapid.SampledFrom(keys).Draw(t, "key"), i})
	}
	return all
}

// playDrawn plays records in their order, with stops and crashes between them, and
// then lets the time of all of them pass. Results of the key end are left out.
func playDrawn(t *rapid.T, f *flow.Flow, all []joinRecord) []string {
	r := flowtest.New(t, f)
	for _, rec := range all {
		playTimed(t, r, f, rec.String())
		switch rapid.SampledFrom([]string{"", "", "", "commit", "crash", "drain", "move", "pause"}).Draw(t, "between") {
		case "commit":
			r.Commit()
		case "crash":
			r.Crash()
		case "drain":
			r.Drain()
		case "move":
			r.Crash(rapid.IntRange(0, f.Options().Partitions-1).Draw(t, "partition"))
		case "pause":
			r.Pause(time.Second)
		}
	}
	for i := range 2 {
		playTimed(t, r, f, joinRecord{i == 0, 20 * 3600, "end", 1000 + i}.String())
	}
	for i := range 2 {
		playTimed(t, r, f, joinRecord{i == 0, 20*3600 + 60, "end", 1002 + i}.String())
	}
	got := slices.DeleteFunc(r.Data("OUT"), func(s string) bool { return strings.HasPrefix(s, "end") })
	slices.Sort(got)
	if errs := r.Errors(); len(errs) > 0 {
		t.Fatalf("dead letters: %v", errs)
	}
	return got
}

// The results are those of the records, whatever their order, and whatever dies.
func TestJoin_Model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := flow.JoinConfig[string, string, string]{
			Kind:   flow.JoinKind(rapid.IntRange(0, 2).Draw(t, "kind")),
			Before: time.Duration(rapid.IntRange(0, 60).Draw(t, "before")) * time.Second,
			After:  time.Duration(rapid.IntRange(0, 60).Draw(t, "after")) * time.Second,
		}
		clock := &flow.EventTime[string]{Lateness: 20 * time.Second}
		if rapid.Bool().Draw(t, "allowed") {
			// The same, allowed by the join in place of the source.
			clock.Lateness, cfg.AllowedLateness = 0, 20*time.Second
		}
		all := drawRecords(t, "a", "b", "c")
		f := joinFlow{cfg: cfg, clock: clock, partitions: rapid.IntRange(1, 3).Draw(t, "partitions"), rekeyed: rapid.Bool().Draw(t, "rekeyed")}.build(t)
		if diff := cmp.Diff(naiveJoin(cfg, all), playDrawn(t, f, all)); diff != "" {
			t.Fatalf("results (-want +got):\n%s", diff)
		}
	})
}

// At the end of the input what has met none says so; nothing is kept for what comes after
// a resume.
func TestJoin_EndOfInput(t *testing.T) {
	j := joinFlow{cfg: flow.JoinConfig[string, string, string]{Kind: flow.OuterJoin, Before: time.Hour, After: time.Hour, Join: func(m *flow.Meta, l, r *string) (string, bool, error) {
		v, ok, err := joinValues(m, l, r)
		return paneText(m) + v, ok, err
	}}}
	alwaysJoined(t, func(partitions int) *flow.Flow { j.partitions = partitions; return j.build(t) }, []string{
		"L: 10:00 a 1", "R: 10:10 a 2", "L: 10:20 b 3", "R: 10:30 c 4", "finish", "R: 10:40 b 5", "L: 10:50 c 6", "finish", "pause 3h",
	}, "a 1+2", "final b 3+-", "final c -+4", "final b -+5", "final c 6+-")
	r := timed(t, j.build(t), "L: 10:00 a 1", "R: 10:10 a 2", "L: 10:20 b 3", "finish")
	if n := r.Keys(); n != 0 {
		t.Errorf("%d records are kept", n)
	}
}

// Where the flow stops at a failure, it stops before the record that has brought it about,
// and not at one that was kept and committed long before.
func TestJoin_StopPosition(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 1, OnError: flow.Stop})
	left, right := timedKeyed(b, "L", nil), timedKeyed(b, "R", nil)
	cfg := anHourAndTen(flow.LeftJoin)
	cfg.Join, cfg.Left, cfg.Right = joinValues, flow.TextCodec(), flow.TextCodec()
	results, _, _ := flow.Join(left, right, "join", cfg)
	flow.To(flow.Map(results, func(_ *flow.Meta, v string) (string, error) {
		if strings.Contains(v, "evil") || strings.HasSuffix(v, "-") {
			return "", errors.New("refused")
		}
		return v, nil
	}, flow.ID("behind")), textSink("OUT"))
	f := build(t, b)
	at := flowtest.Start.Add(10 * time.Hour)
	r := flowtest.New(t, f)
	r.Push(flowtest.Record{Stream: "L", Time: at, Data: "a 1"}, flowtest.Record{Stream: "R", Data: "a x"})
	r.Commit()
	wantStepErrorAt(t, r.Try(flowtest.Record{Stream: "R", Data: "a evil"}), "R", 2)
	r = flowtest.New(t, f)
	r.Push(flowtest.Record{Stream: "L", Time: at, Data: "a 1"})
	r.Commit()
	wantStepErrorAt(t, r.Try(flowtest.Record{Stream: "L", Time: at.Add(3 * time.Hour), Data: "b 1"}, flowtest.Record{Stream: "R", Data: "b x"}), "", 0)
}

func wantStepErrorAt(t *testing.T, err error, stream string, seq uint64) {
	t.Helper()
	var se *flow.StepError
	if !errors.As(err, &se) || se.Step != "behind" || se.Stream != stream || se.Seq != seq {
		t.Errorf("error %v, want one at %q, %d", err, stream, seq)
	}
}
