package kvsnap

import (
	"context"
	"errors"
	"fmt"

	"natsflow/bus"
)

// Claim takes the task over and reads its snapshot. It appends a claim with the
// next generation, which fences the former owner, and then reads the log up to
// it: nothing can be committed after what it reads. load is called with the
// slices of the last base, in the order in which they were added, and then with
// the deltas after it, ascending. It may keep a body, but small ones share a
// buffer of up to ChunkSize. An error of load ends the claim and is returned.
//
// Two claims at the same time: one fences the other, which gets bus.ErrFenced
// here or at its first append.
//
// A *CorruptError (errors.Is ErrSnapshotCorrupt) says which key cannot be read.
// Nothing was purged or overwritten then, save that a claim takes the place of a
// claim or release at the end of the log, which has no body: claims that fail
// again and again do not make the log longer. If the last entry itself is
// damaged, nothing at all is written. load may have been called before the
// damage was found; what it made of the bodies is of no use.
//
// bus.ErrNoSpace: the bucket has no room for the claim; nothing has changed.
func (s *Store) Claim(ctx context.Context, t TaskID, load func(body []byte) error) (*Log, Recovered, error) {
	fail := func(err error) (*Log, Recovered, error) {
		return nil, Recovered{}, fmt.Errorf("claim task %s: %w", t, err)
	}
	if err := errors.Join(s.err, t.validate()); err != nil {
		return fail(err)
	}
	own, err := s.appendClaim(ctx, t)
	if err != nil {
		return fail(err)
	}
	if err := s.probe(ctx, PointCommitted, t); err != nil {
		return fail(err)
	}
	r := &recovery{store: s, task: t, own: own, load: load}
	if err := r.run(ctx); err != nil {
		return fail(err)
	}
	return s.open(ctx, r), r.result(), nil
}

// appendClaim appends a claim behind the head, whatever that is by then.
func (s *Store) appendClaim(ctx context.Context, t TaskID) (*entry, error) {
	for try := 0; ; try++ {
		own, err := s.tryClaim(ctx, t)
		if err == nil {
			return own, nil
		}
		// Fenced: somebody appended between the look and the claim.
		if !errors.Is(err, bus.ErrFenced) && !passing(err) {
			return nil, err
		}
		s.noteWait(try, t, t.logFilter(), err)
		if stop := pause(ctx, try); stop != nil {
			return nil, fmt.Errorf("%w (last: %w)", stop, err)
		}
	}
}

func (s *Store) tryClaim(ctx context.Context, t TaskID) (*entry, error) {
	h := s.newHeader(KindClaim, t, 1, 1, Head{})
	h.Nonce, h.Fresh = newNonce(), true
	var last uint64
	item, err := s.bucket.Last(ctx, t.logFilter())
	switch {
	case errors.Is(err, bus.ErrNotFound) && !bucketGone(err):
	case err != nil:
		return nil, fmt.Errorf("read head: %w", err)
	default:
		head, err := s.decodeItem(item)
		if err != nil {
			return nil, err
		}
		last = head.seq
		h.N, h.Generation, h.Head, h.Fresh = head.N+1, head.Generation+1, head.Head, head.Fresh
		if head.Kind == KindClaim || head.Kind == KindRelease {
			h.N = head.N // has no body, and its head goes on in ours
		}
	}
	value, err := encodeEntry(h)
	if err != nil {
		return nil, err
	}
	// Generation 0: an entry of somebody else with the number of our
	// generation is a lost race.
	seq, err := s.appendEntry(ctx, t, h.N, 0, value, last)
	if err != nil {
		return nil, err
	}
	return &entry{header: *h, task: t, seq: seq}, nil
}

// open makes the log of a finished recovery.
func (s *Store) open(ctx context.Context, r *recovery) *Log {
	l := &Log{
		store: s, task: r.task, generation: r.own.Generation, values: context.WithoutCancel(ctx),
		slot: make(chan struct{}, 1),
		n:    r.own.N, kind: KindClaim, head: r.own.Head, fresh: r.own.Fresh, seqFrom: r.entries[0].N,
	}
	for _, e := range r.entries {
		l.seqs = append(l.seqs, e.seq)
		l.due.count(e, r.from())
	}
	if r.base != nil {
		l.due.from, l.due.state = r.base.From, uint64(r.base.Sections[0].Stored)
	}
	return l
}
