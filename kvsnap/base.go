package kvsnap

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"natsflow/bus"
)

// errAborted is the cause of a base's end by Abort.
var errAborted = errors.New("base was aborted")

// pieceQueue is how many pieces may wait for the upload. With the ones being
// filled, compressed and sent, a base takes about ten times ChunkSize of memory,
// whatever the size of the state.
const pieceQueue = 3

// Base is an image of a task's state while it is being written. Add may be
// called from another goroutine than Finish, but not at the same time as it or
// as another Add. Abort may be called at any time. One of Finish and Abort must
// be called: the upload is a goroutine that ends with them.
type Base struct {
	log  *Log
	from uint64
	set  string
	// Where the totals were when the base was begun.
	delta, outbox uint64

	ctx    context.Context
	cancel context.CancelCauseFunc
	buf    []byte        // piece being filled; Add's and Finish's
	pieces chan []byte   // to the uploader
	free   chan []byte   // buffers back from it
	done   chan struct{} // closed when the uploader has ended
	chunks chunkSet      // the uploader's until done is closed
	closed atomic.Bool   // finished or aborted
}

// BeginBase begins a base of the entries up to N(). It must not be called while
// an append is in flight. Commits go on while it is written, see [Base.Finish]
// for what may be in it.
func (l *Log) BeginBase() *Base {
	ctx, cancel := context.WithCancelCause(l.values)
	b := &Base{
		log: l, ctx: ctx, cancel: cancel, done: make(chan struct{}),
		pieces: make(chan []byte, pieceQueue), free: make(chan []byte, pieceQueue),
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.err != nil:
		cancel(l.err)
		close(b.done)
	case l.base != nil:
		cancel(ErrBaseActive)
		close(b.done)
	default:
		l.base = b
		l.sets++
		b.from, b.set = l.n, setName(l.n+1, l.generation, l.sets)
		b.delta, b.outbox = l.due.delta, l.due.outbox
		go b.upload()
	}
	return b
}

// From is the number of the last entry that the base is certain to cover.
func (b *Base) From() uint64 { return b.from }

// Add adds one slice of the state's image, of any size; recovery gives the very
// same slices to load. The bytes are copied; compression and upload happen in
// another goroutine. Add blocks while that one is more than a few chunks behind,
// and returns at once when the base has failed, which Finish reports.
func (b *Base) Add(body []byte) {
	var length [binary.MaxVarintLen64]byte
	b.add(length[:binary.PutUvarint(length[:], uint64(len(body)))])
	b.add(body)
}

func (b *Base) add(p []byte) {
	limit := b.log.store.cfg.ChunkSize
	for len(p) > 0 && b.ctx.Err() == nil {
		n := min(len(p), limit-len(b.buf))
		b.buf = append(b.buf, p[:n]...)
		p = p[n:]
		if len(b.buf) == limit {
			b.flush()
		}
	}
}

// flush hands the piece that is being filled to the uploader.
func (b *Base) flush() {
	if len(b.buf) == 0 {
		return
	}
	select {
	case b.pieces <- b.buf:
	case <-b.ctx.Done():
	}
	select {
	case b.buf = <-b.free:
	default:
		b.buf = nil
	}
}

// upload compresses and stores pieces until there are no more, or the base
// fails.
func (b *Base) upload() {
	defer close(b.done)
	items := make([]bus.Item, 0, putBatch)
	for {
		items = items[:0]
		for more := true; more && len(items) < putBatch; {
			piece, ok := b.nextPiece(len(items) == 0)
			if more = ok; !ok {
				break
			}
			item, err := b.log.store.encodeChunk(b.log.task, b.set, &b.chunks, piece)
			if err != nil {
				b.cancel(err)
				return
			}
			items = append(items, item)
			select {
			case b.free <- piece[:0]:
			default:
			}
		}
		if len(items) == 0 {
			return
		}
		if err := b.log.store.putChunks(b.ctx, b.log.task, items); err != nil {
			b.cancel(b.log.judge(err))
			return
		}
	}
}

// nextPiece takes a piece from the queue, and waits for one if so asked.
func (b *Base) nextPiece(wait bool) ([]byte, bool) {
	if !wait {
		select {
		case piece, ok := <-b.pieces:
			return piece, ok
		default:
			return nil, false
		}
	}
	select {
	case piece, ok := <-b.pieces:
		return piece, ok
	case <-b.ctx.Done():
		return nil, false
	}
}

