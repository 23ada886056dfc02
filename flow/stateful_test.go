package flow_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"natsflow/flow"
)

// countText emits how many records the key has had, and the stream of the last.
func countText(m *flow.Meta, n *int64, _ string, emit func(string)) error {
	*n++
	emit(fmt.Sprintf("%d %s", *n, m.Stream))
	return nil
}

// script is a function of a stateful step that does what the record says, word
// by word: add changes the state, emit emits it, drop, unchanged, error, panic.
func script(m *flow.Meta, n *int64, v string, emit func(string)) error {
	for _, w := range strings.Fields(v)[1:] {
		switch w {
		case "add":
			*n++
		case "emit":
			emit(fmt.Sprint(*n))
		case "drop":
			m.DropState()
		case "unchanged":
			m.Unchanged()
		case "error":
			return errors.New("as told")
		case "panic":
			panic("as told")
		}
	}
	return nil
}

func scripted(t *testing.T) *runner {
	b := newFlow()
	textTo(flow.Stateful(keyed(b), "script", decimalState, script))
	return run(t, b)
}

func TestStateful_Emits(t *testing.T) {
	r := scripted(t)
	r.want([]string{"a add emit", "b add emit emit", "a add", "a add emit"},
		out("a", "1"), out("b", "1"), out("b", "1"), out("a", "3"))
	if r.keys() != 2 {
		t.Errorf("%d keys", r.keys())
	}
	r.crash()
	r.want([]string{"a add emit", "b emit", "c emit"}, out("a", "4"), out("b", "1"), out("c", "0"))
}

func TestStateful_DropState(t *testing.T) {
	r := scripted(t)
	r.want([]string{"a add add emit", "a drop", "a add emit"}, out("a", "2"), out("a", "1"))
	r.crash()
	// Dropped and made anew within one seal, before and after the drop.
	r.want([]string{"a add emit", "a drop emit", "a emit", "a drop"}, out("a", "2"), out("a", "2"), out("a", "0"))
	if r.keys() != 0 {
		t.Errorf("%d keys after the drop", r.keys())
	}
	r.crash()
	if r.keys() != 0 {
		t.Errorf("%d keys after the restart: the drop was not stored", r.keys())
	}
	r.want([]string{"a emit"}, out("a", "0"))

	t.Run("a key that was never there leaves nothing", func(t *testing.T) {
		r := scripted(t)
		r.want([]string{"a add drop"})
		if r.sealed.Delta != nil {
			t.Errorf("delta %q", r.sealed.Delta)
		}
	})
	t.Run("with an error", func(t *testing.T) {
		r := scripted(t)
		r.want([]string{"a add", "a drop error", "a emit"},
			dead("script", "as told", 2, "a drop error"), out("a", "0"))
	})
}

func TestStateful_Unchanged(t *testing.T) {
	r := scripted(t)
	r.want([]string{"a add", "b add"})
	r.want([]string{"a emit unchanged"}, out("a", "1"))
	if r.sealed.Delta != nil {
		t.Errorf("delta %q of a record that changed nothing", r.sealed.Delta)
	}
	// It says so of its own record, not of the one before it.
	r.want([]string{"a add", "a unchanged"})
	r.crash()
	r.want([]string{"a emit unchanged"}, out("a", "2"))
	// A key that has never been anything else than unchanged has no state.
	r.want([]string{"c emit unchanged"}, out("c", "0"))
	if r.keys() != 2 {
		t.Errorf("%d keys", r.keys())
	}
	// After an error it does not count: the change is stored.
	r.want([]string{"b add unchanged error"}, dead("script", "as told", 8, "b add unchanged error"))
	r.crash()
	r.want([]string{"b emit unchanged"}, out("b", "2"))
}

