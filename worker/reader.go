package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// Bounds of a reader's batches.
const (
	// batchRecords is how many records go to the lanes at once at the most.
	batchRecords = 1024
	// batchBytes is how many bytes of messages do: a frame of the exchange is one
	// message, and has many records.
	batchBytes = 1 << 20
	// flushEvery bounds how long a record waits for more to come when the server
	// had said that more would come.
	flushEvery = 5 * time.Millisecond
	// caughtUpEvery is how often a reader that waits for a cut without messages
	// asks the server whether it is there.
	caughtUpEvery = 50 * time.Millisecond
	// sourceCheck is how often a reader makes sure that the source is still the
	// same stream.
	sourceCheck = 10 * time.Second
	// cursorGrace is how long there may be no cursor before that is trouble.
	cursorGrace = time.Second
)

var (
	errReachedLimit = errors.New("reached the limit")
	errHalted       = errors.New("halted")
)

// reader takes one source through the steps before the key, or what is in the exchange
// for one stage to its tasks. It reads in scans: between two of them the tasks that it
// reads for can change, and the position.
type reader struct {
	s *session
	input
	source int // of the session's inputs
	// gaps looks for messages that were dropped unread, behind the last seek.
	gaps *gaps
	// created tells the stream from another one of the same name.
	created time.Time
	// mirror is what is read in place of a source that the server partitions, else
	// nil. owned are the partitions that are read for, inCursor those that the cursor
	// reads where it does not read all: of a mirror, and of the exchange.
	mirror   *mirror
	owned    []bool
	inCursor []bool

	// cursor is nil before the first tasks came.
	cursor atomic.Pointer[bus.Cursor]
	// Between two scans the conductor has these: whether the cursor has to be made
	// anew before it is used again, how to end the scan, and what is closed when
	// that has ended.
	stale  bool
	halter context.CancelCauseFunc
	over   chan struct{}

	// routing guards what follows. It is held while a batch waits for a lane, so
	// only what reads the source may wait for it.
	routing sync.Mutex
	router  *flow.Router
	// routed is the last sequence whose records are in the router or beyond.
	routed uint64
	// waiting is the number of messages in it, bytes their size.
	waiting, bytes int
	// out holds, for each lane, batches that it had no room for.
	out    [][]*flow.Batch
	unsent bool
	// ticks are, for each lane, those of what it had no room for.
	ticks []flow.Ticks
	// mark is the watermark by the server's clock, quiet the time of the source by it, and
	// lastTime the timestamp of the last message if it is known.
	mark, quiet, lastTime int64
	// broken: a record failed half-way, and what the router holds must not be played.
	broken bool

	// mu guards what follows; it is held for moments only.
	mu sync.Mutex
	// read is the last sequence that was taken or skipped: nothing up to it will
	// be asked for again, and nothing after it has been looked at.
	read  uint64
	count uint64
	// ahead is the highest position that a task has had: a cut cannot be before it.
	ahead uint64
	// limit is the last sequence to read, until the latest timestamp.
	limit uint64
	until int64
	// limited is closed when a limit is set, to wake who waits for it.
	limited chan struct{}
	// ended: it has reached its limit and does not read on, whatever comes.
	ended bool
	// seeking is since when a cursor is being opened, zero when none is.
	seeking time.Time
}

func newReader(s *session, source int) *reader {
	r := &reader{
		s: s, input: s.inputs[source], source: source, owned: make([]bool, s.flow.Options().Partitions),
		out: make([][]*flow.Batch, len(s.lanes)), limit: math.MaxUint64, until: math.MaxInt64, limited: make(chan struct{}), mark: noTime, quiet: noTime,
		ticks: make([]flow.Ticks, len(s.lanes)),
	}
	if r.stage > 0 {
		r.router = s.flow.ExchangeRouter(r.stage)
	} else {
		r.router, r.mirror = s.flow.Router(source), s.mirrors[source]
		r.router.ReadFrom(r.stream)
	}
	for p := range s.flow.Options().Partitions {
		r.disown(p)
	}
	return r
}

// own makes the router pass records of a partition behind a sequence, disown none.
func (r *reader) own(partition int, seen uint64) {
	r.router.Seen(partition, seen)
	r.owned[partition] = true
}

