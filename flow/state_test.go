package flow_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"natsflow/flow"
)

// threeStates has a step of each kind that keeps state.
func threeStates(t fataler) *runner {
	b := newFlow()
	s := flow.Dedupe(keyed(b), "seen", within, func(_ *flow.Meta, v string) (string, error) { return v, nil })
	one := flow.Stateful(s, "script", flow.JSONState[int64](3, nil), script)
	textTo(flow.Merge(one, flow.Aggregate(s, "count", counting(flow.EmitUpdate))))
	return run(t, b)
}

func TestTask_LoadUnknownStep(t *testing.T) {
	r := scripted(t)
	r.feed("k add")
	r.seal()
	b := newFlow()
	textTo(flow.Stateful(keyed(b), "other", decimalState, script))
	err := run(t, b).tasks[0].Load(r.deltas[0][0])
	if !errors.Is(err, flow.ErrState) || !strings.Contains(err.Error(), `step "script", which the flow does not have`) {
		t.Errorf("error %v", err)
	}
}

func TestTask_LoadNotAnImage(t *testing.T) {
	r := scripted(t)
	r.feed("k add", "longer add")
	r.seal()
	image := r.deltas[0][0]
	for n := 1; n < len(image); n++ {
		if err := scripted(t).tasks[0].Load(image[:n]); !errors.Is(err, flow.ErrState) {
			t.Errorf("the first %d of %d bytes: %v", n, len(image), err)
		}
	}
	if err := scripted(t).tasks[0].Load(nil); err != nil {
		t.Errorf("an empty image: %v", err)
	}
}

// hostile are images that announce more than they have.
func hostile() [][]byte {
	head := append([]byte{6}, "script"...)
	huge := binary.AppendUvarint(nil, math.MaxUint64)
	large := binary.AppendUvarint(nil, 1<<40)
	join := func(parts ...[]byte) []byte {
		var b []byte
		for _, p := range parts {
			b = append(b, p...)
		}
		return b
	}
	return [][]byte{
		huge, large, join(huge, []byte("x")),
		join(head, huge, []byte{1}),                        // version
		join(head, []byte{1}, huge),                        // entries
		join(head, []byte{1}, large, []byte{1, 'k', 2, 2}), // one of many entries
		join(head, []byte{1, 1}, huge),                     // key
		join(head, []byte{1, 1}, large),
		join(head, []byte{1, 1, 1, 'k'}, huge), // value
		join(head, []byte{1, 1, 1, 'k'}, large),
		join(head, []byte{1, 1, 1, 'k', 0xff}), // half a number
		join(head, []byte{0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80}),
	}
}

