package flow_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

func TestInspect(t *testing.T) {
	b := newFlow()
	var seen []string
	look := func(m *flow.Meta, v string) {
		if v == "k panic" && m.Key != "" {
			panic("did not like it")
		}
		seen = append(seen, m.Key+":"+v)
	}
	textTo(flow.Inspect(flow.KeyBy(flow.Inspect(text(b), look), firstWord), look, flow.ID("look")))
	r := run(t, b)
	r.feed("k a", "k panic", "k b")
	got := r.seal()
	if len(got) != 3 || got[1].Headers[flow.HeaderDeadStep] != "look" {
		t.Fatalf("outputs %+v", got)
	}
	diffOutputs(t, []published{got[0], got[2]}, out("k", "k a"), out("k", "k b"))
	if diff := cmp.Diff([]string{":k a", "k:k a", ":k panic", ":k b", "k:k b"}, seen); diff != "" {
		t.Errorf("seen (-want +got):\n%s", diff)
	}
}
