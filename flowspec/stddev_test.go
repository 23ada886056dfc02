package flowspec

import (
	"math"
	"math/big"
	"testing"

	"pgregory.net/rapid"
)

// TestStddev_model compares with the definition, computed without rounding.
func TestStddev_model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		offset := rapid.SampledFrom([]float64{0, 1e6, -1e9}).Draw(t, "offset")
		values := rapid.SliceOfN(rapid.Map(rapid.Float64Range(-1000, 1000), func(f float64) float64 { return offset + math.Round(f*8)/8 }), 2, 50).Draw(t, "values")
		var pairs []pair
		for _, f := range values {
			pairs = append(pairs, pair{v: floatValue(f)})
		}
		f := newFolder(aggregateMember{fn: aggVariance}, aggregateMember{fn: aggVariancePop}, aggregateMember{fn: aggStddev}, aggregateMember{fn: aggStddevPop})
		g := f.inSessions(t, pairs)
		squares, _ := exactSquares(values).Float64()
		n := float64(len(values))
		for i, want := range []float64{squares / (n - 1), squares / n, math.Sqrt(squares / (n - 1)), math.Sqrt(squares / n)} {
			got := f.members[i].value(g).float()
			// The mean itself is off by the last bits of the offset.
			if math.Abs(got-want) > 1e-9*want+1e-9*math.Abs(offset)/1e3 {
				t.Errorf("%v: %v, want %v", f.members[i].fn, got, want)
			}
		}
	})
}

func exactSquares(values []float64) *big.Rat {
	sum := new(big.Rat)
	for _, v := range values {
		sum.Add(sum, new(big.Rat).SetFloat64(v))
	}
	mean := sum.Quo(sum, big.NewRat(int64(len(values)), 1))
	squares := new(big.Rat)
	for _, v := range values {
		d := new(big.Rat).Sub(new(big.Rat).SetFloat64(v), mean)
		squares.Add(squares, d.Mul(d, d))
	}
	return squares
}
