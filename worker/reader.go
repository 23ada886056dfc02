package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"natsflow/bus"
	"natsflow/flow"
)

// Bounds of a reader's batches.
const (
	// batchRecords is how many records go to the lanes at once at the most.
	batchRecords = 1024
	// flushEvery bounds how long a record waits for more to come when the server
	// had said that more would come.
	flushEvery = 5 * time.Millisecond
	// caughtUpEvery is how often a reader that waits for a cut without messages
	// asks the server whether it is there.
	caughtUpEvery = 50 * time.Millisecond
	// sourceCheck is how often a reader makes sure that the source is still the
	// same stream.
	sourceCheck = 10 * time.Second
)

var errReachedLimit = errors.New("reached the limit")

// reader takes one source through the steps before the key.
type reader struct {
	s      *session
	source int
	stream string
	cursor *bus.Cursor
	// created tells the stream from another one of the same name.
	created time.Time
	// ahead is the highest position that a task has: a cut cannot be before it.
	ahead uint64

	// routing guards what follows. It is held while a batch waits for a lane, so
	// only what reads the source may wait for it.
	routing sync.Mutex
	router  *flow.Router
	// routed is the last sequence whose records are in the router or beyond.
	routed  uint64
	waiting int
	// out holds, for each lane, batches that it had no room for.
	out    [][]*flow.Batch
	unsent bool

	// mu guards what follows; it is held for moments only.
	mu sync.Mutex
	// read is the last sequence that was taken or skipped: nothing up to it will
	// be asked for again, and nothing after it has been looked at.
	read  uint64
	count uint64
	// limit is the last sequence to read.
	limit uint64
	// limited is closed when a limit is set, to wake who waits for it.
	limited chan struct{}
	// ended: it has reached its limit and does not read on, whatever comes.
	ended bool
}

func newReader(s *session, source int, info bus.StreamInfo, from, ahead uint64) *reader {
	return &reader{
		s: s, source: source, stream: info.Name, created: info.Created, ahead: ahead, router: s.flow.Router(source),
		routed: from - 1, read: from - 1, out: make([][]*flow.Batch, len(s.lanes)),
		limit: math.MaxUint64, limited: make(chan struct{}),
	}
}

// run reads until the limit is reached.
func (r *reader) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { r.flushNowAndThen(ctx) })
	wg.Go(func() { r.watchLimit(ctx, cancel) })
	wg.Go(func() { r.watchStream(ctx, cancel) })
	var err error
	select {
	case <-r.s.reading:
		err = r.cursor.Run(ctx, func(m *bus.Msg) error { return r.handle(ctx, m) })
	case <-ctx.Done():
	}
	reached := errors.Is(err, errReachedLimit) || errors.Is(context.Cause(ctx), errReachedLimit)
	if cause := context.Cause(ctx); !reached && cause != nil {
		err = cause
	}
	cancel(nil)
	wg.Wait()
	if !reached {
		return err
	}
	// What is waiting here belongs before the limit.
	r.routing.Lock()
	defer r.routing.Unlock()
	r.routed, _ = r.position()
	return r.flush(true)
}

func (r *reader) handle(ctx context.Context, m *bus.Msg) error {
	last, ok := r.begin(m.Seq)
	if !ok {
		return errReachedLimit
	}
	r.routing.Lock()
	defer r.routing.Unlock()
	if err := r.router.Route(m.Subject, m.Seq, m.Time, m.Data); err != nil {
		return err
	}
	if err := r.s.cfg.reached(ctx, "read", ""); err != nil {
		return err
	}
	r.routed = m.Seq
	r.waiting++
	if m.Pending == 0 || r.waiting >= batchRecords {
		if err := r.flush(true); err != nil {
			return err
		}
	}
	if last {
		return errReachedLimit
	}
	return nil
}

// begin takes a message, unless it is beyond the limit. It counts as read from
// here on: a limit that is set later cannot be before it. last says that it is
// the last one.
func (r *reader) begin(seq uint64) (last, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return false, false
	}
	if seq > r.limit {
		r.read, r.ended = r.limit, true
		return false, false
	}
	r.read = seq
	r.count++
	r.ended = seq == r.limit
	return r.ended, true
}

// flush hands what was routed to the lanes. While they are busy it blocks, or
// leaves the rest for later if it must not wait. Only the end of the session
// interrupts it, since what was routed cannot be taken back. The lock is held.
func (r *reader) flush(wait bool) error {
	r.router.Take(func(b *flow.Batch) {
		lane := r.s.laneOf(b.Partition)
		r.out[lane] = append(r.out[lane], b)
	})
	r.waiting, r.unsent = 0, false
	for i, l := range r.s.lanes {
		in := laneInput{chunk: chunk{source: r.source, through: r.routed, batches: r.out[i]}}
		if !wait {
			select {
			case l.in <- in:
				r.out[i] = nil
			default:
				r.unsent = true
			}
			continue
		}
		select {
		case l.in <- in:
			r.out[i] = nil
		case <-r.s.ctx.Done():
			return context.Cause(r.s.ctx)
		}
	}
	return nil
}

