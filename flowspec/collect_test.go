package flowspec

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// anyValues are values of all types that are not null.
func anyValues() *rapid.Generator[value] {
	return rapid.OneOf(numbers(), rapid.Map(rapid.StringN(0, 5, -1), stringValue), rapid.Map(rapid.Bool(), boolValue),
		rapid.Map(rapid.SampledFrom([]string{`[]`, `{"a": [1]}`, `[1,2]`}), func(s string) value { return value{kind: kindJSON, str: s} }))
}

func TestCollect_model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 12).Draw(t, "limit")
		values := rapid.SliceOfN(anyValues(), 1, 30).Draw(t, "values")
		var pairs []pair
		for _, v := range values {
			pairs = append(pairs, pair{v: v}, pair{})
		}
		f := newFolder(aggregateMember{fn: aggCollect, limit: limit})
		got := f.one(f.inSessions(t, pairs)).str
		want := string(appendArray(nil, values[:min(limit, len(values))]))
		if got != want {
			t.Fatalf("%s, want %s", got, want)
		}
	})
}

func TestTop_model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 8).Draw(t, "limit")
		ranks := rapid.SliceOfN(rapid.OneOf(numbers(), rapid.Just(value{})), 1, 30).Draw(t, "ranks")
		if rapid.Bool().Draw(t, "texts") {
			ranks = rapid.SliceOfN(rapid.Map(rapid.StringOfN(rapid.RuneFrom([]rune("ab")), 0, 3, -1), stringValue), 1, 30).Draw(t, "ranks")
		}
		bottom, by := rapid.Bool().Draw(t, "bottom"), rapid.Bool().Draw(t, "by")
		m := aggregateMember{fn: aggTop, limit: limit}
		if bottom {
			m.fn = aggBottom
		}
		if by {
			m.by = &expression{}
		}
		var pairs []pair
		for i, rank := range ranks {
			if by {
				pairs = append(pairs, pair{stringValue(fmt.Sprint("number ", i)), rank})
			} else {
				pairs = append(pairs, pair{v: rank})
			}
		}
		f := newFolder(m)
		got := f.one(f.inSessions(t, pairs)).str
		if want := naiveTop(pairs, bottom, by, limit); got != want {
			t.Fatalf("%s, want %s", got, want)
		}
	})
}

// naiveTop sorts all values.
func naiveTop(pairs []pair, bottom, by bool, limit int) string {
	rank := func(p pair) value {
		if by {
			return p.by
		}
		return p.v
	}
	pairs = slices.DeleteFunc(slices.Clone(pairs), func(p pair) bool { return rank(p).isNull() })
	slices.SortStableFunc(pairs, func(a, b pair) int {
		order, err := compareScalars(rank(a), rank(b))
		if err != nil {
			panic(err)
		}
		if bottom {
			return order
		}
		return -order
	})
	values := []value{}
	for _, p := range pairs[:min(limit, len(pairs))] {
		values = append(values, p.v)
	}
	return string(appendArray(nil, values))
}

// TestCollect_copies checks that what is kept does not point into a payload.
func TestCollect_copies(t *testing.T) {
	p := newPlayer(t, `
flow: f
partitions: 1
source: {stream: IN}
steps:
  - key: k
  - aggregate: {all: 'collect(v, 9)', best: 'top(v, 9)', names: 'top(w, 9, v)', n: distinct(v)}
  - to: {stream: OUT, subject: "out.{key}"}
`)
	data := []byte(`{"k":"key","v":"value","w":{"x":1}}`)
	p.play(input{"in", 1, data})
	clear(data)
	p.play(input{"in", 1, []byte(`{"k":"key","v":"value","w":2}`)})
	p.seal()
	want := `OUT out.key {"key":"key","all":["value","value"],"best":["value","value"],"names":[{"x":1},2],"n":1}`
	if diff := cmp.Diff(want, p.out[1]); diff != "" {
		t.Error(diff)
	}
}
