package flowspec

import (
	"bytes"
	stdcmp "cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// folder folds values into groups, as a step and its windows do.
type folder struct {
	aggregate
	v, by value
}

// newFolder makes an aggregate of which all members get the value that is added; those
// with a by get that of it.
func newFolder(members ...aggregateMember) *folder {
	f := &folder{}
	f.members = members
	for i := range f.members {
		m := &f.members[i]
		m.name = fmt.Sprintf("m%d", i)
		m.arg = &expression{text: "v", eval: func(*flow.Meta, record) (value, error) { return f.v, nil }}
		if m.fn == aggCountIf {
			m.arg.eval = func(*flow.Meta, record) (value, error) { return boolValue(f.v.isNumber()), nil }
		}
		if m.by != nil {
			m.by = &expression{text: "by", eval: func(*flow.Meta, record) (value, error) { return f.by, nil }}
		}
	}
	f.finish()
	return f
}

func (f *folder) fold(g *group, v, by value) error {
	f.v, f.by = v, by
	return f.add(&flow.Meta{}, g, record{})
}

func (f *folder) result(g *group) string {
	return string(f.appendResult(nil, &flow.Meta{Key: "k"}, record{group: g}))
}

// fataler is the part of testing.TB that rapid.T has too.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

func (f *folder) store(t fataler, g *group) []byte {
	t.Helper()
	data, err := f.appendGroup(nil, g)
	if err != nil {
		t.Fatalf("store: %v", err)
	}
	return data
}

// reload stores a group and loads it.
func (f *folder) reload(t fataler, g group) group {
	t.Helper()
	data := f.store(t, &g)
	var back group
	if err := f.decodeGroup(data, &back); err != nil {
		t.Fatalf("load %x: %v", data, err)
	}
	return back
}

// pair is a value and what it is ordered by.
type pair struct{ v, by value }

// inSessions folds values into groups that are joined, stored and loaded at any time, looked
// at in between, and returns the one that is left.
func (f *folder) inSessions(t *rapid.T, values []pair) *group {
	t.Helper()
	groups := []group{{}}
	for _, p := range values {
		switch rapid.IntRange(0, 9).Draw(t, "what") {
		case 0:
			groups = append(groups, group{})
		case 1:
			at := rapid.IntRange(0, len(groups)-1).Draw(t, "which")
			groups[at] = f.reload(t, groups[at])
		case 2:
			if last := &groups[len(groups)-1]; last.records > 0 {
				f.result(last)
			}
		case 3:
			f.join(t, &groups)
		}
		if err := f.fold(&groups[len(groups)-1], p.v, p.by); err != nil {
			t.Fatalf("%+v: %v", p, err)
		}
	}
	for len(groups) > 1 {
		f.join(t, &groups)
	}
	last := f.reload(t, groups[0])
	return &last
}

// join merges two groups that follow each other.
func (f *folder) join(t *rapid.T, groups *[]group) {
	t.Helper()
	all := *groups
	if len(all) < 2 {
		return
	}
	at := rapid.IntRange(0, len(all)-2).Draw(t, "join")
	// The state of a window that is there has had a record.
	if all[at].records > 0 && all[at+1].records > 0 {
		later := f.result(&all[at+1])
		if err := f.merge(&all[at], &all[at+1]); err != nil {
			t.Fatalf("join: %v", err)
		}
		if now := f.result(&all[at+1]); now != later {
			t.Fatalf("joining %s into another one made it %s", later, now)
		}
	} else if all[at].records == 0 {
		all[at] = all[at+1]
	}
	*groups = slices.Delete(all, at+1, at+2)
}

// one returns the result of the only member.
func (f *folder) one(g *group) value { return f.members[0].value(g) }

// numbers are values that are numbers of any kind, with many equal ones.
func numbers() *rapid.Generator[value] {
	return rapid.OneOf(
		rapid.Map(rapid.Int64Range(-20, 20), intValue),
		rapid.Map(rapid.Float64Range(-20, 20), func(f float64) value { return floatValue(math.Round(f*4) / 4) }),
		rapid.Map(rapid.Float64Range(-1e300, 1e300), floatValue),
		rapid.Map(rapid.Int64(), intValue),
		rapid.Map(rapid.Uint64Range(1<<63, math.MaxUint64), uintValue),
	)
}

// everyFolder has each function.
func everyFolder() *folder {
	var members []aggregateMember
	for fn := aggCount; fn <= lastFn; fn++ {
		members = append(members, aggregateMember{fn: fn, limit: 3, percent: 50 * percentUnit})
	}
	return newFolder(append(members, aggregateMember{fn: aggTop, limit: 2, by: &expression{}}, aggregateMember{fn: aggBottom, limit: 2, by: &expression{}})...)
}

// TestAggregate_failedAddChangesNothing adds values of which some fail in some member.
func TestAggregate_failedAddChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := everyFolder()
		var g group
		values := rapid.OneOf(numbers(), rapid.Just(boolValue(true)), rapid.Just(stringValue("x")), rapid.Just(value{}), rapid.Just(value{kind: kindJSON, str: "[1]"}))
		if err := f.fold(&g, intValue(1), intValue(1)); err != nil {
			t.Fatal(err)
		}
		for range rapid.IntRange(1, 30).Draw(t, "records") {
			before, stored := f.result(&g), f.store(t, &g)
			if err := f.fold(&g, values.Draw(t, "v"), values.Draw(t, "by")); err == nil {
				continue
			}
			if after := f.result(&g); after != before {
				t.Fatalf("%s became %s", before, after)
			}
			if after := f.store(t, &g); !bytes.Equal(after, stored) {
				t.Fatalf("%x became %x", stored, after)
			}
		}
	})
}

