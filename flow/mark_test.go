package flow_test

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// tally counts the records of a window.
func tally(s flow.Stream[string], id string, w flow.Windows) flow.Stream[string] {
	sums, late := flow.Window(s, id, w, flow.WindowAggregator[string, int64, string]{
		State: decimalState,
		Add: func(_ *flow.Meta, n *int64, v string) error {
			var records int64
			if _, err := fmt.Sscan(v[strings.LastIndexByte(v, ' ')+1:], &records); err != nil {
				return err
			}
			*n += records
			return nil
		},
		Result: func(m *flow.Meta, w flow.Span, n *int64) (string, error) {
			return fmt.Sprintf("%s %s-%s %d", m.Key, clockText(w.Start), clockText(w.End), *n), nil
		},
	})
	flow.To(late, textSink("LATE"), flow.ID("late-"+id))
	return sums
}

// minuteTally counts records such as "a 1" by minutes, for each key; and behind that
// by groups of the keys, and all, of which the windows are longer.
func minuteTally(partitions, stages int, clock flow.Clock) *flow.Builder {
	return tallies(partitions, stages, clock, false)
}

// tallies is that; with raw, records cross as they are, and windows come behind that.
func tallies(partitions, stages int, clock flow.Clock, raw bool) *flow.Builder {
	b := flow.New("test", flow.Options{Partitions: partitions})
	s := flow.From(b, flow.Source{Stream: "IN", Time: clock}, flow.DecodeText(), flow.ID("in"))
	sums := flow.KeyBy(s, firstWord)
	if !raw {
		sums = tally(sums, "minutes", flow.Tumbling(time.Minute))
	}
	for stage := 1; stage < stages; stage++ {
		sums = flow.Rekey(sums, func(_ *flow.Meta, v string) (string, error) { return "group"[:6-2*stage] + v[:2-stage], nil }, flow.TextCodec())
		sums = tally(sums, fmt.Sprintf("sum-%d", stage), flow.Tumbling(5*time.Minute*time.Duration(stage)))
	}
	flow.To(sums, textSink("OUT"))
	return b
}

// A window of the second stage closes when all tasks of the first one have come to its
// end, also those that have no records.
func TestMark(t *testing.T) {
	r := streamTimed(t, build(t, minuteTally(8, 2, nil)),
		"00:00:10 a 1", "00:00:20 b 1", "00:01:10 a 1", "commit", "00:04:10 c 1", "00:04:50 a 1", "commit")
	wantData(t, r, "OUT")
	playLine(t, r, "pause 9s", false)
	wantData(t, r, "OUT") // one second is missing
	playLine(t, r, "pause 1s", false)
	wantData(t, r, "OUT", "groub 00:00-00:05 1", "grouc 00:00-00:05 1", "groua 00:00-00:05 3")
	wantData(t, r, "LATE")
}

func TestMark_stages(t *testing.T) {
	lines := []string{
		"00:00:10 a 1", "00:00:20 b 1", "commit", "00:01:10 a 1", "crash", "00:04:10 c 1", "drain", "00:04:50 a 1",
		"crash", "00:06:00 a 1", "commit", "00:10:05 b 1", "crash", "drain", "00:11 a 1", "commit", "00:20 a 1",
	}
	r := streamTimed(t, build(t, minuteTally(3, 3, nil)), lines...)
	wantData(t, r, "OUT", "gr 00:00-00:10 6", "gr 00:10-00:20 2")
	wantData(t, r, "LATE")
}

