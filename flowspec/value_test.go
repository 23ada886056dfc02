package flowspec

import (
	"encoding/json"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestAppendFloat(t *testing.T) {
	check := func(f float64) {
		t.Helper()
		want, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		if f == 0 {
			want = []byte("0")
		}
		if got := string(appendFloat(nil, f)); got != string(want) {
			t.Errorf("%g: %s, want %s", f, got, want)
		}
	}
	for _, f := range []float64{
		0, math.Copysign(0, -1), 1, -1, 0.1, 8.1, 1e20, 1e21, 1e-6, 9.99e-7, 1e-9, 1e-10, 5e-324,
		math.MaxFloat64, 123456789.125, 1 << 53, 100,
	} {
		check(f)
		check(-f)
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		if f := math.Float64frombits(rng.Uint64()); !math.IsNaN(f) && !math.IsInf(f, 0) {
			check(f)
		}
	}
}

func TestParseNumber(t *testing.T) {
	for _, c := range []struct {
		raw  string
		kind kind
		text string
	}{
		{"0", kindInt, "0"},
		{"-0", kindInt, "0"},
		{"-12", kindInt, "-12"},
		{"999999999999999999", kindInt, "999999999999999999"},
		{"9223372036854775807", kindInt, "9223372036854775807"},
		{"-9223372036854775808", kindInt, "-9223372036854775808"},
		{"9223372036854775808", kindUint, "9223372036854775808"},
		{"18446744073709551615", kindUint, "18446744073709551615"},
		{"18446744073709551616", kindFloat, "18446744073709552000"},
		{"1.0", kindFloat, "1"},
		{"1e2", kindFloat, "100"},
		{"1E400", 0, "error"},
	} {
		v, err := parseNumber(c.raw)
		got := v.text()
		if err != nil {
			got = "error"
		}
		if v.kind != c.kind || got != c.text {
			t.Errorf("%s: %v %s, want %v %s", c.raw, v.kind, got, c.kind, c.text)
		}
	}
}

// TestCompareNumbers judges by arithmetic of unbounded precision.
func TestCompareNumbers(t *testing.T) {
	exact := func(v value) *big.Float {
		switch v.kind {
		case kindInt:
			return new(big.Float).SetInt64(v.int())
		case kindUint:
			return new(big.Float).SetUint64(v.bits)
		}
		return new(big.Float).SetFloat64(v.float())
	}
	values := []value{
		intValue(0), intValue(1), intValue(-1), intValue(math.MaxInt64), intValue(math.MinInt64), intValue(1 << 53), intValue(1<<53 + 1),
		uintValue(1 << 63), uintValue(math.MaxUint64), uintValue(math.MaxUint64 - 1),
		floatValue(0.5), floatValue(-0.5), floatValue(1 << 53), floatValue(1 << 63), floatValue(-(1 << 63)), floatValue(1e19),
		floatValue(1 << 63 * 2.0), floatValue(1e300), floatValue(-1e300), floatValue(math.Nextafter(1<<63, 0)), floatValue(0),
	}
	for _, a := range values {
		for _, b := range values {
			if got, want := compareNumbers(a, b), exact(a).Cmp(exact(b)); got != want {
				t.Errorf("%s and %s: %d, want %d", a.text(), b.text(), got, want)
			}
		}
	}
}

func FuzzString(f *testing.F) {
	for _, s := range []string{"", "plain", "a\"b\\c\n\r\t\x00\x1f", "é\u2028", "\xff\xfe", "😀"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var back string
		if err := json.Unmarshal(appendString(nil, s), &back); err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		if want := strings.ToValidUTF8(s, "\uFFFD"); utf8.ValidString(s) && back != want {
			t.Errorf("%q became %q", s, back)
		}
	})
}

func TestParseDuration(t *testing.T) {
	for _, c := range []struct {
		text, want string
	}{
		{"100ms", "100ms"},
		{"1h30m", "1h30m"},
		{"1.5h", "1h30m"},
		{"30d", "30d"},
		{"1d12h", "36h"},
		{"24h", "1d"},
		{"90s", "1m30s"},
		{"500us", "500µs"},
		{"0s", "0s"},
		{"", "error"},
		{"5", "error"},
		{"h", "error"},
		{"1 h", "error"},
		{"-1h", "error"},
		{"1h1", "error"},
		{"1.1.1h", "error"},
		{"1w", "error"},
		{"200000d", "error"},
		{"1e3s", "error"},
	} {
		d, err := parseDuration(c.text)
		got := formatDuration(d)
		if err != nil {
			got = "error"
		}
		if got != c.want {
			t.Errorf("%q: %s (%v), want %s", c.text, got, err, c.want)
		}
	}
	if d, err := parseDuration("1h0.5s"); err != nil || d != time.Hour+500*time.Millisecond {
		t.Errorf("%v, %v", d, err)
	}
}

func TestOverlap(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"a.b", "a.b", true},
		{"a.b", "a.c", false},
		{"a.*", "a.b", true},
		{"a.>", "a.b.c", true},
		{"a.>", "a", false},
		{">", "x", true},
		{"*.b", "a.*", true},
		{"a", "a.b", false},
	} {
		if overlap(c.a, c.b) != c.want || overlap(c.b, c.a) != c.want {
			t.Errorf("%s and %s: want %v", c.a, c.b, c.want)
		}
	}
}
