package flow_test

import (
	"testing"

	"natsflow/flow"
)

func TestMerge_Sources(t *testing.T) {
	for _, when := range []string{"before the key", "after the key"} {
		t.Run(when, func(t *testing.T) {
			b := newFlow()
			one := text(b)
			two := flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText(), flow.ID("in2"))
			var s flow.Stream[string]
			if when == "before the key" {
				s = flow.KeyBy(flow.Merge(one, two), firstWord)
			} else {
				s = flow.Merge(flow.KeyBy(one, firstWord), flow.KeyBy(two, firstWord))
			}
			// What follows is there once: both streams count into one state.
			textTo(flow.Stateful(s, "count", decimalState, countText))
			r := run(t, b)
			for _, stream := range []string{"IN", "IN2", "IN"} {
				if err := r.play(record{stream: stream, data: "k x"}); err != nil {
					t.Fatal(err)
				}
			}
			diffOutputs(t, r.seal(), out("k", "1 IN"), out("k", "2 IN2"), out("k", "3 IN"))
		})
	}
}

// A value that comes to a merge along two ways passes once along each.
func TestMerge_Diamond(t *testing.T) {
	b := newFlow()
	s := keyed(b)
	add := func(text string) func(*flow.Meta, string) (string, error) {
		return func(_ *flow.Meta, v string) (string, error) { return v + text, nil }
	}
	textTo(flow.Merge(flow.Map(s, add("1")), flow.Map(s, add("2")), s))
	run(t, b).want([]string{"k a", "k b"},
		out("k", "k a1"), out("k", "k a2"), out("k", "k a"), out("k", "k b1"), out("k", "k b2"), out("k", "k b"))
}