// Windows behind one with an allowed lateness wait for its results.
func TestMark_delay(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 2})
	first := flow.Tumbling(time.Minute)
	first.AllowedLateness = 30 * time.Second
	s := flow.From(b, flow.Source{Stream: "IN", Time: flow.EventTime[string]{Of: func(_ *flow.Meta, v string) (time.Time, error) { return clockTime(v) }}}, flow.DecodeText(), flow.ID("in"))
	s = flow.Map(s, func(_ *flow.Meta, v string) (string, error) { return v[strings.IndexByte(v, ' ')+1:], nil })
	sums := tally(flow.KeyBy(s, firstWord), "minutes", first)
	same := func(m *flow.Meta, _ string) (string, error) { return m.Key, nil }
	textTo(tally(flow.Rekey(sums, same, flow.TextCodec()), "again", flow.Tumbling(time.Minute)))
	r := eventTimed(t, build(t, b), "00:00:10 a 1", "00:01:20 b 1", "00:00:30 a 1", "commit", "00:01:29 a 1")
	wantData(t, r, "OUT")
	playLine(t, r, "00:01:30 a 1", true)
	wantData(t, r, "OUT", "a 00:00-00:01 2")
	wantData(t, r, "LATE")
}

// world runs the tasks of a flow each by itself: when a task commits, when another one
// reads what is in the exchange, and when one is lost, is for the test to say.
type world struct {
	tb     fataler
	f      *flow.Flow
	router *flow.Router
	// tasks by stage, with what they have stored and how far they have read.
	tasks [][]*worldTask
	// seq is that of the source, exchange what is published.
	seq      uint64
	exchange []flow.Output
	got      []string
	late     int
}

type worldTask struct {
	*flow.Task
	log [][]byte
	// pos is the position in the exchange, or in the source, stored that of the log, and
	// mark the watermark there.
	pos, stored int
	mark        int64
}

func newWorld(tb fataler, b *flow.Builder) *world {
	w := &world{tb: tb, f: build(tb, b)}
	w.router = w.f.Router(0)
	for stage := range w.f.Stages() {
		var tasks []*worldTask
		for p := range w.f.Options().Partitions {
			t := &worldTask{Task: w.f.StageTask(stage, p)}
			t.mark = t.Now()
			tasks = append(tasks, t)
		}
		w.tasks = append(w.tasks, tasks)
	}
	return w
}

// record puts one into the source; all tasks of the first stage read it.
func (w *world) record(at time.Duration, data string) {
	w.tb.Helper()
	w.seq++
	nanos := flowtest.Start.Add(at).UnixNano()
	if err := w.router.Route("in", w.seq, nanos, []byte(data)); err != nil {
		w.tb.Fatal(err)
	}
	w.router.Take(func(b *flow.Batch) { w.must(w.tasks[0][b.Partition].Play(b)) })
	w.advance(nanos)
}

// advance moves the clock of the source.
func (w *world) advance(nanos int64) {
	w.tb.Helper()
	for _, t := range w.tasks[0] {
		w.must(t.Advance(0, nanos))
	}
}

func (w *world) must(err error) {
	w.tb.Helper()
	if err != nil {
		w.tb.Fatal(err)
	}
}

// read lets a task of a later stage read so many messages of the exchange.
func (w *world) read(t *worldTask, most int) {
	w.tb.Helper()
	r := w.f.ExchangeRouter(t.Stage())
	for range most {
		if t.pos == len(w.exchange) {
			break
		}
		o := w.exchange[t.pos]
		t.pos++
		subject := string(o.Subject)
		if subject != flow.ExchangeSubject("test", t.Stage(), t.Partition()) && subject != flow.ExchangeMarks("test", t.Stage()) {
			continue
		}
		p, err := flow.ExchangePartition(subject)
		w.must(err)
		w.must(r.RouteFrame(p, uint64(t.pos), o.Data))
	}
	r.Take(func(b *flow.Batch) {
		if b.Partition == t.Partition() {
			w.must(t.Play(b))
		}
	})
}

