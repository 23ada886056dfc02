package flow_test

import (
	"errors"
	"strings"
	"testing"

	"natsflow/flow"
)

func TestToKV_DefaultKey(t *testing.T) {
	b := newFlow()
	flow.ToKV(keyed(b), flow.KVSink[string]{Bucket: "LAST", Encode: flow.EncodeText()})
	kv := func(key, data string) published {
		return published{Sink: "kv LAST", Subject: "$KV.LAST." + key, Data: data}
	}
	run(t, b).want([]string{"k 1", "a.b 2", "ä=x 3", " 4"},
		kv("k", "k 1"), kv("a=2Eb", "a.b 2"), kv("=C3=A4=3Dx", "ä=x 3"), kv("=", " 4"))
}

func TestToKV_Key(t *testing.T) {
	b := newFlow()
	flow.ToKV(keyed(b), flow.KVSink[string]{
		Bucket: "LAST", Encode: flow.EncodeText(),
		Key: func(dst []byte, _ *flow.Meta, v string) ([]byte, error) {
			_, key, _ := strings.Cut(v, " ")
			if key == "error" {
				return nil, errors.New("no key")
			}
			return append(dst, key...), nil
		},
	}, flow.ID("last"))
	r := run(t, b)
	for _, key := range []string{"a", "a.b", "a/b=c_d-E9"} {
		r.want([]string{"k " + key}, published{Sink: "kv LAST", Subject: "$KV.LAST." + key, Data: "k " + key})
	}
	for key, want := range map[string]string{
		"": "empty subject", "error": "no key", "a b": "not a subject", "a..b": "not a subject", "a.": "not a subject",
		"ä": "not a key of a bucket", "a$": "not a key of a bucket",
	} {
		r.feed("k " + key)
		got := r.seal()
		if len(got) != 1 || got[0].Headers[flow.HeaderDeadStep] != "last" || !strings.Contains(got[0].Headers[flow.HeaderDeadError], want) {
			t.Errorf("%q: %v, want %q", key, got, want)
		}
	}
}

func TestToKV_Unkeyed(t *testing.T) {
	b := newFlow()
	flow.ToKV(text(b), flow.KVSink[string]{Bucket: "LAST", Encode: flow.EncodeText()})
	run(t, b).want([]string{"x"}, published{Sink: "kv LAST", Subject: "$KV.LAST.in", Data: "x"})
}
