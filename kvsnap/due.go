package kvsnap

const (
	// maxStretch is how many times MaxEntries a log may hold because a base
	// would cost more than the deltas since the last one are worth.
	maxStretch = 10
	// A base is also due when the outboxes in the log have this many bytes,
	// and outboxStretch times as many as the state: they take room until then.
	minOutbox     = 32 << 20
	outboxStretch = 4
)

// dueState is what BaseDue looks at: totals that only grow, and where they were
// when the last base was begun.
type dueState struct {
	delta, outbox uint64 // stored bytes in all entries
	deltaBase     uint64 // of those, in entries that the last base covers
	outboxBase    uint64
	from          uint64 // last entry that the last base covers
	state         uint64 // stored bytes of the last base
}

// BaseDue says that it is time to write a base: that costs the state's size in
// bytes, and what it saves is the reading and keeping of everything since the
// last one. It is due when the stored deltas since the last base have
//
//   - more bytes than the state had then, and more than MinBaseBytes;
//   - more bytes than the state had then, in more than MaxEntries entries;
//
// or when there are more than 10 times MaxEntries entries, or outboxes of more
// than 32 MiB and 4 times the state. By the first two rules a log writes at most
// three bytes per byte of delta: the delta, and a base no larger than the deltas
// before it and what these added to the state. The others bound the length of
// the log of a large state with tiny commits, and cost at most the state's size
// per 10 times MaxEntries commits, or a quarter of the outboxes.
//
// It is false while a base is being written.
func (l *Log) BaseDue() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.base != nil || l.err != nil {
		return false
	}
	d := &l.due
	entries := l.n - d.from
	limit := uint64(l.store.cfg.MaxEntries)
	delta := d.delta - d.deltaBase
	outbox := d.outbox - d.outboxBase
	switch {
	case entries > maxStretch*limit:
		return true
	case outbox > max(minOutbox, outboxStretch*d.state):
		return true
	case delta < d.state:
		return false
	}
	return delta > uint64(l.store.cfg.MinBaseBytes) || entries > limit
}

// count adds an entry that was read back, if it is behind the last base's from.
func (d *dueState) count(e *entry, from uint64) {
	if e.N <= from {
		return
	}
	if s, _, ok := e.section(sectionDelta); ok {
		d.delta += uint64(s.Stored)
	}
	if s, _, ok := e.section(sectionOutbox); ok {
		d.outbox += uint64(s.Stored)
	}
}
