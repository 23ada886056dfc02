package flowspec

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// TestDistinct_model counts the values by comparing each with each.
func TestDistinct_model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.OneOf(anyValues(), rapid.Map(rapid.Int64Range(0, 60), func(i int64) value {
			if i%2 == 0 {
				return floatValue(float64(i))
			}
			return intValue(i)
		})), 1, 60).Draw(t, "values")
		var pairs []pair
		var different []value
		for _, v := range values {
			pairs = append(pairs, pair{v: v})
			known := false
			for _, have := range different {
				known = known || same(v, have)
			}
			if !known {
				different = append(different, v)
			}
		}
		f := newFolder(aggregateMember{fn: aggDistinct, limit: len(different)}, aggregateMember{fn: aggApproxDistinct})
		g := f.inSessions(t, pairs)
		want := fmt.Sprintf(`{"key":"k","m0":%d,"m1":%d}`, len(different), len(different))
		if got := f.result(g); got != want {
			t.Fatalf("%s, want %s", got, want)
		}
		if err := f.fold(g, stringValue("a new one, too long to be there"), value{}); err == nil {
			t.Fatalf("no error at %d values", len(different)+1)
		}
		if got := f.result(g); got != want {
			t.Fatalf("%s after an error, want %s", got, want)
		}
	})
}

func TestDistinct_limit(t *testing.T) {
	f := newFolder(aggregateMember{fn: aggDistinct, limit: defaultDistinct})
	var g group
	for i := range int64(defaultDistinct) {
		for range 2 {
			if err := f.fold(&g, intValue(i), value{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	err := f.fold(&g, intValue(-1), value{})
	const want = "m0: distinct(v): there are more than 10000 distinct values: use approx_distinct, or a higher limit as the second argument"
	if err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	g = f.reload(t, g)
	if got := f.one(&g); got != intValue(defaultDistinct) {
		t.Errorf("%+v", got)
	}
}

func TestAppendIdentity(t *testing.T) {
	groups := [][]value{
		{intValue(0), floatValue(0), floatValue(math.Copysign(0, -1))},
		{intValue(1), floatValue(1)},
		{stringValue("1")},
		{boolValue(true)},
		{boolValue(false)},
		{stringValue("true")},
		{stringValue("")},
		{floatValue(0.5)},
		{uintValue(1 << 63), floatValue(1 << 63)},
		{intValue(math.MinInt64), floatValue(math.MinInt64)},
		{floatValue(1 << 63 * 2)},
		{{kind: kindJSON, str: `[1]`}, {kind: kindJSON, str: `[ 1.0 ]`}},
		{{kind: kindJSON, str: `["1"]`}},
		{stringValue("[1]")},
		{{kind: kindJSON, str: `{"a":1,"b":[null,"x"]}`}, {kind: kindJSON, str: `{"b" : [null,"\u0078"], "a":1e0, "a":2}`}},
		{{kind: kindJSON, str: `{"a":1,"b":[null,"y"]}`}},
		{{kind: kindJSON, str: `[1e999]`}},
		{{kind: kindJSON, str: `[]`}},
		{{kind: kindJSON, str: `{}`}},
	}
	owner := map[string]int{}
	for i, values := range groups {
		for _, v := range values {
			id := string(appendIdentity(nil, v))
			if other, ok := owner[id]; ok && other != i {
				t.Errorf("%+v has the identity of %+v", v, groups[other][0])
			}
			owner[id] = i
		}
	}
	if len(owner) != len(groups) {
		t.Errorf("%d identities for %d values", len(owner), len(groups))
	}
}

// TestApproxDistinct checks the accuracy, and that the result is that of the set of values:
// neither results in between, nor storing and loading, nor joining change it.
func TestApproxDistinct(t *testing.T) {
	for _, n := range []int{10, 1000, 5000, 20_000, 200_000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(uint64(n), 1))
			f := newFolder(aggregateMember{fn: aggApproxDistinct})
			var calm group
			parts := make([]group, 3)
			for i := range n + n/2 {
				v := stringValue(fmt.Sprintf("user-%d", i%n))
				part := rng.IntN(len(parts))
				for _, g := range []*group{&calm, &parts[part]} {
					if err := f.fold(g, v, value{}); err != nil {
						t.Fatal(err)
					}
				}
				switch rng.IntN(max(n/40, 2)) {
				case 0:
					parts[part] = f.reload(t, parts[part])
				case 1:
					f.one(&parts[part])
				}
			}
			for i := range parts {
				if err := f.merge(&parts[0], &parts[i]); err != nil {
					t.Fatal(err)
				}
			}
			got := f.one(&calm)
			most := 0.02
			if n <= 5000 {
				most = 0.001
			}
			if off := math.Abs(got.float()-float64(n)) / float64(n); off > most {
				t.Errorf("%d is off by %.2f%%", got.int(), 100*off)
			}
			if joined := f.one(&parts[0]); joined != got {
				t.Errorf("%d after merging, %d without", joined.int(), got.int())
			}
			back := f.reload(t, calm)
			if stored := f.one(&back); stored != got {
				t.Errorf("%d after loading, %d before", stored.int(), got.int())
			}
		})
	}
}
