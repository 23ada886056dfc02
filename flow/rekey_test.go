package flow_test

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// countWords counts the records of a key, and emits "<key> <count> <record>".
func countWords(s flow.Stream[string], id string) flow.Stream[string] {
	return flow.Stateful(s, id, decimalState, func(m *flow.Meta, n *int64, v string, emit func(string)) error {
		if strings.Contains(v, "fail-"+id) {
			return errors.New("fails")
		}
		*n++
		emit(fmt.Sprintf("%s %d %s", m.Key, *n, v))
		return nil
	})
}

// lastLetter is the key of later stages.
func lastLetter(_ *flow.Meta, v string) (string, error) {
	switch {
	case strings.HasSuffix(v, "?"):
		return "", errNoKey
	case strings.HasSuffix(v, "panic"):
		panic("no letter")
	}
	return v[len(v)-1:], nil
}

func length(_ *flow.Meta, v string) (string, error) { return fmt.Sprint(len(v)), nil }

// twoStages counts by the first word, and behind that by the last letter.
func twoStages(opts flow.Options) *flow.Builder {
	b := flow.New("test", opts)
	textTo(countWords(flow.Rekey(countWords(keyed(b), "first"), lastLetter, flow.TextCodec(), flow.ID("letter")), "second"))
	return b
}

func pushText(r *flowtest.Runner, payloads ...string) {
	for _, p := range payloads {
		r.Push(flowtest.Record{Subject: "in", Data: p})
	}
}

func TestRekey(t *testing.T) {
	f := build(t, twoStages(flow.Options{Partitions: 4}))
	if f.Stages() != 2 {
		t.Errorf("%d stages", f.Stages())
	}
	r := flowtest.New(t, f)
	pushText(r, "a 1x", "b 2x", "a 3y")
	r.Commit()
	pushText(r, "c 4x")
	r.Crash()
	r.Drain()
	got := r.Data("OUT")
	slices.Sort(got)
	want := []string{"x 1 a 1 a 1x", "x 2 b 1 b 2x", "x 3 c 1 c 4x", "y 1 a 2 a 3y"}
	// The two of x that are committed at once may come in either order.
	if got[0] != want[0] {
		want = []string{"x 1 b 1 b 2x", "x 2 a 1 a 1x", "x 3 c 1 c 4x", "y 1 a 2 a 3y"}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	if r.Keys() != 5 {
		t.Errorf("%d keys, want 3 and 2", r.Keys())
	}
	var steps []string
	for _, s := range f.Steps() {
		steps = append(steps, fmt.Sprintf("%s %d", s.ID, s.Stage))
	}
	if diff := cmp.Diff([]string{"in 0", "key 0", "first 0", "letter 0", "second 1", "out 1"}, steps); diff != "" {
		t.Errorf("stages of the steps (-want +got):\n%s", diff)
	}
}

// TestRekey_model plays random records through three stages, with branches that meet
// again, crashes and drains, and compares with maps.
func TestRekey_model(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 3))
		b := flow.New("test", flow.Options{Partitions: 1 + rng.IntN(5)})
		first := countWords(keyed(b), "first")
		yes, no := flow.Branch(first, func(_ *flow.Meta, v string) (bool, error) { return len(v)%2 == 0, nil })
		second := flow.Merge(
			flow.Rekey(yes, lastLetter, flow.TextCodec(), flow.ID("even")),
			flow.Rekey(no, lastLetter, flow.JSONCodec[string](), flow.ID("odd")))
		textTo(countWords(flow.Rekey(countWords(second, "second"), length, flow.TextCodec()), "third"))
		r := flowtest.New(t, build(t, b))
		firsts, letters := map[string]int{}, map[string]int{}
		for range 1 + rng.IntN(200) {
			word, letter := fmt.Sprint(rng.IntN(5)), string(rune('a'+rng.IntN(4)))
			pushText(r, word+" "+strings.Repeat("z", rng.IntN(3))+letter)
			firsts[word]++
			letters[letter]++
			switch rng.IntN(12) {
			case 0:
				r.Commit()
			case 1:
				r.Crash()
			case 2:
				r.Crash(0)
			case 3:
				r.Drain()
			}
		}
		// The model: the numbers that each key has given, whatever the order.
		third, second2, gotFirst, gotLetter := map[string]int{}, map[string]bool{}, map[string]int{}, map[string]int{}
		for _, res := range r.Data("OUT") {
			w := strings.Fields(res) // length n letter n word n word payload
			third[w[0]]++
			if w[1] != fmt.Sprint(third[w[0]]) {
				t.Fatalf("seed %d: %q is number %d", seed, res, third[w[0]])
			}
			if id := w[2] + w[3]; second2[id] {
				t.Fatalf("seed %d: %q came twice", seed, id)
			} else {
				second2[id] = true
			}
			gotLetter[w[2]]++
			gotFirst[w[4]]++
		}
		if diff := cmp.Diff([]map[string]int{firsts, letters}, []map[string]int{gotFirst, gotLetter}); diff != "" {
			t.Fatalf("seed %d: counts (-want +got):\n%s", seed, diff)
		}
	}
}