// commit commits a task.
func (w *world) commit(t *worldTask) flow.Sealed {
	w.tb.Helper()
	s, err := t.Seal()
	w.must(err)
	if s.Delta != nil {
		t.log = append(t.log, s.Delta)
	}
	t.stored, t.mark = t.pos, t.Now()
	w.late += s.Late
	w.must(flow.Outputs(s.Outbox, func(_ int, o flow.Output) error {
		switch sink := w.f.Sinks()[o.Sink]; {
		case sink.Kind == flow.SinkExchange:
			w.exchange = append(w.exchange, o)
		case sink.Name == "OUT":
			w.got = append(w.got, string(o.Data))
		case sink.Kind == flow.SinkDead:
			w.tb.Fatalf("dead letter %v", o.Headers)
		}
		return nil
	}))
	if t.Dirty() || t.Untold() || t.Unsealed() {
		w.tb.Fatal("there is something left after a commit")
	}
	return s
}

// image stores a task as a whole.
func (w *world) image(t *worldTask) {
	w.tb.Helper()
	w.commit(t)
	t.BeginImage()
	t.log = nil
	for more := true; more; {
		part, next, err := t.NextImage(2)
		w.must(err)
		t.log, more = append(t.log, part), next
	}
}

// crash loses what a task of a later stage has not committed.
func (w *world) crash(t *worldTask) {
	w.tb.Helper()
	t.Task = w.f.StageTask(t.Stage(), t.Partition())
	for _, image := range t.log {
		w.must(t.Load(image))
	}
	t.Loaded()
	t.pos = t.stored
	if t.Now() != t.mark {
		w.tb.Fatalf("task %d.%d has watermark %d, it had committed %d", t.Stage(), t.Partition(), t.Now(), t.mark)
	}
	if t.Dirty() {
		w.tb.Fatal("dirty after loading")
	}
}

// TestMark_model plays a random history: tasks commit, read and are lost in any order.
// Since no record is late, the results are those of the records, whatever the order.
func TestMark_model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages := rapid.IntRange(2, 3).Draw(t, "stages")
		w := newWorld(t, tallies(rapid.IntRange(1, 4).Draw(t, "partitions"), stages, nil, rapid.Bool().Draw(t, "raw")))
		want := map[string]int{}
		now := time.Duration(0)
		task := func(from int) *worldTask {
			return rapid.SampledFrom(slices.Concat(w.tasks[from:]...)).Draw(t, "task")
		}
		size := 5 * time.Minute * time.Duration(stages-1)
		t.Repeat(map[string]func(*rapid.T){
			"record": func(t *rapid.T) {
				now += time.Duration(rapid.IntRange(0, 200).Draw(t, "seconds")) * time.Second
				key := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "key")
				w.record(now, key+" 1")
				group := map[int]string{2: "grou" + key, 3: "gr"}[stages]
				start := flowtest.Start.Add(now.Truncate(size))
				want[fmt.Sprintf("%s %s-%s", group, clockText(start), clockText(start.Add(size)))]++
			},
			"pause":  func(*rapid.T) { now += time.Minute; w.advance(flowtest.Start.Add(now).UnixNano()) },
			"commit": func(*rapid.T) { w.commit(task(0)) },
			"later":  func(*rapid.T) { w.commit(task(1)) },
			"read":   func(t *rapid.T) { w.read(task(1), rapid.IntRange(1, 9).Draw(t, "messages")) },
			"crash":  func(*rapid.T) { w.crash(task(1)) },
			"image":  func(*rapid.T) { w.image(task(1)) },
		})
		w.advance(flowtest.Start.Add(now + 2*size).UnixNano())
		for stage, tasks := range w.tasks {
			for _, t := range tasks {
				if stage > 0 {
					w.read(t, len(w.exchange))
				}
				w.commit(t)
			}
		}
		got := map[string]int{}
		for _, line := range w.got {
			window, n, _ := cutLast(line)
			if _, twice := got[window]; twice {
				t.Fatalf("%s has two results", window)
			}
			got[window] = n
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("windows (-want +got):\n%s", diff)
		}
		if w.late > 0 {
			t.Fatalf("%d records are late", w.late)
		}
	})
}

