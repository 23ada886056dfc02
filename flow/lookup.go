package flow

import "errors"

// Tables are the KV buckets that a flow looks keys up in, as the runtime has them:
// copies in memory, which follow the buckets.
type Tables interface {
	// Get returns the value that a key of a bucket has now; ok is false if the key is
	// not there. It is called by several tasks at the same time. The value must not be
	// modified.
	Get(bucket, key string) (value []byte, ok bool)
}

// LookupInfo describes a step that looks keys up in a bucket.
type LookupInfo struct {
	// Step is the id of the step.
	Step string
	// Bucket is the name of the KV bucket.
	Bucket string
}

// Lookups returns the steps that look keys up, in the order of their making.
func (f *Flow) Lookups() []LookupInfo { return append([]LookupInfo(nil), f.lookups...) }

// UseTables gives the task the tables that its steps look keys up in. It comes before
// the first batch; without it each record of such a step fails.
func (t *Task) UseTables(tables Tables) { t.lookups = tables }

var errNoTables = errors.New("the runtime has given the task no tables to look keys up in")

// Lookup enriches each value by what a KV bucket has under a key: fn gets the bytes of
// the value there, which it must not modify, and ok is false where the key is not in
// the bucket. The key is one of the bucket as it is, with its dots; see [AppendKVKey]
// for those that a [ToKV] has made of keys of records. An error of key or fn makes the
// record a dead letter. The id may be empty.
//
// A worker has a copy of the whole bucket in memory, complete before the first record,
// and follows its changes. So the result depends on when a record is processed: a
// change of the bucket that comes shortly before or after a record may count for it or
// not, and a replay after a crash, of what was not committed, sees the bucket as it is
// then. Each record still has one result. Where the order between changes and records
// matters, make the bucket a source.
//
// Since the result is not the same everywhere, exactly one task must ask: the stream has
// a key, by KeyBy, or is redistributed, by [Redistribute]. To give the records a key that
// comes of a lookup, use [Rekey] behind it.
func Lookup[T, U any](s Stream[T], id, bucket string, key func(m *Meta, v T) (string, error),
	fn func(m *Meta, v T, value []byte, ok bool) (U, error), opts ...StepOption,
) Stream[U] {
	step, out := s.step("lookup", append([]StepOption{ID(id)}, opts...)), then[T, U](s)
	name := s.b.steps[step].ID
	s.b.need(step, "function for the key", key != nil)
	s.b.need(step, "function", fn != nil)
	if !validBucket(bucket) {
		s.b.errorf("step %q: %q is not the name of a bucket", name, bucket)
	}
	if !s.keyed {
		s.b.errorf("step %q: give the stream a key before, by KeyBy (the subject of a record will do), or redistribute it: workers see a change of the bucket at different times, so that only the one that has the key may look a record up", name)
		return out
	}
	s.b.lookups = append(s.b.lookups, LookupInfo{Step: name, Bucket: bucket})
	s.hub.subscribe(func(in *instance) emit[T] {
		next, t := out.hub.bind(in), in.task
		return func(m *Meta, v T) {
			in.step = step
			if t.lookups == nil {
				in.fail(step, m, errNoTables)
				return
			}
			k, err := key(m, v)
			if err != nil {
				in.fail(step, m, err)
				return
			}
			value, ok := t.lookups.Get(bucket, k)
			u, err := fn(m, v, value, ok)
			if err != nil {
				in.fail(step, m, err)
				return
			}
			next(m, u)
		}
	})
	return out
}
