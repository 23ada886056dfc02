package kvsnap

import (
	"context"
	"errors"
	"fmt"

	"natsflow/bus"
)

const (
	// Bodies in chunks are read for several entries at once: at most this many
	// sets or bytes, unless one body alone is larger.
	maxBatchSets  = 32
	maxBatchBytes = 32 << 20
)

// errOvertaken: the own claim was not where it was written, so somebody else has
// claimed the task since. A successor's claim takes the place of one that has
// appended nothing yet, before the successor can purge anything. So a read that
// misses what was purged under it misses the own claim, too, and is not taken for
// damage.
var errOvertaken = fmt.Errorf("the claim was replaced by another one: %w", bus.ErrFenced)

// recovery reads a task's log up to the claim own.
type recovery struct {
	store *Store
	task  TaskID
	own   *entry
	load  func([]byte) error

	entries []*entry // first every entry, then those behind the floor
	base    *entry   // the last one, nil if none
	// How many of entries were told to forget their delta and their outbox.
	loaded, published int

	pending []Pending
	bytes   int64
}

func (r *recovery) run(ctx context.Context) error {
	if err := r.scan(ctx); err != nil {
		return err
	}
	if err := r.check(); err != nil {
		return err
	}
	if err := r.loadBase(ctx); err != nil {
		return err
	}
	return r.loadEntries(ctx)
}

func (r *recovery) result() Recovered {
	return Recovered{
		Fresh: r.own.Fresh, Generation: r.own.Generation, Head: r.own.Head.clone(),
		Unpublished: r.pending, StateBytes: r.bytes, Entries: len(r.entries),
	}
}

func (r *recovery) floor() uint64 {
	if r.base == nil {
		return 0
	}
	return r.base.Floor
}

// from is the last entry whose delta the base covers.
func (r *recovery) from() uint64 {
	if r.base == nil {
		return 0
	}
	return r.base.From
}

// damaged stands for an entry that cannot be decoded, until it is known whether
// it is behind the floor.
type damaged struct {
	n   uint64
	err error
}

