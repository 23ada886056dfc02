package flow

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// naiveMatch goes token by token.
func naiveMatch(pattern, subject []string) bool {
	for i, p := range pattern {
		if p == ">" {
			return len(subject) > i
		}
		if i >= len(subject) || p != "*" && p != subject[i] {
			return false
		}
	}
	return len(pattern) == len(subject)
}

func naiveSubject(s string) bool {
	for _, token := range strings.Split(s, ".") {
		if token == "" || token == "*" || token == ">" || strings.ContainsAny(token, " \t\n\x00\x7f") {
			return false
		}
	}
	return len(s) <= maxSubject
}

func TestMatches(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		token := rapid.SampledFrom([]string{"a", "b", "ab", "a*", "*a", ">a", "a>"})
		pattern := rapid.SliceOfN(rapid.OneOf(token, rapid.Just("*")), 1, 4).Draw(t, "pattern")
		if rapid.Bool().Draw(t, "tail") {
			pattern = append(pattern, ">")
		}
		subject := rapid.SliceOfN(token, 1, 5).Draw(t, "subject")
		p, s := strings.Join(pattern, "."), strings.Join(subject, ".")
		want := naiveMatch(pattern, subject)
		if got := matches(p, []byte(s)); got != want {
			t.Fatalf("matches(%q, %q) = %v", p, s, got)
		}
		if !validPattern(p) {
			t.Fatalf("%q is not a pattern", p)
		}
		// The short way for one pattern with a token at its end is the same.
		if err := checkStreamSubject([]string{p})([]byte(s)); (err == nil) != want {
			t.Fatalf("pattern %q: subject %q: %v", p, s, err)
		}
	})
}

func TestCheckSubject(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.StringOfN(rapid.RuneFrom([]rune("ab.*> \t\n\x00\x7fä")), 0, 8, -1).Draw(t, "subject")
		s += strings.Repeat("x", rapid.SampledFrom([]int{0, 0, 2040, 2048, 2049}).Draw(t, "more"))
		want := naiveSubject(s)
		if err := checkSubject([]byte(s)); (err == nil) != want {
			t.Fatalf("checkSubject(%q) = %v", s, err)
		}
		if err := checkStreamSubject([]string{">"})([]byte(s)); (err == nil) != want {
			t.Fatalf("%q for all subjects: %v", s, err)
		}
		whole := "out." + s
		want = naiveSubject(whole) && !strings.Contains(s, ".")
		if err := checkStreamSubject([]string{"out.*"})([]byte(whole)); (err == nil) != want {
			t.Fatalf("%q for out.*: %v", whole, err)
		}
	})
}

func TestValidNames(t *testing.T) {
	for name, want := range map[string][2]bool{
		"ORDERS": {true, true}, "a-b_C9": {true, true}, "a$": {true, false},
		"": {}, "a b": {}, "a.b": {}, "a*": {}, ">": {}, "a/b": {}, `a\b`: {}, "a\n": {},
	} {
		if got := [2]bool{validStream(name), validBucket(name)}; got != want {
			t.Errorf("%q: stream, bucket %v, want %v", name, got, want)
		}
	}
	for pattern, want := range map[string]bool{
		"a": true, "*": true, ">": true, "a.*.b.>": true, "": false, "a..b": false, "a.>.b": false, ".a": false, "a b": false,
	} {
		if got := validPattern(pattern); got != want {
			t.Errorf("pattern %q: %v", pattern, got)
		}
	}
}
