package flow

import "slices"

// The sessions of a key do not overlap. A session is from its first record to the
// gap behind its last one; it ends sooner where it would be longer than Max, and
// where the next one begins, which can only be when joining the two would make one
// longer than Max.

// addSession folds a record into a session, which it may begin, extend, or join
// with the next one.
func (op *windowed[T, S, U]) addSession(m *Meta, v T) {
	op.in.step = op.step
	if m.ahead {
		op.tooLate(m, v, m.at)
		return
	}
	c, fresh := op.table.getOrAdd(m.Key)
	k := &c.state
	i, there := op.session(k, m.at)
	if end := m.at + int64(op.w.Gap); !there && op.in.task.closed(op.step, end+op.delay) {
		if fresh {
			op.table.forget(c)
		}
		op.tooLate(m, v, end)
		return
	}
	marked := op.table.mark(c)
	if !there {
		k.open = slices.Insert(k.open, i, openWindow[S]{span: span{m.at, m.at}})
	}
	before := k.open[i].span
	k.open[i].start, k.open[i].end = min(before.start, m.at), max(before.end, m.at)
	op.queue(c)
	if err := op.a.Add(m, &k.open[i].state, v); err != nil {
		k.open[i].span = before
		if !there {
			k.open = slices.Delete(k.open, i, i+1)
		}
		op.failed(m, c, marked, fresh, err)
		return
	}
	op.changed(c, i, m.at)
	if !op.join(m, k, i) {
		return
	}
	op.queue(c)
	if op.w.Emit == EmitEach {
		op.update(m, op.spanOf(k, i), &k.open[i].state)
	}
}

// session returns the session that a record at a time belongs to, or the place of
// one that it begins. Of two that it could belong to it is the earlier one.
func (op *windowed[T, S, U]) session(k *keyWindows[S], at int64) (i int, there bool) {
	// The first session that begins behind the record.
	n, _ := slices.BinarySearchFunc(k.open, at, func(w openWindow[S], at int64) int {
		if w.start <= at {
			return -1
		}
		return 1
	})
	if n > 0 && at < op.endOf(k, n-1) {
		return n - 1, true
	}
	if n < len(k.open) && op.joins(span{at, at}, k.open[n].span) {
		return n, true
	}
	return n, false
}

// joins reports whether two sessions, given by their first and last times, the
// earlier one first, are one.
func (op *windowed[T, S, U]) joins(a, b span) bool {
	return b.start-a.end < int64(op.w.Gap) && (op.w.Max == 0 || max(a.end, b.end)-a.start < int64(op.w.Max))
}

// join joins a session that has grown with the one behind it, if they have come
// close. It reports false after an error: they stay apart.
func (op *windowed[T, S, U]) join(m *Meta, k *keyWindows[S], i int) bool {
	if i+1 == len(k.open) || !op.joins(k.open[i].span, k.open[i+1].span) {
		return true
	}
	w, next := &k.open[i], &k.open[i+1]
	if err := op.a.Merge(&w.state, &next.state); err != nil {
		op.in.fail(op.step, m, err)
		return false
	}
	w.end = max(w.end, next.end)
	if w.early == 0 || next.early != 0 && next.early < w.early {
		w.early = next.early
	}
	k.open = slices.Delete(k.open, i+1, i+2)
	return true
}