func TestRekey_order(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 8})
	textTo(flow.Rekey(keyed(b), lastLetter, flow.TextCodec()))
	r := flowtest.New(t, build(t, b))
	var want []string
	for i := range 300 {
		want = append(want, fmt.Sprintf("k %s%dx", strings.Repeat(".", 3000), i))
	}
	pushText(r, want...) // more than a frame holds
	if diff := cmp.Diff(want, r.Data("OUT")); diff != "" {
		t.Error("records of one key have lost their order")
	}
}

func TestRekey_dead(t *testing.T) {
	r := flowtest.New(t, build(t, twoStages(flow.Options{Partitions: 3})))
	pushText(r, "a ok", "b ?", "c panic", "d fail-secondx", "e ok")
	head := func(step, err, seq string) map[string]string {
		return map[string]string{
			flow.HeaderDeadFlow: "test", flow.HeaderDeadStep: step, flow.HeaderDeadError: err,
			flow.HeaderDeadStream: "IN", flow.HeaderDeadSubject: "in", flow.HeaderDeadSeq: seq,
		}
	}
	dead := r.DeadLetters()
	slices.SortFunc(dead, func(a, b flowtest.Result) int {
		return strings.Compare(a.Headers[flow.HeaderDeadSeq], b.Headers[flow.HeaderDeadSeq])
	})
	for i := range dead {
		if e, _, ok := strings.Cut(dead[i].Headers[flow.HeaderDeadError], " (at"); ok {
			dead[i].Headers[flow.HeaderDeadError] = e
		}
		dead[i].Kind, dead[i].Subject, dead[i].Sink = "", "", ""
	}
	late := head("second", "fails", "4")
	late[flow.HeaderDeadStage] = "1"
	panicked := dead[1].Headers[flow.HeaderDeadError]
	if !strings.Contains(panicked, "no letter") {
		t.Errorf("the panic is %q", panicked)
	}
	want := []flowtest.Result{
		{Headers: head("letter", "no key", "2"), Data: "b ?"},
		{Headers: head("letter", panicked, "3"), Data: "c panic"},
		{Headers: late, Data: "d 1 d fail-secondx"},
	}
	if diff := cmp.Diff(want, dead); diff != "" {
		t.Errorf("dead letters (-want +got):\n%s", diff)
	}
	if n := len(r.Results("OUT")); n != 2 {
		t.Errorf("%d results", n)
	}
}

func TestRekey_badCodec(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 2})
	codec := flow.TextCodec()
	codec.Decode = func(_ *flow.Meta, data []byte) (string, error) {
		switch string(data) {
		case "a 2x":
			return "", errors.New("is bad")
		case "a 3x":
			panic("is worse")
		}
		return string(data), nil
	}
	textTo(flow.Rekey(keyed(b), lastLetter, codec, flow.ID("letter")))
	r := flowtest.New(t, build(t, b))
	pushText(r, "a 1x", "a 2x", "a 3x", "a 4x")
	if diff := cmp.Diff([]string{"a 1x", "a 4x"}, r.Data("OUT")); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	errs := r.Errors()
	if len(errs) != 2 || errs[0] != "letter: decode behind the exchange: is bad" || !strings.Contains(errs[1], "is worse") {
		t.Errorf("dead letters %q", errs)
	}
}

