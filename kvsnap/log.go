package kvsnap

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// LogStats counts what this generation has written, in bytes as stored.
type LogStats struct {
	// Commits and Bases acknowledged.
	Commits, Bases uint64
	// DeltaBytes, OutboxBytes and BaseBytes are the bodies, compressed, in
	// entries or chunks.
	DeltaBytes, OutboxBytes, BaseBytes uint64
	// EntryBytes is the size of all entries: headers and the bodies in them.
	EntryBytes uint64
}

// Log is the log of a task that this process has claimed. It is safe for
// concurrent use; appends are made one after the other.
//
// An error that leaves the outcome of a write open, or says that the task is
// another's, is sticky: every later write returns it, and the task must be
// claimed again. bus.ErrNoSpace, bus.ErrTooLarge, bus.ErrUntrusted and a context
// that ended before anything was sent are not: nothing was stored, try again.
type Log struct {
	store      *Store
	task       TaskID
	generation uint64
	// values carries what Claim's context carries, without its end: a base is
	// uploaded beyond the call that began it.
	values context.Context

	// slot is held by the one append under way. A channel, so that waiting for
	// it ends with the context.
	slot    chan struct{}
	scratch []byte // packed bodies of the append under way

	mu      sync.Mutex // guards all below; never held during I/O
	n       uint64     // last entry
	kind    string     // its kind
	head    Head       // its head
	fresh   bool       // nothing but claims yet
	seqs    []uint64   // sequences of the entries from seqFrom to n
	seqFrom uint64
	sets    uint64 // chunk sets begun
	err     error  // sticky
	base    *Base  // being written
	due     dueState
	stats   LogStats
}

// N is the number of the last entry of the log that is known to be stored.
func (l *Log) N() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n
}

// Generation of the claim that this log was opened with.
func (l *Log) Generation() uint64 { return l.generation }

// Task that the log belongs to.
func (l *Log) Task() TaskID { return l.task }

// Stats counts what was written since the claim.
func (l *Log) Stats() LogStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stats
}

// StateBytes is what the state takes in the bucket, compressed: the last base and
// the deltas since it was begun, which a restart reads.
func (l *Log) StateBytes() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.due.state + l.due.delta - l.due.deltaBase
}

// Append stores a commit and returns its number. When it returns nil the commit
// is acknowledged; it will be seen by whoever claims the task next.
//
// bus.ErrFenced: another process has claimed the task; nothing was stored; for
// good. bus.ErrNoSpace: nothing was stored; try again, with the same commit or a
// larger one. An answer that is lost is no error as long as ctx lives: the head
// of the log tells, and the entry is sent again if it is not there. If ctx ends
// first, bus.ErrUnknownOutcome is in the error, and it is sticky.
func (l *Log) Append(ctx context.Context, c Commit) (uint64, error) {
	if err := l.acquire(ctx); err != nil {
		return 0, err
	}
	defer l.leave()
	n, err := l.next(c.Published)
	if err != nil {
		return 0, err
	}
	h := l.store.newHeader(KindCommit, l.task, n, l.generation, l.confirmed(c.Head))
	h.Outputs, h.Targets = c.Outputs, c.Targets
	bodies, err := l.place(ctx, h, c.Delta, c.Outbox)
	if err == nil {
		err = l.write(ctx, h, PointCommitted, bodies...)
	}
	if err != nil {
		for _, s := range h.Sections {
			if s.Set != "" {
				l.store.dropRefused(ctx, l.task, err, s.Set)
			}
		}
		return 0, fmt.Errorf("append entry %d of task %s: %w", n, l.task, err)
	}
	return n, nil
}

// Release gives the task up: the next owner need not wait for anything. h is the
// head to leave behind. The log takes no further entries. A base that is being
// written must be finished or aborted before.
func (l *Log) Release(ctx context.Context, h Head) error {
	if err := l.acquire(ctx); err != nil {
		return err
	}
	defer l.leave()
	n, err := l.next(h.Published)
	if err != nil {
		return err
	}
	entry := l.store.newHeader(KindRelease, l.task, n, l.generation, l.confirmed(h))
	l.mu.Lock()
	if l.kind == KindClaim {
		// Nothing happened since the claim: take its place, so that a task
		// without work gets no longer a log from starts and stops.
		entry.N = l.n
		entry.Fresh = l.fresh && entry.Head.isZero()
	}
	l.mu.Unlock()
	if err := l.write(ctx, entry, PointCommitted); err != nil {
		return fmt.Errorf("release task %s: %w", l.task, err)
	}
	l.fail(ErrReleased)
	return nil
}

// acquire waits until no append is under way.
func (l *Log) acquire(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("task %s: %w", l.task, context.Cause(ctx))
	}
	select {
	case l.slot <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for an append of task %s: %w", l.task, context.Cause(ctx))
	}
}

