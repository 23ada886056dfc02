package flowspec

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestPercentile_model compares with the sorted values.
func TestPercentile_model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(numbers(), 1, 60).Draw(t, "values")
		p := rapid.Uint32Range(0, 100*percentUnit).Draw(t, "p")
		var pairs []pair
		var sorted []float64
		for _, v := range values {
			pairs = append(pairs, pair{v: v})
			sorted = append(sorted, v.float())
		}
		slices.Sort(sorted)
		f := newFolder(aggregateMember{fn: aggPercentile, percent: percentage(p)})
		got := f.one(f.inSessions(t, pairs)).float()
		rank := (int(p)*len(sorted) + 100*percentUnit - 1) / (100 * percentUnit)
		want := sorted[max(rank, 1)-1]
		if off := math.Abs(got - want); off > math.Abs(want)/100 && off > 1e-300 {
			t.Fatalf("%v, want %v", got, want)
		}
	})
}

// TestPercentile_integers are exact below 128, and integers beyond.
func TestPercentile_integers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Int64Range(-127, 127), 1, 80).Draw(t, "values")
		p := rapid.Uint32Range(0, 100).Draw(t, "p")
		f := newFolder(aggregateMember{fn: aggPercentile, percent: percentage(p * percentUnit)})
		var g group
		for _, v := range values {
			if err := f.fold(&g, intValue(v), value{}); err != nil {
				t.Fatal(err)
			}
		}
		slices.Sort(values)
		want := intValue(values[max((int(p)*len(values)+99)/100, 1)-1])
		if got := f.one(&g); got != want {
			t.Fatalf("%+v, want %+v", got, want)
		}
	})
}

// TestBinOf checks the order of the bins and the accuracy at their bounds.
func TestBinOf(t *testing.T) {
	for _, f := range []float64{0x1p-1022, 1e-300, 0.1, 1, 1.5, 63.999, 64, 127, 128, 1e15, math.MaxFloat64} {
		key := binOf(f)
		h := histogram{kind: kindFloat}
		if off := math.Abs(h.middle(key)-f) / f; off >= 0.01 {
			t.Errorf("%v: the middle of its bin is %v", f, h.middle(key))
		}
		if binOf(-f) != -key || h.middle(-key) != -h.middle(key) {
			t.Errorf("%v and %v have the bins %d and %d", f, -f, key, binOf(-f))
		}
		if below := binOf(math.Nextafter(f, 0)); below > key || key > maxBin {
			t.Errorf("%v is in the bin %d, what is below it in %d", f, key, below)
		}
	}
	for _, f := range []float64{0, math.Copysign(0, -1), math.SmallestNonzeroFloat64, 0x1p-1023} {
		if binOf(f) != 0 || binOf(-f) != 0 {
			t.Errorf("%v is not in the bin of zero", f)
		}
	}
	if binOf(math.MaxFloat64) != maxBin {
		t.Errorf("the last bin is %d, not %d", binOf(math.MaxFloat64), maxBin)
	}
}

func TestParsePercentage(t *testing.T) {
	for _, c := range []struct {
		text string
		want percentage
		back string
	}{
		{"0", 0, "0"},
		{"100", 1_000_000, "100"},
		{"99.9", 999_000, "99.9"},
		{"099.90", 999_000, "99.9"},
		{"0.0001", 1, "0.0001"},
		{"50.0", 500_000, "50"},
		{"100.0001", 0, ""},
		{"101", 0, ""},
		{"1000", 0, ""},
		{"1e1", 0, ""},
		{"-1", 0, ""},
		{".5", 0, ""},
		{"5.", 0, ""},
		{"", 0, ""},
		{"0.00001", 0, ""},
		{"x", 0, ""},
	} {
		if got, back := parsePercentage(c.text); got != c.want || back != c.back {
			t.Errorf("%q: %d %q, want %d %q", c.text, got, back, c.want, c.back)
		}
	}
}

// TestPercentage_rank is exact where floats are not.
func TestPercentage_rank(t *testing.T) {
	for _, c := range []struct {
		p       percentage
		n, want uint64
	}{
		{999_000, 1000, 999},
		{999_000, 1001, 1000},
		{0, 5, 1},
		{1_000_000, 5, 5},
		{500_000, 4, 2},
		{500_000, 5, 3},
		{290_000, 100, 29},
		{1_000_000, math.MaxUint64, math.MaxUint64},
	} {
		if got := c.p.rank(c.n); got != c.want {
			t.Errorf("%d of %d: %d, want %d", c.p, c.n, got, c.want)
		}
	}
}
