package flow

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
)

// Sink says where results go.
type Sink[T any] struct {
	// Stream is the JetStream stream that takes the results. It is created when
	// it is not there.
	Stream string
	// Subjects that Subject makes, with wildcards: what a stream that has to be
	// created listens to. Required.
	Subjects []string
	// Subject appends the subject of a result to dst. Required. See
	// [KeySubject]. One that is not a subject, has more than 2,048 bytes or is
	// not among Subjects makes the record a dead letter.
	Subject func(dst []byte, m *Meta, v T) ([]byte, error)
	// Encode appends the payload. Required.
	Encode Encoder[T]
}

// KVSink says which KV bucket takes the results, the latest under each key.
type KVSink[T any] struct {
	// Bucket is its name. It is created when it is not there.
	Bucket string
	// Key appends the key of a result to dst. Defaults to the record's key, by
	// [AppendKVKey]. One that a bucket cannot have makes the record a dead
	// letter.
	Key func(dst []byte, m *Meta, v T) ([]byte, error)
	// Encode appends the value. Required.
	Encode Encoder[T]
}

// KeySubject makes subjects of a prefix and the record's key as one token, such
// as "counts." and "counts.ATL".
func KeySubject[T any](prefix string) func(dst []byte, m *Meta, v T) ([]byte, error) {
	return func(dst []byte, m *Meta, _ T) ([]byte, error) {
		return AppendToken(append(dst, prefix...), m.Key), nil
	}
}

// To publishes each value to a stream, exactly once unless the flow says
// otherwise. The values of one key keep their order.
func To[T any](s Stream[T], sink Sink[T], opts ...StepOption) {
	s = KeyBySubject(s)
	step := s.step("to", opts)
	if sink.Stream == "" || len(sink.Subjects) == 0 || sink.Subject == nil || sink.Encode == nil {
		s.b.errorf("step %q: To needs Stream, Subjects, Subject and Encode", s.b.steps[step].ID)
		return
	}
	if !validStream(sink.Stream) {
		s.b.errorf("step %q: %q is not the name of a stream", s.b.steps[step].ID, sink.Stream)
	}
	for _, p := range sink.Subjects {
		if !validPattern(p) {
			s.b.errorf("step %q: %q is not a subject", s.b.steps[step].ID, p)
		}
	}
	subjects := slices.Clone(sink.Subjects)
	index := s.b.sink(SinkInfo{Step: s.b.steps[step].ID, Kind: SinkStream, Name: sink.Stream, Subjects: subjects})
	publish(s, publication[T]{
		step: step, sink: index, subject: sink.Subject, encode: sink.Encode, check: checkStreamSubject(subjects),
	})
}

// ToKV puts each value into a KV bucket.
func ToKV[T any](s Stream[T], sink KVSink[T], opts ...StepOption) {
	s = KeyBySubject(s)
	step := s.step("to-kv", opts)
	if sink.Bucket == "" || sink.Encode == nil {
		s.b.errorf("step %q: ToKV needs Bucket and Encode", s.b.steps[step].ID)
		return
	}
	if !validBucket(sink.Bucket) {
		s.b.errorf("step %q: %q is not the name of a bucket", s.b.steps[step].ID, sink.Bucket)
	}
	if sink.Key == nil {
		sink.Key = func(dst []byte, m *Meta, _ T) ([]byte, error) { return AppendKVKey(dst, m.Key), nil }
	}
	index := s.b.sink(SinkInfo{Step: s.b.steps[step].ID, Kind: SinkBucket, Name: sink.Bucket})
	prefix := "$KV." + sink.Bucket + "."
	publish(s, publication[T]{
		step: step, sink: index, prefix: prefix, subject: sink.Key, encode: sink.Encode, check: checkKVSubject(prefix),
	})
}

// publication is what a sink step does with a value.
type publication[T any] struct {
	step, sink int
	// prefix of each subject.
	prefix  string
	subject func(dst []byte, m *Meta, v T) ([]byte, error)
	encode  Encoder[T]
	// check looks at the whole subject.
	check func(subject []byte) error
}

func publish[T any](s Stream[T], p publication[T]) {
	s.hub.subscribe(func(in *instance) emit[T] {
		t := in.task
		// Both are made before the outbox is touched: they may fail half-way.
		var subject, payload []byte
		return func(m *Meta, v T) {
			in.step = p.step
			var err error
			if subject, err = p.subject(append(subject[:0], p.prefix...), m, v); err == nil {
				switch {
				case len(subject) <= len(p.prefix):
					err = errNoSubject
				default:
					err = p.check(subject)
				}
			}
			if err == nil {
				payload, err = p.encode(payload[:0], m, v)
			}
			if most := t.mostResult[p.sink]; err == nil && most > 0 && len(payload) > most {
				err = fmt.Errorf("%w: %d bytes of at most %d", ErrResultTooLarge, len(payload), most)
			}
			if err != nil {
				in.fail(p.step, m, err)
				return
			}
			t.outbox = appendOutputHead(t.outbox, p.sink, subject)
			t.outbox = appendBytes(t.outbox, payload)
			t.outputs++
		}
	})
}

func appendBytes(dst, b []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(b)))
	return append(dst, b...)
}

// StopWhen asks for the drain of the flow when a value satisfies cond: it stops
// at the first coherent cut at or after the record. The request is part of the
// commit, so that it is made once and is not lost.
func StopWhen[T any](s Stream[T], cond func(m *Meta, v T) (bool, error), opts ...StepOption) {
	s = KeyBySubject(s)
	step := s.step("stop-when", opts)
	s.b.need(step, "function", cond != nil)
	if s.b.control < 0 {
		s.b.control = s.b.sink(SinkInfo{Kind: SinkControl})
	}
	index := s.b.control
	s.hub.subscribe(func(in *instance) emit[T] {
		t := in.task
		return func(m *Meta, v T) {
			in.step = step
			stop, err := cond(m, v)
			if err != nil {
				in.fail(step, m, err)
				return
			}
			// One request a commit is enough, and what a drain makes at its end asks
			// for nothing new.
			if !stop || t.stopped || m.pane >= PanePartial {
				return
			}
			at := fmt.Sprintf("at %s sequence %d", m.Stream, m.Seq)
			if m.Seq == 0 {
				at = fmt.Sprintf("for a window or timer of key %q", headerText(m.Key))
			}
			reason := fmt.Sprintf("step %s: stop_when held %s", in.f.stepID(step), at)
			body, err := json.Marshal(map[string]string{"mode": "suspend", "at": "now", "reason": reason})
			if err != nil {
				in.fail(step, m, err)
				return
			}
			t.stopped = true
			t.outbox = appendOutputHead(t.outbox, index, nil)
			t.outbox = appendBytes(t.outbox, body)
			t.outputs++
		}
	})
}
