package flow_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"natsflow/flow"
)

func reproKeyed(b *flow.Builder) flow.Stream[[]byte] {
	return flow.KeyBy(flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeBytes()),
		func(*flow.Meta, []byte) (string, error) { return "k", nil })
}

func reproRun(t *testing.T, f *flow.Flow, n int) (*flow.Task, flow.Sealed) {
	r := f.Router(0)
	tasks := map[int]*flow.Task{}
	var last *flow.Task
	for i := 1; i <= n; i++ {
		if err := r.Route("in", uint64(i), int64(i), []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	r.Take(func(b *flow.Batch) {
		if tasks[b.Partition] == nil {
			tasks[b.Partition] = f.Task(b.Partition)
		}
		last = tasks[b.Partition]
		if err := last.Play(b); err != nil {
			t.Fatal(err)
		}
	})
	s, err := last.Seal()
	if err != nil {
		t.Fatal(err)
	}
	return last, s
}

func TestRepro_NestedDrop(t *testing.T) {
	b := flow.New("r", flow.Options{})
	one := flow.Stateful(reproKeyed(b), "a", decimalState, func(m *flow.Meta, n *int64, v []byte, emit func([]byte)) error {
		m.DropState()
		emit(v)
		return nil
	})
	two := flow.Stateful(one, "b", decimalState, func(m *flow.Meta, n *int64, v []byte, emit func([]byte)) error { return nil })
	flow.To(two, bytesTo("OUT", "out."))
	task, _ := reproRun(t, build(t, b), 1)
	if task.Keys() != 1 {
		t.Errorf("%d keys, want that of b alone", task.Keys())
	}
}

func TestRepro_NestedUnchanged(t *testing.T) {
	b := flow.New("r", flow.Options{})
	one := flow.Stateful(reproKeyed(b), "a", decimalState, func(m *flow.Meta, n *int64, v []byte, emit func([]byte)) error {
		if m.Seq == 1 {
			emit(v)
			m.Unchanged()
			return nil
		}
		*n++
		emit(v)
		return nil
	})
	two := flow.Stateful(one, "b", decimalState, func(m *flow.Meta, n *int64, v []byte, emit func([]byte)) error {
		if m.Seq == 2 {
			m.Unchanged()
		}
		return nil
	})
	flow.To(two, bytesTo("OUT", "out."))
	f := build(t, b)
	r, task := f.Router(0), (*flow.Task)(nil)
	play := func(seq uint64) {
		r.Route("in", seq, int64(seq), nil)
		r.Take(func(b *flow.Batch) {
			if task == nil {
				task = f.Task(b.Partition)
			}
			task.Play(b)
		})
	}
	play(1)
	play(2) // b unchanged, a not
	s, _ := task.Seal()
	if !strings.Contains(string(s.Delta), "a") {
		t.Errorf("the change of a is lost: %q", s.Delta)
	}
}

func TestRepro_CommitChain(t *testing.T) {
	b := flow.New("r", flow.Options{})
	agg := func(s flow.Stream[[]byte], id string) flow.Stream[[]byte] {
		return flow.Aggregate(s, id, flow.Aggregator[[]byte, int64, []byte]{
			State: decimalState, Emit: flow.EmitCommit,
			Add:    func(_ *flow.Meta, n *int64, _ []byte) error { *n++; return nil },
			Result: func(_ *flow.Meta, n *int64) ([]byte, error) { return []byte{byte(*n)}, nil },
		})
	}
	flow.To(agg(agg(reproKeyed(b), "a"), "b"), bytesTo("OUT", "out."))
	_, s := reproRun(t, build(t, b), 3)
	if s.Outputs != 1 {
		t.Errorf("%d outputs", s.Outputs)
	}
}

func TestRepro_BadSubject(t *testing.T) {
	b := flow.New("r", flow.Options{})
	sink := bytesTo("OUT", "out.")
	sink.Subject = func(dst []byte, _ *flow.Meta, _ []byte) ([]byte, error) { return append(dst, "out.a b..c"...), nil }
	flow.To(reproKeyed(b), sink)
	_, s := reproRun(t, build(t, b), 1)
	if s.DeadLetters != 1 {
		t.Errorf("published to a subject that is none")
	}
}

func TestRepro_SealNil(t *testing.T) {
	b := flow.New("r", flow.Options{})
	flow.To(reproKeyed(b), bytesTo("OUT", "out."))
	task, _ := reproRun(t, build(t, b), 1)
	s, _ := task.Seal()
	if s.Outbox != nil || s.Delta != nil {
		t.Errorf("not nil: %v %v", s.Outbox, s.Delta)
	}
}

func TestRepro_SealPanic(t *testing.T) {
	b := flow.New("r", flow.Options{})
	codec := decimalState
	codec.Append = func([]byte, *int64) ([]byte, error) { panic("boom") }
	flow.To(flow.Stateful(reproKeyed(b), "a", codec, func(m *flow.Meta, n *int64, v []byte, emit func([]byte)) error { return nil }), bytesTo("OUT", "out."))
	f := build(t, b)
	r := f.Router(0)
	r.Route("in", 1, 1, nil)
	defer func() {
		if p := recover(); p != nil {
			t.Errorf("panic out of Seal: %v", p)
		}
	}()
	r.Take(func(bt *flow.Batch) {
		task := f.Task(bt.Partition)
		task.Play(bt)
		if _, err := task.Seal(); !errors.Is(err, flow.ErrPanic) {
			t.Errorf("err = %v", err)
		}
	})
}

func TestRepro_RecoveredHalt(t *testing.T) {
	b := flow.New("r", flow.Options{OnError: flow.Stop})
	src := flow.FlatMap(flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeBytes()), func(_ *flow.Meta, v []byte, emit func([]byte)) error {
		defer func() { _ = recover() }()
		emit(v)
		return nil
	})
	flow.To(flow.Map(src, func(*flow.Meta, []byte) ([]byte, error) { return nil, errors.New("bad") }), bytesTo("OUT", "out."))
	f := build(t, b)
	if err := f.Router(0).Route("in", 1, 1, nil); err == nil {
		t.Error("the failure got lost")
	}
}

func TestRepro_NextImageZero(t *testing.T) {
	b := flow.New("r", flow.Options{})
	flow.To(flow.Stateful(reproKeyed(b), "a", decimalState, func(m *flow.Meta, n *int64, v []byte, emit func([]byte)) error { return nil }), bytesTo("OUT", "out."))
	task, _ := reproRun(t, build(t, b), 1)
	done := make(chan struct{})
	go func() { task.BeginImage(); task.NextImage(0); close(done) }()
	select {
	case <-done:
	case <-time.After(2 * time.Second):
		t.Error("does not end")
	}
}

func TestRepro_AggregatePanic(t *testing.T) {
	b := flow.New("r", flow.Options{})
	flow.To(flow.Aggregate(reproKeyed(b), "a", flow.Aggregator[[]byte, int64, []byte]{
		State: decimalState,
		Add: func(_ *flow.Meta, n *int64, _ []byte) error {
			if *n++; *n == 2 {
				panic("boom")
			}
			return nil
		},
		Result: func(_ *flow.Meta, n *int64) ([]byte, error) { return nil, nil },
	}), bytesTo("OUT", "out."))
	f := build(t, b)
	r := f.Router(0)
	var task *flow.Task
	for i := uint64(1); i <= 2; i++ {
		r.Route("in", i, 1, nil)
		r.Take(func(bt *flow.Batch) {
			if task == nil {
				task = f.Task(bt.Partition)
			}
			task.Play(bt)
		})
		if s, _ := task.Seal(); len(s.Delta) == 0 {
			t.Errorf("record %d: memory differs from what is stored", i)
		}
	}
}

func TestRepro_BuildTwice(t *testing.T) {
	b := flow.New("r", flow.Options{OnError: 7})
	s := reproKeyed(b)
	flow.To(s, bytesTo("OUT", "out."))
	if _, err := b.Build(); err == nil {
		t.Error("an OnError that there is not")
	}
}