// cutLast cuts a line before its last word, a number.
func cutLast(line string) (before string, n int, err error) {
	i := strings.LastIndexByte(line, ' ')
	_, err = fmt.Sscan(line[i+1:], &n)
	return line[:i], n, err
}

// A watermark alone is no reason for a commit of the task that hears it, and it is not
// lost: with the next commit it is stored, as with an image.
func TestTask_heard(t *testing.T) {
	w := newWorld(t, minuteTally(2, 2, nil))
	w.record(0, "a 1")
	for _, task := range w.tasks[0] {
		if !task.Untold() || !task.Unsealed() {
			t.Error("a watermark that has moved is not to be told")
		}
		if s := w.commit(task); s.Frames != 1 || s.Outputs != 1 {
			t.Errorf("%d frames of %d outputs, want one mark", s.Frames, s.Outputs)
		}
	}
	second := w.tasks[1][0]
	w.read(second, 1)
	if second.Now() != second.mark || second.Dirty() || !second.Unsealed() {
		t.Error("with one of two marks")
	}
	w.read(second, 1)
	if second.Now() != flowtest.Start.UnixNano() || second.Dirty() || !second.Unsealed() {
		t.Errorf("with two of two marks: now %d", second.Now())
	}
	if second.Keys() != 0 {
		t.Errorf("%d keys", second.Keys())
	}
	w.crash(second) // and the marks are read again
	w.read(second, 2)
	w.commit(second)
	w.crash(second)
	if second.Now() != flowtest.Start.UnixNano() {
		t.Error("the watermark is not in the log")
	}
	w.image(second)
	w.crash(second)
	if second.Now() != flowtest.Start.UnixNano() {
		t.Error("the watermark is not in the image")
	}
}

// A task that commits often does not tell each time, unless it has frames.
func TestTask_TellLater(t *testing.T) {
	w := newWorld(t, minuteTally(1, 2, nil))
	first := w.tasks[0][0]
	first.TellLater(true)
	w.record(0, "a 1")
	s, err := first.Seal()
	if err != nil || s.Frames != 0 || s.Delta == nil || !first.Untold() {
		t.Errorf("%d frames, untold %v, %v", s.Frames, first.Untold(), err)
	}
	w.record(time.Minute, "a 1")
	if s := w.commit(first); s.Frames != 2 {
		t.Errorf("%d frames, want one and a mark", s.Frames)
	}
	first.TellLater(false)
	w.record(61*time.Second, "a 1")
	if s := w.commit(first); s.Frames != 1 {
		t.Errorf("%d frames, want a mark", s.Frames)
	}
	if s := w.commit(first); s.Frames != 0 || s.Outbox != nil {
		t.Errorf("%d frames though nothing has moved", s.Frames)
	}
}

// Where no later stage waits for times, no watermark crosses.
func TestFlow_TimedStage(t *testing.T) {
	untimed := twoStages(flow.Options{Partitions: 1})
	before := flow.New("test", flow.Options{Partitions: 1})
	textTo(flow.Rekey(tally(keyed(before), "w", flow.Tumbling(time.Minute)), lastLetter, flow.TextCodec()))
	between := minuteTally(1, 2, nil)
	for name, test := range map[string]struct {
		b    *flow.Builder
		want []bool
	}{
		"none":    {untimed, []bool{false, false, false}},
		"before":  {before, []bool{false, false, false}},
		"behind":  {between, []bool{false, true, false}},
		"further": {minuteTally(1, 3, nil), []bool{false, true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, test.b)
			for stage, want := range test.want {
				if got := w.f.TimedStage(stage); got != want {
					t.Errorf("stage %d: %v", stage, got)
				}
			}
			w.record(time.Second, "a 1")
			if first := w.tasks[0][0]; first.Untold() != test.want[1] {
				t.Errorf("untold %v", first.Untold())
			}
		})
	}
}

