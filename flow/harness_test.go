package flow_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

// fataler is the part of testing.TB that rapid.T has too.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// decimalState stores a number.
var decimalState = flow.StateCodec[int64]{
	Version: 1,
	Append:  func(dst []byte, n *int64) ([]byte, error) { return binary.AppendVarint(dst, *n), nil },
	Decode: func(data []byte, n *int64) error {
		v, size := binary.Varint(data)
		if size <= 0 || size != len(data) {
			return errors.New("not a number")
		}
		*n = v
		return nil
	},
}

func build(tb fataler, b *flow.Builder) *flow.Flow {
	tb.Helper()
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// newFlow starts a flow of one partition, so that its results have one order.
func newFlow(change ...func(*flow.Options)) *flow.Builder {
	opts := flow.Options{Partitions: 1}
	for _, c := range change {
		c(&opts)
	}
	return flow.New("test", opts)
}

func stopOnError(o *flow.Options) { o.OnError = flow.Stop }

// text reads stream IN as text.
func text(b *flow.Builder) flow.Stream[string] {
	return flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText(), flow.ID("in"))
}

var errNoKey = errors.New("no key")

// firstWord is a key function.
func firstWord(_ *flow.Meta, v string) (string, error) {
	if v == "panic-key" {
		panic("no key at all")
	}
	key, _, ok := strings.Cut(v, " ")
	if !ok {
		return "", errNoKey
	}
	return key, nil
}

// keyed reads stream IN as text with its first word as the key.
func keyed(b *flow.Builder) flow.Stream[string] {
	return flow.KeyBy(text(b), firstWord, flow.ID("key"))
}

// textTo publishes text under out.<key>.
func textTo(b flow.Stream[string]) {
	flow.To(b, flow.Sink[string]{
		Stream: "OUT", Subjects: []string{"out.*"},
		Subject: flow.KeySubject[string]("out."), Encode: flow.EncodeText(),
	}, flow.ID("out"))
}

// bytesTo publishes bytes as they are under the record's key.
func bytesTo(stream, prefix string) flow.Sink[[]byte] {
	return flow.Sink[[]byte]{
		Stream: stream, Subjects: []string{prefix + "*"},
		Subject: flow.KeySubject[[]byte](prefix), Encode: flow.EncodeBytes(),
	}
}

// record of stream IN, or of another.
type record struct {
	stream  string
	subject string
	seq     uint64
	nanos   int64
	data    string
}

// published is an output in a form that is easy to compare.
type published struct {
	Sink    string
	Subject string
	Data    string
	Headers map[string]string
}

// out is a result of the sink that textTo makes.
func out(key, data string) published {
	return published{Sink: "stream OUT", Subject: "out." + key, Data: data}
}

// dead is a dead letter of stream IN.
func dead(step, err string, seq uint64, data string) published {
	return published{Sink: "dead-letter ", Subject: "natsflow.dlq.test", Data: data, Headers: map[string]string{
		flow.HeaderDeadFlow: "test", flow.HeaderDeadStep: step, flow.HeaderDeadError: err,
		flow.HeaderDeadStream: "IN", flow.HeaderDeadSubject: "in", flow.HeaderDeadSeq: fmt.Sprint(seq),
	}}
}

// runner plays records through a flow as a worker does: route, play, seal, and
// after a crash load what was sealed.
type runner struct {
	tb      fataler
	f       *flow.Flow
	routers map[string]*flow.Router
	tasks   []*flow.Task
	last    map[string]uint64
	// deltas that were sealed, by partition.
	deltas [][][]byte
	sealed flow.Sealed
}

func run(tb fataler, b *flow.Builder) *runner {
	tb.Helper()
	return start(tb, build(tb, b))
}

func start(tb fataler, f *flow.Flow) *runner {
	r := &runner{tb: tb, f: f, last: map[string]uint64{}, deltas: make([][][]byte, f.Options().Partitions)}
	r.bind()
	return r
}

func (r *runner) bind() {
	r.routers = map[string]*flow.Router{}
	for i, s := range r.f.Sources() {
		r.routers[s.Stream] = r.f.Router(i)
	}
	r.tasks = make([]*flow.Task, r.f.Options().Partitions)
	for p := range r.tasks {
		r.tasks[p] = r.f.Task(p)
	}
}

