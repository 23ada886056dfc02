package flow

import (
	"strconv"
	"testing"
	"time"
)

// Keys that come and go leave entries in the heaps of timers and of the TTL until these
// are due. There are never many more of them than there are keys.
func TestStatefulWith_dropped(t *testing.T) {
	b := New("test", Options{Partitions: 1})
	keyed := KeyBy(From(b, Source{Stream: "IN"}, DecodeText()), func(_ *Meta, v string) (string, error) { return v, nil })
	out := StatefulWith(keyed, "step", StatefulConfig[string, int, string]{
		State: JSONState[int](1, nil), TTL: 24 * time.Hour,
		On: func(m *Meta, n *int, v string, _ func(string)) error {
			m.SetTimer("timeout", m.EventTime().Add(30*24*time.Hour))
			if *n++; *n == 2 {
				m.DropState()
			}
			return nil
		},
		OnTimer: func(*Meta, *int, string, func(string)) error { return nil },
	})
	To(out, Sink[string]{Stream: "OUT", Subjects: []string{"out"}, Subject: func(dst []byte, _ *Meta, _ string) ([]byte, error) { return append(dst, "out"...), nil }, Encode: EncodeText()})
	f, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	r, task := f.Router(0), f.Task(0)
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano()
	const keys = 5000
	for i := range 2 * keys {
		if err := r.Route("in", uint64(i+1), at, []byte(strconv.Itoa(i/2))); err != nil {
			t.Fatal(err)
		}
	}
	r.Take(func(b *Batch) {
		if err := task.Play(b); err != nil {
			t.Fatal(err)
		}
		b.Release()
	})
	if n := task.Keys(); n != 0 {
		t.Errorf("%d keys have state", n)
	}
	heaps := 0
	for _, s := range task.timers {
		var n int
		switch s := s.(type) {
		case *expiry[int]:
			n = len(s.heap)
		case *timerQueue[int]:
			n = len(s.heap)
		default:
			continue
		}
		if heaps++; n > 1100 {
			t.Errorf("%T has %d entries", s, n)
		}
	}
	if heaps != 3 {
		t.Errorf("%d heaps", heaps)
	}
}