func (r *reader) disown(partition int) {
	r.router.Seen(partition, math.MaxUint64)
	r.owned[partition] = false
}

// seek makes the next scan begin behind a sequence. The cursor is made anew if
// it stands elsewhere, or reads other partitions.
func (r *reader) seek(ctx context.Context, through uint64) error {
	r.mu.Lock()
	stale := through != r.read || r.outdated()
	// The tasks that were here stay where they are.
	r.ahead = max(r.ahead, r.read)
	r.read, r.ended = through, false
	r.mu.Unlock()
	r.routed = through
	if !stale {
		return nil
	}
	r.setSeeking(time.Now())
	defer r.setSeeking(time.Time{})
	info, err := r.s.conn.Stream(ctx, r.stream)
	if err != nil {
		return fmt.Errorf("source %s: %w", r.stream, err)
	}
	if was := r.s.known[r.stream].Created; r.stage == 0 && !was.IsZero() && !info.Created.Equal(was) {
		return fmt.Errorf("%w: stream %s was created anew since the flow began to read it, so that its sequences mean other messages: start the worker again, it says what to do", ErrSource, r.stream)
	}
	from, gap, err := checkSource(info, through, r.s.cfg.AcceptGap || r.lossy())
	if r.lossy() {
		gap = 0
	}
	if errors.Is(err, ErrGap) || gap > 0 {
		if err := r.s.overtaken(ctx, r.source, through); err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	if gap > 0 {
		r.s.log.Warn("going on without messages that are gone from the source", "source", r.stream, "missing", gap, "from", info.FirstSeq)
	}
	r.close(ctx)
	cfg := bus.CursorConfig{
		Stream: r.stream, Subjects: r.subjects, From: from, Created: info.Created,
		Name: "natsflow-" + r.s.flow.Name() + "-" + r.s.cfg.Name, Logger: r.s.log,
	}
	if r.mirror != nil {
		if err := r.mirror.check(ctx, r.s.conn, from); err != nil {
			return err
		}
		cfg.Stream, cfg.Subjects, cfg.Created = r.mirror.name, partitionFilters(r.owned), time.Time{}
	}
	if r.stage > 0 {
		cfg.Subjects = exchangeFilters(r.s.flow, r.stage, r.owned)
	}
	if r.filtered() {
		r.inCursor = slices.Clone(r.owned)
	}
	cursor, err := r.s.conn.OpenCursor(ctx, cfg)
	if err != nil {
		return fmt.Errorf("source %s: %w", r.stream, err)
	}
	r.cursor.Store(cursor)
	r.gaps = newGaps(r.s, r.subjects, info, from)
	if r.mirror != nil {
		r.gaps.whole = false
	}
	r.gaps.compacts = r.gaps.compacts || r.bucket
	r.created, r.stale = info.Created, false
	return nil
}

func (r *reader) setSeeking(since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seeking = since
}

// trouble says that the source is not read though it should be, for want of a
// cursor; empty if it is. A worker without one would look as if there were nothing
// to do.
func (r *reader) trouble() string {
	r.mu.Lock()
	since := r.seeking
	r.mu.Unlock()
	err := errors.New("it is being opened")
	if cursor := r.cursor.Load(); cursor != nil && since.IsZero() {
		since, err = cursor.Lacking()
	}
	if since.IsZero() || time.Since(since) < cursorGrace {
		return ""
	}
	return fmt.Sprintf("not consuming source %s, without a cursor for %v: %v", r.stream, time.Since(since).Round(time.Second), err)
}

// close removes the cursor when the server can be reached.
func (r *reader) close(ctx context.Context) {
	cursor := r.cursor.Load()
	if cursor == nil || !r.s.conn.Connected() {
		return
	}
	if err := cursor.Close(ctx); err != nil {
		r.s.log.Debug("the cursor was not removed; it goes by itself", "source", r.stream, "err", err)
	}
}

// start begins a scan where the last one ended, or where seek said.
func (r *reader) start() {
	ctx, cancel := context.WithCancelCause(r.s.ctx)
	over := make(chan struct{})
	r.halter, r.over = cancel, over
	r.s.wg.Go(func() {
		defer close(over)
		defer cancel(nil)
		err := r.scan(ctx)
		switch {
		case errors.Is(err, errReachedLimit):
			r.stale = true // the message that it stopped at is not handled for the cursor
			r.s.wake()
		case errors.Is(err, errHalted):
		case r.mirror != nil && errors.Is(err, bus.ErrNotFound):
			// It is disposable: the next session makes it anew.
			r.s.cancel(fmt.Errorf("%w: mirror %s of source %s: %w", errAway, r.mirror.name, r.stream, err))
		case r.stage == 0 && r.s.intakes[r.source] != nil && errors.Is(err, bus.ErrNotFound):
			r.s.cancel(r.s.intakes[r.source].deleted(r.s.flow.Name(), err))
		default:
			r.s.cancel(fmt.Errorf("source %s: %w", r.stream, err))
		}
	})
}

// halt ends the scan where it is. All that was read is with the lanes then.
func (r *reader) halt() {
	if r.halter == nil {
		return
	}
	r.halter(errHalted)
	<-r.over
	r.halter = nil
}

// scan reads until the limit is reached or it is halted, and returns which. What
// was read is with the lanes then.
func (r *reader) scan(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { r.flushNowAndThen(ctx) })
	wg.Go(func() { r.watchLimit(ctx, cancel) })
	wg.Go(func() { r.watchStream(ctx, cancel) })
	wg.Go(func() { r.followServer(ctx) })
	err := r.cursor.Load().Run(ctx, func(m *bus.Msg) error { return r.handle(ctx, m) })
	reached := errors.Is(err, errReachedLimit)
	if cause := context.Cause(ctx); !reached && cause != nil {
		err = cause
		reached = errors.Is(cause, errReachedLimit)
	}
	cancel(nil)
	wg.Wait()
	if !reached && !errors.Is(err, errHalted) {
		return err
	}
	r.routing.Lock()
	defer r.routing.Unlock()
	if reached {
		// What is waiting here belongs before the limit.
		r.routed, _ = r.position()
	}
	if ferr := r.flush(true); ferr != nil {
		return ferr
	}
	return err
}

