package flow_test

import (
	"errors"
	"strings"
	"testing"

	"natsflow/flow"
)

func TestFilter(t *testing.T) {
	keep := func(_ *flow.Meta, v string) (bool, error) {
		if v == "k bad" {
			return true, errors.New("is bad")
		}
		return strings.Contains(v, "o"), nil
	}
	want := []published{out("k", "k one"), dead("keep", "is bad", 3, "k bad"), out("k", "k two")}
	payloads := []string{"k one", "k six", "k bad", "k two"}
	t.Run("before the key", func(t *testing.T) {
		b := newFlow()
		textTo(flow.KeyBy(flow.Filter(text(b), keep, flow.ID("keep")), firstWord))
		run(t, b).want(payloads, want...)
	})
	t.Run("after the key", func(t *testing.T) {
		b := newFlow()
		textTo(flow.Filter(keyed(b), keep, flow.ID("keep")))
		run(t, b).want(payloads, want...)
	})
	t.Run("nothing is left", func(t *testing.T) {
		b := newFlow()
		textTo(flow.Filter(keyed(b), func(*flow.Meta, string) (bool, error) { return false, nil }))
		r := run(t, b)
		r.want(payloads)
		if r.sealed.Records != 4 || r.sealed.Delta != nil {
			t.Errorf("sealed %+v, want 4 records and no state", r.sealed)
		}
	})
}