func TestTask_LoadIsBoundedByItsInput(t *testing.T) {
	for i, image := range hostile() {
		task := scripted(t).tasks[0]
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := task.Load(image)
		runtime.ReadMemStats(&after)
		if !errors.Is(err, flow.ErrState) {
			t.Errorf("image %d: %v", i, err)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 64<<10 {
			t.Errorf("image %d of %d bytes allocates %d", i, len(image), n)
		}
	}
}

func TestTask_NextImage(t *testing.T) {
	for _, size := range []int{-1, 0, 1, 3, math.MaxInt} {
		r := threeStates(t)
		for i := range 7 {
			r.feed(fmt.Sprintf("k%d add", i))
		}
		r.feed("k3 drop")
		task, restored := r.tasks[0], threeStates(t).tasks[0]
		task.BeginImage()
		parts := 0
		for more := true; more; parts++ {
			var part []byte
			var err error
			if part, more, err = task.NextImage(size); err != nil {
				t.Fatal(err)
			}
			if err := restored.Load(part); err != nil {
				t.Fatal(err)
			}
			if parts > 100 {
				t.Fatal("the image does not end")
			}
		}
		if restored.Keys() != task.Keys() || task.Keys() != 6+7+8 {
			t.Errorf("size %d: %d keys restored of %d", size, restored.Keys(), task.Keys())
		}
		if size == math.MaxInt && parts != 3 {
			t.Errorf("%d parts, want one a step", parts)
		}
	}
	t.Run("no state", func(t *testing.T) {
		b := newFlow()
		textTo(keyed(b))
		task := run(t, b).tasks[0]
		task.BeginImage()
		if part, more, err := task.NextImage(1); part != nil || more || err != nil {
			t.Errorf("%v %v %v", part, more, err)
		}
	})
}

func TestTask_Dirty(t *testing.T) {
	r := scripted(t)
	task := r.tasks[0]
	for _, test := range []struct {
		payload string
		dirty   bool
	}{{"k unchanged", false}, {"k add", true}, {"k emit unchanged", true}, {"k drop", true}, {"nokey", true}} {
		r.feed(test.payload)
		if task.Dirty() != test.dirty || (task.Pending() > 0) != (test.payload == "k emit unchanged" || test.payload == "nokey") {
			t.Errorf("after %q: dirty %v, %d pending", test.payload, task.Dirty(), task.Pending())
		}
		r.seal()
	}
}

func TestTask_SealIsNilWhenThereIsNothing(t *testing.T) {
	r := scripted(t)
	r.feed("k add emit")
	r.seal()
	for _, payload := range []string{"k unchanged", "k add", "k unchanged emit", "k unchanged"} {
		r.feed(payload)
		s, err := r.tasks[0].Seal()
		if err != nil {
			t.Fatal(err)
		}
		if (s.Delta != nil) != strings.Contains(payload, "add") || (s.Outbox != nil) != strings.Contains(payload, "emit") {
			t.Errorf("%q: delta %q, outbox %q", payload, s.Delta, s.Outbox)
		}
	}
}

// The byte strings of a seal belong to the caller: later records leave them be.
func TestTask_SealedIsNotShared(t *testing.T) {
	r := scripted(t)
	var deltas, outboxes []string
	var sealed []flow.Sealed
	for i := range 20 {
		r.feed(fmt.Sprintf("k%d add emit", i%3), "k add emit")
		s, err := r.tasks[0].Seal()
		if err != nil {
			t.Fatal(err)
		}
		sealed = append(sealed, s)
		deltas, outboxes = append(deltas, string(s.Delta)), append(outboxes, string(s.Outbox))
	}
	for i, s := range sealed {
		if string(s.Delta) != deltas[i] || string(s.Outbox) != outboxes[i] {
			t.Fatalf("the bytes of seal %d have changed", i)
		}
	}
}

// machine drives a task the way a worker does and keeps a naive model beside it:
// records, seals, a base taken in slices while records change the state, crashes.
type machine struct {
	r    *runner
	task *flow.Task
	// log has the sealed deltas; base the parts of the last finished base, to be
	// loaded before the deltas from baseFrom on.
	log      [][]byte
	base     [][]byte
	baseFrom int
	// taking is the base under way.
	taking     bool
	complete   bool
	uncovered  bool
	parts      [][]byte
	takingFrom int
	// now and stored are the model, stored as of the last seal.
	now, stored model
	want        []published
	waiting     []string
}

type model struct {
	seq     uint64
	counts  map[string]int64
	totals  map[string]int64
	records map[string]uint64
}

func (m model) clone() model {
	return model{m.seq, maps.Clone(m.counts), maps.Clone(m.totals), maps.Clone(m.records)}
}

func newMachine(t *rapid.T) *machine {
	b := newFlow()
	s := keyed(b)
	one := flow.Stateful(s, "script", flow.JSONState[int64](3, nil), script)
	two := flow.Aggregate(flow.Filter(s, func(_ *flow.Meta, v string) (bool, error) { return strings.Contains(v, "add"), nil }),
		"count", flow.Aggregator[string, int64, string]{
			State: decimalState, Emit: flow.EmitCommit,
			Add:    func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
			Result: func(m *flow.Meta, n *int64) (string, error) { return fmt.Sprintf("total %d at %d", *n, m.Seq), nil },
		})
	textTo(flow.Merge(one, two))
	m := &machine{r: run(t, b)}
	m.task = m.r.tasks[0]
	m.now = model{counts: map[string]int64{}, totals: map[string]int64{}, records: map[string]uint64{}}
	m.stored = m.now.clone()
	return m
}

// record plays a batch of a few records.
func (m *machine) record(t *rapid.T) {
	var batch []record
	for range rapid.IntRange(1, 3).Draw(t, "records") {
		batch = append(batch, m.draw(t))
	}
	m.r.tb = t
	if err := m.r.play(batch...); err != nil {
		t.Fatal(err)
	}
	m.uncovered = m.uncovered || m.taking
}

// draw makes a record and plays it in the model.
func (m *machine) draw(t *rapid.T) record {
	key := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", "g", "h"}).Draw(t, "key")
	op := rapid.SampledFrom([]string{"add emit", "add emit", "add", "emit unchanged", "drop", "add drop", "drop emit"}).Draw(t, "op")
	m.now.seq++
	n, there := m.now.counts[key]
	if strings.Contains(op, "add") {
		n, there = n+1, true
		if m.now.totals[key]++; m.now.records[key] == 0 {
			m.waiting = append(m.waiting, key)
		}
		m.now.records[key] = m.now.seq
	}
	if strings.Contains(op, "emit") {
		m.want = append(m.want, out(key, fmt.Sprint(n)))
	}
	switch {
	case strings.Contains(op, "drop"):
		delete(m.now.counts, key)
	case there:
		m.now.counts[key] = n
	}
	return record{seq: m.now.seq, data: key + " " + op}
}

func (m *machine) seal(t *rapid.T) {
	s, err := m.task.Seal()
	if err != nil {
		t.Fatal(err)
	}
	if s.Delta != nil {
		m.log = append(m.log, s.Delta)
	}
	for _, key := range m.waiting {
		m.want = append(m.want, out(key, fmt.Sprintf("total %d at %d", m.now.totals[key], m.now.records[key])))
	}
	m.r.tb = t
	got := m.r.outputs(s.Outbox)
	if fmt.Sprint(got) != fmt.Sprint(m.want) {
		t.Fatalf("outputs %v\nwant %v", got, m.want)
	}
	clear(m.now.records)
	m.want, m.waiting, m.uncovered = nil, nil, false
	m.stored = m.now.clone()
	m.finishBase()
}

// finishBase takes the base for good when all that it may hold is in the log.
func (m *machine) finishBase() {
	if m.taking && m.complete && !m.uncovered {
		m.base, m.baseFrom = m.parts, m.takingFrom
		m.taking = false
	}
}

func (m *machine) image(t *rapid.T) {
	if !m.taking {
		m.taking, m.complete, m.parts, m.takingFrom = true, false, nil, len(m.log)
		m.uncovered = m.task.Dirty()
		m.task.BeginImage()
		return
	}
	if m.complete {
		return
	}
	part, more, err := m.task.NextImage(rapid.IntRange(1, 4).Draw(t, "size"))
	if err != nil {
		t.Fatal(err)
	}
	m.parts, m.complete = append(m.parts, part), !more
	m.finishBase()
}

func (m *machine) crash(t *rapid.T) {
	m.r.tb = t
	m.r.bind()
	m.task = m.r.tasks[0]
	for _, image := range append(append([][]byte{}, m.base...), m.log[m.baseFrom:]...) {
		if err := m.task.Load(image); err != nil {
			t.Fatal(err)
		}
	}
	m.task.Loaded()
	m.now = m.stored.clone()
	m.want, m.waiting, m.taking, m.uncovered = nil, nil, false, false
	if got, want := m.task.Keys(), len(m.now.counts)+len(m.now.totals); got != want {
		t.Fatalf("%d keys after loading, want %d", got, want)
	}
	// Every value is as the model has it: emit changes nothing.
	for _, key := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		if err := m.r.play(record{seq: m.now.seq + 1, data: key + " emit unchanged"}); err != nil {
			t.Fatal(err)
		}
		m.want = append(m.want, out(key, fmt.Sprint(m.now.counts[key])))
	}
	m.seal(t)
}

