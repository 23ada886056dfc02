package flow

import (
	"bytes"
	"errors"
	"fmt"
	"time"
)

// TableConfig says how the records of a stream meet those of a table.
type TableConfig[L, R, U any] struct {
	// Kind is [InnerJoin], the default, or [LeftJoin].
	Kind JoinKind
	// Latest lets a record meet what the table has when it comes, at once. Without it
	// a record meets what the table had at the time of the record, which is the same
	// in every replay, and waits until that is known. With it the results depend on
	// which records of the two streams are read first, and no times are needed.
	Latest bool
	// AllowedLateness is how long what the table had is kept for records of the
	// stream that come late. Not with Latest.
	AllowedLateness time.Duration
	// Stream and Table say how the records are kept. With Latest those of the stream
	// are not.
	Stream Codec[L]
	Table  Codec[R]
	// Version of these bytes, 0 and up. Raise it when their meaning changes: records
	// of another version are not read, and the task does not start with them.
	Version int
	// Deletes says of a record of the table whether it deletes the key. nil for none.
	Deletes func(m *Meta, v R) (bool, error)
	// Join makes the result. entry is nil where the table has none, which is asked
	// for with a [LeftJoin] only. ok is false where there is no result; a [LeftJoin]
	// asks again then, without the entry. What the pointers lead to must not be
	// changed. Required.
	Join func(m *Meta, v *L, entry *R) (result U, ok bool, err error)
}

// JoinTable joins each record of a stream with the entry that a table has for its
// key. The table is a stream, too, of which the last record of a key counts. Both are
// keyed, and of one stage.
//
// A record of time t meets the newest record of the table whose time is not after t.
// So that the results are the same in every replay, however the two streams are read,
// it waits until all of these have come: until the watermark of the task is behind t.
// Results of a key come in the order of the times. With [TableConfig.Latest] nothing
// waits. At the end of the input, a drain with [Finish], what waits meets what there is
// of the table, with [PaneFinal], and the table stays.
//
// What the table had is kept for as long as a record that is not late may need it, the
// newest entry for ever, unless it is deleted. A record of the stream whose time is
// behind the watermark by more than AllowedLateness is late: it goes to the second
// stream, or fails with [ErrLate] if no step follows that. A record of the table
// counts from when it comes, however late that is, unless what is newer has taken its
// place for good: then it is counted as late, and has no effect. Of two with the same
// time the one counts that came last.
//
// Results have the times and the position of the record of the stream. Meta.Raw has
// the bytes by its codec, unless with Latest.
//
// id is the identity of the state.
func JoinTable[L, R, U any](stream Stream[L], table Stream[R], id string, cfg TableConfig[L, R, U], opts ...StepOption) (results Stream[U], late Stream[L]) {
	opts = append([]StepOption{func(info *StepInfo) { info.Windows = cfg.describe() }}, opts...)
	step := stateful(stream, "join-table", id, cfg.Version, opts)
	results, late = then[L, U](stream), then[L, L](stream)
	b := stream.b
	checkInputs(step, stream, table)
	b.need(step, "function Join", cfg.Join != nil)
	b.need(step, "codec with Encode and Decode for the records of the stream", cfg.Latest || cfg.Stream.usable())
	b.need(step, "codec with Encode and Decode for the records of the table", cfg.Table.usable())
	if err := cfg.validate(); err != nil {
		b.errorf("step %q: %w", id, err)
	}
	if !cfg.Latest {
		b.waits(stream.stage)
		// They come in the order of their times, not of their positions.
		results.source, results.delay = 0, max(stream.delay+cfg.AllowedLateness, table.delay)
	}
	node := new(joinNode)
	bind := func(in *instance) *tableJoined[L, R, U] {
		if op, ok := in.memo[node]; ok {
			return op.(*tableJoined[L, R, U])
		}
		op := &tableJoined[L, R, U]{
			in: in, step: step, cfg: cfg, out: results.hub.bind(in),
			tableDelay: int64(table.delay), horizon: int64(max(stream.delay, table.delay) + cfg.AllowedLateness),
		}
		in.memo[node] = op
		if len(late.hub.outs) > 0 {
			op.late = late.hub.bind(in)
		}
		sides := []joinSide{sideStream, sideTable}
		if cfg.Latest {
			sides = []joinSide{sideLatest}
		}
		op.kept = newKept(in.task, in.f.stepID(step), cfg.Version, sides, op.check)
		op.kept.due = op.due
		if !cfg.Latest {
			in.task.timers = append(in.task.timers, op)
		}
		return op
	}
	stream.hub.subscribe(func(in *instance) emit[L] {
		if cfg.Latest {
			return bind(in).meetLatest
		}
		return bind(in).addStream
	})
	table.hub.subscribe(func(in *instance) emit[R] { return bind(in).addTable })
	return results, late
}