// flushNowAndThen flushes what waits for messages that do not come.
func (r *reader) flushNowAndThen(ctx context.Context) {
	t := time.NewTicker(flushEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		// Whoever holds the lock is busy with messages, and flushes by itself.
		if !r.routing.TryLock() {
			continue
		}
		if r.waiting > 0 || r.unsent {
			_ = r.flush(false) // errs only when it waits
		}
		r.routing.Unlock()
	}
}

// watchLimit ends the reader when every message up to the limit has been read
// though no message stands at or behind it.
func (r *reader) watchLimit(ctx context.Context, cancel context.CancelCauseFunc) {
	t := time.NewTicker(caughtUpEvery)
	defer t.Stop()
	for asked := false; ; {
		r.mu.Lock()
		limited, limit := r.limited, r.limit
		r.mu.Unlock()
		if limit == math.MaxUint64 {
			select {
			case <-ctx.Done():
				return
			case <-limited:
				asked = false
				continue
			}
		}
		if asked {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
		}
		asked = true
		if r.reached(0) {
			cancel(errReachedLimit)
			return
		}
		through, err := r.cursor.CaughtUp(ctx)
		// After an error the server is away; the next round asks again.
		if err == nil && r.reached(through) {
			cancel(errReachedLimit)
			return
		}
	}
}

// watchStream ends the session when the stream is not the one any more that the
// positions are of: a cursor on a new one would wait for ever, or skip what is in
// it, without a word.
func (r *reader) watchStream(ctx context.Context, cancel context.CancelCauseFunc) {
	t := time.NewTicker(sourceCheck)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		info, err := r.s.conn.Stream(ctx, r.stream)
		// Another error is for the cursor to deal with.
		if err == nil && !info.Created.Equal(r.created) {
			cancel(fmt.Errorf("%w: stream %s was created anew while the flow was reading it", ErrSource, r.stream))
			return
		}
	}
}

// reached reports whether every message up to the limit has been read, when it is
// known that all up to a sequence have been.
func (r *reader) reached(through uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if max(through, r.read) < r.limit {
		return false
	}
	r.read, r.ended = r.limit, true
	return true
}

// bound sets the limit of a reader that does not run yet.
func (r *reader) bound(limit uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.putLimit(max(limit, r.read))
}

// setLimit makes the reader stop after a sequence. It returns the position that
// the flow has in the source, and does nothing when that is beyond the limit.
func (r *reader) setLimit(limit uint64) (at uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at = max(r.read, r.ahead)
	if at > limit {
		return at, false
	}
	r.putLimit(limit)
	return at, true
}

// unlimit takes a limit back. It reports false when the reader has reached it and
// does not read on.
func (r *reader) unlimit() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return false
	}
	if r.limit != math.MaxUint64 {
		r.limited = make(chan struct{})
	}
	r.limit = math.MaxUint64
	return true
}

// stop makes the reader stop where it is and returns where that is.
func (r *reader) stop() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.putLimit(min(r.limit, r.read))
	return r.limit
}

// stopForCut makes the reader stop where it is, or where the task is that is ahead
// of it, and returns where that is. It is the first coherent cut.
func (r *reader) stopForCut() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.putLimit(min(r.limit, max(r.read, r.ahead)))
	return r.limit
}

func (r *reader) putLimit(limit uint64) {
	if r.limit == math.MaxUint64 && limit != math.MaxUint64 {
		close(r.limited)
	}
	r.limit = limit
}

func (r *reader) position() (read, count uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.read, r.count
}

// checkSource refuses a source that cannot be read from the positions that the
// tasks have, and returns the first sequence to read.
func checkSource(info bus.StreamInfo, lowest uint64, acceptGap bool) (from, gap uint64, err error) {
	switch {
	case info.Retention != "limits":
		return 0, 0, fmt.Errorf("%w: stream %s has %s retention, which deletes messages when a consumer acks or goes away: a flow reads streams with limits retention; let one source it: nats stream add NAME --source %s",
			ErrSource, info.Name, info.Retention, info.Name)
	case lowest > info.LastSeq:
		return 0, 0, fmt.Errorf("%w: the flow has processed stream %s up to sequence %d, but the stream ends at %d: it was purged, restored or created anew",
			ErrSource, info.Name, lowest, info.LastSeq)
	case info.FirstSeq > lowest+1 && lowest > 0:
		gap = info.FirstSeq - lowest - 1
		if !acceptGap {
			return 0, 0, fmt.Errorf("%w: stream %s begins at sequence %d, the flow has processed it up to %d: up to %d messages are missing; start with --accept-gap to go on without them",
				ErrGap, info.Name, info.FirstSeq, lowest, gap)
		}
	}
	return max(lowest+1, 1), gap, nil
}