// A base taken in slices while records change what it is taken of, and the
// deltas from its begin on, are together the exact state.
func TestTask_Images(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(t)
		t.Repeat(map[string]func(*rapid.T){
			"record":  m.record,
			"record2": m.record,
			"record3": m.record,
			"seal":    m.seal,
			"image":   m.image,
			"image2":  m.image,
			"crash":   m.crash,
		})
		m.crash(t)
	})
}

// State of steps that are left out is skipped, and that of the others loaded.
func TestTask_LeaveOut(t *testing.T) {
	old := threeStates(t)
	old.feed("k add", "longer add", "k add 2")
	old.seal()
	delta, base := old.deltas[0][0], wholeImage(t, old.tasks[0])
	b := newFlow()
	textTo(flow.Stateful(keyed(b), "script", flow.JSONState[int64](3, nil), script))
	f := build(t, b)
	for name, image := range map[string][]byte{"delta": delta, "base": base, "delta and base": slices.Concat(delta, base)} {
		t.Run(name, func(t *testing.T) {
			task := f.Task(0)
			task.LeaveOut("seen")
			if err := task.Load(image); !errors.Is(err, flow.ErrState) || !strings.Contains(err.Error(), `step "count"`) {
				t.Errorf("with one of two: error %v", err)
			}
			task = f.Task(0)
			task.LeaveOut("seen", "other")
			task.LeaveOut("count", "script")
			if err := task.Load(image); err != nil {
				t.Fatal(err)
			}
			task.Loaded()
			if n := task.Keys(); n != 2 || task.Dirty() {
				t.Errorf("%d keys of the step that is not left out, want 2; dirty: %v", n, task.Dirty())
			}
			// What was skipped is in no base again: the flow needs nothing left out.
			if err := f.Task(0).Load(wholeImage(t, task)); err != nil {
				t.Error(err)
			}
			for n := 1; n < len(image); n++ {
				// At the end of a section, the beginning is an image, too.
				if err := task.Load(image[:n]); err != nil && !errors.Is(err, flow.ErrState) {
					t.Errorf("the first %d bytes: error %v", n, err)
				}
			}
			if err := task.Load(image[:len(image)-1]); !errors.Is(err, flow.ErrState) {
				t.Errorf("without the last byte: error %v", err)
			}
		})
	}
}

// wholeImage is a base of the task.
func wholeImage(t *testing.T, task *flow.Task) []byte {
	t.Helper()
	task.BeginImage()
	var image []byte
	for more := true; more; {
		var part []byte
		var err error
		if part, more, err = task.NextImage(100); err != nil {
			t.Fatal(err)
		}
		image = append(image, part...)
	}
	return image
}
