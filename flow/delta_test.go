package flow_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"weak"

	"pgregory.net/rapid"

	"natsflow/flow"
)

// countingCodec is decimalState that counts its calls, and refuses the numbers
// that refuse says.
type countingCodec struct {
	calls  int
	refuse func(n int64) error
}

func (c *countingCodec) codec() flow.StateCodec[int64] {
	codec := decimalState
	codec.Append = func(dst []byte, n *int64) ([]byte, error) {
		c.calls++
		if c.refuse != nil {
			if err := c.refuse(*n); err != nil {
				return nil, err
			}
		}
		return decimalState.Append(dst, n)
	}
	return codec
}

func countingScript(t *testing.T, c *countingCodec) *runner {
	b := newFlow()
	textTo(flow.Stateful(keyed(b), "script", c.codec(), script))
	return run(t, b)
}

// batchOf makes the records of one batch.
func batchOf(payloads ...string) []record {
	var batch []record
	for i, p := range payloads {
		batch = append(batch, record{data: p, nanos: int64(i + 1)})
	}
	return batch
}

// batch plays a batch of payloads, with sequences after those before.
func (r *runner) batch(payloads ...string) {
	r.tb.Helper()
	if err := r.play(batchOf(payloads...)...); err != nil {
		r.tb.Fatal(err)
	}
}

// wantEntries seals and compares the entries of the delta.
func (r *runner) wantEntries(entries ...string) {
	r.tb.Helper()
	s, err := r.tasks[0].Seal()
	if err != nil {
		r.tb.Fatal(err)
	}
	if got := deltaEntries(r.tb, s.Delta); !slices.Equal(got, entries) {
		r.tb.Fatalf("delta %v, want %v", got, entries)
	}
}

// deltaEntries reads an image of one step with decimalState by the format's
// description alone: "key=number", or "key-" for a deletion.
func deltaEntries(t fataler, image []byte) []string {
	t.Helper()
	var all []string
	number := func() uint64 {
		v, n := binary.Uvarint(image)
		if n <= 0 {
			t.Fatalf("no number in %q", image)
		}
		image = image[n:]
		return v
	}
	text := func(n uint64) string {
		s := string(image[:n])
		image = image[n:]
		return s
	}
	for len(image) > 0 {
		text(number())
		if version := number(); version != 1 {
			t.Fatalf("version %d", version)
		}
		for entries := number(); entries > 0; entries-- {
			key := text(number())
			n := number()
			if n == 0 {
				all = append(all, key+"-")
				continue
			}
			value, _ := binary.Varint([]byte(text(n - 1)))
			all = append(all, fmt.Sprintf("%s=%d", key, value))
		}
	}
	return all
}

// A seal has nothing to encode but what changed again after its batch.
func TestTask_SealEncodesWhatChangedAgain(t *testing.T) {
	c := &countingCodec{}
	r := countingScript(t, c)
	wantCalls := func(when string, n int) {
		t.Helper()
		if c.calls != n {
			t.Fatalf("%s: %d states encoded, want %d", when, c.calls, n)
		}
		c.calls = 0
	}
	r.batch("a add", "b add", "a add", "c add", "d add", "e add", "f add")
	wantCalls("a batch", 6)
	r.wantEntries("a=2", "b=1", "c=1", "d=1", "e=1", "f=1")
	wantCalls("its seal", 0)

	r.batch("a add", "b add", "c add", "d add", "e add")
	r.batch("c add", "a drop", "c add", "f add")
	wantCalls("two batches", 6)
	r.wantEntries("a-", "b=2", "c=4", "d=2", "e=2", "f=2")
	wantCalls("a seal with one changed again, one removed", 1)

	// What says that it changed nothing does not make a mark, but cannot keep
	// what was encoded before: the step may have said so of an earlier change.
	r.batch("b add", "c add")
	r.batch("b unchanged")
	c.calls = 0
	r.wantEntries("b=3", "c=5")
	wantCalls("a seal", 1)

	// A long batch does not wait for its end.
	long := slices.Repeat([]string{"b add"}, 300)
	long[10], long[290], long[295] = "c add", "c add", "d add"
	r.batch(long...)
	wantCalls("a long batch", 3)
	r.wantEntries("b=300", "c=7", "d=3")
	wantCalls("its seal, with two changed again", 2)
}

