package flow

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// Source names a JetStream stream, or a KV bucket, to read.
type Source struct {
	// Stream is its name.
	Stream string
	// Subjects filters it; empty takes all of it.
	Subjects []string
	// Bucket, in place of Stream, names a KV bucket whose changes are read: each value
	// that a key gets, and each deletion, which has no payload (see [DecodeKV]). The
	// stream of the source is then that of the bucket, [BucketStream].
	//
	// A bucket drops values that were replaced. So a flow that was away, or that replays
	// what it had not committed, sees the last value of a key and not each one before it;
	// that is no gap. A deletion is seen for as long as the bucket keeps its marker.
	Bucket string
	// Keys filters the bucket, with wildcards such as "eu.*" or "eu.>"; empty takes all
	// keys.
	Keys []string
	// PartitionBy names tokens of the subject by their positions, from 1, for a flow
	// with many workers and much to read. The server then sorts the records by
	// partition, in a mirror of the stream that natsflow makes and keeps, and each
	// worker reads those of its own tasks only. Without it, each worker reads all of
	// them and drops what is not its own.
	//
	// The key of each record has to be these tokens of its subject, one behind the
	// other without anything in between; a record with another key fails. Records that
	// do not get a key may be partitioned by any tokens.
	PartitionBy []int
	// Time says what the time of a record is: an [EventTime] of the type that the
	// decoder makes. nil, the default, is the timestamp that the stream gave it.
	Time Clock
}

type sourceNode interface {
	info() SourceInfo
	bind(in *instance) func(m *Meta, data []byte)
}

type source[T any] struct {
	inf    SourceInfo
	step   int
	decode Decoder[T]
	// at is nil where the stream's timestamps are the times.
	at  func(m *Meta, v T) (time.Time, error)
	out *hub[T]
}

func (s *source[T]) info() SourceInfo { return s.inf }

func (s *source[T]) bind(in *instance) func(m *Meta, data []byte) {
	next := s.out.bind(in)
	if s.at != nil {
		next = s.timed(in, next)
	}
	return func(m *Meta, data []byte) {
		in.step = s.step
		v, err := s.decode(m, data)
		if err != nil {
			in.fail(s.step, m, fmt.Errorf("decode: %w", err))
			return
		}
		next(m, v)
	}
}

// timed takes the time that a record brings into account before the record goes on.
func (s *source[T]) timed(in *instance, next emit[T]) emit[T] {
	return func(m *Meta, v T) {
		if s.deletion(m) {
			in.router.unmoved(m)
			next(m, v)
			return
		}
		at, err := s.at(m, v)
		if err != nil {
			in.fail(s.step, m, fmt.Errorf("%w: %w", errTime, err))
			return
		}
		if err := in.router.observe(m, at); err != nil {
			in.fail(s.step, m, err)
			return
		}
		next(m, v)
	}
}

// From reads a stream or a bucket. Each can be read once; several steps may follow.
func From[T any](b *Builder, src Source, decode Decoder[T], opts ...StepOption) Stream[T] {
	src = b.resolve(src)
	out := Stream[T]{b: b, hub: &hub[T]{b: b}, source: len(b.sources) + 1}
	for _, s := range b.sources {
		if s.info().Stream == src.Stream {
			b.errorf("source %q is read twice: read it once and let several steps follow", src.Stream)
		}
	}
	step := out.step("source", opts)
	b.need(step, "decoder", decode != nil)
	inf := SourceInfo{
		Step: b.steps[step].ID, Stream: src.Stream,
		Subjects: src.Subjects, PartitionBy: slices.Clone(src.PartitionBy), Bucket: src.Bucket,
	}
	if _, err := inf.Transforms(b.opts.Partitions); err != nil {
		b.errorf("source %q: %w", src.Stream, err)
	}
	node := &source[T]{inf: inf, step: step, decode: decode, out: out.hub}
	node.useClock(b, src.Time)
	b.sources = append(b.sources, node)
	return out
}

// keyNode is the place where records leave the router for the tasks.
type keyNode interface {
	bindTask(in *instance) any
	newColumn() column
}