func TestRekey_stop(t *testing.T) {
	r := flowtest.New(t, build(t, twoStages(flow.Options{Partitions: 1, OnError: flow.Stop})))
	pushText(r, "a 1x")
	r.Commit()
	pushText(r, "a 2x", "b fail-secondx")
	for range 2 {
		err := r.TryCommit()
		wantStepError(t, err, "second", 3)
		var e *flow.StepError
		if errors.As(err, &e); e.Frame != 2 || !strings.Contains(err.Error(), `step "second", stream IN, sequence 3, sequence 2 of the exchange: fails`) {
			t.Errorf("frame %d, %v", e.Frame, err)
		}
		r.Crash()
	}
}

// TestRekey_meta: position and times cross, also of what comes of no record.
func TestRekey_meta(t *testing.T) {
	type seen struct {
		Stream, Subject, Key, Raw string
		Seq                       uint64
		At, Time                  int64
	}
	var got []seen
	look := func(m *flow.Meta, v string) {
		got = append(got, seen{m.Stream, m.Subject, m.Key, string(m.Raw()), m.Seq, m.EventTime().Unix() - flowtest.Start.Unix(), m.Time().Unix() - flowtest.Start.Unix()})
	}
	b := flow.New("test", flow.Options{Partitions: 1})
	windows, _ := flow.Window(keyed(b), "w", flow.Tumbling(10*time.Second), flow.WindowAggregator[string, int64, string]{
		State:  decimalState,
		Add:    func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
		Result: func(m *flow.Meta, _ flow.Span, n *int64) (string, error) { return fmt.Sprint(m.Key, *n), nil },
	})
	records := flow.Rekey(keyed2(b), lastLetter, flow.TextCodec())
	textTo(flow.Inspect(flow.Merge(flow.Rekey(windows, lastLetter, flow.TextCodec()), records), look))
	r := flowtest.New(t, build(t, b))
	r.Push(flowtest.Record{Stream: "IN", Subject: "in.a", Time: flowtest.Start.Add(time.Second), Data: "a x"})
	r.Push(flowtest.Record{Stream: "IN2", Subject: "in2.b", Time: flowtest.Start.Add(2 * time.Second), Data: "b y"})
	r.Push(flowtest.Record{Stream: "IN2", Subject: "in2.b", Time: flowtest.Start.Add(3 * time.Second), Data: "b z"})
	r.Pause(time.Minute)
	r.Commit()
	want := []seen{
		{"IN2", "in2.b", "y", "b y", 1, 2, 2},
		{"IN2", "in2.b", "z", "b z", 2, 3, 3},
		{"", "", "1", "a1", 0, 9, got[len(got)-1].Time},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metas behind the exchange (-want +got):\n%s", diff)
	}
}

// keyed2 is keyed for stream IN2.
func keyed2(b *flow.Builder) flow.Stream[string] {
	return flow.KeyBy(flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText()), firstWord)
}

