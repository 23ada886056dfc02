package kvsnap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"natsflow/bus"
)

const (
	firstPause = 10 * time.Millisecond
	longPause  = time.Second
	noteAfter  = 7 // tries, about a second
	// putBatch is the number of chunks that are encoded and on their way at a
	// time, so that a set of any size takes bounded memory.
	putBatch = 4
)

// pause waits before attempt number try (from 0) is repeated: longer each time,
// up to a second, with jitter so that many tasks do not come back together.
func pause(ctx context.Context, try int) error {
	d := min(firstPause<<min(try, 16), longPause)
	timer := time.NewTimer(d/2 + rand.N(d/2+1))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}

// passing tells the errors after which it makes sense to look or try again.
func passing(err error) bool {
	if refused(err) || errors.Is(err, bus.ErrClosed) || bucketGone(err) {
		return false
	}
	return errors.Is(err, bus.ErrUnknownOutcome) || errors.Is(err, bus.ErrConflict)
}

// codeStreamNotFound is the server's code for a stream, and so a bucket, that is
// not there. bus.ErrNotFound says the same of a key, which is no reason to stop.
const codeStreamNotFound = 10059

func bucketGone(err error) bool {
	var api *bus.APIError
	return errors.As(err, &api) && api.ErrorCode == codeStreamNotFound
}

// noteWait says, once per write, that it takes long, so that nobody waits in
// silence.
func (s *Store) noteWait(try int, t TaskID, key string, err error) {
	if try == noteAfter {
		s.cfg.Logger.Warn("snapshot store does not answer, trying on", "flow", s.cfg.Flow, "task", t.String(), "key", key, "err", err)
	}
}

// refused tells the errors that say for sure that this write was not made and
// that a later one may be.
func refused(err error) bool {
	return errors.Is(err, bus.ErrNoSpace) || errors.Is(err, bus.ErrTooLarge) || errors.Is(err, bus.ErrUntrusted)
}

// unsettled is a refusal after an attempt that was never answered. That one may
// still be stored, so what its entry refers to must stay.
type unsettled struct{ err error }

func (e *unsettled) Error() string { return e.err.Error() + " (an earlier attempt was not answered)" }
func (e *unsettled) Unwrap() error { return e.err }

// unknown makes the error for a write that may have been made.
func unknown(err error) error {
	if errors.Is(err, bus.ErrUnknownOutcome) {
		return err
	}
	return fmt.Errorf("%w: %w", bus.ErrUnknownOutcome, err)
}

// appendEntry appends value as entry n, behind the entry with the sequence last
// (0: the log is empty), and sees to it that the outcome is known: whatever the
// answer, the head of the log says whether these very bytes are there, and they
// are sent again if nothing is. The same bytes with the same expectation can be
// stored only once.
//
// The errors: bus.ErrFenced (someone else's entry is there), refused ones
// (nothing is stored), *CorruptError (the head cannot be read), *stopped, and
// bus.ErrUnknownOutcome for all others.
func (s *Store) appendEntry(ctx context.Context, t TaskID, n, generation uint64, value []byte, last uint64) (uint64, error) {
	key, filter := t.entryKey(n), t.logFilter()
	unanswered := false
	for try := 0; ; try++ {
		seq, err := s.bucket.Append(ctx, key, value, filter, last)
		if err := s.probe(ctx, PointEntryUnacked, t); err != nil {
			return 0, err
		}
		switch {
		case err == nil:
			return seq, nil
		case refused(err) && unanswered:
			return 0, &unsettled{err}
		case refused(err):
			return 0, err
		case !passing(err) && !errors.Is(err, bus.ErrFenced):
			return 0, unknown(err)
		}
		s.noteWait(try, t, key, err)
		unanswered = unanswered || errors.Is(err, bus.ErrUnknownOutcome)
		// Fenced, too, is worth a look: the entry of the other writer may be
		// our own, stored by a first attempt whose answer was lost.
		seq, there, err := s.look(ctx, t, generation, value, last)
		if err != nil || there {
			return seq, err
		}
		if err := pause(ctx, try); err != nil {
			return 0, unknown(err)
		}
	}
}

