package flowspec

import (
	"strings"
	"testing"
)

// A TTL is a part of the definition, and the plan says what it does.
func TestTTL_Plan(t *testing.T) {
	const yaml = "flow: f\nsource: {stream: IN}\nsteps:\n  - key: k\n  - aggregate: {n: count()}\n    id: total\n    ttl: 30d\n  - to: {stream: OUT, subject: out}\n"
	parse := func(src string) *Spec {
		t.Helper()
		s, err := Parse("flow.yaml", []byte(src))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	hash := func(src string) string {
		t.Helper()
		f, err := parse(src).Build()
		if err != nil {
			t.Fatal(err)
		}
		return f.Hash()
	}
	if hash(yaml) == hash(strings.Replace(yaml, "30d", "31d", 1)) || hash(yaml) == hash(strings.Replace(yaml, "    ttl: 30d\n", "", 1)) {
		t.Error("another TTL gives the same hash")
	}
	plan := parse(yaml).Plan().String()
	for _, want := range []string{"n = count(); ttl: 30d", "one entry for each key (k), kept for 30d after its last record"} {
		if !strings.Contains(plan, want) {
			t.Errorf("no %q in\n%s", want, plan)
		}
	}
}
