package flow_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"natsflow/flow"
)

// counting counts the records of a key; "bad" is an error and "panic" panics
// after the count.
func counting(emit flow.EmitMode) flow.Aggregator[string, int64, string] {
	return flow.Aggregator[string, int64, string]{
		State: decimalState, Emit: emit,
		Add: func(_ *flow.Meta, n *int64, v string) error {
			if strings.HasSuffix(v, "bad") {
				return errors.New("is bad")
			}
			*n++
			if strings.HasSuffix(v, "panic") {
				panic("as told")
			}
			return nil
		},
		Result: func(m *flow.Meta, n *int64) (string, error) {
			switch *n {
			case 13:
				return "", errors.New("unlucky")
			case 17:
				panic("as told")
			}
			return fmt.Sprintf("%s %d %d", m.Key, *n, m.Seq), nil
		},
	}
}

func TestAggregate_Update(t *testing.T) {
	b := newFlow()
	textTo(flow.Aggregate(keyed(b), "count", counting(flow.EmitUpdate)))
	r := run(t, b)
	r.want([]string{"a x", "b x", "a x", "a bad", "c bad"},
		out("a", "a 1 1"), out("b", "b 1 2"), out("a", "a 2 3"),
		dead("count", "is bad", 4, "a bad"), dead("count", "is bad", 5, "c bad"))
	if r.keys() != 2 {
		t.Errorf("%d keys: one whose only record failed has no state", r.keys())
	}
	r.want([]string{"b bad"}, dead("count", "is bad", 6, "b bad"))
	if r.sealed.Delta != nil {
		t.Errorf("delta %q after an error that changed nothing", r.sealed.Delta)
	}
	r.crash()
	r.want([]string{"a x"}, out("a", "a 3 7"))
}

// A panic in Add may leave the state changed: memory and store must agree.
func TestAggregate_Panic(t *testing.T) {
	for _, emit := range []flow.EmitMode{flow.EmitUpdate, flow.EmitCommit} {
		b := newFlow()
		textTo(flow.Aggregate(keyed(b), "count", counting(emit)))
		r := run(t, b)
		r.want([]string{"a x"}, out("a", "a 1 1"))
		r.feed("a panic")
		got := r.seal()
		if len(got) != 1 || got[0].Headers[flow.HeaderDeadStep] != "count" {
			t.Fatalf("outputs %+v", got)
		}
		r.crash()
		r.want([]string{"a x"}, out("a", "a 3 3"))
	}
}

func TestAggregate_Commit(t *testing.T) {
	b := newFlow()
	textTo(flow.Aggregate(keyed(b), "count", counting(flow.EmitCommit)))
	r := run(t, b)
	// One result a key, in the order of the first change, with the position of
	// the last record.
	r.want([]string{"a x", "b x", "a x", "c x", "b x", "a bad"},
		dead("count", "is bad", 6, "a bad"), out("a", "a 2 3"), out("b", "b 2 5"), out("c", "c 1 4"))
	r.want([]string{"c x", "a x"}, out("c", "c 2 7"), out("a", "a 3 8"))
	r.want(nil)
	if r.sealed.Outputs != 0 || r.sealed.Delta != nil {
		t.Errorf("sealed %+v though nothing changed", r.sealed)
	}
	// What was not sealed is played again and emitted then.
	r.feed("b x")
	r.crash()
	r.want([]string{"b x"}, out("b", "b 3 10"))
}

func TestAggregate_CommitResultFails(t *testing.T) {
	b := newFlow()
	textTo(flow.Aggregate(keyed(b), "count", counting(flow.EmitCommit)))
	r := run(t, b)
	var payloads []string
	for range 12 {
		payloads = append(payloads, "a x")
	}
	r.want(payloads, out("a", "a 12 12"))
	r.want([]string{"a last", "b x"}, dead("count", "unlucky", 13, "a last"), out("b", "b 1 14"))
	r.want([]string{"a x", "a x", "a x"}, out("a", "a 16 17"))
	// A panic costs the key that it happened with, not those behind it.
	r.feed("a 17", "b x")
	got := r.seal()
	if len(got) != 2 || got[0].Data != "a 17" || got[0].Headers[flow.HeaderDeadStep] != "count" ||
		!strings.HasPrefix(got[0].Headers[flow.HeaderDeadError], "step panicked: as told") {
		t.Fatalf("outputs %+v", got)
	}
	diffOutputs(t, got[1:], out("b", "b 2 19"))
}

// An aggregate that emits with the commit behind another one: both results are
// in the commit that has their state. Otherwise a drain or a crash would lose
// the second, whose state is stored by then.
func TestAggregate_CommitChain(t *testing.T) {
	inner := flow.Aggregator[string, int64, string]{
		State: decimalState, Emit: flow.EmitCommit,
		Add:    func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
		Result: func(_ *flow.Meta, n *int64) (string, error) { return fmt.Sprint(*n), nil },
	}
	t.Run("one behind the other", func(t *testing.T) {
		b := newFlow()
		textTo(flow.Aggregate(flow.Aggregate(keyed(b), "first", counting(flow.EmitCommit)), "second", inner))
		r := run(t, b)
		r.want([]string{"a x", "a x", "b x"}, out("a", "1"), out("b", "1"))
		r.want([]string{"b x"}, out("b", "2"))
	})
	t.Run("one behind two", func(t *testing.T) {
		b := newFlow()
		s := keyed(b)
		one := flow.Aggregate(s, "one", counting(flow.EmitCommit))
		two := flow.Aggregate(s, "two", counting(flow.EmitCommit))
		textTo(flow.Aggregate(flow.Merge(one, two), "both", inner))
		r := run(t, b)
		r.want([]string{"a x"}, out("a", "2"))
		r.want([]string{"a x", "a x"}, out("a", "4"))
	})
}
