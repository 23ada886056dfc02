// Package kvsnap is the snapshot store: it keeps the state, the positions and
// the unpublished results of the tasks of one flow in one KV bucket, so that a
// task can be stopped or killed at any instant and opened again, here or
// elsewhere, exactly as it was at its last commit. The bytes of states, deltas
// and outboxes are opaque to it.
//
// # What is in the bucket
//
// Each task has a log of numbered entries:
//
//	log.<stage>.<partition>.<n>              entry n
//	chunk.<stage>.<partition>.<set>.<i>      bodies that do not fit an entry
//
// An entry is one line of JSON, readable with `nats kv get`, a newline, and the
// bodies. There are four kinds:
//
//	claim    a new owner took the task over; its generation is one higher
//	commit   delta of the state, positions and outbox of one step forward
//	base     the whole state, so that older entries can go
//	release  the owner gave the task up
//
// Every entry repeats the [Head]: offsets, watermarks, totals, how far publishing
// is confirmed. The last entry alone tells all but the state.
//
// Every entry and chunk carries a checksum over all its other bytes, the flow,
// the task and its own number. Whatever does not fit ends in a [CorruptError]
// that names the key: the task does not start, and nothing is overwritten.
//
// # Who is authoritative
//
// The log is. An entry is appended by compare-and-set on the last entry of the
// task's log, so only the process that made the last claim can append, however
// late another one wakes up: it gets bus.ErrFenced, for good. Leases and
// assignments only say who should try.
//
// A claim that follows a claim or a release takes that entry's number and so
// replaces it: such an entry has no body and its head is carried over, so
// nothing is lost, and a process that fails in a loop while opening a task does
// not make the log longer.
//
// # Chunks
//
// A chunk set is written, and all its acknowledgements awaited, before the entry
// that refers to it is appended: an entry never refers to what is not there. Set
// names are unique (next entry number, generation, a counter of the generation),
// so that neither a crashed attempt nor a late former owner can write over the
// chunks of a living entry.
//
// # Bases, and why they are fuzzy
//
// A base is written while commits go on. It says From: the entry that was last
// when it was begun. Its slices may already hold values of later entries.
// Recovery loads the base and then all deltas after From. Deltas hold absolute
// values, so loading one that the base has seen already changes nothing.
//
// After a base, entries up to its floor are purged: the lower of From and the
// last entry whose results are confirmed as published. Chunk sets are begun
// after the entry before them was acknowledged, so the chunks of every entry
// behind the floor have higher sequences than the floor's own entry, and all
// chunks below that sequence are dead: those of older entries, of older bases
// and of attempts that crashed. A purge works by sequence, so one that a frozen
// process sends late removes only what was dead when it was decided.
//
// # What each failure does
//
//	crash before the entry is stored     the commit never happened; its chunks are purged later
//	crash after it, before the ack       the commit happened; recovery finds it
//	no answer from the server            the head of the log is read, and the same bytes are sent again if they are not there
//	no answer until the context ends     the log is closed with bus.ErrUnknownOutcome: claim again
//	another owner                        bus.ErrFenced, sticky
//	bucket full                          bus.ErrNoSpace, nothing stored; try again
//	crash between base and purge         the dead entries are ignored, and go with the next base
//	damaged, missing or foreign bytes    CorruptError; nothing is purged or overwritten
package kvsnap
