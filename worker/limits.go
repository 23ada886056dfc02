package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"natsflow/bus"
)

const (
	// limitCheck is how often a worker looks at the limits of its sources.
	limitCheck = 10 * time.Second
	// lowHeadroom is the headroom below which it warns; the warning ends at
	// enoughHeadroom, so that it does not come and go at the border.
	lowHeadroom, enoughHeadroom = 0.2, 0.3
)

// unprocessed is the first message of a source that is not processed; the zero
// value is none.
type unprocessed struct {
	seq uint64
	// at is its timestamp; only needed for a stream with a maximal age.
	at time.Time
}

// headroom is how far a source is from dropping the first message that is not
// processed, by the limit that is the nearest.
type headroom struct {
	// ratio is 1 with all room left, or no limit, and 0 at the limit: the room
	// left, as a part of the limit.
	ratio float64
	// limit is MaxMsgs, MaxBytes or MaxAge; empty if nothing is to be dropped.
	limit string
	// messages is how many more can come before, with MaxMsgs and MaxBytes. For
	// MaxBytes it is an estimate, by the mean size of those in the stream.
	messages uint64
	// left is the time until then, with MaxAge.
	left time.Duration
}

// headroomOf computes it. What is not processed counts from the first such message
// through the last of the stream, with what belongs to other flows, and with what
// was deleted in between unless the stream has fewer messages in all: the room is
// never less than that.
func headroomOf(info bus.StreamInfo, first unprocessed) headroom {
	room := headroom{ratio: 1}
	if first.seq == 0 || first.seq > info.LastSeq || info.Msgs == 0 {
		return room
	}
	waiting := float64(min(info.LastSeq-first.seq+1, info.Msgs))
	nearer := func(limit string, left, most float64) bool {
		ratio := min(max(left/most, 0), 1)
		if ratio >= room.ratio {
			return false
		}
		room = headroom{ratio: ratio, limit: limit}
		return true
	}
	if most := float64(info.MaxMsgs); most > 0 && !info.DiscardNew {
		left := most - waiting
		if nearer("MaxMsgs", left, most) {
			room.messages = uint64(max(left, 0))
		}
	}
	if most := float64(info.MaxBytes); most > 0 && !info.DiscardNew {
		mean := max(float64(info.Bytes)/float64(info.Msgs), 1)
		left := most - waiting*mean
		if nearer("MaxBytes", left, most) {
			room.messages = uint64(max(left, 0) / mean)
		}
	}
	// Too old is too old, whatever is to be discarded at the other limits.
	if most := info.MaxAge; most > 0 {
		left := most - info.AsOf.Sub(first.at)
		if nearer("MaxAge", float64(left), float64(most)) {
			room.left = max(left, 0)
		}
	}
	return room
}

// describe says what will happen to a stream.
func (h headroom) describe(stream string) string {
	when := fmt.Sprintf("after %d more", h.messages)
	if h.limit == "MaxAge" {
		when = fmt.Sprintf("in %v", h.left.Round(time.Second))
	}
	return fmt.Sprintf("stream %s drops messages that are not processed %s (%s)", stream, when, h.limit)
}

// watchLimits warns while a source is about to drop messages that this worker has
// not processed.
func (s *session) watchLimits(ctx context.Context) {
	t := time.NewTicker(limitCheck)
	defer t.Stop()
	defer func() {
		for _, r := range s.readers[:len(s.sources)] {
			s.metrics.headroom.DeleteLabelValues(r.stream)
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		for i, in := range s.intakes {
			s.checkLimits(ctx, i)
			if in != nil {
				s.checkIntake(ctx, in)
			}
		}
	}
}

// checkLimits looks at one source.
func (s *session) checkLimits(ctx context.Context, source int) {
	src := s.sources[source]
	if src.Bucket != "" {
		return // what a bucket drops is replaced or too old, and not missed
	}
	committed, ok := s.committed(source)
	if !ok {
		// It has no tasks now; who has them looks.
		s.metrics.headroom.DeleteLabelValues(src.Stream)
		s.setWarning(src.Stream, "")
		return
	}
	room, err := s.lookAtLimits(ctx, src.Stream, src.Subjects, committed)
	if err != nil {
		s.log.Debug("the limits of a source were not looked at", "stream", src.Stream, "err", err)
		return
	}
	s.metrics.headroom.WithLabelValues(src.Stream).Set(room.ratio)
	warned := s.warning(src.Stream) != ""
	switch {
	case room.ratio < lowHeadroom && !warned:
		args := []any{"stream", src.Stream, "limit", room.limit, "headroom", fmt.Sprintf("%.0f%%", 100*room.ratio), "committed", committed}
		if room.limit == "MaxAge" {
			args = append(args, "left", room.left.Round(time.Second))
		} else {
			args = append(args, "left", room.messages)
		}
		s.log.Warn("a source is about to drop messages that are not processed", args...)
	case room.ratio >= enoughHeadroom && warned:
		s.log.Info("the source has room again", "stream", src.Stream, "headroom", fmt.Sprintf("%.0f%%", 100*room.ratio), "committed", committed)
		s.setWarning(src.Stream, "")
		return
	case !warned:
		return
	}
	s.setWarning(src.Stream, room.describe(src.Stream))
}

// lookAtLimits asks for the stream, and for the first message that is not processed
// only where its place cannot be known without: among messages of other subjects,
// or when its age counts.
func (s *session) lookAtLimits(ctx context.Context, stream string, subjects []string, committed uint64) (headroom, error) {
	info, err := s.conn.Stream(ctx, stream)
	if err != nil {
		return headroom{}, err
	}
	if info.LastSeq <= committed || info.MaxMsgs <= 0 && info.MaxBytes <= 0 && info.MaxAge <= 0 {
		return headroom{ratio: 1}, nil
	}
	first := unprocessed{seq: max(committed+1, info.FirstSeq)}
	if info.MaxAge > 0 || len(subjects) > 0 {
		first.seq, first.at, err = s.conn.FirstFrom(ctx, stream, subjects, committed+1)
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return headroom{}, err
		}
	}
	return headroomOf(info, first), nil
}

func (s *session) setWarning(source, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text == "" {
		delete(s.warnings, source)
		return
	}
	s.warnings[source] = text
}

func (s *session) warning(source string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.warnings[source]
}

// warned returns the warnings, by source.
func (s *session) warned() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for _, source := range slices.Sorted(maps.Keys(s.warnings)) {
		all = append(all, s.warnings[source])
	}
	return all
}
