package flow

import "fmt"

// exchangeRouter is what a router of the exchange has besides.
type exchangeRouter struct {
	nodes map[string]crossing
	// order are the nodes of the records of the frame at hand.
	order []crossing
}

// ExchangeRouter makes the router for the records that come to a stage, above 0 and
// below [Flow.Stages]. It is fed by [Router.RouteFrame].
func (f *Flow) ExchangeRouter(stage int) *Router {
	r := &Router{
		f: f, batches: make([]*Batch, f.opts.Partitions), seen: make([]uint64, f.opts.Partitions), highest: noTime,
		partition: -1, stage: stage, exchange: &exchangeRouter{nodes: map[string]crossing{}},
	}
	r.in = &instance{f: f, memo: map[any]any{}, router: r}
	nodes := f.keysOf(stage)
	for _, k := range nodes {
		c := k.(crossing)
		r.exchange.nodes[c.stepID()] = c
	}
	stream := ExchangeStream(f.name)
	r.pool.New = func() any {
		b := &Batch{source: stream, pool: &r.pool, columns: make([]column, 1+len(nodes))}
		b.columns[0] = &crossedColumn[*StepError]{}
		for i, k := range nodes {
			b.columns[i+1] = k.newColumn()
		}
		return b
	}
	return r
}

// RouteFrame is [Router.Route] for a message of the exchange. partition is that of its
// subject, see [ExchangePartition]. Besides a *StepError it returns an error that wraps
// [ErrFrame]; then it has routed nothing of the message.
func (r *Router) RouteFrame(partition int, seq uint64, data []byte) error {
	if partition == AllPartitions {
		return r.routeMark(seq, data)
	}
	if partition < 0 || partition >= len(r.seen) {
		return fmt.Errorf("sequence %d: %w: it is for partition %d of %d", seq, ErrFrame, partition, len(r.seen))
	}
	if seq <= r.seen[partition] {
		return r.halted()
	}
	if err := r.checkFrame(partition, data); err != nil {
		return fmt.Errorf("sequence %d: %w", seq, err)
	}
	f, err := openFrameReader(data)
	if err != nil {
		return err // which checkFrame has seen
	}
	r.partition = partition
	b := r.batch(partition)
	b.frames = append(b.frames, frameRef{producer: f.head.producer, number: f.head.number, seq: seq, run: len(b.runs)})
	for i := 0; r.in.halted == nil && i < len(r.exchange.order); {
		if i, err = r.routeUntilPanic(f, seq, i); err != nil {
			return err
		}
	}
	return r.halted()
}

// checkFrame reads the frame once without any effect, so that a damaged one is never
// applied in part.
func (r *Router) checkFrame(partition int, data []byte) error {
	f, err := openFrameReader(data)
	if err != nil {
		return err
	}
	if f.head.stage != r.stage || f.head.partition != partition || f.head.producer >= len(r.seen) {
		return fmt.Errorf("%w: it is of partition %d for partition %d of stage %d, under the subject of partition %d of stage %d",
			ErrFrame, f.head.producer, f.head.partition, f.head.stage, partition, r.stage)
	}
	r.exchange.order = r.exchange.order[:0]
	for {
		rec, err := f.next()
		if err != nil {
			return err
		}
		if rec == nil {
			return nil
		}
		node := r.exchange.nodes[rec.step]
		if node == nil {
			return fmt.Errorf("%w: it has records of the step %q, which does not lead to stage %d in this definition of the flow: start the former definition until the flow is drained, then this one",
				ErrFrame, rec.step, r.stage)
		}
		if p := Partition(rec.key, len(r.seen)); p != partition {
			return fmt.Errorf("%w: the key %q belongs to partition %d and not to %d", ErrFrame, rec.key, p, partition)
		}
		r.exchange.order = append(r.exchange.order, node)
	}
}

// routeUntilPanic routes the records from number i on. A panic of a codec costs the
// record that it happened in.
func (r *Router) routeUntilPanic(f *frameReader, seq uint64, from int) (done int, err error) {
	i, m := from, &r.meta
	defer func() {
		if p := recover(); p != nil {
			r.in.panicked(m, p)
			done, err = i+1, nil
		}
	}()
	for ; i < len(r.exchange.order); i++ {
		rec, err := f.next()
		if err != nil {
			return i, err // which checkFrame has seen
		}
		m.Stream, m.Subject, m.Seq, m.Key = rec.stream, rec.subject, rec.seq, rec.key
		m.nanos, m.at, m.mark, m.raw, m.frame = rec.nanos, rec.at, noTime, rec.value, seq
		m.ahead = rec.ahead
		r.exchange.order[i].route(r, m, rec.value)
	}
	return i, nil
}

// deadCrossed routes a record of the exchange whose value cannot be decoded.
func deadCrossed(r *Router, m *Meta, e *StepError) {
	b := r.batch(r.partition)
	addCrossed(b.columns[0].(*crossedColumn[*StepError]), m, e)
	b.crossed(0)
}

// crossed is ran for a record of the last frame of the batch.
func (b *Batch) crossed(column int) {
	b.records++
	if n := len(b.runs); n > b.frames[len(b.frames)-1].run && b.runs[n-1].column == column {
		b.runs[n-1].n++
		return
	}
	b.runs = append(b.runs, run{column, 1})
}

// crossedColumn is a column of records that came by the exchange. Each brings all of
// its position along: the records of a frame are of many sources and sequences.
type crossedColumn[T any] struct {
	key   int
	items []crossed[T]
}

type crossed[T any] struct {
	meta  Meta
	value T
}

func addCrossed[T any](c *crossedColumn[T], m *Meta, v T) {
	c.items = append(c.items, crossed[T]{*m, v})
}

func (c *crossedColumn[T]) reset() {
	clear(c.items)
	c.items = c.items[:0]
}

func (c *crossedColumn[T]) play(t *Task, from, to int) {
	next := t.in.keyed(c.key).(emit[T])
	for from < to && t.in.halted == nil {
		from = c.playUntilPanic(t, next, from, to)
	}
}

func (c *crossedColumn[T]) playUntilPanic(t *Task, next emit[T], from, to int) (done int) {
	i := from
	defer func() {
		if r := recover(); r != nil {
			t.in.panicked(&t.meta, r)
			done = i + 1
		}
	}()
	for ; i < to; i++ {
		if t.overdue {
			if t.settle(); t.in.halted != nil {
				return i
			}
		}
		t.meta = c.items[i].meta
		t.meta.mark = t.now
		next(&t.meta, c.items[i].value)
	}
	return i
}
