package flow

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
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
	// [KeySubject].
	Subject func(dst []byte, m *Meta, v T) ([]byte, error)
	// Encode appends the payload. Required.
	Encode Encoder[T]
}

// KVSink says which KV bucket takes the results, the latest under each key.
type KVSink[T any] struct {
	// Bucket is its name. It is created when it is not there.
	Bucket string
	// Key appends the key of a result to dst. Defaults to the record's key, by
	// [AppendKVKey].
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
	s = keyedBySubject(s)
	step := s.step("to", opts)
	if sink.Stream == "" || len(sink.Subjects) == 0 || sink.Subject == nil || sink.Encode == nil {
		s.b.errorf("step %q: To needs Stream, Subjects, Subject and Encode", s.b.steps[step].ID)
		return
	}
	index := s.b.sink(SinkInfo{Step: s.b.steps[step].ID, Kind: SinkStream, Name: sink.Stream, Subjects: sink.Subjects})
	publish(s, step, index, "", sink.Subject, sink.Encode)
}

// ToKV puts each value into a KV bucket.
func ToKV[T any](s Stream[T], sink KVSink[T], opts ...StepOption) {
	s = keyedBySubject(s)
	step := s.step("to-kv", opts)
	if sink.Bucket == "" || sink.Encode == nil {
		s.b.errorf("step %q: ToKV needs Bucket and Encode", s.b.steps[step].ID)
		return
	}
	if sink.Key == nil {
		sink.Key = func(dst []byte, m *Meta, _ T) ([]byte, error) { return AppendKVKey(dst, m.Key), nil }
	}
	index := s.b.sink(SinkInfo{Step: s.b.steps[step].ID, Kind: SinkBucket, Name: sink.Bucket})
	publish(s, step, index, "$KV."+sink.Bucket+".", sink.Key, sink.Encode)
}

func publish[T any](s Stream[T], step, index int, prefix string,
	subject func([]byte, *Meta, T) ([]byte, error), encode Encoder[T],
) {
	s.hub.subscribe(func(in *instance) emit[T] {
		t := in.task
		var payload []byte
		return func(m *Meta, v T) {
			in.step = step
			var err error
			t.subjectScratch, err = subject(append(t.subjectScratch[:0], prefix...), m, v)
			if err == nil {
				payload, err = encode(payload[:0], m, v)
			}
			if err == nil && len(t.subjectScratch) == len(prefix) {
				err = fmt.Errorf("empty subject")
			}
			if err != nil {
				in.fail(step, m, err)
				return
			}
			t.outbox = appendOutputHead(t.outbox, index, t.subjectScratch)
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
	s = keyedBySubject(s)
	step := s.step("stop-when", opts)
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
			// One request a commit is enough.
			if !stop || t.stopped {
				return
			}
			t.stopped = true
			reason := fmt.Sprintf("step %s: stop_when held at %s sequence %d", in.f.stepID(step), m.Stream, m.Seq)
			t.outbox = appendOutputHead(t.outbox, index, nil)
			body, err := json.Marshal(map[string]string{"mode": "suspend", "at": "now", "reason": reason})
			if err != nil {
				in.fail(step, m, err)
				return
			}
			t.outbox = appendBytes(t.outbox, body)
			t.outputs++
		}
	})
}