func (r *reader) handle(ctx context.Context, m *bus.Msg) error {
	if err := r.checkGap(ctx, m.Seq); err != nil {
		return err
	}
	last, ok := r.begin(m.Seq, m.Time, r.stage > 0 && isMark(m.Subject))
	if !ok {
		return errReachedLimit
	}
	r.routing.Lock()
	defer r.routing.Unlock()
	if err := r.route(m); err != nil {
		r.broken = true
		return err
	}
	if err := r.s.cfg.reached(ctx, "read", ""); err != nil {
		return err
	}
	r.routed, r.lastTime = m.Seq, m.Time
	r.waiting++
	r.bytes += len(m.Data)
	// What the lanes had no room for is waited for before there is more of it.
	if m.Pending == 0 || r.waiting >= batchRecords || r.bytes >= batchBytes || r.unsent {
		if err := r.flush(true); err != nil {
			return err
		}
	}
	if last {
		return errReachedLimit
	}
	return nil
}

func (r *reader) route(m *bus.Msg) error {
	switch {
	case r.stage > 0:
		return r.routeFrame(m)
	case r.mirror != nil:
		return r.router.RouteMirrored(m.Subject, m.Seq, m.Time, m.Data)
	}
	return r.router.Route(m.Subject, m.Seq, m.Time, m.Data)
}

// begin takes a message, unless it is beyond the limit. It counts as read from
// here on: a limit that is set later cannot be before it. last says that it is
// the last one. A watermark does not count as a frame.
func (r *reader) begin(seq uint64, nanos int64, mark bool) (last, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended || nanos > r.until {
		r.ended = true
		return false, false
	}
	if seq > r.limit {
		r.read, r.ended = r.limit, true
		return false, false
	}
	r.read = seq
	if !mark {
		r.count++
	}
	r.ended = seq == r.limit
	return r.ended, true
}

