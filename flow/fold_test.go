package flow_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

var textState = flow.StateCodec[string]{
	Version: 2,
	Append:  func(dst []byte, s *string) ([]byte, error) { return append(dst, *s...), nil },
	Decode:  func(data []byte, s *string) error { *s = string(data); return nil },
	Migrate: func(version int, data []byte, s *string) error {
		if version != 1 {
			return fmt.Errorf("no version %d", version)
		}
		*s = "old " + string(data)
		return nil
	},
}

var errNotCombined = errors.New("not combined")

// joinWords combines two texts in their order; "bad" cannot be combined.
func joinWords(a, b string) (string, error) {
	if b == "bad" {
		return "", errNotCombined
	}
	return a + "," + b, nil
}

func secondWord(s flow.Stream[string]) flow.Stream[string] {
	return flow.Map(s, func(_ *flow.Meta, v string) (string, error) {
		_, word, _ := strings.Cut(v, " ")
		return word, nil
	})
}

func TestReduce_Aggregate(t *testing.T) {
	b := newFlow()
	textTo(flow.Aggregate(secondWord(keyed(b)), "all", flow.Reduce(textState, joinWords).Whole()))
	r := run(t, b)
	r.want([]string{"a 1", "b 2", "a 3"}, out("a", "1"), out("b", "2"), out("a", "1,3"))
	r.crash()
	// An error changes nothing. The first record is not combined with anything.
	r.want([]string{"a bad", "a 4", "c bad", "c 5"},
		dead("all", "not combined", 4, "a bad"), out("a", "1,3,4"), out("c", "bad"), out("c", "bad,5"))
	r.crash()
	r.want([]string{"a 6"}, out("a", "1,3,4,6"))
}

// TestReduce_Migrate loads what a former version stored.
func TestReduce_Migrate(t *testing.T) {
	aggregate := func(codec flow.StateCodec[string]) *flow.Flow {
		b := newFlow()
		textTo(flow.Aggregate(secondWord(keyed(b)), "all", flow.Reduce(codec, joinWords).Whole()))
		return build(t, b)
	}
	former := textState
	former.Version = 1
	r := start(t, aggregate(former))
	r.want([]string{"a 1"}, out("a", "1"))
	next := start(t, aggregate(textState))
	if err := next.tasks[0].Load(r.sealed.Delta); err != nil {
		t.Fatal(err)
	}
	next.tasks[0].Loaded()
	next.want([]string{"a 2"}, out("a", "old 1,2"))
	for _, damaged := range []string{"", "\x02x", "\x00x"} {
		delta := fmt.Sprintf("\x03all\x02\x01\x01a%c%s", rune(len(damaged)+1), damaged)
		if err := start(t, aggregate(textState)).tasks[0].Load([]byte(delta)); !errors.Is(err, flow.ErrState) {
			t.Errorf("%q: %v", damaged, err)
		}
	}
}

// TestReduce_Panic: a key of which the only record panicked is stored, and loaded, without
// a value.
func TestReduce_Panic(t *testing.T) {
	b := newFlow()
	a := flow.Reduce(textState, joinWords)
	add := a.Add
	a.Add = func(m *flow.Meta, s *flow.Reduced[string], v string) error {
		if v == "panic" {
			panic("as told")
		}
		return add(m, s, v)
	}
	textTo(flow.Aggregate(secondWord(keyed(b)), "all", a.Whole()))
	r := run(t, b)
	r.feed("a panic")
	if got := r.seal(); len(got) != 1 || got[0].Headers[flow.HeaderDeadStep] != "all" {
		t.Fatalf("outputs %+v", got)
	}
	r.crash()
	r.want([]string{"a 2", "a 3"}, out("a", "2"), out("a", "2,3"))
}

