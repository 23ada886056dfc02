package flow

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// MaxStages bounds the number of stages of a flow.
const MaxStages = 16

// Codec says how a value crosses from one stage to the next. The bytes are stored in
// the exchange of the flow until the next stage has them: when a flow that is not
// drained goes on with another version, that has to read what this one wrote.
type Codec[T any] struct {
	// Encode appends the value to dst.
	Encode Encoder[T]
	// Decode reads what Encode wrote. The bytes may be kept but not modified. An error
	// makes the record a dead letter.
	Decode Decoder[T]
}

// JSONCodec returns the codec by encoding/json.
func JSONCodec[T any]() Codec[T] { return Codec[T]{EncodeJSON[T](), DecodeJSON[T]()} }

// BytesCodec returns the codec of bytes that cross as they are.
func BytesCodec() Codec[[]byte] { return Codec[[]byte]{EncodeBytes(), DecodeBytes()} }

// TextCodec returns the codec of strings.
func TextCodec() Codec[string] { return Codec[string]{EncodeText(), DecodeText()} }

// Rekey gives each record another key, or behind a [Redistribute] its first one, and
// begins the next stage: records of one new key come from the tasks of many old ones, so
// that they cross, by the exchange of the flow, to the tasks of the next stage. That is
// exactly once like everything else.
//
// Records that have both keys in common keep their order; of those from different old
// keys the order is that in which their tasks commit. Results and positions are a
// function of the sources in the sense that each record counts once, and of that order
// only where a step depends on it.
//
// Behind it, the [Meta] of a record is what it was, with the new key; what comes of no
// single record, such as the result of a window, has no position there either. Times
// cross as well, and watermarks where a step waits for them, so that windows work.
func Rekey[T any](s Stream[T], key func(m *Meta, v T) (string, error), codec Codec[T], opts ...StepOption) Stream[T] {
	step := s.step("rekey", opts)
	id := s.b.steps[step].ID
	s.b.need(step, "function", key != nil)
	s.b.need(step, "codec with Encode and Decode", codec.Encode != nil && codec.Decode != nil)
	if !s.keyed {
		s.b.errorf("step %q: the stream has no key yet: use KeyBy", id)
		return s
	}
	if s.b.exchange < 0 {
		s.b.exchange = s.b.sink(SinkInfo{
			Kind: SinkExchange, Name: ExchangeStream(s.b.name), Subjects: []string{ExchangeAll(s.b.name)},
		})
	}
	node := &rekey[T]{id: id, step: step, to: s.stage + 1, decode: codec.Decode, out: &hub[T]{b: s.b}}
	for _, c := range s.b.crossings {
		if c.stage() == node.to {
			node.index++
		}
	}
	s.b.crossings = append(s.b.crossings, node)
	s.hub.subscribe(func(in *instance) emit[T] {
		t := in.task
		w := t.frameWriter()
		var payload []byte
		return func(m *Meta, v T) {
			in.step = step
			k, err := key(m, v)
			if err == nil {
				// Made before the frame is touched: it may fail half-way.
				payload, err = codec.Encode(payload[:0], m, v)
			}
			if err == nil {
				err = w.add(id, m, k, payload)
			}
			if err != nil {
				in.fail(step, m, err)
			}
		}
	})
	return Stream[T]{b: s.b, hub: node.out, keyed: true, source: s.source, stage: node.to, delay: s.delay}
}

// crossing is the place where records come out of the exchange.
type crossing interface {
	keyNode
	stepID() string
	// stage that the records come to.
	stage() int
	// route takes a record of a frame to its column.
	route(r *Router, m *Meta, value []byte)
}

type rekey[T any] struct {
	id       string
	step, to int
	// index among those that lead to the same stage.
	index  int
	decode Decoder[T]
	out    *hub[T]
}

func (k *rekey[T]) bindTask(in *instance) any { return k.out.bind(in) }
func (k *rekey[T]) newColumn() column         { return &crossedColumn[T]{key: k.index + 1} }
func (k *rekey[T]) stepID() string            { return k.id }
func (k *rekey[T]) stage() int                { return k.to }

func (k *rekey[T]) route(r *Router, m *Meta, value []byte) {
	r.in.step = k.step
	v, err := k.decode(m, value)
	if err != nil {
		r.in.fail(k.step, m, fmt.Errorf("decode behind the exchange: %w", err))
		return
	}
	b := r.batch(r.partition)
	addCrossed(b.columns[k.index+1].(*crossedColumn[T]), m, v)
	b.crossed(k.index + 1)
}

// stages are those behind the first one, in order.
func (b *Builder) stages() []int {
	var all []int
	for _, c := range b.crossings {
		if !slices.Contains(all, c.stage()) {
			all = append(all, c.stage())
		}
	}
	slices.Sort(all)
	return all
}

// Stages returns the number of stages: one more than the key is changed, on the
// longest way through the flow.
func (f *Flow) Stages() int { return f.stages }

// keysOf are the places where records come into a stage. Their order is that of the
// columns of its batches.
func (f *Flow) keysOf(stage int) []keyNode {
	if stage == 0 {
		return f.keys
	}
	var nodes []keyNode
	for _, c := range f.crossings {
		if c.stage() == stage {
			nodes = append(nodes, c)
		}
	}
	return nodes
}

const (
	exchangePrefix       = "natsflow.x."
	exchangeStreamPrefix = "NATSFLOW_X_"
)

// ExchangeStream is the name of the stream by which the records of a flow cross from
// one stage to the next.
func ExchangeStream(flow string) string { return exchangeStreamPrefix + flow }

// ExchangeAll is the subject, with a wildcard, of all frames of a flow.
func ExchangeAll(flow string) string { return exchangePrefix + flow + ".>" }

// ExchangeSubject is the subject of the frames for a task.
func ExchangeSubject(flow string, stage, partition int) string {
	return stageSubject(flow, stage) + strconv.Itoa(partition)
}

// ExchangeMarks is the subject of the messages by which the tasks of a stage learn the
// watermarks of those of the stage before.
func ExchangeMarks(flow string, stage int) string { return stageSubject(flow, stage) + allTasks }

// ExchangeMarksAll is the subject, with a wildcard, of the watermarks for all stages.
func ExchangeMarksAll(flow string) string { return exchangePrefix + flow + ".*." + allTasks }

// ExchangePartition returns the partition that a subject of the exchange is for,
// [AllPartitions] for one of [ExchangeMarks]. It returns an error that wraps [ErrFrame]
// for a subject that is neither.
func ExchangePartition(subject string) (int, error) {
	last := subject[strings.LastIndexByte(subject, '.')+1:]
	if last == allTasks {
		return AllPartitions, nil
	}
	p, err := strconv.Atoi(last)
	if err != nil || p < 0 {
		return 0, fmt.Errorf("%w: the subject %q does not end with a partition", ErrFrame, subject)
	}
	return p, nil
}

// ExchangeSubjects is the subject, with a wildcard, of the frames and the watermarks for
// all tasks of a stage.
func ExchangeSubjects(flow string, stage int) string { return stageSubject(flow, stage) + "*" }

func stageSubject(flow string, stage int) string {
	return exchangePrefix + flow + "." + strconv.Itoa(stage) + "."
}
