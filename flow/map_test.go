package flow_test

import (
	"errors"
	"strings"
	"testing"

	"natsflow/flow"
)

func TestMap(t *testing.T) {
	upper := func(m *flow.Meta, v string) (string, error) {
		if v == "k bad" {
			return "", errors.New("is bad")
		}
		return strings.ToUpper(v) + m.Key, nil
	}
	t.Run("before the key", func(t *testing.T) {
		b := newFlow()
		textTo(flow.KeyBy(flow.Map(text(b), upper, flow.ID("upper")), firstWord))
		run(t, b).want([]string{"k one", "k bad", "k two"},
			out("K", "K ONE"), dead("upper", "is bad", 2, "k bad"), out("K", "K TWO"))
	})
	t.Run("after the key", func(t *testing.T) {
		b := newFlow()
		textTo(flow.Map(keyed(b), upper, flow.ID("upper")))
		run(t, b).want([]string{"k one", "k bad", "k two"},
			out("k", "K ONEk"), dead("upper", "is bad", 2, "k bad"), out("k", "K TWOk"))
	})
	t.Run("changes the type", func(t *testing.T) {
		b := newFlow()
		length := flow.Map(keyed(b), func(_ *flow.Meta, v string) (int, error) { return len(v), nil })
		flow.ToKV(length, flow.KVSink[int]{Bucket: "LENGTHS", Encode: flow.EncodeJSON[int]()})
		run(t, b).want([]string{"k one"}, published{Sink: "kv LENGTHS", Subject: "$KV.LENGTHS.k", Data: "5"})
	})
}

func TestMap_Meta(t *testing.T) {
	b := newFlow()
	var got flow.Meta
	var raw, rawKeyed string
	var when int64
	src := flow.Map(text(b), func(m *flow.Meta, v string) (string, error) {
		raw = string(m.Raw())
		if m.Key != "" {
			t.Errorf("key %q before the key", m.Key)
		}
		return strings.ToUpper(v), nil
	})
	textTo(flow.Map(flow.KeyBy(src, firstWord), func(m *flow.Meta, v string) (string, error) {
		got, rawKeyed, when = *m, string(m.Raw()), m.Time().UnixNano()
		if m.UnixNano() != when {
			t.Errorf("UnixNano %d, Time %d", m.UnixNano(), when)
		}
		return v, nil
	}))
	r := run(t, b)
	if err := r.play(record{subject: "in.a", seq: 7, nanos: 1_700_000_000_000_000_001, data: "k one"}); err != nil {
		t.Fatal(err)
	}
	if got.Stream != "IN" || got.Subject != "in.a" || got.Seq != 7 || got.Key != "K" || when != 1_700_000_000_000_000_001 {
		t.Errorf("meta %+v at %d", got, when)
	}
	if raw != "k one" || rawKeyed != "k one" {
		t.Errorf("raw %q and %q, want the payload of the source", raw, rawKeyed)
	}
}
