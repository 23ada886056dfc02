package flow_test

import (
	"errors"
	"strings"
	"testing"

	"natsflow/flow"
)

func TestBranch(t *testing.T) {
	long := func(_ *flow.Meta, v string) (bool, error) {
		if v == "k bad" {
			return false, errors.New("is bad")
		}
		return len(v) > 6, nil
	}
	mark := func(text string) func(*flow.Meta, string) (string, error) {
		return func(_ *flow.Meta, v string) (string, error) { return v + text, nil }
	}
	payloads := []string{"k longer", "k s", "k bad", "k longest"}
	t.Run("one side goes nowhere", func(t *testing.T) {
		b := newFlow()
		_, no := flow.Branch(keyed(b), long, flow.ID("long"))
		textTo(no)
		run(t, b).want(payloads, out("k", "k s"), dead("long", "is bad", 3, "k bad"))
	})
	t.Run("before the key", func(t *testing.T) {
		b := newFlow()
		yes, no := flow.Branch(text(b), long, flow.ID("long"))
		textTo(flow.KeyBy(flow.Merge(flow.Map(yes, mark("+")), flow.Map(no, mark("-"))), firstWord, flow.ID("key")))
		run(t, b).want(payloads,
			out("k", "k longer+"), out("k", "k s-"), dead("long", "is bad", 3, "k bad"), out("k", "k longest+"))
	})
}

func TestBranch_Keyed(t *testing.T) {
	b := newFlow()
	yes, no := flow.Branch(keyed(b), func(_ *flow.Meta, v string) (bool, error) {
		return strings.HasSuffix(v, "!"), nil
	})
	textTo(yes)
	flow.ToKV(no, flow.KVSink[string]{Bucket: "REST", Encode: flow.EncodeText()})
	run(t, b).want([]string{"k a", "k b!"},
		published{Sink: "kv REST", Subject: "$KV.REST.k", Data: "k a"}, out("k", "k b!"))
}