// With other clocks the former watermarks mean nothing.
func TestTask_otherClocks(t *testing.T) {
	w := newWorld(t, minuteTally(1, 2, nil))
	w.record(time.Hour, "a 1")
	w.commit(w.tasks[0][0])
	second := w.tasks[1][0]
	w.read(second, 1)
	w.commit(second)
	same := build(t, minuteTally(1, 2, nil)).StageTask(1, 0)
	other := build(t, minuteTally(1, 2, flow.EventTime[string]{Of: func(m *flow.Meta, _ string) (time.Time, error) { return m.Time(), nil }})).StageTask(1, 0)
	for _, task := range []*flow.Task{same, other} {
		for _, d := range second.log {
			if err := task.Load(d); err != nil {
				t.Fatal(err)
			}
		}
		task.Loaded()
	}
	if same.Now() != second.Now() || other.Now() >= same.Now() {
		t.Errorf("watermarks %d and %d of %d", same.Now(), other.Now(), second.Now())
	}
	if same.Unsealed() || !other.Unsealed() || other.Dirty() {
		t.Error("the former watermarks are not forgotten by the next commit")
	}
}

// TestMark_golden pins the bytes: they are stored.
func TestMark_golden(t *testing.T) {
	w := newWorld(t, minuteTally(2, 2, nil))
	w.record(0, "a 1")
	w.commit(w.tasks[0][1])
	const want = "02" + "e06d8fd4" + "01" + "01" + "8080d0dfbd94b98631" + "ffffffffffffffffff01"
	if o := w.exchange[0]; string(o.Subject) != "natsflow.x.test.1.all" || hex.EncodeToString(o.Data) != want {
		t.Errorf("%s %x, want %s", o.Subject, o.Data, want)
	}
	second := w.tasks[1][0]
	w.read(second, 1)
	w.commit(second)
	const head, clocks = "06" + "006d61726b73", "01" + "08" + "6164636435336566" + "0e" + "8080d0dfbd94b98631" + "0000" + "0100"
	if got := hex.EncodeToString(second.log[0]); got != head+"01"+clocks {
		t.Errorf("the delta is %s, want %s", got, head+"01"+clocks)
	}
	// Version 0 repeated a watermark that is known, and had nothing for others.
	for former, want := range map[string]bool{
		head + "00" + "01" + "08" + "6164636435336566" + "0d" + "8080d0dfbd94b98631" + "00" + "0100": true,
		head + "00" + clocks: false,
		head + "02" + clocks: false,
	} {
		data, err := hex.DecodeString(former)
		if err != nil {
			t.Fatal(err)
		}
		task := w.f.StageTask(1, 0)
		if err := task.Load(data); (err == nil) != want || err != nil && !errors.Is(err, flow.ErrState) {
			t.Errorf("%s: %v", former, err)
			continue
		}
		task.Loaded()
		if want && task.Watermark(1) != second.Watermark(1) {
			t.Errorf("%s: the watermark is %d, want %d", former, task.Watermark(1), second.Watermark(1))
		}
	}
}

func TestRouter_RouteFrame_marks(t *testing.T) {
	w := newWorld(t, minuteTally(2, 2, nil))
	w.record(0, "a 1")
	w.commit(w.tasks[0][1])
	good := w.exchange[0].Data
	change := func(at int, b byte) []byte {
		data := slices.Clone(good)
		data[at] = b
		return resum(data)
	}
	for name, test := range map[string]struct {
		data []byte
		want string
	}{
		"empty":            {nil, "it has version -1"},
		"short":            {good[:4], "its checksum does not match"},
		"damaged":          {append(slices.Clone(good), 0), "its checksum does not match"},
		"cut":              {resum(slices.Clone(good[:len(good)-1])), "is damaged"},
		"more":             {resum(append(slices.Clone(good), 0)), "is damaged"},
		"of another stage": {change(5, 2), "a watermark of partition 1 for stage 2"},
		"of no producer":   {change(6, 2), "a watermark of partition 2 for stage 1"},
	} {
		t.Run(name, func(t *testing.T) {
			r := w.f.ExchangeRouter(1)
			err := r.RouteFrame(flow.AllPartitions, 7, test.data)
			if !errors.Is(err, flow.ErrFrame) || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "sequence 7") {
				t.Errorf("error %v, want %q", err, test.want)
			}
			r.Take(func(b *flow.Batch) { t.Error("something was routed") })
		})
	}
	// Those that a task has had, and those of tasks that are elsewhere.
	r := w.f.ExchangeRouter(1)
	r.Seen(0, 7)
	for seq, want := range map[uint64][]int{7: {1}, 8: {0, 1}} {
		var got []int
		if err := r.RouteFrame(flow.AllPartitions, seq, good); err != nil {
			t.Fatal(err)
		}
		r.Take(func(b *flow.Batch) { got = append(got, b.Partition) })
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("sequence %d (-want +got):\n%s", seq, diff)
		}
	}
}