// flush hands what was routed to the lanes. While they are busy it blocks, or
// leaves the rest for later if it must not wait. Only the end of the session
// interrupts it, since what was routed cannot be taken back. The lock is held.
func (r *reader) flush(wait bool) error {
	if r.broken {
		return nil
	}
	r.router.Take(func(b *flow.Batch) {
		lane := r.s.laneOf(kvsnap.TaskID{Stage: r.stage, Partition: b.Partition})
		b.Behind(r.ticks[lane])
		r.out[lane] = append(r.out[lane], b)
	})
	ticks, stream := r.router.TakeTicks()
	r.waiting, r.bytes, r.unsent = 0, 0, false
	for i, l := range r.s.lanes {
		r.ticks[i] = r.ticks[i].Join(ticks)
		in := laneInput{chunk: chunk{
			source: r.source, through: r.routed, batches: r.out[i], highest: r.router.HighestTime(), mark: r.at(),
			stream: max(r.quiet, stream), ticks: r.ticks[i],
		}}
		if !wait {
			select {
			case l.in <- in:
				r.out[i], r.ticks[i] = nil, nil
			default:
				r.unsent = true
			}
			continue
		}
		select {
		case l.in <- in:
			r.out[i], r.ticks[i] = nil, nil
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
		through, err := r.caughtUp(ctx)
		// After an error the server is away; the next round asks again.
		if err == nil && r.reached(through) {
			cancel(errReachedLimit)
			return
		}
	}
}

// caughtUp returns a sequence of the source such that all up to it that has to be
// read here has been.
func (r *reader) caughtUp(ctx context.Context) (uint64, error) {
	cursor := r.cursor.Load()
	if r.mirror == nil {
		return cursor.CaughtUp(ctx)
	}
	return r.mirror.caughtUp(ctx, r.s.conn, cursor)
}

// advance notes that all up to a sequence has been read though no message stands
// there. Without that, a worker whose partitions get nothing would stay where it
// is, until the source had dropped what is behind that.
func (r *reader) advance(through uint64) {
	// Whoever holds the lock is busy with messages, and gets there by itself.
	if !r.routing.TryLock() {
		return
	}
	defer r.routing.Unlock()
	r.mu.Lock()
	// With a limit it matters exactly where the reader is.
	free := r.limit == math.MaxUint64 && r.until == math.MaxInt64 && !r.ended
	if free {
		r.read = max(r.read, through)
	}
	r.mu.Unlock()
	if free && through > r.routed {
		r.routed = through
		_ = r.flush(false) // errs only when it waits
	}
}

// watchStream ends the session when the stream is not the one any more that the
// positions are of: a cursor on a new one would wait for ever, or skip what is in
// it, without a word. It also notes when there is nothing to read up to its end.
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
		if err == nil && info.Retention != "limits" {
			_, _, err := checkSource(info, 0, true)
			cancel(err)
			return
		}
		if at, _ := r.position(); err == nil && info.LastSeq > at {
			if through, err := r.caughtUp(ctx); err == nil {
				r.advance(through)
			}
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

// setLimit makes the reader stop after a sequence. It returns the position that
// the flow has in the source, and does nothing when that is beyond the limit.
func (r *reader) setLimit(limit uint64) (at uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at = max(r.read, r.ahead)
	if at > limit {
		return at, false
	}
	r.until = math.MaxInt64
	r.putLimit(limit)
	return at, true
}

// unlimit takes a limit back, between two scans.
func (r *reader) unlimit() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.limit != math.MaxUint64 {
		r.limited = make(chan struct{})
	}
	r.limit, r.until, r.ended = math.MaxUint64, math.MaxInt64, false
}

// setUntil makes the reader stop before the first message that is later than a
// time: the cut of a drain will be there.
func (r *reader) setUntil(t time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t.Before(time.Unix(0, math.MaxInt64)) {
		r.until = t.UnixNano()
	}
}

// stopAt makes the reader stop after a sequence, or where it is if that is
// behind it. Tasks may be beyond it.
func (r *reader) stopAt(limit uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.putLimit(max(limit, r.read))
}

// atLimit reports that every message up to the limit has been read.
func (r *reader) atLimit() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ended && r.read >= r.limit
}

// reach notes a position that a task has: a cut cannot be before it.
func (r *reader) reach(seq uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ahead = max(r.ahead, seq)
}

// furthest is the position that the flow has in the source, as far as this
// process knows.
func (r *reader) furthest() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(r.read, r.ahead)
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
		return 0, 0, fmt.Errorf("%w: stream %s had limits retention when the flow began to read it, and has %s retention now, which deletes messages when a consumer acks or goes away: give it limits retention again (nats stream edit %s --retention limits), or give the flow another name to start afresh",
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