func (cfg *TableConfig[L, R, U]) validate() error {
	switch {
	case cfg.Kind != InnerJoin && cfg.Kind != LeftJoin:
		return fmt.Errorf("a join with a table is inner or left, not %v", cfg.Kind)
	case cfg.AllowedLateness < 0 || cfg.AllowedLateness > maxWindow:
		return fmt.Errorf("an allowed lateness is not negative and at most %d days", int(maxWindow/day))
	case cfg.Latest && cfg.AllowedLateness != 0:
		return errors.New("with Latest no record is late: leave out AllowedLateness")
	}
	return nil
}

func (cfg *TableConfig[L, R, U]) describe() string {
	s := "table join " + cfg.Kind.String()
	if cfg.Latest {
		s += " latest"
	}
	if cfg.AllowedLateness != 0 {
		s += fmt.Sprintf(" allowed lateness %v", cfg.AllowedLateness)
	}
	return s
}

// tableJoined is a join with a table in one task. The records that wait, and the
// versions of the table, are kept records.
type tableJoined[L, R, U any] struct {
	in   *instance
	step int
	cfg  TableConfig[L, R, U]
	kept *keptRecords
	out  emit[U]
	late emit[L]
	// tableDelay is how far behind the watermark records of the table may be, horizon
	// how far those of the stream may be.
	tableDelay, horizon int64
	value               L
	scratch             []byte
}

// check looks at the bytes of a loaded record.
func (op *tableJoined[L, R, U]) check(side joinSide, m *Meta, data []byte) (err error) {
	if side == sideStream {
		_, err = op.cfg.Stream.Decode(m, data)
	} else {
		_, err = op.cfg.Table.Decode(m, data)
	}
	return err
}

// known returns the watermark at which all of the table up to a time has come.
func (op *tableJoined[L, R, U]) known(at int64) int64 { return at + 1 + op.tableDelay }

// past returns the watermark from which on no record of the stream with that time, or
// before, is not late.
func (op *tableJoined[L, R, U]) past(at int64) int64 { return at + 1 + op.horizon }

// meetLatest joins a record with what the table has.
func (op *tableJoined[L, R, U]) meetLatest(m *Meta, v L) {
	op.in.step, op.value = op.step, v
	var entry *keptRecord
	if of := op.kept.keys[m.Key]; of != nil {
		entry = &of.lists[1][0].state
	}
	// Its results are its own, whatever the record is a result of.
	pane := m.pane
	m.pane = PaneNone
	op.meet(m, &op.value, entry)
	m.pane = pane
	var none L
	op.value = none
}

// addStream lets a record wait until the table of its time is known.
func (op *tableJoined[L, R, U]) addStream(m *Meta, v L) {
	op.in.step = op.step
	t := op.in.task
	if past := op.past(m.at); m.ahead || t.closed(op.step, past) {
		tooLate(op.in, op.step, m, v, op.late, past)
		return
	}
	var err error
	if op.scratch, err = op.cfg.Stream.Encode(op.scratch[:0], m, v); err != nil {
		op.in.fail(op.step, m, err)
		return
	}
	// At the end of the input the clock is ahead while the steps before come to theirs.
	if t.finishing || !t.closed(op.step, op.known(m.at)) {
		op.kept.add(m, sideStream, 0, op.scratch)
		return
	}
	// It is late, but not too late.
	known := *m
	known.raw, known.pane = bytes.Clone(op.scratch), PaneNone
	if op.value, err = op.cfg.Stream.Decode(&known, known.raw); err != nil {
		op.in.fail(op.step, m, fmt.Errorf("decode what was kept: %w", err))
		return
	}
	var entry *keptRecord
	if of := op.kept.keys[m.Key]; of != nil {
		entry = op.entryAt(of, m.at)
	}
	op.meet(&known, &op.value, entry)
	var none L
	op.value = none
}

// entryAt returns what the table had for a key at a time, nil for nothing.
func (op *tableJoined[L, R, U]) entryAt(of *keptKey, at int64) *keptRecord {
	if n := of.behind(sideTable, at); n > 0 {
		return &of.lists[1][n-1].state
	}
	return nil
}