func (l *Log) leave() { <-l.slot }

// next is the number of the next entry, or the error that forbids one.
func (l *Log) next(published uint64) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return 0, fmt.Errorf("task %s: %w", l.task, l.err)
	}
	if published > l.n {
		return 0, fmt.Errorf("task %s: published up to %d, but the last entry is %d", l.task, published, l.n)
	}
	return l.n + 1, nil
}

// confirmed is a head of the caller's as it is stored: a copy, and what was
// confirmed as published stays confirmed.
func (l *Log) confirmed(h Head) Head {
	l.mu.Lock()
	defer l.mu.Unlock()
	h = h.clone()
	h.Published = max(h.Published, l.head.Published)
	return h
}

// place decides what goes into the entry and what into chunks, writes the chunks
// and describes both in h. It returns the bodies for the entry, which are good
// until the next call.
func (l *Log) place(ctx context.Context, h *header, delta, outbox []byte) ([][]byte, error) {
	limit := l.store.cfg.ChunkSize
	raws := [2][]byte{delta, outbox}
	names := [2]string{sectionDelta, sectionOutbox}
	var encodings [2]string
	var ends [3]int // of the packed bodies in scratch
	packed := l.scratch[:0]
	for i, raw := range raws {
		if len(raw) > 0 && len(raw) <= limit {
			packed, encodings[i] = l.store.codec.appendPacked(packed, raw)
		}
		ends[i+1] = len(packed)
	}
	l.scratch = packed
	if len(packed) > limit { // each fits, but not both: the larger one goes
		i := 0
		if ends[1] < len(packed)-ends[1] {
			i = 1
		}
		encodings[i] = ""
	}
	var bodies [][]byte
	for i, raw := range raws {
		body := packed[ends[i]:ends[i+1]]
		switch {
		case len(raw) == 0:
		case encodings[i] != "":
			h.Sections = append(h.Sections, section{Name: names[i], Raw: int64(len(raw)), Stored: int64(len(body)), Encoding: encodings[i]})
			bodies = append(bodies, body)
		default:
			set := l.newSet()
			s, err := l.store.putSet(ctx, l.task, names[i], set, raw)
			if err != nil {
				h.Sections = append(h.Sections, section{Name: names[i], Set: set}) // for the caller to drop
				return nil, l.judge(err)
			}
			h.Sections = append(h.Sections, s)
		}
	}
	return bodies, nil
}

// newSet names a chunk set.
func (l *Log) newSet() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sets++
	return setName(l.n+1, l.generation, l.sets)
}

// write appends the entry h and notes that it is there. The caller holds the
// slot.
func (l *Log) write(ctx context.Context, h *header, point string, bodies ...[]byte) error {
	value, err := encodeEntry(h, bodies...)
	if err != nil {
		return err
	}
	if ctx.Err() != nil { // nothing sent yet, so this one is not sticky
		return context.Cause(ctx)
	}
	last := l.lastSeq()
	seq, err := l.store.appendEntry(ctx, l.task, h.N, l.generation, value, last)
	if err != nil {
		if !refused(err) {
			l.fail(err)
		}
		return err
	}
	l.note(h, seq, len(value))
	return l.judge(l.store.probe(ctx, point, l.task))
}

func (l *Log) lastSeq() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seqs[len(l.seqs)-1]
}

// note takes over an entry that was stored.
func (l *Log) note(h *header, seq uint64, size int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.N == l.n { // a release in the place of the claim
		l.seqs[len(l.seqs)-1] = seq
	} else {
		l.seqs = append(l.seqs, seq)
	}
	l.n, l.kind, l.head, l.fresh = h.N, h.Kind, h.Head, l.fresh && h.Fresh
	l.stats.EntryBytes += uint64(size)
	for _, s := range h.Sections {
		switch s.Name {
		case sectionDelta:
			l.stats.DeltaBytes += uint64(s.Stored)
			l.due.delta += uint64(s.Stored)
		case sectionOutbox:
			l.stats.OutboxBytes += uint64(s.Stored)
			l.due.outbox += uint64(s.Stored)
		case sectionBase:
			l.stats.BaseBytes += uint64(s.Stored)
		}
	}
	switch h.Kind {
	case KindCommit:
		l.stats.Commits++
	case KindBase:
		l.stats.Bases++
	}
}

// fail makes err sticky, unless another one is.
func (l *Log) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
	}
}

// judge makes the error of a probe sticky, since the process counts as dead, and
// passes every other on.
func (l *Log) judge(err error) error {
	var dead *stopped
	if errors.As(err, &dead) {
		l.fail(err)
	}
	return err
}
