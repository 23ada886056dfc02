package worker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"natsflow/bus"
	"natsflow/flow"
)

// mirrorPrefix begins the names of the mirrors, followed by flow, source and a hash
// of what the mirror does.
const mirrorPrefix = "NATSFLOW_P_"

// mirror is a copy of a source in which the server has sorted the records by
// partition, with the sequences of the source. It may lag behind, and it is
// disposable: positions, cuts and gaps are those of the source.
type mirror struct {
	name string
	// source and its filters.
	source   string
	subjects []string
}

// checkMirrored refuses a source that a mirror would harm.
func checkMirrored(src flow.SourceInfo, info bus.StreamInfo) error {
	if len(src.PartitionBy) > 0 && info.AllowDirect {
		// The server lets mirrors of such a stream answer its direct gets, also when
		// their subjects are others.
		return fmt.Errorf("%w: stream %s allows direct gets, and the server would let the partitioned mirror answer some of them, with other subjects: nats stream edit %s --no-allow-direct, or leave out partition_by",
			ErrSource, info.Name, info.Name)
	}
	return nil
}

// openMirrors makes the mirrors that the flow needs, and deletes its former ones.
// The workers of a flow have one definition, so that nobody reads these.
func (s *session) openMirrors(ctx context.Context) error {
	s.mirrors = make([]*mirror, len(s.sources))
	var names []string
	for i, src := range s.sources {
		if len(src.PartitionBy) == 0 {
			continue
		}
		m, err := s.openMirror(ctx, src)
		if err != nil {
			return fmt.Errorf("source %s: %w", src.Stream, err)
		}
		s.mirrors[i] = m
		names = append(names, m.name)
	}
	former, err := s.conn.StreamNames(ctx, mirrorPrefix+s.flow.Name()+"_")
	if err != nil {
		s.log.Warn("former mirrors of the sources, if there are any, stay", "err", err)
		return nil
	}
	for _, name := range former {
		if slices.Contains(names, name) {
			continue
		}
		if err := s.conn.DeleteStream(ctx, name); err != nil && !errors.Is(err, bus.ErrNotFound) {
			s.log.Warn("a former mirror of a source stays", "stream", name, "err", err)
			continue
		}
		s.log.Info("deleted a former mirror of a source", "stream", name)
	}
	return nil
}

func (s *session) openMirror(ctx context.Context, src flow.SourceInfo) (*mirror, error) {
	info, err := s.conn.Stream(ctx, src.Stream)
	if err != nil {
		return nil, err
	}
	if err := checkMirrored(src, info); err != nil {
		return nil, err
	}
	transforms, err := src.Transforms(s.flow.Options().Partitions)
	if err != nil {
		return nil, err
	}
	cfg := bus.MirrorConfig{
		Origin: src.Stream, Replicas: s.cfg.Replicas, Description: "the records of " + src.Stream + " by the partitions of the natsflow flow " + s.flow.Name(),
		Metadata: map[string]string{"natsflow": "mirror", "natsflow-flow": s.flow.Name()},
	}
	for _, t := range transforms {
		cfg.Transforms = append(cfg.Transforms, bus.Transform(t))
	}
	// A mirror with other transforms, or of a former stream of the name, has another
	// name, so that it is never mistaken for this one.
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %q", info.Created.UnixNano(), transforms))
	cfg.Name = mirrorPrefix + s.flow.Name() + "_" + src.Stream + "_" + hex.EncodeToString(sum[:4])
	at, created, err := s.conn.EnsureMirror(ctx, cfg)
	if errors.Is(err, bus.ErrExists) {
		return nil, fmt.Errorf("%w: %w: delete it: nats stream rm %s", ErrSource, err, cfg.Name)
	}
	if err != nil {
		return nil, err
	}
	if created {
		s.log.Info("created the partitioned mirror of the source", "source", src.Stream, "stream", at.Name, "transforms", transforms)
	}
	return &mirror{name: cfg.Name, source: src.Stream, subjects: src.Subjects}, nil
}

// check refuses a mirror that lacks records, which the source still has, from a
// sequence on. Only somebody else can have removed them.
func (m *mirror) check(ctx context.Context, conn *bus.Conn, from uint64) error {
	// In this order: what the source has now, the mirror had then, or has still to get.
	info, err := conn.Stream(ctx, m.name)
	if errors.Is(err, bus.ErrNotFound) {
		return fmt.Errorf("%w: mirror %s of source %s: %w", errAway, m.name, m.source, err)
	}
	if err != nil {
		return fmt.Errorf("mirror %s of source %s: %w", m.name, m.source, err)
	}
	first, _, err := conn.FirstFrom(ctx, m.source, m.subjects, from)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("source %s: %w", m.source, err)
	}
	if first <= info.LastSeq && first < info.FirstSeq {
		return fmt.Errorf("%w: the mirror %s begins at sequence %d, but source %s has records from %d on that are not processed: delete the mirror, it is made anew: nats stream rm %s",
			ErrSource, m.name, info.FirstSeq, m.source, first, m.name)
	}
	return nil
}

// caughtUp returns a sequence of the source such that all up to it that the cursor
// reads from the mirror has been handled.
func (m *mirror) caughtUp(ctx context.Context, conn *bus.Conn, cursor *bus.Cursor) (uint64, error) {
	// First the end of the source, then the last record in it: when the mirror has
	// come to that, it has all up to the end. Its last sequence need not be the end:
	// the source may have deleted what was there, or never let the mirror have it.
	info, err := conn.Stream(ctx, m.source)
	if err != nil {
		return 0, err
	}
	last, err := conn.LastMatching(ctx, m.source, m.subjects)
	if err != nil {
		return 0, err
	}
	through, err := cursor.CaughtUp(ctx)
	if err != nil || through < last {
		return through, err
	}
	return max(through, info.LastSeq), nil
}

// partitionFilters are the filters of a mirror for partitions; none for all.
func partitionFilters(owned []bool) []string {
	if !slices.Contains(owned, false) {
		return nil
	}
	var filters []string
	for p, is := range owned {
		if is {
			filters = append(filters, flow.PartitionFilter(p))
		}
	}
	return filters
}

// outdated reports that the cursor has to be made anew before it is used again.
func (r *reader) outdated() bool {
	// A cursor with partitions that have been given away would go on to get all of
	// their records.
	return r.stale || r.cursor.Load() == nil || r.filtered() && !slices.Equal(r.owned, r.inCursor)
}