// scan reads all entries. Those at or before the floor of the last base may be
// there in part, when a purge did not happen or is happening; they do not count,
// not even damaged.
func (r *recovery) scan(ctx context.Context) error {
	var bad []damaged
	seen := false
	err := r.store.bucket.Read(ctx, []string{r.task.logFilter()}, 0, r.own.seq, func(item bus.Item) error {
		_, n, ok := parseEntryKey(item.Key)
		if !ok {
			return corrupt(item.Key, "not the key of a log entry")
		}
		e, err := r.store.decodeItem(item)
		if err != nil {
			bad = append(bad, damaged{n, err})
			return nil //nolint:nilerr // judged when the whole log has been read
		}
		seen = seen || (e.seq == r.own.seq && e.Nonce == r.own.Nonce)
		r.take(e)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read log: %w", err)
	}
	for _, d := range bad {
		if d.n > r.floor() {
			return d.err
		}
	}
	if !seen {
		return errOvertaken
	}
	return nil
}

// take adds an entry and lets go of the bodies that it makes superfluous.
func (r *recovery) take(e *entry) {
	if e.Kind == KindBase {
		r.base = e
	}
	for ; r.loaded < len(r.entries) && r.entries[r.loaded].N <= r.from(); r.loaded++ {
		r.entries[r.loaded].forget(sectionDelta)
	}
	for ; r.published < len(r.entries) && r.entries[r.published].N <= e.Head.Published; r.published++ {
		r.entries[r.published].forget(sectionOutbox)
	}
	r.entries = append(r.entries, e)
}

// check sees that the entries behind the floor are all there.
func (r *recovery) check() error {
	next := r.floor() + 1
	kept := r.entries[:0]
	var before *entry
	for _, e := range r.entries {
		if e.N <= r.floor() {
			continue
		}
		key := r.task.entryKey(e.N)
		switch {
		case e.N > next:
			return corrupt(r.task.entryKey(next), "entry is missing, the next one is %d", e.N)
		case e.N < next:
			return corrupt(key, "entry is stored behind entry %d", next-1)
		case before != nil && e.Generation < before.Generation:
			return corrupt(key, "generation %d follows generation %d", e.Generation, before.Generation)
		}
		before = e
		next++
		kept = append(kept, e)
	}
	clear(r.entries[len(kept):])
	r.entries = kept
	if before == nil || before.N != r.own.N {
		return corrupt(r.task.entryKey(r.own.N), "the claim is not the last entry")
	}
	return nil
}

// loadBase gives the slices of the base to load.
func (r *recovery) loadBase(ctx context.Context) error {
	if r.base == nil || r.base.Sections[0].Set == "" {
		return nil
	}
	s := r.base.Sections[0]
	key := r.task.entryKey(r.base.N)
	split := splitter{key: key, limit: s.Raw, emit: r.emit}
	c := newSetReader(r, s, split.feed)
	if err := r.readSets(ctx, map[string]*setReader{s.Set: c}); err != nil {
		return err
	}
	if !split.empty() {
		return corrupt(key, "base ends within a body")
	}
	return nil
}

// emit gives a body to the caller.
func (r *recovery) emit(body []byte) error {
	r.bytes += int64(len(body))
	if r.load == nil {
		return nil
	}
	if err := r.load(body); err != nil {
		return fmt.Errorf("load state: %w", err)
	}
	return nil
}

// job is a body of an entry that is needed.
type job struct {
	entry  *entry
	sec    section
	inline []byte
	chunks *setReader // nil for an inline body
	body   []byte     // from chunks
}

// loadEntries loads the deltas behind the base and collects the outboxes that
// are not confirmed as published, ascending.
func (r *recovery) loadEntries(ctx context.Context) error {
	var jobs []*job
	var size int64
	sets := map[string]*setReader{}
	flush := func() error {
		if err := r.readSets(ctx, sets); err != nil {
			return err
		}
		for _, j := range jobs {
			if err := r.finishJob(j); err != nil {
				return err
			}
		}
		jobs, size = nil, 0
		clear(sets)
		return nil
	}
	for _, e := range r.entries {
		for i, s := range e.Sections {
			delta := s.Name == sectionDelta && e.N > r.from()
			outbox := s.Name == sectionOutbox && e.N > r.own.Head.Published
			if !delta && !outbox {
				continue
			}
			if s.Set != "" && (len(sets) == maxBatchSets || size+s.Raw > maxBatchBytes) {
				if err := flush(); err != nil {
					return err
				}
			}
			j := &job{entry: e, sec: s, inline: e.bodies[i]}
			if s.Set != "" {
				j.chunks = newSetReader(r, s, func(raw []byte) error {
					j.body = append(j.body, raw...)
					return nil
				})
				sets[s.Set] = j.chunks
				size += s.Raw
			}
			jobs = append(jobs, j)
		}
	}
	return flush()
}

// finishJob gives a body that is read to where it belongs.
func (r *recovery) finishJob(j *job) error {
	body := j.body
	if j.chunks == nil {
		raw, err := r.store.codec.unpack(j.inline, j.sec.Encoding, j.sec.Raw)
		if err != nil {
			return corrupt(r.task.entryKey(j.entry.N), "%s: %v", j.sec.Name, err)
		}
		body = raw
	}
	if j.sec.Name == sectionDelta {
		return r.emit(body)
	}
	r.pending = append(r.pending, Pending{N: j.entry.N, Outbox: body, Targets: j.entry.Targets, Sinks: j.entry.Head.Sinks})
	return nil
}

// readSets reads chunk sets to their ends. The filter has the own claim as well,
// so that the read has an end that is known to exist.
func (r *recovery) readSets(ctx context.Context, sets map[string]*setReader) error {
	if len(sets) == 0 {
		return nil
	}
	claim := r.task.entryKey(r.own.N)
	filters := []string{claim}
	for set := range sets {
		filters = append(filters, r.task.setFilter(set))
	}
	seen := false
	err := r.store.bucket.Read(ctx, filters, 0, r.own.seq, func(item bus.Item) error {
		if item.Key == claim {
			seen = seen || item.Seq == r.own.seq
			return nil
		}
		_, set, i, ok := parseChunkKey(item.Key)
		if !ok || sets[set] == nil || item.Deleted {
			return corrupt(item.Key, "not a chunk that was written, or deleted")
		}
		return sets[set].take(i, item)
	})
	if err != nil {
		return fmt.Errorf("read chunks: %w", err)
	}
	if !seen {
		return errOvertaken
	}
	var errs []error
	for _, s := range sets {
		errs = append(errs, s.end())
	}
	return errors.Join(errs...)
}
