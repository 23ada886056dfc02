package flow_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

const within = 10 * time.Second

// deduped drops repeats of the second word.
func deduped(b *flow.Builder) {
	textTo(flow.Dedupe(keyed(b), "seen", within, func(_ *flow.Meta, v string) (string, error) {
		words := strings.Fields(v)
		if words[1] == "bad" {
			return "", errors.New("is bad")
		}
		return words[1], nil
	}))
}

// at makes records of a key and a value at a number of seconds.
func at(seconds float64, data string) record {
	return record{nanos: int64(seconds * float64(time.Second)), data: data}
}

func (r *runner) wantAt(records []record, outputs ...published) {
	r.tb.Helper()
	if err := r.play(records...); err != nil {
		r.tb.Fatal(err)
	}
	got := r.seal()
	if fmt.Sprint(got) != fmt.Sprint(outputs) {
		r.tb.Fatalf("outputs %v\nwant %v", got, outputs)
	}
}

func TestDedupe(t *testing.T) {
	b := newFlow()
	deduped(b)
	r := run(t, b)
	r.wantAt([]record{at(100, "k a"), at(101, "k a"), at(101, "k b"), at(102, "j a"), at(103, "k bad"), at(104, "k b again")},
		out("k", "k a"), out("k", "k b"), out("j", "j a"), dead("seen", "is bad", 5, "k bad"))
	// The time counts from the record that was accepted, not from its repeats.
	r.wantAt([]record{at(109.999, "k a")})
	r.wantAt([]record{at(110, "k a again"), at(119.999, "k a")}, out("k", "k a again"))
}

// Key and value are told apart, whatever bytes they have.
func TestDedupe_KeyAndValueAreApart(t *testing.T) {
	b := newFlow()
	s := flow.KeyBy(text(b), func(_ *flow.Meta, v string) (string, error) { k, _, _ := strings.Cut(v, "|"); return k, nil })
	textTo(flow.Dedupe(s, "seen", within, func(_ *flow.Meta, v string) (string, error) { _, v, _ = strings.Cut(v, "|"); return v, nil }))
	run(t, b).want([]string{"ab|c", "a|bc", "|abc", "abc|"}, out("ab", "ab|c"), out("a", "a|bc"), out("=", "|abc"), out("abc", "abc|"))
}

func TestDedupe_Expiry(t *testing.T) {
	b := newFlow()
	deduped(b)
	r := run(t, b)
	for i := range 5000 {
		if err := r.play(at(float64(i), fmt.Sprintf("k v%d", i))); err != nil {
			t.Fatal(err)
		}
		if i > 20 && r.keys() > 11 {
			t.Fatalf("%d values after %d seconds of one a second, 10 s each", r.keys(), i)
		}
		if i%7 == 0 {
			r.seal()
		}
	}
	r.seal()
	// The deltas have the deletions too.
	r.crash()
	if r.keys() > 11 {
		t.Errorf("%d values after the restart", r.keys())
	}
	// A burst leaves as fast as records come.
	for i := range 1000 {
		if err := r.play(at(6000, fmt.Sprintf("k w%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	for range 600 {
		if err := r.play(at(7000, "k same")); err != nil {
			t.Fatal(err)
		}
	}
	if r.keys() != 1 {
		t.Errorf("%d values long after their time", r.keys())
	}
}

func TestDedupe_Restore(t *testing.T) {
	b := newFlow()
	deduped(b)
	r := run(t, b)
	r.wantAt([]record{at(100, "k a"), at(105, "k b")}, out("k", "k a"), out("k", "k b"))
	r.crash()
	r.wantAt([]record{at(109, "k a"), at(109, "k b"), at(110, "k a 2"), at(112, "k b"), at(115, "k b 2")},
		out("k", "k a 2"), out("k", "k b 2"))
	// What was restored expires too.
	r.crash()
	r.wantAt([]record{at(200, "k x"), at(200, "k y")}, out("k", "k x"), out("k", "k y"))
	if r.keys() != 2 {
		t.Errorf("%d values, want x and y", r.keys())
	}
}

// Two sources have two clocks: a value of the later one is known to the earlier.
func TestDedupe_TimeGoesBack(t *testing.T) {
	b := newFlow()
	deduped(b)
	r := run(t, b)
	r.wantAt([]record{at(100, "k a"), at(50, "k a"), at(50, "k b"), at(105, "k b"), at(115, "k b 2")},
		out("k", "k a"), out("k", "k b"), out("k", "k b"), out("k", "k b 2"))
}

// The naive model remembers every acceptance for ever; restarts at any moment.
func TestDedupe_Model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := flow.New("test", flow.Options{Partitions: 2})
		deduped(b)
		r := run(t, b)
		accepted := map[string]time.Duration{}
		now := time.Second
		for range rapid.IntRange(1, 60).Draw(t, "records") {
			now += time.Duration(rapid.IntRange(0, 4).Draw(t, "seconds")) * time.Second
			value := rapid.SampledFrom([]string{"a x", "a y", "b x", "c z"}).Draw(t, "value")
			last, there := accepted[value]
			want := !there || now-last >= within
			if want {
				accepted[value] = now
			}
			if err := r.play(record{nanos: int64(now), data: value}); err != nil {
				t.Fatal(err)
			}
			if got := r.seal(); (len(got) == 1) != want {
				t.Fatalf("%s at %v, accepted last at %v (%v): %d outputs", value, now, last, there, len(got))
			}
			if rapid.IntRange(0, 6).Draw(t, "crash") == 0 {
				r.crash()
			}
		}
	})
}