// Keys that change in each batch are encoded once, by the seal.
func TestTask_SealEncodesBusyKeys(t *testing.T) {
	c := &countingCodec{}
	r := countingScript(t, c)
	for i, test := range []struct {
		batches, early, sealed int
	}{
		{3, 3, 3}, // not known yet
		{3, 0, 3}, // known
		{1, 0, 3}, // no longer true
		{1, 3, 0}, // known
		{2, 3, 3}, {2, 0, 3},
	} {
		c.calls = 0
		for range test.batches {
			r.batch("a add", "b add", "c add")
		}
		early := c.calls
		r.seal()
		if early != test.early || c.calls-early != test.sealed {
			t.Errorf("delta %d: %d states encoded by the batches, %d by the seal, want %d and %d",
				i, early, c.calls-early, test.early, test.sealed)
		}
	}
	r.crash()
	r.want([]string{"a emit", "b emit", "c emit"}, out("a", "12"), out("b", "12"), out("c", "12"))
}

// What a codec refuses, or panics at, matters if it is still there at the seal.
func TestTask_CodecFailsBeforeTheSeal(t *testing.T) {
	errThree := errors.New("three")
	for name, refuse := range map[string]func(n int64) error{
		"error": func(n int64) error {
			if n == 3 {
				return errThree
			}
			return nil
		},
		"panic": func(n int64) error {
			if n == 3 {
				panic("three")
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &countingCodec{refuse: refuse}
			r := countingScript(t, c)
			r.batch("a add", "b add", "b add", "b add", "c add")
			r.batch("d add")
			r.batch("b add", "c add")
			r.wantEntries("a=1", "b=4", "c=2", "d=1")
			r.batch("b drop", "a add", "a add", "c drop")
			c.calls = 0
			r.batch("d add")
			if c.calls != 0 {
				t.Errorf("%d calls of a codec that has failed", c.calls)
			}
			_, err := r.tasks[0].Seal()
			if err == nil || !strings.HasPrefix(err.Error(), `step "script": encode state: `) || !strings.Contains(err.Error(), "three") {
				t.Errorf("error %v", err)
			}
		})
	}
}

// Result may change the state: the change is stored with the commit that emits.
func TestAggregate_ResultChangesState(t *testing.T) {
	for _, mode := range []flow.EmitMode{flow.EmitUpdate, flow.EmitCommit} {
		b := newFlow()
		textTo(flow.Aggregate(keyed(b), "sum", flow.Aggregator[string, int64, string]{
			State: decimalState, Emit: mode,
			Add:    func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
			Result: func(_ *flow.Meta, n *int64) (string, error) { *n += 10; return fmt.Sprint(*n), nil },
		}))
		r := run(t, b)
		r.want([]string{"a x"}, out("a", "11"))
		r.want([]string{"a x"}, out("a", "22"))
		r.crash()
		r.want([]string{"a x"}, out("a", "33"))
	}
}

// A batch of several columns keeps the order of its records, however long its
// runs are.
func TestTask_PlayLongRuns(t *testing.T) {
	for _, runs := range [][]int{{1000}, {255, 1, 256, 257}, {1, 1, 300, 2, 512, 1}, {256, 256, 256}} {
		b := newFlow()
		left, right := flow.Branch(text(b), func(_ *flow.Meta, v string) (bool, error) { return strings.HasPrefix(v, "left"), nil })
		number := func(m *flow.Meta, n *int64, _ string, emit func(string)) error {
			*n++
			emit(fmt.Sprint(*n, " at ", m.Seq))
			return nil
		}
		one := flow.Stateful(flow.KeyBy(left, firstWord), "left", decimalState, number)
		two := flow.Stateful(flow.KeyBy(right, firstWord), "right", decimalState, number)
		textTo(flow.Merge(one, two))
		r := run(t, b)
		var payloads []string
		var want []published
		counts := map[string]int{}
		for i, n := range runs {
			side := []string{"left", "right"}[i%2]
			for range n {
				counts[side]++
				payloads = append(payloads, side+" x")
				want = append(want, out(side, fmt.Sprint(counts[side], " at ", len(payloads))))
			}
		}
		r.batch(payloads...)
		diffOutputs(t, r.seal(), want...)
	}
}

