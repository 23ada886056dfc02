package flow_test

import (
	"errors"
	"fmt"
	"testing"

	"natsflow/flow"
)

// hookFlow counts the records of each key, and says so at a drain. The state counts the
// drains in its hundreds. Key "e" is left as it is, "x" is dropped, "y" fails, "z" panics.
func hookFlow(tb fataler) *flow.Flow {
	tb.Helper()
	b := newFlow()
	out := flow.StatefulWith(keyed(b), "count", flow.StatefulConfig[string, int64, string]{
		State: decimalState,
		On: func(m *flow.Meta, n *int64, _ string, emit func(string)) error {
			*n++
			emit(fmt.Sprintf("%s %d", m.Key, *n))
			return nil
		},
		OnDrain: func(m *flow.Meta, d flow.Drain, n *int64, emit func(string)) error {
			*n += 100
			emit(fmt.Sprintf("%s%s %d, %s %d at %d", paneText(m), m.Key, *n, d.Mode, d.Epoch, d.Cut["IN"]))
			switch m.Key {
			case "e":
				*n -= 100
				m.Unchanged()
			case "x":
				m.DropState()
			case "y":
				return errors.New("bad")
			case "z":
				panic("as told")
			}
			return nil
		},
	})
	flow.To(out, textSink("OUT"))
	return build(tb, b)
}

func TestStatefulWith_OnDrain(t *testing.T) {
	r := streamTimed(t, hookFlow(t), "b 1", "x 1", "a 1", "e 1", "y 1", "z 1", "b 2", "drain", "x 1", "b 1", "finish", "crash", "b 1")
	wantData(t, r, "OUT", "b 1", "x 1", "a 1", "e 1", "y 1", "z 1", "b 2",
		"partial a 101, suspend 1 at 7", "partial b 102, suspend 1 at 7", "partial e 101, suspend 1 at 7", "partial x 101, suspend 1 at 7", "partial y 101, suspend 1 at 7", "partial z 101, suspend 1 at 7",
		"x 1", "b 103",
		"final a 201, finish 2 at 9", "final b 203, finish 2 at 9", "final e 101, finish 2 at 9", "final x 101, finish 2 at 9", "final y 201, finish 2 at 9", "final z 201, finish 2 at 9",
		"b 204")
	wantErrors(t, r, "count: bad", "count: step panicked: as told (at flow/drainhook_test.go:35)", "count: bad", "count: step panicked: as told (at flow/drainhook_test.go:35)")
	if n := r.Keys(); n != 5 {
		t.Errorf("%d keys", n)
	}
}