// look reads the head of a log to find out whether value was stored behind last.
// Not there and no error means that the head is still the entry at last.
func (s *Store) look(ctx context.Context, t TaskID, generation uint64, value []byte, last uint64) (seq uint64, there bool, err error) {
	for try := 0; ; try++ {
		head, err := s.bucket.Last(ctx, t.logFilter())
		switch {
		case err == nil && bytes.Equal(head.Value, value) && !head.Deleted:
			return head.Seq, true, nil
		case bucketGone(err):
			return 0, false, fmt.Errorf("bucket of task %s has vanished: %w", t, err)
		case err == nil && head.Seq == last, errors.Is(err, bus.ErrNotFound) && last == 0:
			return 0, false, nil
		case err == nil && head.Seq > last:
			return 0, false, s.other(head, generation)
		case errors.Is(err, bus.ErrNotFound):
			return 0, false, fmt.Errorf("log of task %s has vanished: %w", t, err)
		case err != nil && !passing(err):
			return 0, false, unknown(err)
		}
		// No answer, or one that is older than what we know: from a server
		// that does not know yet that it leads no more.
		s.noteWait(try, t, t.logFilter(), err)
		if err := pause(ctx, try); err != nil {
			return 0, false, unknown(err)
		}
	}
}

// other says what it means that head is where our own entry was to go.
func (s *Store) other(head bus.Item, generation uint64) error {
	e, err := s.decodeItem(head)
	if err != nil {
		return err
	}
	if e.Kind != KindClaim && e.Generation == generation {
		// An attempt of ours that was given up (bucket full, then changed by
		// the caller) has arrived late. It is committed, and it is not what
		// the caller has in memory.
		return fmt.Errorf("an earlier attempt at entry %d was stored late: %w", e.N, bus.ErrUnknownOutcome)
	}
	return fmt.Errorf("entry %d of generation %d by %q: %w", e.N, e.Generation, e.Owner, bus.ErrFenced)
}

// decodeItem decodes an entry as it was read.
func (s *Store) decodeItem(item bus.Item) (*entry, error) {
	if item.Deleted {
		return nil, corrupt(item.Key, "entry was deleted")
	}
	e, err := decodeEntry(s.cfg.Flow, item.Key, item.Value)
	if err != nil {
		return nil, err
	}
	e.seq = item.Seq
	return e, nil
}

// putChunks stores chunks and returns when all are acknowledged. Storing one
// twice does no harm: the set has one writer and its bytes do not change.
func (s *Store) putChunks(ctx context.Context, t TaskID, items []bus.Item) error {
	for try := 0; ; try++ {
		err := s.bucket.PutMany(ctx, items)
		if err == nil {
			return s.probe(ctx, PointChunkWritten, t)
		}
		if !passing(err) {
			return err
		}
		s.noteWait(try, t, items[0].Key, err)
		if stop := pause(ctx, try); stop != nil {
			return fmt.Errorf("%w (last: %w)", stop, err)
		}
	}
}

// putSet writes one body as a chunk set.
func (s *Store) putSet(ctx context.Context, t TaskID, name, set string, body []byte) (section, error) {
	var c chunkSet
	items := make([]bus.Item, 0, putBatch)
	for len(body) > 0 {
		items = items[:0]
		for len(body) > 0 && len(items) < putBatch {
			piece := body[:min(len(body), s.cfg.ChunkSize)]
			body = body[len(piece):]
			item, err := s.encodeChunk(t, set, &c, piece)
			if err != nil {
				return section{}, err
			}
			items = append(items, item)
		}
		if err := s.putChunks(ctx, t, items); err != nil {
			return section{}, fmt.Errorf("write chunks of %s: %w", name, err)
		}
	}
	return c.section(name, set), nil
}

// dropRefused removes the chunks of a set after its write, or that of the entry
// that was to refer to it, was refused for want of space: a full bucket must not
// be kept full by attempts to write to it. Nothing depends on it: the next base
// removes them, too.
func (s *Store) dropRefused(ctx context.Context, t TaskID, cause error, set string) {
	var open *unsettled
	if !errors.Is(cause, bus.ErrNoSpace) || errors.As(cause, &open) {
		return
	}
	if err := s.bucket.Purge(ctx, t.setFilter(set), 0); err != nil {
		s.cfg.Logger.Debug("chunks of a failed write stay until the next base", "flow", s.cfg.Flow, "task", t.String(), "set", set, "err", err)
	}
}