// A large delta leaves no memory behind once the deltas are small again.
func TestTask_LargeDeltaIsFreed(t *testing.T) {
	const size = 32 << 20
	b := newFlow()
	codec := decimalState
	codec.Append = func(dst []byte, n *int64) ([]byte, error) { return append(dst, make([]byte, *n)...), nil }
	textTo(flow.Stateful(keyed(b), "bytes", codec, func(_ *flow.Meta, n *int64, v string, _ func(string)) error {
		*n = 1
		if strings.Contains(v, "large") {
			*n = size
		}
		return nil
	}))
	r := run(t, b)
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	for _, payload := range []string{"a large", "a small", "b small"} {
		r.batch(payload)
		s, err := r.tasks[0].Seal()
		if err != nil {
			t.Fatal(err)
		}
		if n := cap(s.Delta); n > 5*len(s.Delta) {
			t.Errorf("%q: a delta of %d bytes has memory for %d", payload, len(s.Delta), n)
		}
	}
	// The codec's own buffer may stay: it is as large as the largest state.
	if kept := heap() - before; kept > size*3/2+size/4 {
		t.Errorf("%d bytes are kept after a delta of %d", kept, size)
	}
	runtime.KeepAlive(r)
}

// What a removed key had as its state is garbage once the next batch is played.
func TestTask_RemovedStateIsFreed(t *testing.T) {
	type held [1 << 10]byte
	var states []weak.Pointer[held]
	b := newFlow()
	textTo(flow.Stateful(keyed(b), "held", flow.StateCodec[*held]{
		Append: func(dst []byte, _ **held) ([]byte, error) { return dst, nil },
		Decode: func([]byte, **held) error { return nil },
	}, func(m *flow.Meta, s **held, v string, _ func(string)) error {
		if strings.Contains(v, "drop") {
			m.DropState()
		} else if *s == nil {
			*s = &held{}
			states = append(states, weak.Make(*s))
		}
		return nil
	}))
	r := run(t, b)
	alive := func() (n int) {
		runtime.GC()
		for _, p := range states {
			if p.Value() != nil {
				n++
			}
		}
		return n
	}
	r.batch("a x", "b x", "c x")
	r.seal()
	r.batch("a drop", "b drop", "c x")
	r.seal()
	r.batch("c x")
	if n := alive(); len(states) != 3 || n != 1 {
		t.Errorf("%d of %d states are in memory, want that of c", n, len(states))
	}
	runtime.KeepAlive(r)
}

// deltaModel is the naive form of a table: cells in a map, and those that changed
// in the order of their first change.
type deltaModel struct {
	live    map[string]*modelCell
	changed []*modelCell
}

type modelCell struct {
	key           string
	n             int64
	changed, gone bool
}

func (m *deltaModel) play(key string, words []string) {
	c, there := m.live[key]
	if !there {
		c = &modelCell{key: key}
		m.live[key] = c
	}
	marked := !c.changed
	if marked {
		c.changed = true
		m.changed = append(m.changed, c)
	}
	drop, unchanged, failed := false, false, false
	for _, w := range words {
		switch w {
		case "add":
			c.n++
		case "drop":
			drop = true
		case "unchanged":
			unchanged = true
		case "error":
			failed = true
		case "panic":
			return
		}
	}
	takeBack := drop && !there || !drop && unchanged && !failed
	if takeBack && marked {
		c.changed = false
		m.changed = m.changed[:len(m.changed)-1]
	}
	c.gone = drop && there
	if drop || takeBack && !there {
		delete(m.live, key)
	}
}

func (m *deltaModel) seal() []string {
	var entries []string
	for _, c := range m.changed {
		c.changed = false
		if c.gone {
			entries = append(entries, c.key+"-")
			continue
		}
		entries = append(entries, fmt.Sprintf("%s=%d", c.key, c.n))
	}
	m.changed = nil
	return entries
}