type keyBy[T any] struct {
	index int
	out   *hub[T]
}

func (k *keyBy[T]) bindTask(in *instance) any { return k.out.bind(in) }
func (k *keyBy[T]) newColumn() column         { return &typedColumn[T]{key: k.index} }

// column holds the records of one key step on their way to one partition.
type column interface {
	play(t *Task, from, to int)
	reset()
}

// typedColumn keeps the records as they are, unboxed.
type typedColumn[T any] struct {
	key   int
	items []item[T]
	// times has those of the items where the flow has clocks.
	times []timing
}

// timing is the time of a record and the watermark before it.
type timing struct {
	at, mark int64
	ahead    bool
}

type item[T any] struct {
	seq     uint64
	nanos   int64
	subject string
	key     string
	raw     []byte
	value   T
}

func (c *typedColumn[T]) reset() {
	clear(c.items)
	c.items, c.times = c.items[:0], c.times[:0]
}

// play runs the items through the task. A panic of a step costs the record that
// it happened in, not the batch.
func (c *typedColumn[T]) play(t *Task, from, to int) {
	next := t.in.keyed(c.key).(emit[T])
	for from < to && t.in.halted == nil {
		from = c.playUntilPanic(t, next, from, to)
	}
}

func (c *typedColumn[T]) playUntilPanic(t *Task, next emit[T], from, to int) (done int) {
	i := from
	defer func() {
		if r := recover(); r != nil {
			t.in.panicked(&t.meta, r)
			done = i + 1
		}
	}()
	m := &t.meta
	for ; i < to; i++ {
		it := &c.items[i]
		if len(c.times) > 0 {
			// What is due at the watermark before the record comes before it.
			if t.second != nil {
				t.followTo(it.seq, c.times[i].mark, it.nanos)
			} else {
				t.raise(t.source, c.times[i].mark)
			}
			if t.in.halted != nil {
				return i
			}
			m.at, m.mark, m.ahead, m.Stream = c.times[i].at, c.times[i].mark, c.times[i].ahead, t.stream
		} else {
			m.at = it.nanos
		}
		m.Seq, m.nanos, m.Subject, m.Key, m.raw = it.seq, it.nanos, it.subject, it.key, it.raw
		next(m, it.value)
	}
	return i
}

// KeyBy gives each record a key. Records of one key are processed in order, and
// the steps that follow can keep state for each key. [Rekey] gives them another key.
func KeyBy[T any](s Stream[T], key func(m *Meta, v T) (string, error), opts ...StepOption) Stream[T] {
	step := s.step("key", opts)
	s.b.need(step, "function", key != nil)
	switch {
	case s.spread:
		s.b.errorf("step %q: the stream is redistributed: give it a key by Rekey, which says how its values cross to the tasks of that key", s.b.steps[step].ID)
		return s
	case s.keyed:
		s.b.errorf("step %q: the stream has a key already; give it another one by Rekey, which says how its values cross to the tasks of that key", s.b.steps[step].ID)
		return s
	}
	return keyStream(s, step, false, key)
}

// keyStream takes the records of a stream to the tasks of their keys; with anyPartition a
// record may be in any partition that its subject leads to. Where the stream is spread, its
// sequence says to which task it goes.
func keyStream[T any](s Stream[T], step int, anyPartition bool, key func(m *Meta, v T) (string, error)) Stream[T] {
	// Column 0 is the dead letters' (see Router.deadLetter).
	node := &keyBy[T]{index: len(s.b.keys) + 1, out: &hub[T]{b: s.b}}
	s.b.keys = append(s.b.keys, node)
	spread := s.spread
	s.hub.subscribe(func(in *instance) emit[T] {
		r := in.router
		return func(m *Meta, v T) {
			in.step = step
			k, err := key(m, v)
			if err != nil {
				in.fail(step, m, err)
				return
			}
			var p int
			if spread {
				p = int(m.Seq % uint64(r.f.opts.Partitions))
			} else {
				p = Partition(k, r.f.opts.Partitions)
			}
			if p != r.partition && r.partition >= 0 {
				if !anyPartition {
					in.fail(step, m, r.misplaced(k, p))
					return
				}
				p = r.partition
			}
			if m.Seq <= r.seen[p] {
				return
			}
			b := r.batch(p)
			c := b.columns[node.index].(*typedColumn[T])
			c.items = append(c.items, item[T]{m.Seq, m.nanos, m.Subject, k, m.raw, v})
			if r.f.timed {
				c.times = append(c.times, timing{m.at, m.mark, m.ahead})
			}
			b.ran(node.index)
		}
	})
	return Stream[T]{b: s.b, hub: node.out, keyed: true, source: s.source, spread: s.spread}
}