// What a step says of its state must not be taken for that of the step before
// it, which is still running while it emits.
func TestStateful_Nested(t *testing.T) {
	nested := func(outer, inner string) *runner {
		b := newFlow()
		one := flow.Stateful(keyed(b), "outer", decimalState, func(m *flow.Meta, n *int64, v string, emit func(string)) error {
			word, _, _ := strings.Cut(strings.TrimPrefix(v, "k "), " ")
			if strings.Contains(outer, word+"=drop") {
				m.DropState()
			}
			if strings.Contains(outer, word+"=unchanged") {
				m.Unchanged()
			} else {
				*n++
			}
			emit(fmt.Sprintf("k %s %d", word, *n))
			return nil
		})
		textTo(flow.Stateful(one, "inner", decimalState, func(m *flow.Meta, n *int64, v string, emit func(string)) error {
			word := strings.Fields(v)[1]
			if strings.Contains(inner, word+"=drop") {
				m.DropState()
			}
			if strings.Contains(inner, word+"=unchanged") {
				m.Unchanged()
			} else {
				*n++
			}
			emit(fmt.Sprintf("%s %d", strings.Fields(v)[2], *n))
			return nil
		}))
		return run(t, b)
	}
	t.Run("the outer drops, the inner does not", func(t *testing.T) {
		r := nested("x=drop", "")
		r.want([]string{"k a", "k x", "k b"}, out("k", "1 1"), out("k", "2 2"), out("k", "1 3"))
		r.crash()
		r.want([]string{"k c"}, out("k", "2 4"))
	})
	t.Run("the inner drops, the outer does not", func(t *testing.T) {
		r := nested("", "x=drop")
		r.want([]string{"k a", "k x", "k b"}, out("k", "1 1"), out("k", "2 2"), out("k", "3 1"))
		r.crash()
		r.want([]string{"k c"}, out("k", "4 2"))
	})
	t.Run("the inner is unchanged, the outer is not", func(t *testing.T) {
		r := nested("a=unchanged", "b=unchanged")
		r.want([]string{"k a", "k b"}, out("k", "0 1"), out("k", "1 1"))
		r.crash()
		r.want([]string{"k c"}, out("k", "2 2"))
	})
	t.Run("the outer is unchanged, the inner is not", func(t *testing.T) {
		r := nested("b=unchanged", "a=unchanged")
		r.want([]string{"k a", "k b"}, out("k", "1 0"), out("k", "1 1"))
		r.crash()
		r.want([]string{"k c"}, out("k", "2 2"))
	})
}

func TestStateful_Error(t *testing.T) {
	r := scripted(t)
	r.want([]string{"a add emit error", "a emit"},
		out("a", "1"), dead("script", "as told", 1, "a add emit error"), out("a", "1"))
	if r.sealed.DeadLetters != 1 || r.sealed.Outputs != 3 || r.sealed.Records != 2 {
		t.Errorf("sealed %+v", r.sealed)
	}
}

func TestStateful_Panic(t *testing.T) {
	r := scripted(t)
	r.feed("a add", "a add panic", "a emit", "b add panic")
	got := r.seal()
	if len(got) != 3 || got[1].Data != "2" {
		t.Fatalf("outputs %+v", got)
	}
	for i, data := range map[int]string{0: "a add panic", 2: "b add panic"} {
		h := got[i].Headers
		if got[i].Data != data || h[flow.HeaderDeadStep] != "script" || !strings.HasPrefix(h[flow.HeaderDeadError], "step panicked: as told") {
			t.Errorf("dead letter %+v", got[i])
		}
	}
	// The change before the panic is in memory, so it has to be stored too.
	r.crash()
	r.want([]string{"a emit", "b emit"}, out("a", "2"), out("b", "1"))
}

// The key may be a piece of a payload that is overwritten later.
func TestStateful_KeyIsCopied(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 1})
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeBytes())
	s := flow.KeyBy(src, func(_ *flow.Meta, v []byte) (string, error) { return unsafeString(v), nil })
	flow.To(flow.Stateful(s, "count", decimalState, func(_ *flow.Meta, n *int64, v []byte, emit func([]byte)) error {
		*n++
		emit([]byte{byte('0' + *n)})
		return nil
	}), bytesTo("OUT", "out."))
	f := build(t, b)
	router, task := f.Router(0), f.Task(0)
	payload := []byte("abc")
	for seq := uint64(1); seq <= 2; seq++ {
		copy(payload, "abc")
		if err := router.Route("in", seq, 1, payload); err != nil {
			t.Fatal(err)
		}
		router.Take(func(b *flow.Batch) {
			if err := task.Play(b); err != nil {
				t.Fatal(err)
			}
			b.Release()
		})
		copy(payload, "xyz")
	}
	s2, err := task.Seal()
	if err != nil {
		t.Fatal(err)
	}
	if task.Keys() != 1 || !strings.Contains(string(s2.Delta), "abc") {
		t.Errorf("%d keys, delta %q", task.Keys(), s2.Delta)
	}
}