// TestAggregate_failedMergeChangesNothing joins groups that cannot be one.
func TestAggregate_failedMergeChangesNothing(t *testing.T) {
	f := newFolder(aggregateMember{fn: aggCollect, limit: 9}, aggregateMember{fn: aggDistinct, limit: 3}, aggregateMember{fn: aggTop, limit: 9}, aggregateMember{fn: aggFirst})
	for name, values := range map[string][2][]value{
		"too many": {{intValue(1), intValue(2)}, {intValue(3), intValue(4)}},
		"no order": {{intValue(1)}, {stringValue("x")}},
	} {
		t.Run(name, func(t *testing.T) {
			var groups [2]group
			for i := range groups {
				for _, v := range values[i] {
					if err := f.fold(&groups[i], v, value{}); err != nil {
						t.Fatal(err)
					}
				}
			}
			want := []string{f.result(&groups[0]), f.result(&groups[1])}
			if err := f.merge(&groups[0], &groups[1]); err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff(want, []string{f.result(&groups[0]), f.result(&groups[1])}); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// FuzzState loads anything. What is accepted is stored as it was, makes a result, and
// takes further values.
func FuzzState(f *testing.F) {
	a := everyFolder()
	seed := func(values ...value) {
		var g group
		for _, v := range values {
			if err := a.fold(&g, v, v); err != nil {
				f.Fatal(err)
			}
		}
		f.Add(a.store(f, &g))
	}
	seed()
	seed(intValue(5), intValue(-7), floatValue(2.5))
	seed(intValue(5), floatValue(5), intValue(5))
	seed(value{}, floatValue(1e150), floatValue(-1e-300))
	f.Add([]byte{})
	f.Add([]byte{2, 0xf0, 13, 2, 3, 2, 3, 4})
	f.Fuzz(func(t *testing.T, data []byte) {
		var g group
		if err := a.decodeGroup(data, &g); err != nil {
			return
		}
		result := a.result(&g)
		if !json.Valid([]byte(result)) {
			t.Fatalf("%s", result)
		}
		again, back := a.store(t, &g), a.reload(t, g)
		if got := a.result(&back); got != result {
			t.Fatalf("%x became %x: %s instead of %s", data, again, got, result)
		}
		if third := a.store(t, &back); !bytes.Equal(third, again) {
			t.Fatalf("%x became %x", again, third)
		}
		_ = a.fold(&g, intValue(3), intValue(4))
		if result := a.result(&g); !json.Valid([]byte(result)) {
			t.Fatalf("%s", result)
		}
	})
}

// TestState_former loads what an aggregate of the first version stored.
func TestState_former(t *testing.T) {
	p := newPlayer(t, `
flow: f
partitions: 1
source: {stream: IN}
steps:
  - key: k
  - aggregate: {n: count(), c: count(v), i: count_if(v > 1), s: sum(v), lo: min(v), hi: max(v), a: avg(w), f: first(o), l: last(o)}
    id: agg
  - to: {stream: OUT, subject: out}
`)
	const stored = "\x03agg\x01\x01\x01x \x02\x10\x02 \x012\x02\x03B\rR\nd\x02\x04\x00\x00\x00\x00\x00\x00\xe0?v\x03[1]\x85\x01t"
	if err := p.tasks[0].Load([]byte(stored)); err != nil {
		t.Fatal(err)
	}
	p.tasks[0].Loaded()
	p.play(input{"in", 1, []byte(`{"k":"x"}`)})
	p.seal()
	want := []string{`OUT out {"key":"x","n":3,"c":2,"i":1,"s":-2,"lo":-7,"hi":5,"a":1.25,"f":[1],"l":"t"}`}
	if diff := cmp.Diff(want, p.out); diff != "" {
		t.Error(diff)
	}
}

// TestState_otherArguments changes the arguments of functions that are stored.
func TestState_otherArguments(t *testing.T) {
	store := func(m aggregateMember) []byte {
		t.Helper()
		f := newFolder(m)
		var g group
		for _, n := range []int64{1, 3, 2, 3} {
			if err := f.fold(&g, intValue(n), intValue(-n)); err != nil {
				t.Fatal(err)
			}
		}
		return f.store(t, &g)
	}
	by := &expression{}
	for _, tc := range []struct {
		before, after aggregateMember
		// want is the result after one more value, 9 by 9.
		want, wantErr string
	}{
		{aggregateMember{fn: aggCollect, limit: 9}, aggregateMember{fn: aggCollect, limit: 2}, "[1,3]", ""},
		{aggregateMember{fn: aggCollect, limit: 2}, aggregateMember{fn: aggCollect, limit: 9}, "[1,3,9]", ""},
		{aggregateMember{fn: aggTop, limit: 9}, aggregateMember{fn: aggTop, limit: 2}, "[9,3]", ""},
		{aggregateMember{fn: aggTop, limit: 2, by: by}, aggregateMember{fn: aggTop, limit: 3, by: by}, "[9,1,2]", ""},
		{aggregateMember{fn: aggTop, limit: 2, by: by}, aggregateMember{fn: aggTop, limit: 2}, "", "ordered by another expression"},
		{aggregateMember{fn: aggTop, limit: 2}, aggregateMember{fn: aggTop, limit: 2, by: by}, "", "ordered by another expression"},
		{aggregateMember{fn: aggTop, limit: 2}, aggregateMember{fn: aggBottom, limit: 2}, "", "what is stored is top where the step has bottom(v)"},
		{aggregateMember{fn: aggDistinct, limit: 9}, aggregateMember{fn: aggDistinct, limit: 2}, "", "more than 2 distinct values"},
		{aggregateMember{fn: aggDistinct, limit: 3}, aggregateMember{fn: aggDistinct, limit: 4}, "4", ""},
		{aggregateMember{fn: aggDistinct, limit: 3}, aggregateMember{fn: aggApproxDistinct}, "", "what is stored is distinct where the step has approx_distinct(v)"},
		{aggregateMember{fn: aggPercentile, percent: 1}, aggregateMember{fn: aggPercentile, percent: 100 * percentUnit}, "9", ""},
		{aggregateMember{fn: aggStddev}, aggregateMember{fn: aggVariancePop}, "7.840000000000001", ""},
		{aggregateMember{fn: aggSum}, aggregateMember{fn: aggStddev}, "", "what is stored is sum where the step has stddev(v)"},
		{aggregateMember{fn: aggStddev}, aggregateMember{fn: aggSum}, "", "what is stored is stddev where the step has sum(v)"},
	} {
		f := newFolder(tc.after)
		var g group
		err := f.decodeGroup(store(tc.before), &g)
		if err == nil {
			err = f.fold(&g, intValue(9), intValue(9))
		}
		switch {
		case tc.wantErr == "" && err == nil:
			if got := string(f.one(&g).appendJSON(nil)); got != tc.want {
				t.Errorf("%s to %s: %s, want %s", tc.before.String(), f.members[0].String(), got, tc.want)
			}
		case tc.wantErr == "" || err == nil || !strings.Contains(err.Error(), tc.wantErr):
			t.Errorf("%+v to %s: %v, want %s", tc.before, f.members[0].String(), err, tc.wantErr)
		}
		if err != nil && errors.Is(err, errGroup) && !strings.Contains(err.Error(), "give the changed step another id") {
			t.Errorf("%v: it does not say what to do", err)
		}
	}
}

const everyAggregateFlow = `
flow: every
partitions: 4
source: {stream: IN, time: {path: at, format: unix, lateness: 5m, max_ahead: 9999d}}
steps:
  - key: k
  - aggregate:
      n: count()
      total: sum(v)
      all: collect(v, 40)
      best: top(v, 3)
      names: 'top([at, v], 3, v)'
      worst: bottom(at, 2, v)
      kinds: distinct(v, 60)
      about: approx_distinct(v)
      p90: percentile(v, 90)
      spread: stddev(v)
%s
  - to: {stream: OUT, subject: "out.{key}"}
`

// TestAggregates_Replay plays records with crashes and stops in between: the results are
// those of a run without.
func TestAggregates_Replay(t *testing.T) {
	for name, window := range map[string]string{
		"none":     "",
		"commit":   "    emit: commit",
		"tumbling": "    window: {tumbling: 10m}",
		"sliding":  "    window: {sliding: {size: 30m, every: 7m}}",
		"session":  "    window: {session: {gap: 3m}}",
		"count":    "    window: {count: 25}",
		"update":   "    window: {session: {gap: 3m}}\n    emit: update",
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(5, 5))
			var chunks [][]flowtest.Record
			now := int64(1767322800)
			for range 60 {
				var chunk []flowtest.Record
				for range 10 {
					now += rng.Int64N(90)
					v := fmt.Sprint(rng.Int64N(40))
					switch rng.IntN(30) {
					case 0, 1, 2:
						v = fmt.Sprint(rng.NormFloat64())
					case 3:
						v = "null"
					case 4:
						v = `"text"`
					}
					chunk = append(chunk, flowtest.Record{Data: fmt.Sprintf(`{"k":"k%d","at":%d,"v":%s}`, rng.IntN(5), now-rng.Int64N(200), v)})
				}
				chunks = append(chunks, chunk)
			}
			s, err := Parse("flow.yaml", fmt.Appendf(nil, everyAggregateFlow, window))
			if err != nil {
				t.Fatal(err)
			}
			f, err := s.Build()
			if err != nil {
				t.Fatal(err)
			}
			run := func(disturb func(r *flowtest.Runner)) []flowtest.Result {
				r := flowtest.New(t, f)
				for i, chunk := range chunks {
					r.Push(chunk...)
					if i%3 == 2 {
						// emit: commit goes by them.
						r.Commit()
					}
					disturb(r)
				}
				r.Push(flowtest.Record{Data: `{"k":"end","at":1968322800}`})
				return append(r.Results("OUT"), r.DeadLetters()...)
			}
			calm := run(func(*flowtest.Runner) {})
			disturbed := run(func(r *flowtest.Runner) {
				switch rng.IntN(4) {
				case 0:
					r.Crash()
				case 1:
					r.Crash(rng.IntN(4))
				case 2:
					if name != "commit" {
						r.Drain()
					}
				}
			})
			byKey := func(a, b flowtest.Result) int {
				// Dead letters of different tasks have no order.
				return stdcmp.Or(strings.Compare(a.Subject, b.Subject), strings.Compare(a.Headers[flow.HeaderDeadSeq], b.Headers[flow.HeaderDeadSeq]))
			}
			slices.SortStableFunc(calm, byKey)
			slices.SortStableFunc(disturbed, byKey)
			if diff := cmp.Diff(calm, disturbed); diff != "" {
				t.Errorf("(-calm +disturbed):\n%.3000s", diff)
			}
			if len(calm) < 20 {
				t.Errorf("only %d results", len(calm))
			}
		})
	}
}