// frames plays records through the first stage of a flow and returns the frames.
func frames(tb fataler, f *flow.Flow, limit int, payloads ...string) (all []flow.Output, s flow.Sealed) {
	tb.Helper()
	router, task := f.Router(0), f.Task(0)
	for i, sink := range f.Sinks() {
		if sink.Kind == flow.SinkExchange {
			task.LimitResults(i, limit)
		}
	}
	for i, p := range payloads {
		if err := router.Route("in.x", uint64(i+100), int64(i+1000), []byte(p)); err != nil {
			tb.Fatal(err)
		}
	}
	router.Take(func(b *flow.Batch) {
		if err := task.Play(b); err != nil {
			tb.Fatal(err)
		}
	})
	if len(payloads) > 0 && (!task.Dirty() || task.Pending() == 0) {
		tb.Fatalf("dirty %v, %d bytes pending", task.Dirty(), task.Pending())
	}
	s, err := task.Seal()
	if err != nil {
		tb.Fatal(err)
	}
	if task.Dirty() || task.Pending() != 0 {
		tb.Fatal("dirty after the seal")
	}
	err = flow.Outputs(s.Outbox, func(_ int, o flow.Output) error {
		if f.Sinks()[o.Sink].Kind == flow.SinkExchange {
			all = append(all, o)
		}
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	if len(all) != s.Frames {
		tb.Fatalf("%d frames, Sealed.Frames is %d", len(all), s.Frames)
	}
	return all, s
}

// oneStageOn only changes the key.
func oneStageOn(tb fataler) *flow.Flow {
	b := newFlow()
	textTo(flow.Rekey(keyed(b), lastLetter, flow.TextCodec(), flow.ID("letter")))
	return build(tb, b)
}

// TestFrame_golden pins the bytes: they are stored.
func TestFrame_golden(t *testing.T) {
	got, _ := frames(t, oneStageOn(t), 0, "a 1x", "b 2x")
	const want = "01" + "a7aaa6a9" + "01" + "00" + "00" + "01" + "02" +
		"08" + "066c6574746572" + "02494e" + "04696e2e78" + "c801" + "d00f" + "0178" + "0461203178" +
		"0f" + "02" + "02" + "0178" + "0462203278"
	if len(got) != 1 || string(got[0].Subject) != "natsflow.x.test.1.0" || hex.EncodeToString(got[0].Data) != want {
		t.Fatalf("frames\n%x, want\n%s", got[0].Data, want)
	}
}

func TestFrame_bounds(t *testing.T) {
	long := func(n int) string { return "a " + strings.Repeat("y", n) + "x" }
	f := oneStageOn(t)
	var many []string
	for range 100 {
		many = append(many, long(10_000))
	}
	got, s := frames(t, f, 0, many...)
	total := 0
	for _, o := range got {
		if len(o.Data) > 256<<10+100 || len(o.Data) < 200<<10 && total == 0 {
			t.Errorf("a frame of %d bytes", len(o.Data))
		}
		total += len(o.Data)
	}
	if len(got) != 4 || s.Outputs != 4 || total < 100*10_000 {
		t.Errorf("%d frames with %d bytes", len(got), total)
	}
	// A smaller message, and a record that never fits.
	got, s = frames(t, f, 5000, long(1000), long(6000), long(3000), long(2000))
	if len(got) != 2 || s.DeadLetters != 1 || len(got[0].Data) > 5000 || len(got[1].Data) > 5000 {
		t.Errorf("%d frames, %d dead letters", len(got), s.DeadLetters)
	}
	router := f.ExchangeRouter(1)
	task := f.StageTask(1, 0)
	for i, o := range got {
		if err := router.RouteFrame(0, uint64(i+1), o.Data); err != nil {
			t.Fatal(err)
		}
	}
	router.Take(func(b *flow.Batch) {
		if b.Len() != 3 {
			t.Errorf("%d records", b.Len())
		}
		if err := task.Play(b); err != nil {
			t.Fatal(err)
		}
	})
	if s, err := task.Seal(); err != nil || s.Outputs != 3 || s.Records != 3 || s.Frames != 0 {
		t.Errorf("sealed %+v, %v", s, err)
	}
}

// TestTask_frameNumbers: a frame that comes twice is dropped, and one that is missing is
// seen, whatever is stored and loaded in between.
func TestTask_frameNumbers(t *testing.T) {
	f := build(t, twoStages(flow.Options{Partitions: 1}))
	router, first := f.Router(0), f.Task(0)
	var all [][]byte
	var sent [][]byte
	for i := range 5 {
		if err := router.Route("in", uint64(i+1), int64(i+1), fmt.Appendf(nil, "a %dx", i)); err != nil {
			t.Fatal(err)
		}
		router.Take(func(b *flow.Batch) {
			if err := first.Play(b); err != nil {
				t.Fatal(err)
			}
		})
		s, err := first.Seal()
		if err != nil {
			t.Fatal(err)
		}
		sent = append(sent, s.Delta)
		if err := flow.Outputs(s.Outbox, func(_ int, o flow.Output) error { all = append(all, o.Data); return nil }); err != nil {
			t.Fatal(err)
		}
		// Another owner counts on, also one whose definition has no other stage.
		b := newFlow()
		textTo(countWords(keyed(b), "first"))
		between := build(t, b).Task(0)
		for _, task := range []*flow.Task{between, f.Task(0)} {
			for _, d := range sent {
				if err := task.Load(d); err != nil {
					t.Fatal(err)
				}
			}
			task.Loaded()
			if task.Keys() != 1 {
				t.Errorf("%d keys", task.Keys())
			}
			task.BeginImage()
			sent = nil
			for more := true; more; {
				part, next, err := task.NextImage(1)
				if err != nil {
					t.Fatal(err)
				}
				sent, more = append(sent, part), next
			}
			first = task
		}
	}
	var log [][]byte
	play := func(accept bool, seq int, frames ...int) (flow.Sealed, error) {
		r, task := f.ExchangeRouter(1), f.StageTask(1, 0)
		for _, d := range log {
			if err := task.Load(d); err != nil {
				t.Fatal(err)
			}
		}
		task.Loaded()
		if accept {
			task.AcceptLostFrames()
		}
		for i, k := range frames {
			if err := r.RouteFrame(0, uint64(seq+i), all[k]); err != nil {
				t.Fatal(err)
			}
		}
		var err error
		r.Take(func(b *flow.Batch) { err = task.Play(b) })
		if err != nil {
			return flow.Sealed{}, err
		}
		s, err := task.Seal()
		log = append(log, s.Delta)
		return s, err
	}
	want := func(s flow.Sealed, err error, records, repeats int) {
		t.Helper()
		if err != nil || s.Records != records || s.Outputs != records || s.Repeats != repeats {
			t.Errorf("%d records, %d outputs, %d repeats, %v", s.Records, s.Outputs, s.Repeats, err)
		}
	}
	s, err := play(false, 1, 0, 1, 0)
	want(s, err, 2, 1)
	s, err = play(false, 4, 1, 0)
	want(s, err, 0, 2)
	_, err = play(false, 6, 4)
	if !errors.Is(err, flow.ErrLostFrames) || !strings.Contains(err.Error(), "before sequence 6, frames 3 to 4 from task 0.0 to task 1.0") {
		t.Errorf("error %v", err)
	}
	s, err = play(false, 6, 2)
	want(s, err, 1, 0)
	s, err = play(true, 7, 4, 3)
	want(s, err, 1, 1)
}

// resum makes the checksum of a frame right.
func resum(frame []byte) []byte {
	if len(frame) >= 5 {
		binary.LittleEndian.PutUint32(frame[1:], crc32.Checksum(frame[5:], crc32.MakeTable(crc32.Castagnoli)))
	}
	return frame
}

func TestRouter_RouteFrame_errors(t *testing.T) {
	f := oneStageOn(t)
	all, _ := frames(t, f, 0, "a 1x", "b 2x")
	good := all[0].Data
	change := func(i int, b byte) []byte {
		bad := slices.Clone(good)
		bad[i] = b
		return bad
	}
	two := build(t, twoStages(flow.Options{Partitions: 2}))
	for name, test := range map[string]struct {
		f         *flow.Flow
		partition int
		data      []byte
		want      string
	}{
		"nothing":            {f, 0, nil, "it has version -1"},
		"another version":    {f, 0, change(0, 2), "it has version 2, this natsflow reads version 1"},
		"short":              {f, 0, good[:4], "checksum"},
		"a flipped bit":      {f, 0, change(len(good)-1, 'y'), "checksum"},
		"cut off":            {f, 0, resum(slices.Clone(good[:len(good)-1])), "record 2 of 2 is damaged"},
		"more":               {f, 0, resum(append(slices.Clone(good), 0)), "1 bytes come behind"},
		"an unknown flag":    {f, 0, resum(change(10, 0x80)), "record 1 of 2 is damaged"},
		"an unknown step":    {f, 0, resum(change(12, 'x')), `the step "xetter", which does not lead to stage 1`},
		"of another stage":   {f, 0, resum(change(5, 2)), "of stage 2, under the subject of partition 0 of stage 1"},
		"of no producer":     {f, 0, resum(change(7, 1)), "it is of partition 1"},
		"partition beyond":   {f, 1, good, "partition 1 of 1"},
		"partition below":    {f, -2, good, "partition -2 of 1"},
		"for all":            {f, flow.AllPartitions, good, "it has version 1, this natsflow reads version 2"},
		"of another flow":    {two, 1, good, "for partition 0 of stage 1, under the subject of partition 1"},
		"key of another one": {two, flow.Partition("x", 2) ^ 1, resum(change(6, byte(flow.Partition("x", 2)^1))), `the key "x" belongs to partition`},
	} {
		t.Run(name, func(t *testing.T) {
			r := test.f.ExchangeRouter(1)
			err := r.RouteFrame(test.partition, 7, test.data)
			if !errors.Is(err, flow.ErrFrame) || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "sequence 7") {
				t.Errorf("error %v, want %q", err, test.want)
			}
			r.Take(func(b *flow.Batch) { t.Errorf("%d records were routed", b.Len()) })
		})
	}
}

func TestRouter_RouteFrame_seen(t *testing.T) {
	f := oneStageOn(t)
	all, _ := frames(t, f, 0, "a 1x")
	r := f.ExchangeRouter(1)
	r.Seen(0, 7)
	for _, seq := range []uint64{6, 7} {
		if err := r.RouteFrame(0, seq, all[0].Data); err != nil {
			t.Fatal(err)
		}
		r.Take(func(*flow.Batch) { t.Errorf("sequence %d was routed", seq) })
	}
	if err := r.RouteFrame(0, 8, all[0].Data); err != nil {
		t.Fatal(err)
	}
	n := 0
	r.Take(func(b *flow.Batch) { n = b.Len() })
	if n != 1 {
		t.Errorf("%d records of sequence 8", n)
	}
}

// FuzzRouter_RouteFrame: any bytes are a frame or an error, at a cost that their
// length bounds.
func FuzzRouter_RouteFrame(f *testing.F) {
	fl := oneStageOn(f)
	all, _ := frames(f, fl, 0, "a 1x", "b 2x", "c 3y", "d 4z")
	for _, o := range all {
		f.Add(o.Data)
		f.Add(o.Data[:len(o.Data)/2])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := fl.ExchangeRouter(1)
		n := allocated(func() {
			err := r.RouteFrame(0, 1, resum(data))
			if err != nil && !errors.Is(err, flow.ErrFrame) {
				t.Errorf("error %v", err)
			}
			r.Take(func(b *flow.Batch) {
				if err != nil {
					t.Errorf("%d records and error %v", b.Len(), err)
				}
				if b.Len() > len(data) {
					t.Errorf("%d records of %d bytes", b.Len(), len(data))
				}
				if err := fl.StageTask(1, 0).Play(b); err != nil && !errors.Is(err, flow.ErrLostFrames) {
					t.Error(err)
				}
			})
		})
		if most := uint64(1<<20 + 1024*len(data)); n > most {
			t.Errorf("%d bytes allocate %d", len(data), n)
		}
	})
}