// dedupedTimes drops repeats of the second word of records such as "10:05 k v" from two
// sources, of event time; in a later stage with the word as the key if that is asked for.
func dedupedTimes(partitions int, lateness time.Duration, stage bool) *flow.Builder {
	b := flow.New("test", flow.Options{Partitions: partitions})
	var all []flow.Stream[string]
	for _, name := range []string{"IN", "IN2"} {
		src := flow.Source{Stream: name, Time: flow.EventTime[string]{
			Lateness: lateness,
			Of:       func(_ *flow.Meta, v string) (time.Time, error) { return clockTime(v) },
		}}
		s := flow.From(b, src, flow.DecodeText())
		all = append(all, flow.KeyBy(s, func(_ *flow.Meta, v string) (string, error) { return strings.Fields(v)[1], nil }))
	}
	s := flow.Merge(all[0], all[1])
	value := func(_ *flow.Meta, v string) (string, error) { return strings.Fields(v)[2], nil }
	if stage {
		s = flow.Rekey(s, value, flow.TextCodec())
	}
	textTo(flow.Dedupe(s, "seen", within, value))
	return b
}

// Of several sources the times of the records count, whichever comes first.
func TestDedupe_times(t *testing.T) {
	r := eventTimed(t, build(t, dedupedTimes(1, time.Minute, false)),
		"IN: 10:00:30 k a", "IN2: 10:00:21 k a", "IN2: 10:00:39 k a", "crash", "IN2: 10:00:20 k a", "IN: 10:00:40 k a",
		"drain", "IN2: 10:00:11 k a", "IN: 10:00:49 k a", "IN2: 10:00:10 j a", "IN: 10:00:10 k b")
	wantData(t, r, "OUT", "10:00:30 k a", "10:00:20 k a", "10:00:40 k a", "10:00:10 j a", "10:00:10 k b")
	if r.Keys() != 3 {
		t.Errorf("%d values", r.Keys())
	}
	// Forgotten when the lower watermark has come to 10 s behind them.
	for _, line := range []string{"IN: 10:10 k z", "IN2: 10:01:49 k z", "IN2: 10:01:50 x x", "IN2: 10:01:50 x x"} {
		playLine(t, r, line, true)
	}
	wantData(t, r, "OUT", "10:00:30 k a", "10:00:20 k a", "10:00:40 k a", "10:00:10 j a", "10:00:10 k b", "10:10 k z", "10:01:49 k z", "10:01:50 x x")
	if r.Keys() != 2 {
		t.Errorf("%d values, want k z and x x", r.Keys())
	}
	// Later than that there is no telling.
	playLine(t, r, "IN: 10:00:30 k a", true)
	playLine(t, r, "IN: 10:00:10 j a", true)
	playLine(t, r, "IN: 10:00:10 j a", true)
	if got := r.Data("OUT"); len(got) != 11 {
		t.Errorf("results %q", got)
	}
}

// What nothing repeats any more goes without records, in the first stage and behind it.
func TestDedupe_timesExpire(t *testing.T) {
	for _, stage := range []bool{false, true} {
		b := flow.New("test", flow.Options{Partitions: 2})
		s := flow.Merge(keyed(b), keyed2(b))
		if stage {
			s = flow.Rekey(s, firstWord, flow.TextCodec())
		}
		textTo(flow.Dedupe(s, "seen", within, func(_ *flow.Meta, v string) (string, error) { return v, nil }))
		r := flowtest.New(t, build(t, b))
		for i := range 3000 {
			r.Push(flowtest.Record{Stream: []string{"IN", "IN2"}[i%2], Data: fmt.Sprintf("k%d v", i)})
		}
		r.Commit()
		if r.Keys() != 3000 {
			t.Errorf("%d values", r.Keys())
		}
		for range 4 {
			r.Pause(within)
			r.Commit()
		}
		if r.Keys() != 0 {
			t.Errorf("stage %v: %d values long after their time", stage, r.Keys())
		}
	}
}