// Finish waits for the upload, appends the base's entry and purges what it makes
// superfluous: entries up to the lower of From and the last one whose outbox is
// confirmed as published, and their chunks. Of h only Published and Sinks are
// taken; the rest of the entry's head is that of the last entry, so that a base
// never moves a position.
//
// The slices may hold values that are newer than From, but only committed ones:
// Finish must not be called before every value that was given to Add is covered
// by an acknowledged commit. Otherwise a crash after it would leave a state that
// is ahead of its offsets.
//
// The errors are those of [Log.Append]. After an error that is not sticky the
// log is as it was, and a new base can be begun. A failed purge is no error: the
// base is good, and the next one purges more.
func (b *Base) Finish(ctx context.Context, h Head) error {
	if b.closed.Load() {
		return fmt.Errorf("base of task %s: already finished or aborted", b.log.task)
	}
	err := b.finish(ctx, h)
	b.end(err)
	if err != nil {
		return fmt.Errorf("base of task %s from entry %d: %w", b.log.task, b.from, err)
	}
	return nil
}

func (b *Base) finish(ctx context.Context, h Head) error {
	l := b.log
	if err := b.await(ctx); err != nil {
		l.store.dropRefused(ctx, l.task, err, b.set)
		return err
	}
	if err := l.acquire(ctx); err != nil {
		return err
	}
	defer l.leave()
	n, err := l.next(h.Published)
	if err != nil {
		return err
	}
	l.mu.Lock()
	head := l.head.confirm(h)
	l.mu.Unlock()
	e := l.store.newHeader(KindBase, l.task, n, l.generation, head)
	e.From, e.Floor = b.from, min(b.from, head.Published)
	e.Sections = []section{b.chunks.section(sectionBase, b.set)}
	if err := l.write(ctx, e, PointBaseWritten); err != nil {
		l.store.dropRefused(ctx, l.task, err, b.set)
		return err
	}
	logBefore, chunkBefore := l.rebase(b, e)
	l.store.purge(ctx, l.task, logBefore, chunkBefore)
	return l.judge(l.store.probe(ctx, PointPurged, l.task))
}

// await sends the last piece and waits for the uploader.
func (b *Base) await(ctx context.Context) error {
	if b.ctx.Err() == nil {
		b.flush()
	}
	close(b.pieces)
	select {
	case <-b.done:
	case <-ctx.Done():
		b.cancel(context.Cause(ctx))
		<-b.done
	}
	if b.ctx.Err() != nil {
		return context.Cause(b.ctx)
	}
	return nil
}

// Abort gives the base up and waits for its upload to end. What was written of
// it goes with the next base. After Finish it does nothing.
func (b *Base) Abort() { b.end(errAborted) }

// end stops the upload and lets the log begin another base.
func (b *Base) end(err error) {
	b.closed.Store(true)
	b.cancel(err)
	<-b.done
	b.log.mu.Lock()
	defer b.log.mu.Unlock()
	if b.log.base == b {
		b.log.base = nil
	}
}

// rebase notes that a base was stored and returns the sequences below which
// entries and chunks of the task are dead; 0 if there are none, or none known.
func (l *Log) rebase(b *Base, e *header) (logBefore, chunkBefore uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due.from, l.due.deltaBase, l.due.outboxBase = b.from, b.delta, b.outbox
	l.due.state = uint64(e.Sections[0].Stored)
	if e.Floor == 0 {
		return 0, 0
	}
	// Entry floor+1 exists: the base's own number is higher than the floor.
	if e.Floor+1 >= l.seqFrom {
		logBefore = l.seqs[e.Floor+1-l.seqFrom]
	}
	if e.Floor >= l.seqFrom {
		// Every chunk set of an entry behind the floor, of this base and of
		// the append that may be under way was begun after the floor's entry
		// was acknowledged.
		chunkBefore = l.seqs[e.Floor-l.seqFrom]
		l.seqs = append([]uint64(nil), l.seqs[e.Floor-l.seqFrom:]...)
		l.seqFrom = e.Floor
	}
	return logBefore, chunkBefore
}

// purge removes dead entries and chunks, without markers. It works by sequence:
// sent late by a process that was frozen, it still removes only what was dead
// when it was decided.
func (s *Store) purge(ctx context.Context, t TaskID, logBefore, chunkBefore uint64) {
	var errs []error
	if logBefore > 0 {
		errs = append(errs, s.bucket.Purge(ctx, t.logFilter(), logBefore))
	}
	if chunkBefore > 0 {
		errs = append(errs, s.bucket.Purge(ctx, t.chunkFilter(), chunkBefore))
	}
	if err := errors.Join(errs...); err != nil {
		s.cfg.Logger.Warn("old entries stay until the next base", "flow", s.cfg.Flow, "task", t.String(), "err", err)
	}
}