// meet emits the result of a record. It reports whether there is one.
func (op *tableJoined[L, R, U]) meet(m *Meta, v *L, entry *keptRecord) (ok bool) {
	var u U
	var err error
	if entry != nil && entry.flags&keptDeleted == 0 {
		of := Meta{Key: m.Key, mark: m.mark}
		entry.meta(&of)
		var r *R
		if r, err = keptValue(entry, &of, op.cfg.Table); err == nil {
			u, ok, err = op.cfg.Join(m, v, r)
		}
	}
	if err == nil && !ok && op.cfg.Kind == LeftJoin {
		u, ok, err = op.cfg.Join(m, v, nil)
	}
	if err != nil {
		op.in.fail(op.step, m, err)
		return false
	}
	if ok {
		op.out(m, u)
		op.in.step = op.step
	}
	return ok
}

// addTable takes a record of the table.
func (op *tableJoined[L, R, U]) addTable(m *Meta, v R) {
	op.in.step = op.step
	deleted := false
	op.scratch = op.scratch[:0]
	var err error
	switch {
	case m.ahead && !op.cfg.Latest:
		// It would be what the table has for a year to come.
		err = m.tooFarAhead()
	case op.cfg.Deletes != nil:
		deleted, err = op.cfg.Deletes(m, v)
	}
	if err == nil && !deleted {
		op.scratch, err = op.cfg.Table.Encode(op.scratch, m, v)
	}
	switch {
	case err != nil:
		op.in.fail(op.step, m, err)
	case op.cfg.Latest:
		op.setLatest(m, deleted)
	default:
		op.addVersion(m, deleted)
	}
}

// setLatest replaces the entry of a key.
func (op *tableJoined[L, R, U]) setLatest(m *Meta, deleted bool) {
	of := op.kept.keys[m.Key]
	switch {
	case deleted && of == nil:
	case deleted:
		op.kept.removeFirst(of, sideLatest)
	case of == nil:
		op.kept.add(m, sideLatest, 0, op.scratch)
	default:
		c := of.lists[1][0]
		op.kept.set(c, m, sideLatest, 0, op.scratch)
		op.kept.table.mark(c)
	}
}

// addVersion adds what the table has from the time of the record on.
func (op *tableJoined[L, R, U]) addVersion(m *Meta, deleted bool) {
	if of := op.kept.keys[m.Key]; of != nil {
		versions := of.lists[1]
		i := of.behind(sideTable, m.at)
		if i < len(versions) && op.in.task.closed(op.step, op.past(versions[i].state.at)) {
			// Nothing that may come is of a time between the two.
			op.in.task.late++
			return
		}
	}
	flags := byte(0)
	if deleted {
		flags = keptDeleted
	}
	op.kept.add(m, sideTable, flags, op.scratch)
}

// due returns when something is to be done for a key: a record has waited long enough,
// or a version is not needed any more.
func (op *tableJoined[L, R, U]) due(of *keptKey) int64 {
	due := op.dropDue(of)
	if waiting := of.lists[0]; len(waiting) > 0 {
		due = min(due, op.known(waiting[0].state.at))
	}
	return due
}

// dropDue returns when the oldest version of a key goes: when no record needs what was
// before the next one. That nothing is there is known without a record of it. None goes
// at the end of the input, since the flow may be resumed.
func (op *tableJoined[L, R, U]) dropDue(of *keptKey) int64 {
	versions := of.lists[1]
	due := noDue
	if len(versions) == 0 || op.cfg.Latest || op.in.task.finishing {
		return due
	}
	if len(versions) > 1 {
		due = op.past(versions[1].state.at)
	}
	if first := &versions[0].state; first.flags&keptDeleted != 0 {
		due = min(due, op.past(first.at))
	}
	return due
}

// index, next and fire are those of a timedStep.
func (op *tableJoined[L, R, U]) index() int  { return op.step }
func (op *tableJoined[L, R, U]) next() int64 { return op.kept.next() }

// fire does what is due first; next has been called.
func (op *tableJoined[L, R, U]) fire() {
	of := op.kept.pop()
	waiting := of.lists[0]
	if len(waiting) == 0 || op.dropDue(of) < op.known(waiting[0].state.at) {
		op.kept.removeFirst(of, sideTable)
		return
	}
	rec := waiting[0].state
	entry := op.entryAt(of, rec.at)
	// The record is gone before its result is made, which may panic.
	op.kept.removeFirst(of, sideStream)
	m := op.in.task.goes(of.key, &rec)
	op.in.step = op.step
	v, err := keptValue(&rec, m, op.cfg.Stream)
	if err != nil {
		op.in.fail(op.step, m, err)
		return
	}
	if op.meet(m, v, entry) && op.in.task.finishing {
		op.in.task.made()
	}
}