// TestFold_Sessions folds random clicks into sessions that are joined, with stops and crashes:
// each session has the records that a sort finds in it.
func TestFold_Sessions(t *testing.T) {
	const gap = 10
	add := func(_ *flow.Meta, s *[]int, v string) error {
		n, err := strconv.Atoi(v)
		*s = append(*s, n)
		return err
	}
	merge := func(into, from *[]int) error { *into = append(*into, *from...); return nil }
	lowest := func(a, b string) (string, error) {
		x, err := strconv.Atoi(a)
		y, err2 := strconv.Atoi(b)
		return strconv.Itoa(min(x, y)), errors.Join(err, err2)
	}
	rapid.Check(t, func(t *rapid.T) {
		b := newFlow()
		src := flow.From(b, flow.Source{Stream: "IN", Time: flow.EventTime[string]{
			Of: func(_ *flow.Meta, v string) (time.Time, error) {
				n, err := strconv.Atoi(v)
				return flowtest.Start.Add(time.Duration(n) * time.Second), err
			},
			Lateness: time.Hour,
		}}, flow.DecodeText())
		all := flow.KeyBy(src, func(*flow.Meta, string) (string, error) { return "k", nil })
		sessions, _ := flow.Window(all, "sessions", flow.Sessions(gap*time.Second, 0), flow.Fold(flow.JSONState[[]int](1, nil), add, merge))
		textTo(flow.Map(sessions, func(_ *flow.Meta, s []int) (string, error) {
			s = slices.Clone(s)
			slices.Sort(s)
			return fmt.Sprint(s), nil
		}))
		lows, _ := flow.Window(all, "lows", flow.Sessions(gap*time.Second, 0), flow.Reduce(textState, lowest))
		flow.To(lows, flow.Sink[string]{Stream: "LOWS", Subjects: []string{"lows"}, Subject: func(dst []byte, _ *flow.Meta, _ string) ([]byte, error) { return append(dst, "lows"...), nil }, Encode: flow.EncodeText()})

		at := rapid.SliceOfN(rapid.IntRange(0, 200), 1, 30).Draw(t, "at")
		r := flowtest.New(t, build(t, b))
		for _, n := range at {
			r.Push(flowtest.Record{Data: strconv.Itoa(n)})
			switch rapid.IntRange(0, 5).Draw(t, "then") {
			case 0:
				r.Crash()
			case 1:
				r.Commit()
			case 2:
				r.Drain()
			}
		}
		r.Push(flowtest.Record{Data: "9000"})
		slices.Sort(at)
		var want, wantLows []string
		for begin := 0; begin < len(at); {
			end := begin + 1
			for end < len(at) && at[end]-at[end-1] < gap {
				end++
			}
			want = append(want, fmt.Sprint(at[begin:end]))
			wantLows = append(wantLows, strconv.Itoa(at[begin]))
			begin = end
		}
		if diff := cmp.Diff(want, r.Data("OUT")); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(wantLows, r.Data("LOWS")); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}

// TestFold_Commit: the aggregator over all records of a key can emit with the commit.
func TestFold_Commit(t *testing.T) {
	b := newFlow()
	sum := flow.Fold(decimalState, func(_ *flow.Meta, n *int64, v string) error { *n += int64(len(v)); return nil }, nil).Whole()
	sum.Emit = flow.EmitCommit
	textTo(flow.Map(flow.Aggregate(secondWord(keyed(b)), "sum", sum), func(_ *flow.Meta, n int64) (string, error) { return strconv.FormatInt(n, 10), nil }))
	r := run(t, b)
	r.want([]string{"a x", "a xx", "b y"}, out("a", "3"), out("b", "1"))
	r.crash()
	r.want([]string{"a x"}, out("a", "4"))
}

func TestFold_Errors(t *testing.T) {
	hour := flow.Tumbling(time.Hour)
	for name, test := range map[string]mistake{
		"fold without add": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Window(s, "x", hour, flow.Fold[string](decimalState, nil, nil))
		}, `step "x": there is no Add`},
		"whole fold without add": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Aggregate(s, "x", flow.Fold[string](decimalState, nil, nil).Whole())
		}, `step "x": there is no Add`},
		"reduce without combine": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Window(s, "x", hour, flow.Reduce(textState, nil))
		}, `step "x": there is no Add`},
		"reduce without codec": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Window(s, "x", hour, flow.Reduce(flow.StateCodec[string]{}, joinWords))
		}, `step "x": there is no state codec`},
		"fold of sessions without merge": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Window(s, "x", flow.Sessions(time.Hour, 0), flow.Fold(decimalState, func(*flow.Meta, *int64, string) error { return nil }, nil))
		}, `step "x": there is no Merge`},
		"whole without result": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Aggregate(s, "x", flow.WindowAggregator[string, int64, string]{State: decimalState, Add: func(*flow.Meta, *int64, string) error { return nil }}.Whole())
		}, `step "x": there is no Result`},
	} {
		t.Run(name, test.check)
	}
}