// FuzzRouter_RouteFrame_marks: any bytes are a watermark or an error.
func FuzzRouter_RouteFrame_marks(f *testing.F) {
	w := newWorld(f, minuteTally(2, 2, nil))
	w.record(0, "a 1")
	for _, t := range w.tasks[0] {
		w.commit(t)
	}
	for _, o := range w.exchange {
		f.Add(o.Data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := w.f.ExchangeRouter(1)
		err := r.RouteFrame(flow.AllPartitions, 1, resum(data))
		if err != nil && !errors.Is(err, flow.ErrFrame) {
			t.Errorf("error %v", err)
		}
		r.Take(func(b *flow.Batch) {
			task := w.f.StageTask(1, b.Partition)
			if err := task.Play(b); err != nil {
				t.Fatal(err)
			}
			s, err := task.Seal()
			if err != nil {
				t.Fatal(err)
			}
			again := w.f.StageTask(1, b.Partition)
			if err := again.Load(s.Delta); err != nil {
				t.Fatal(err)
			}
			again.Loaded()
			if again.Now() != task.Now() {
				t.Errorf("watermark %d was stored as %d", task.Now(), again.Now())
			}
		})
	})
}

func TestExchangePartition(t *testing.T) {
	want := map[string]int{"natsflow.x.f.1.0": 0, "natsflow.x.f.2.17": 17, flow.ExchangeMarks("f", 1): flow.AllPartitions}
	got := map[string]int{}
	for subject := range maps.Keys(want) {
		p, err := flow.ExchangePartition(subject)
		if err != nil {
			t.Error(err)
		}
		got[subject] = p
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, bad := range []string{"", "natsflow.x.f.1.", "natsflow.x.f.1.-1", "natsflow.x.f.1.x"} {
		if _, err := flow.ExchangePartition(bad); !errors.Is(err, flow.ErrFrame) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// A record that is late behind the exchange goes where the late ones of that window go.
func TestMark_late(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 2})
	s := flow.From(b, flow.Source{Stream: "IN", Time: flow.EventTime[string]{Of: func(_ *flow.Meta, v string) (time.Time, error) { return clockTime(v) }}}, flow.DecodeText())
	s = flow.Map(s, func(_ *flow.Meta, v string) (string, error) { return v[strings.IndexByte(v, ' ')+1:], nil })
	same := func(m *flow.Meta, _ string) (string, error) { return m.Key, nil }
	textTo(tally(flow.Rekey(flow.KeyBy(s, firstWord), same, flow.TextCodec()), "minutes", flow.Tumbling(time.Minute)))
	r := eventTimed(t, build(t, b), "00:00:10 a 1", "00:01:20 b 1", "00:00:30 a 2", "commit", "00:00:40 a 3", "00:03 b 1")
	// The one of 00:00:30 crossed in one frame with the first, before the watermark.
	wantData(t, r, "OUT", "a 00:00-00:01 3", "b 00:01-00:02 1")
	wantData(t, r, "LATE", "a 3")
	if r.Late() != 1 {
		t.Errorf("%d late records", r.Late())
	}
}