// What one kind of dedupe has stored, the other one can load.
func TestDedupe_timesOfOneSource(t *testing.T) {
	one := func(several bool) *flow.Flow {
		b := newFlow()
		s := keyed(b)
		if several {
			s = flow.Merge(s, keyed2(b))
		}
		textTo(flow.Dedupe(s, "seen", within, func(_ *flow.Meta, v string) (string, error) { return v, nil }))
		return build(t, b)
	}
	task := func(f *flow.Flow, deltas ...[]byte) *flow.Task {
		task := f.Task(0)
		for _, d := range deltas {
			if err := task.Load(d); err != nil {
				t.Fatal(err)
			}
		}
		task.Loaded()
		return task
	}
	play := func(f *flow.Flow, task *flow.Task, source int, seconds int64) flow.Sealed {
		router := f.Router(source)
		if err := router.Route("in", 1, seconds*int64(time.Second), []byte("k v")); err != nil {
			t.Fatal(err)
		}
		router.Take(func(b *flow.Batch) {
			if err := task.Play(b); err != nil {
				t.Fatal(err)
			}
		})
		s, err := task.Seal()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	single, merged := one(false), one(true)
	first := play(single, task(single), 0, 100)
	second := task(merged, first.Delta)
	if s := play(merged, second, 1, 95); s.Outputs != 0 {
		t.Error("what one source had is not known with two")
	}
	s := play(merged, second, 1, 80)
	if s.Outputs != 1 {
		t.Error("a time before is taken for a repeat")
	}
	third := task(single, first.Delta, s.Delta)
	if s := play(single, third, 0, 109); s.Outputs != 0 {
		t.Error("of two times, the last one does not count with one source")
	}
	if s := play(single, third, 0, 110); s.Outputs != 1 {
		t.Error("a value is kept for too long")
	}
}

// The naive model remembers every acceptance for ever. No record is late, so that the
// order in which they come does not matter to it.
func TestDedupe_timesModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const lateness = 20
		stage := rapid.Bool().Draw(t, "stage")
		r := flowtest.New(nil, build(t, dedupedTimes(2, lateness*time.Second, stage)))
		accepted := map[string][]int{}
		highest := map[string]int{"IN": 0, "IN2": 0}
		var want []string
		for range rapid.IntRange(1, 60).Draw(t, "records") {
			source := rapid.SampledFrom([]string{"IN", "IN2"}).Draw(t, "source")
			at := max(0, highest[source]+rapid.IntRange(-lateness, lateness).Draw(t, "seconds"))
			highest[source] = max(highest[source], at)
			value := rapid.SampledFrom([]string{"a x", "a y", "b x", "c z"}).Draw(t, "value")
			line := fmt.Sprintf("%s %s", flowtest.Start.Add(time.Duration(at)*time.Second).Format("15:04:05"), value)
			key := value
			if stage {
				key = value[2:]
			}
			repeat := slices.ContainsFunc(accepted[key], func(was int) bool { return max(was-at, at-was) < int(within/time.Second) })
			if !repeat {
				accepted[key] = append(accepted[key], at)
				want = append(want, line)
			}
			r.Push(flowtest.Record{Stream: source, Data: line, Time: flowtest.Start.Add(time.Hour)})
			r.Commit() // so that a later stage has them in this order
			switch rapid.IntRange(0, 9).Draw(t, "event") {
			case 0:
				r.Crash()
			case 1:
				r.Drain()
			case 2:
				r.Crash(1)
			}
		}
		got := r.Data("OUT")
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("accepted\n%q, want\n%q", got, want)
		}
	})
}

// The end of the input closes windows, and does not make a dedupe behind them forget.
func TestDedupe_timesFinish(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 1})
	var all []flow.Stream[string]
	for _, name := range []string{"IN", "IN2"} {
		s := flow.From(b, flow.Source{Stream: name, Time: flow.EventTime[string]{Of: func(_ *flow.Meta, v string) (time.Time, error) { return clockTime(v) }}}, flow.DecodeText())
		s = flow.Map(s, func(_ *flow.Meta, v string) (string, error) { return v[strings.IndexByte(v, ' ')+1:], nil })
		all = append(all, flow.KeyBy(s, firstWord))
	}
	counts := tally(flow.Merge(all[0], all[1]), "minutes", flow.Tumbling(time.Minute))
	textTo(flow.Dedupe(counts, "seen", time.Hour, func(m *flow.Meta, _ string) (string, error) { return m.Key, nil }))
	r := eventTimed(t, build(t, b), "IN2: 00:00:10 a 1", "IN: 05:00 b 1")
	r.Finish()
	wantData(t, r, "OUT", "a 00:00-00:01 1", "b 05:00-05:01 1")
	for _, line := range []string{"IN2: 00:01:30 a 1", "IN2: 02:00 c 1", "IN2: 02:01 a 1", "IN2: 02:02 a 1"} {
		playLine(t, r, line, true)
	}
	wantData(t, r, "OUT", "a 00:00-00:01 1", "b 05:00-05:01 1", "c 02:00-02:01 1", "a 02:01-02:02 1")
}