// play routes the records and plays the batches. The error is that of the first
// one that stops the flow.
func (r *runner) play(records ...record) error {
	for _, rec := range records {
		if rec.stream == "" {
			rec.stream = "IN"
		}
		if rec.seq == 0 {
			rec.seq = r.last[rec.stream] + 1
		}
		r.last[rec.stream] = rec.seq
		if rec.nanos == 0 {
			rec.nanos = int64(rec.seq)
		}
		if rec.subject == "" {
			rec.subject = "in"
		}
		if err := r.routers[rec.stream].Route(rec.subject, rec.seq, rec.nanos, []byte(rec.data)); err != nil {
			return err
		}
	}
	var err error
	for _, s := range r.f.Sources() {
		r.routers[s.Stream].Take(func(b *flow.Batch) {
			if perr := r.tasks[b.Partition].Play(b); err == nil {
				err = perr
			}
			b.Release()
		})
	}
	return err
}

// feed plays payloads of stream IN.
func (r *runner) feed(payloads ...string) {
	r.tb.Helper()
	for _, p := range payloads {
		if err := r.play(record{data: p}); err != nil {
			r.tb.Fatal(err)
		}
	}
}

// seal seals every task and returns the outputs, in the order of the partitions.
func (r *runner) seal() []published {
	r.tb.Helper()
	var all []published
	r.sealed = flow.Sealed{}
	for p, t := range r.tasks {
		s, err := t.Seal()
		if err != nil {
			r.tb.Fatal(err)
		}
		if t.Dirty() {
			r.tb.Fatalf("task %d is dirty after the seal", p)
		}
		if s.Delta != nil {
			r.deltas[p] = append(r.deltas[p], s.Delta)
		}
		outputs := r.outputs(s.Outbox)
		if len(outputs) != s.Outputs {
			r.tb.Fatalf("the outbox has %d outputs, Sealed.Outputs is %d", len(outputs), s.Outputs)
		}
		all = append(all, outputs...)
		r.sealed.Outputs += s.Outputs
		r.sealed.DeadLetters += s.DeadLetters
		r.sealed.Records += s.Records
		r.sealed.Delta = append(r.sealed.Delta, s.Delta...)
	}
	return all
}

func (r *runner) outputs(outbox []byte) []published {
	r.tb.Helper()
	sinks := r.f.Sinks()
	var all []published
	err := flow.Outputs(outbox, func(i int, o flow.Output) error {
		if i != len(all) {
			r.tb.Fatalf("output %d has number %d", len(all), i)
		}
		p := published{Sink: fmt.Sprintf("%s %s", sinks[o.Sink].Kind, sinks[o.Sink].Name), Subject: string(o.Subject), Data: string(o.Data)}
		for h := 0; h < len(o.Headers); h += 2 {
			if p.Headers == nil {
				p.Headers = map[string]string{}
			}
			p.Headers[o.Headers[h]] = o.Headers[h+1]
		}
		all = append(all, p)
		return nil
	})
	if err != nil {
		r.tb.Fatal(err)
	}
	return all
}

// crash loses what was not sealed and starts again from what was.
func (r *runner) crash() {
	r.tb.Helper()
	r.bind()
	for p, t := range r.tasks {
		for _, d := range r.deltas[p] {
			if err := t.Load(d); err != nil {
				r.tb.Fatal(err)
			}
		}
		t.Loaded()
		if t.Dirty() {
			r.tb.Fatal("a task is dirty after loading")
		}
	}
}

func (r *runner) keys() (n int) {
	for _, t := range r.tasks {
		n += t.Keys()
	}
	return n
}

// want feeds the payloads, seals and compares the outputs.
func (r *runner) want(payloads []string, outputs ...published) {
	r.tb.Helper()
	r.feed(payloads...)
	if diff := cmp.Diff(outputs, r.seal()); diff != "" {
		r.tb.Fatalf("outputs (-want +got):\n%s", diff)
	}
}

func diffOutputs(t *testing.T, got []published, want ...published) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("outputs (-want +got):\n%s", diff)
	}
}

// wantStepError checks a failure that stops the flow.
func wantStepError(t *testing.T, err error, step string, seq uint64) {
	t.Helper()
	var se *flow.StepError
	if !errors.As(err, &se) {
		t.Fatalf("error %v, want a *StepError", err)
	}
	if se.Step != step || se.Seq != seq {
		t.Errorf("failed in step %q at sequence %d, want %q at %d", se.Step, se.Seq, step, seq)
	}
}

// unsafeString makes a string of bytes without a copy, as a fast key function
// might.
func unsafeString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
