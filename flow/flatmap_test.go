package flow_test

import (
	"errors"
	"strings"
	"testing"

	"natsflow/flow"
)

// words emits each word after the key, with the key; "bad" is an error and
// "panic" panics.
func words(_ *flow.Meta, v string, emit func(string)) error {
	key, rest, _ := strings.Cut(v, " ")
	for _, w := range strings.Fields(rest) {
		switch w {
		case "bad":
			return errors.New("is bad")
		case "panic":
			panic("the sky falls")
		}
		emit(key + " " + w)
	}
	return nil
}

func TestFlatMap(t *testing.T) {
	payloads := []string{"k one two", "k", "k three bad four", "k five"}
	want := []published{
		out("k", "k one"), out("k", "k two"), out("k", "k three"),
		dead("words", "is bad", 3, "k three bad four"), out("k", "k five"),
	}
	t.Run("before the key", func(t *testing.T) {
		b := newFlow()
		textTo(flow.KeyBy(flow.FlatMap(text(b), words, flow.ID("words")), firstWord))
		run(t, b).want(payloads, want...)
	})
	t.Run("after the key", func(t *testing.T) {
		b := newFlow()
		s := flow.KeyBy(text(b), func(*flow.Meta, string) (string, error) { return "k", nil })
		textTo(flow.FlatMap(s, words, flow.ID("words")))
		run(t, b).want(payloads, want...)
	})
}

// A step that emits gets the blame for its own panic and not for that of a step
// behind it, and the other way round.
func TestFlatMap_PanicIsNamed(t *testing.T) {
	for _, test := range []struct{ payload, step string }{
		{"k fine panic", "words"},
		{"k fine boom", "behind"},
	} {
		b := newFlow()
		s := flow.FlatMap(keyed(b), words, flow.ID("words"))
		textTo(flow.Map(s, func(_ *flow.Meta, v string) (string, error) {
			if v == "k boom" {
				panic(v)
			}
			return v, nil
		}, flow.ID("behind")))
		r := run(t, b)
		r.feed(test.payload)
		got := r.seal()
		if len(got) != 2 || got[0].Data != "k fine" || got[1].Headers[flow.HeaderDeadStep] != test.step {
			t.Errorf("%s: outputs %+v", test.payload, got)
		}
	}
}