// KeyBySubject gives the records of a stream without a key their subjects as keys, so
// that those of one subject keep their order; a stream that has a key stays as it is. With
// [Source.PartitionBy] a record is in the partition that the server has put it in,
// whatever tokens of the subject say that. [To] and [ToKV] do it by themselves.
func KeyBySubject[T any](s Stream[T], opts ...StepOption) Stream[T] {
	if s.keyed {
		return s
	}
	return keyStream(s, s.step("key", opts), true, subjectKey[T])
}

func subjectKey[T any](m *Meta, _ T) (string, error) { return m.Subject, nil }

// Batch is what a router collected for one partition. It is played by the
// partition's task and then released.
type Batch struct {
	// Partition whose task is to play it.
	Partition int

	source  string
	index   int // of the source
	pool    *sync.Pool
	columns []column
	runs    []run
	records int
	// frames of the exchange that the records are of.
	frames []frameRef
	// ticks of the source, of all its records since the batch before.
	ticks Ticks
}

// run is a number of records of one column; the runs of a batch keep the order
// in which the records came when a source has several key steps.
type run struct{ column, n int }

func (b *Batch) ran(column int) {
	b.records++
	if n := len(b.runs); n > 0 && b.runs[n-1].column == column {
		b.runs[n-1].n++
		return
	}
	b.runs = append(b.runs, run{column, 1})
}

// Len returns the number of records in it.
func (b *Batch) Len() int { return b.records }

// Release gives the batch back to its router. It must not be used afterwards.
func (b *Batch) Release() {
	for _, c := range b.columns {
		c.reset()
	}
	b.runs, b.records, b.frames, b.ticks = b.runs[:0], 0, b.frames[:0], nil
	b.pool.Put(b)
}

// Router runs the steps before the key on the records of one source and sorts
// them by partition. It is not safe for concurrent use.
type Router struct {
	f       *Flow
	in      *instance
	route   func(m *Meta, data []byte)
	meta    Meta
	batches []*Batch
	touched []int
	// seen is, for each partition, the last sequence that its task has applied.
	seen []uint64
	// by is the source's PartitionBy.
	by []int
	// partition of the record at hand if the server has sorted it, else -1.
	partition int
	pool      sync.Pool
	// clock is nil where the stream's timestamps are the times; highest is the
	// highest time so far.
	clock   *ClockInfo
	highest int64
	// moves is nil unless the flow has two times.
	moves *moves
	// stage is above 0 for a router of the exchange, and exchange what it has for that.
	stage    int
	exchange *exchangeRouter
}

// Router makes a router for the source with that index in [Flow.Sources].
func (f *Flow) Router(source int) *Router {
	r := &Router{f: f, batches: make([]*Batch, f.opts.Partitions), seen: make([]uint64, f.opts.Partitions), highest: noTime}
	r.in = &instance{f: f, memo: map[any]any{}, router: r}
	inf := f.sources[source].info()
	r.meta.Stream, r.by, r.partition = inf.Stream, inf.PartitionBy, -1
	r.clock = inf.Clock
	if f.twoTimes {
		r.moves = &moves{stream: noTime, event: noTime}
	}
	r.route = f.sources[source].bind(r.in)
	r.pool.New = func() any {
		b := &Batch{source: r.meta.Stream, index: source, pool: &r.pool, columns: make([]column, 1+len(f.keys))}
		b.columns[0] = &typedColumn[*StepError]{}
		for i, k := range f.keys {
			b.columns[i+1] = k.newColumn()
		}
		return b
	}
	return r
}

