package flow_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// rate adds what the bucket RATES has for the second word.
func rate(s flow.Stream[string]) flow.Stream[string] {
	return flow.Lookup(s, "rate", "RATES", func(_ *flow.Meta, v string) (string, error) {
		_, currency, ok := strings.Cut(v, " ")
		if !ok || currency == "" {
			return "", errors.New("no currency")
		}
		return currency, nil
	}, func(m *flow.Meta, v string, value []byte, ok bool) (string, error) {
		switch {
		case !ok:
			return v + " none", nil
		case string(value) == "bad":
			return "", errors.New("a bad rate")
		}
		return v + " " + string(value), nil
	})
}

func TestLookup(t *testing.T) {
	b := newFlow()
	textTo(rate(keyed(b)))
	f := build(t, b)
	if diff := cmp.Diff([]flow.LookupInfo{{Step: "rate", Bucket: "RATES"}}, f.Lookups()); diff != "" {
		t.Errorf("lookups (-want +got):\n%s", diff)
	}
	r := flowtest.New(t, f)
	r.Set("RATES", "EUR", "1.1")
	r.Push(flowtest.Record{Data: "a EUR"}, flowtest.Record{Data: "b USD"})
	r.Set("RATES", "USD", "1")
	r.Set("RATES", "EUR", "bad")
	r.Push(flowtest.Record{Data: "a EUR"}, flowtest.Record{Data: "b USD"}, flowtest.Record{Data: "c "})
	r.Unset("RATES", "EUR")
	r.Set("RATES", "USD", "")
	r.Push(flowtest.Record{Data: "a EUR"}, flowtest.Record{Data: "b USD"})
	if diff := cmp.Diff([]string{"a EUR 1.1", "b USD none", "b USD 1", "a EUR none", "b USD "}, r.Data("OUT")); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"rate: a bad rate", "rate: no currency"}, r.Errors()); diff != "" {
		t.Errorf("dead letters (-want +got):\n%s", diff)
	}
}

// What was not committed is looked up again after a crash: it has one result all the
// same, by the bucket as it is then.
func TestLookup_replay(t *testing.T) {
	b := newFlow()
	textTo(rate(keyed(b)))
	r := flowtest.New(t, build(t, b))
	r.Set("RATES", "EUR", "1")
	r.Push(flowtest.Record{Data: "a EUR"})
	r.Commit()
	r.Push(flowtest.Record{Data: "b EUR"})
	r.Set("RATES", "EUR", "2")
	r.Crash()
	if diff := cmp.Diff([]string{"a EUR 1", "b EUR 2"}, r.Data("OUT")); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
}

// A key may come of a lookup, by a change of key behind it; later stages look up, too.
func TestLookup_stages(t *testing.T) {
	b := newFlow(func(o *flow.Options) { o.Partitions = 4 })
	crossed := flow.Rekey(rate(keyed(b)), func(_ *flow.Meta, v string) (string, error) { return v[strings.LastIndex(v, " ")+1:], nil }, flow.TextCodec())
	textTo(flow.Lookup(crossed, "", "GROUPS", func(m *flow.Meta, _ string) (string, error) { return m.Key, nil },
		func(_ *flow.Meta, v string, value []byte, _ bool) (string, error) {
			return v + " " + string(value), nil
		}))
	f := build(t, b)
	if got := f.Lookups(); len(got) != 2 || got[1].Bucket != "GROUPS" || got[1].Step == "" {
		t.Errorf("lookups %+v", got)
	}
	r := flowtest.New(t, f)
	r.Set("RATES", "EUR", "r1")
	r.Set("GROUPS", "r1", "g1")
	r.Push(flowtest.Record{Data: "a EUR"})
	r.Drain()
	r.Push(flowtest.Record{Data: "b EUR"})
	if diff := cmp.Diff([]string{"a EUR r1 g1", "b EUR r1 g1"}, r.Data("OUT")); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
}

func TestLookup_withoutTables(t *testing.T) {
	b := newFlow()
	textTo(rate(keyed(b)))
	r := run(t, b)
	r.feed("a EUR")
	if diff := cmp.Diff([]published{dead("rate", "the runtime has given the task no tables to look keys up in", 1, "a EUR")}, r.seal()); diff != "" {
		t.Errorf("outputs (-want +got):\n%s", diff)
	}
}

func TestLookup_errors(t *testing.T) {
	none := func(*flow.Meta, string) (string, error) { return "", nil }
	fn := func(_ *flow.Meta, v string, _ []byte, _ bool) (string, error) { return v, nil }
	for want, look := range map[string]func(b *flow.Builder) flow.Stream[string]{
		`step "l": give the stream a key before, by KeyBy`: func(b *flow.Builder) flow.Stream[string] { return flow.Lookup(text(b), "l", "B", none, fn) },
		`step "l": "a.b" is not the name of a bucket`:      func(b *flow.Builder) flow.Stream[string] { return flow.Lookup(keyed(b), "l", "a.b", none, fn) },
		`step "l": there is no function for the key`:       func(b *flow.Builder) flow.Stream[string] { return flow.Lookup(keyed(b), "l", "B", nil, fn) },
		`step "l": there is no function`: func(b *flow.Builder) flow.Stream[string] {
			return flow.Lookup[string, string](keyed(b), "l", "B", none, nil)
		},
		`step "key": the id is used twice`: func(b *flow.Builder) flow.Stream[string] { return flow.Lookup(keyed(b), "key", "B", none, fn) },
	} {
		b := newFlow()
		textTo(look(b))
		if _, err := b.Build(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
