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
)

var errReachedLimit = errors.New("reached the limit")

// reader takes one source through the steps before the key.
type reader struct {
	s      *session
	source int
	stream string
	cursor *bus.Cursor

	mu     sync.Mutex
	router *flow.Router
	// read is the last sequence that was routed or skipped; every matching
	// message up to it has been taken.
	read    uint64
	waiting int
	count   uint64
	// limit is the last sequence to read.
	limit uint64
	// limited is closed when a limit is set, to wake who waits for it.
	limited chan struct{}
}

func newReader(s *session, source int, stream string, from uint64) *reader {
	return &reader{
		s: s, source: source, stream: stream, router: s.flow.Router(source),
		read: from - 1, limit: math.MaxUint64, limited: make(chan struct{}),
	}
}

// run reads until the limit is reached.
func (r *reader) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { r.flushNowAndThen(ctx, cancel) })
	wg.Go(func() { r.watchLimit(ctx, cancel) })
	err := r.cursor.Run(ctx, func(m *bus.Msg) error { return r.handle(ctx, m) })
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
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.flush(r.read)
}

func (r *reader) handle(ctx context.Context, m *bus.Msg) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.Seq > r.limit {
		r.read = r.limit
		return errReachedLimit
	}
	if err := r.router.Route(m.Subject, m.Seq, m.Time, m.Data); err != nil {
		return err
	}
	if err := r.s.cfg.reached(ctx, "read", ""); err != nil {
		return err
	}
	r.read = m.Seq
	r.count++
	r.waiting++
	if m.Pending == 0 || r.waiting >= batchRecords {
		if err := r.flush(r.read); err != nil {
			return err
		}
	}
	if m.Seq == r.limit {
		return errReachedLimit
	}
	return nil
}

// flush hands what was routed to the lanes. It blocks while they are busy; only
// the end of the session interrupts it, since what was routed cannot be taken
// back. The lock is held.
func (r *reader) flush(through uint64) error {
	chunks := make([]chunk, len(r.s.lanes))
	r.router.Take(func(b *flow.Batch) {
		c := &chunks[r.s.laneOf(b.Partition)]
		c.batches = append(c.batches, b)
	})
	r.waiting = 0
	for i := range chunks {
		chunks[i].source, chunks[i].through = r.source, through
		select {
		case r.s.lanes[i].in <- laneInput{chunk: chunks[i]}:
		case <-r.s.ctx.Done():
			return context.Cause(r.s.ctx)
		}
	}
	return nil
}

// flushNowAndThen flushes what waits for messages that do not come.
func (r *reader) flushNowAndThen(ctx context.Context, cancel context.CancelCauseFunc) {
	t := time.NewTicker(flushEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		r.mu.Lock()
		var err error
		if r.waiting > 0 {
			err = r.flush(r.read)
		}
		r.mu.Unlock()
		if err != nil {
			cancel(err)
			return
		}
	}
}

// watchLimit ends the reader when every message up to the limit has been read
// though no message stands at or behind it.
func (r *reader) watchLimit(ctx context.Context, cancel context.CancelCauseFunc) {
	t := time.NewTicker(caughtUpEvery)
	defer t.Stop()
	for first := true; ; first = false {
		r.mu.Lock()
		limited, limit := r.limited, r.limit
		r.mu.Unlock()
		if limit == math.MaxUint64 {
			select {
			case <-ctx.Done():
				return
			case <-limited:
				continue
			}
		}
		if !first {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
		}
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

// reached reports whether every message up to the limit has been read, when it is
// known that all up to a sequence have been.
func (r *reader) reached(through uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if max(through, r.read) < r.limit {
		return false
	}
	r.read = r.limit
	return true
}

// setLimit makes the reader stop after a sequence; the highest number takes a
// limit back. It returns how far the reader has read, and does nothing when that
// is beyond the limit.
func (r *reader) setLimit(limit uint64) (read uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.read > limit {
		return r.read, false
	}
	if r.limit == math.MaxUint64 && limit != math.MaxUint64 {
		close(r.limited)
	}
	if r.limit != math.MaxUint64 && limit == math.MaxUint64 {
		r.limited = make(chan struct{})
	}
	r.limit = limit
	return r.read, true
}

// stop makes the reader stop where it is and returns where that is.
func (r *reader) stop() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.limit == math.MaxUint64 {
		close(r.limited)
	}
	r.limit = min(r.limit, r.read)
	return r.limit
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