func TestRekey_mistakes(t *testing.T) {
	by := func(_ *flow.Meta, v string) (string, error) { return v, nil }
	rekeyed := func(s flow.Stream[string]) flow.Stream[string] {
		return flow.Rekey(s, by, flow.TextCodec(), flow.ID("x"))
	}
	for name, test := range map[string]mistake{
		"no key before": {func(b *flow.Builder, _ flow.Stream[string]) {
			rekeyed(flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText()))
		}, `step "x": the stream has no key yet: use KeyBy`},
		"no key function": {func(_ *flow.Builder, s flow.Stream[string]) { flow.Rekey(s, nil, flow.TextCodec(), flow.ID("x")) }, `step "x": there is no function`},
		"no codec":        {func(_ *flow.Builder, s flow.Stream[string]) { flow.Rekey(s, by, flow.Codec[string]{}, flow.ID("x")) }, `step "x": there is no codec`},
		"merge of stages": {func(_ *flow.Builder, s flow.Stream[string]) { flow.Merge(s, rekeyed(s)) }, "a stream of stage 0 and one of stage 1"},
		"long dedupe behind it": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Dedupe(rekeyed(s), "d", 30*365*24*time.Hour, by)
		}, `step "d": dedupe within 262800h0m0s: at most 7300 days`},
		"KeyBy behind a key": {func(_ *flow.Builder, s flow.Stream[string]) { flow.KeyBy(s, by, flow.ID("x")) }, "give it another one by Rekey"},
		"too many stages": {func(_ *flow.Builder, s flow.Stream[string]) {
			for range flow.MaxStages {
				s = flow.Rekey(s, by, flow.TextCodec())
			}
		}, "17 stages, at most 16"},
	} {
		t.Run(name, test.check)
	}
}

// TestFlow_Hash_stages: a change of the key is a part of the definition.
func TestFlow_Hash_stages(t *testing.T) {
	one, two := newFlow(), newFlow()
	textTo(flow.Map(keyed(one), func(_ *flow.Meta, v string) (string, error) { return v, nil }, flow.ID("letter"), flow.Kind("rekey")))
	textTo(flow.Rekey(keyed(two), lastLetter, flow.TextCodec(), flow.ID("letter")))
	if build(t, one).Hash() == build(t, two).Hash() {
		t.Error("a flow of two stages has the hash of one")
	}
}