func (m *deltaModel) entries() []string {
	var entries []string
	for key, c := range m.live {
		entries = append(entries, fmt.Sprintf("%s=%d", key, c.n))
	}
	slices.Sort(entries)
	return entries
}

// deltaMachine plays batches in a task and in the model.
type deltaMachine struct {
	r     *runner
	model deltaModel
	// log has all deltas; base is an image in parts, complete with the deltas
	// from baseFrom on.
	log, base          [][]byte
	baseFrom           int
	parts              [][]byte
	taking, complete   bool
	takingFrom, floods int
}

func (m *deltaMachine) batch(t *rapid.T) {
	ops := []string{"add", "add", "add", "unchanged", "drop", "add drop", "add error", "unchanged error", "drop error", "add panic", "drop panic", "panic"}
	var payloads []string
	add := func(key, op string) {
		payloads = append(payloads, key+" "+op)
		m.model.play(key, strings.Fields(op))
	}
	for range rapid.IntRange(0, 8).Draw(t, "records") {
		add(rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"}).Draw(t, "key"), rapid.SampledFrom(ops).Draw(t, "op"))
	}
	// Long batches are encoded in between.
	if m.floods < 3 && rapid.IntRange(0, 9).Draw(t, "flood") == 0 {
		m.floods++
		for i := range rapid.IntRange(200, 300).Draw(t, "flooding") {
			add(fmt.Sprint("f", i%7), "add")
		}
		add("a", "add")
		add("b", "drop")
	}
	m.r.tb = t
	m.r.batch(payloads...)
}

func (m *deltaMachine) seal(t *rapid.T) {
	s, err := m.r.tasks[0].Seal()
	if err != nil {
		t.Fatal(err)
	}
	want := m.model.seal()
	if got := deltaEntries(t, s.Delta); !slices.Equal(got, want) {
		t.Fatalf("delta %v, want %v", got, want)
	}
	m.log = append(m.log, s.Delta)
	// What changed while the image was taken is in the log now.
	if m.taking && m.complete {
		m.base, m.baseFrom, m.taking = m.parts, m.takingFrom, false
	}
}

func (m *deltaMachine) image(t *rapid.T) {
	task := m.r.tasks[0]
	if !m.taking {
		m.taking, m.complete, m.parts, m.takingFrom = true, false, nil, len(m.log)
		task.BeginImage()
	}
	if m.complete {
		return
	}
	part, more, err := task.NextImage(rapid.IntRange(1, 3).Draw(t, "size"))
	if err != nil {
		t.Fatal(err)
	}
	m.parts, m.complete = append(m.parts, part), !more
}

// restore seals and compares task, model and a second task that loads what is
// stored.
func (m *deltaMachine) restore(t *rapid.T) {
	m.seal(t)
	want := m.model.entries()
	second := m.r.f.Task(0)
	for _, image := range append(slices.Clone(m.base), m.log[m.baseFrom:]...) {
		if err := second.Load(image); err != nil {
			t.Fatal(err)
		}
	}
	second.Loaded()
	second.BeginImage()
	image, more, err := second.NextImage(1000)
	if err != nil || more {
		t.Fatal(more, err)
	}
	got := deltaEntries(t, image)
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Fatalf("restored %v, want %v", got, want)
	}
	if n := m.r.tasks[0].Keys(); n != len(want) {
		t.Fatalf("%d keys, want %d", n, len(want))
	}
}

// Each delta has exactly what changed, in the order of the first changes, however
// batches, seals and images fall; deltas and images restore the state.
func TestTask_Deltas(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newFlow()
		textTo(flow.Stateful(keyed(b), "script", decimalState, script))
		m := &deltaMachine{r: run(t, b), model: deltaModel{live: map[string]*modelCell{}}}
		t.Repeat(map[string]func(*rapid.T){
			"batch": m.batch, "batch2": m.batch, "batch3": m.batch,
			"seal": m.seal, "image": m.image, "image2": m.image, "restore": m.restore,
		})
		m.restore(t)
	})
}
