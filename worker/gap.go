package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"natsflow/bus"
)

// gapCost bounds the time that a reader spends on asking about jumps: after a
// question it reads for so many times as long before the next one about a jump of
// the usual size.
const gapCost = 20

// gaps notices that a source has dropped messages which the flow had not read yet,
// while it runs.
//
// What a reader sees is a jump: after sequence p comes s > p+1. Most jumps are
// nothing: messages in between that the filter leaves out, or that were deleted.
// Messages were dropped unread only if the stream began behind p+1 when the server
// went on to s. That moment has passed when s is handled here, since messages are
// sent ahead, and the first sequence F that is asked for now may have moved on in
// between by the normal expiry of what the reader has long got. So:
//
//   - F <= p+1: everything behind p was kept until now. No gap.
//   - The reader takes every subject, and F >= s: a message between p and s was
//     there for the reader if it was there at all, and now they are gone from the
//     front on. A gap, unless each of them had been deleted one by one and the
//     limits then reached the reader's very position; the start would refuse that
//     just the same. (F between p and s is not possible here: message F exists and
//     would have been read.)
//   - There is a filter, and F > s: the limits have overtaken the reader. Whether
//     one of the missing messages was for it, nobody can tell. It is taken for a
//     gap, as at the start.
//   - There is a filter, and F <= s: this is what a quiet subject in a busy stream
//     looks like all the time, and so no gap.
//
// A stream that keeps a number of messages for each subject and has no other limit
// drops a message only because there is a newer one of its subject. That is what
// such a stream is for, and never a gap. Nor is it one if a bucket, as a source,
// drops values by its other limits.
type gaps struct {
	stream string
	// whole: the reader takes all messages. compacts: see above.
	whole, compacts bool
	accept          bool
	// first asks for the first sequence of the stream, and waits while the server
	// is away. ok is false when the stream is gone, which is for others to say.
	first func(ctx context.Context) (seq uint64, ok bool, err error)
	warn  func(missing, from uint64)

	// last is the last sequence that was passed, or what stands before the first
	// one; 0 when nothing has been read ever.
	last uint64
	// usual is the size of the jumps that turned out to be nothing: a gap is larger
	// as a rule, and is asked about at once.
	usual uint64
	next  time.Time
}

// newGaps watches a reader that begins at from. What is gone by now was dealt with
// at the start.
func newGaps(s *session, subjects []string, info bus.StreamInfo, from uint64) *gaps {
	g := &gaps{
		stream: info.Name, accept: s.cfg.AcceptGap,
		whole:    !info.Mirror && info.ReadsAll(subjects),
		compacts: info.MaxMsgsPerSubject > 0 && info.MaxMsgs <= 0 && info.MaxBytes <= 0 && info.MaxAge == 0,
		last:     from - 1,
	}
	if g.last > 0 && info.FirstSeq > from {
		g.last = info.FirstSeq - 1
	}
	g.first = func(ctx context.Context) (uint64, bool, error) { return s.firstSeq(ctx, info.Name) }
	g.warn = func(missing, from uint64) {
		s.log.Warn("the source has dropped messages that the flow had not read; going on without them", "source", g.stream, "missing", missing, "from", from)
	}
	return g
}

// pass is called with the sequence of each message, before it is taken, and returns
// [ErrGap] if messages before it may be gone.
func (g *gaps) pass(ctx context.Context, seq uint64) error {
	last := g.last
	g.last = max(seq, last)
	if seq <= last+1 || last == 0 || g.compacts {
		return nil
	}
	jump := seq - last - 1
	began := time.Now()
	if jump <= g.usual && began.Before(g.next) {
		return nil
	}
	first, ok, err := g.first(ctx)
	if err != nil {
		g.last = last // it comes again
		return err
	}
	if !ok {
		return nil
	}
	now := time.Now()
	g.next = now.Add(gapCost * now.Sub(began))
	if first <= last+1 || first < seq || first == seq && !g.whole {
		// The size fades, so that one large jump does not hide others for ever.
		g.usual = max(jump, g.usual-g.usual/8)
		return nil
	}
	if g.accept {
		g.warn(jump, seq)
		return nil
	}
	return fmt.Errorf("%w: stream %s has dropped messages before the flow could read them: it begins at sequence %d, the flow has read it up to %d: up to %d messages are missing; start with --accept-gap to go on without them, and give the stream larger limits",
		ErrGap, g.stream, first, last, jump)
}

// firstSeq asks for the first sequence of a stream until there is an answer: to go
// on without one could skip a gap for good.
func (s *session) firstSeq(ctx context.Context, stream string) (seq uint64, ok bool, err error) {
	wait := newPatience(s, "look for a gap in source "+stream)
	for {
		info, err := s.conn.Stream(ctx, stream)
		switch {
		case err == nil:
			wait.over()
			return info.FirstSeq, true, nil
		case errors.Is(err, bus.ErrNotFound):
			return 0, false, nil
		case !bus.Retryable(err):
			return 0, false, err
		}
		if err := wait.next(ctx, err); err != nil {
			return 0, false, err
		}
	}
}

// checkGap looks for a gap before a message. With one, the reader ends where it is,
// and the session with what was read until then committed: that is not in the
// stream any more either, so that nobody could read it again.
func (r *reader) checkGap(ctx context.Context, seq uint64) error {
	if r.stage > 0 {
		return nil // it has no limits, and is trimmed behind its readers
	}
	before := r.gaps.last
	err := r.gaps.pass(ctx, seq)
	if !errors.Is(err, ErrGap) {
		return err
	}
	if err := r.s.overtaken(ctx, r.source, before); err != nil {
		return err
	}
	if !r.haltAt(before) {
		return nil // beyond the limit of the reader, and so of no interest
	}
	r.s.halt(err)
	return errReachedLimit
}

// haltAt makes the reader stop for good after a sequence that it has read, unless
// its limit is not behind that.
func (r *reader) haltAt(seq uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended || r.limit <= seq {
		return false
	}
	r.putLimit(r.read)
	r.ended = true
	return true
}

// halting ends a session from within, in order.
type halting struct{ haltErr error }

// halt makes the session stop reading, commit what was read and end with err. Only
// the first call counts.
func (s *session) halt(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.haltErr == nil {
		s.haltErr = err
		s.wake()
	}
}

// halted returns why the session is to end, nil if it is not.
func (s *session) halted() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.haltErr
}
