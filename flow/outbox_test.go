package flow_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"

	"natsflow/flow"
)

// outbox returns one with results, a dead letter and a request to stop.
func outbox(t fataler) []byte {
	b := newFlow()
	s := keyed(b)
	textTo(s)
	flow.StopWhen(s, func(*flow.Meta, string) (bool, error) { return true, nil })
	r := run(t, b)
	r.feed("k a", "bad", "k "+strings.Repeat("x", 300))
	s2, err := r.tasks[0].Seal()
	if err != nil {
		t.Fatal(err)
	}
	return s2.Outbox
}

func TestOutputs(t *testing.T) {
	box := outbox(t)
	var got []flow.Output
	err := flow.Outputs(box, func(i int, o flow.Output) error {
		if i != len(got) {
			t.Errorf("output %d is called %d", len(got), i)
		}
		got = append(got, o)
		return nil
	})
	if err != nil || len(got) != 4 {
		t.Fatalf("%d outputs, %v", len(got), err)
	}
	// An append to what points into the outbox does not write into it.
	before := string(box)
	for _, o := range got {
		_, _ = append(o.Subject, "overwritten"...), append(o.Data, "overwritten"...)
	}
	if string(box) != before {
		t.Error("the outbox was overwritten")
	}
	stop := errors.New("enough")
	n := 0
	if err := flow.Outputs(box, func(int, flow.Output) error { n++; return stop }); !errors.Is(err, stop) || n != 1 {
		t.Errorf("%d calls, %v", n, err)
	}
	if err := flow.Outputs(nil, func(int, flow.Output) error { return stop }); err != nil {
		t.Errorf("an empty outbox: %v", err)
	}
}

func TestOutputs_NotAnOutbox(t *testing.T) {
	huge := binary.AppendUvarint(nil, math.MaxUint64)
	large := binary.AppendUvarint(nil, 1<<40)
	for name, box := range map[string][]byte{
		"sink":         append(append([]byte{}, huge...), 0, 0, 0),
		"subject":      append([]byte{0}, huge...),
		"subject size": append([]byte{0}, large...),
		"headers":      append([]byte{0, 0}, large...),
		"odd headers":  {0, 0, 1, 0, 0},
		"many headers": append(append([]byte{0, 0, 66}, make([]byte, 66)...), 0),
		"header size":  append([]byte{0, 0, 2}, large...),
		"payload":      append([]byte{0, 0, 0}, huge...),
		"no payload":   {0, 0, 0},
		"end":          {0x80},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := flow.Outputs(box, func(int, flow.Output) error { return nil })
		runtime.ReadMemStats(&after)
		if !errors.Is(err, flow.ErrOutbox) {
			t.Errorf("%s: %v", name, err)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 64<<10 {
			t.Errorf("%s: %d bytes allocate %d", name, len(box), n)
		}
	}
	box := outbox(t)
	for n := range box {
		count := 0
		err := flow.Outputs(box[:n], func(int, flow.Output) error { count++; return nil })
		if err != nil && (!errors.Is(err, flow.ErrOutbox) || err.Error() != fmt.Sprintf("output %d: not an outbox", count)) {
			t.Errorf("the first %d bytes: %v after %d outputs", n, err, count)
		}
	}
}