// ReadFrom gives the records another stream than the one of the source: that which
// their sequences are of.
func (r *Router) ReadFrom(stream string) { r.meta.Stream = stream }

// Seen tells the router that the task of a partition has applied every record up
// to seq, so that these are dropped when they are read again.
func (r *Router) Seen(partition int, seq uint64) { r.seen[partition] = seq }

func (r *Router) batch(p int) *Batch {
	b := r.batches[p]
	if b == nil {
		b = r.pool.Get().(*Batch)
		b.Partition = p
		r.batches[p] = b
		r.touched = append(r.touched, p)
	}
	return b
}

// Route runs one record of the source up to its key. data is kept until the
// batches that it went to are released; subject and nanos (the stream's
// timestamp in nanoseconds since 1970) describe the record. With [Stop] a record
// that fails is returned as a *StepError, from then on by every call; what the
// router holds must not be played then, since it may hold a part of the record.
func (r *Router) Route(subject string, seq uint64, nanos int64, data []byte) (err error) {
	return r.run(-1, subject, seq, nanos, data)
}

// RouteMirrored is [Router.Route] for a record of a mirror that has
// [SourceInfo.Transforms], under the subject that it has there. All that comes of
// the record goes to the task of the partition that it is in there, also when it
// does not get a key: who reads another partition does not see it.
func (r *Router) RouteMirrored(mirrored string, seq uint64, nanos int64, data []byte) error {
	p, subject, err := cutPartition(mirrored, r.f.opts.Partitions)
	if err != nil {
		return fmt.Errorf("sequence %d: %w", seq, err)
	}
	if seq <= r.seen[p] {
		return r.halted()
	}
	return r.run(p, subject, seq, nanos, data)
}

// misplaced is the error of a record that has a key of another partition than the
// one that the server found. Its task may belong to a worker that never sees it.
func (r *Router) misplaced(key string, p int) error {
	return fmt.Errorf("the key %q belongs to partition %d, but by its subject the record is in partition %d: the source is partitioned by the tokens %v of the subject, so the key has to be just these; or leave out PartitionBy (partition_by)",
		key, p, r.partition, r.by)
}

func (r *Router) run(partition int, subject string, seq uint64, nanos int64, data []byte) (err error) {
	r.partition = partition
	m := &r.meta
	m.Subject, m.Seq, m.nanos, m.Key, m.raw, m.ahead = subject, seq, nanos, "", data, false
	if r.clock == nil {
		// Timestamps do not go back, so that no record before one is later.
		m.at, m.mark, r.highest = nanos, nanos, max(r.highest, nanos)
	}
	if r.moves != nil {
		r.noteMove(seq, nanos)
	}
	defer func() {
		if p := recover(); p != nil {
			r.in.panicked(m, p)
			err = r.halted()
		}
	}()
	r.route(m, data)
	return r.halted()
}

func (r *Router) halted() error {
	if r.in.halted == nil {
		return nil
	}
	return r.in.halted
}

// deadLetter routes a record that has no key: its sequence, or the partition that
// the server found, chooses the task that publishes it with its commit.
func (r *Router) deadLetter(m *Meta, e *StepError) {
	p := r.partition
	if p < 0 {
		p = int(m.Seq % uint64(r.f.opts.Partitions))
	}
	if r.stage > 0 {
		deadCrossed(r, m, e)
		return
	}
	if m.Seq <= r.seen[p] {
		return
	}
	b := r.batch(p)
	c := b.columns[0].(*typedColumn[*StepError])
	c.items = append(c.items, item[*StepError]{m.Seq, m.nanos, m.Subject, "", m.raw, e})
	b.ran(0)
}

// Take calls fn with each batch that has records and leaves the router empty.
// The batches belong to fn. Behind it, with [Flow.TwoTimes], [Router.TakeTicks] is to
// be called.
func (r *Router) Take(fn func(*Batch)) {
	for _, p := range r.touched {
		b := r.batches[p]
		r.batches[p] = nil
		if r.moves != nil {
			b.ticks = r.moves.ticks
		}
		fn(b)
	}
	r.touched = r.touched[:0]
}
