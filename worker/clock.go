package worker

import (
	"context"
	"math"
	"slices"
	"time"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// Bounds of the look at the server's clock.
const (
	// clockEvery is how often a reader sees whether something may be due though no
	// record has come.
	clockEvery = 100 * time.Millisecond
	// clockRetry is the wait after a look that was of no use.
	clockRetry = time.Second
	// clockAnew is how long it is believed how far the server's clock is from this
	// one's.
	clockAnew = 10 * time.Second
	// storeMargin covers a message that gets its timestamp just before the server
	// says what time it is, and its place in the stream just after. In a stream with
	// replicas it gets its timestamp before it is agreed upon.
	storeMargin, replicaMargin = 100 * time.Millisecond, 2 * time.Second
)

// noTime is a clock that has not been set.
const noTime = math.MinInt64

// clockName is the name of a source's clock in a head. With another clock the times
// of the former one mean nothing.
func clockName(src flow.SourceInfo) string {
	if src.Clock != nil {
		return src.Stream + " event time"
	}
	return src.Stream
}

// streamTimeName is the name, in a head, of the time of a source whose records have no
// other one, where that is ahead of its watermark.
func streamTimeName(src flow.SourceInfo) string { return src.Stream + " stream time" }

// restoreClocks gives a task the watermarks and clocks that its log has. There are none
// behind the exchange.
func (t *task) restoreClocks(sources []flow.SourceInfo, inputs int) {
	t.highest = slices.Repeat([]int64{noTime}, inputs)
	if t.id.Stage > 0 {
		return
	}
	for i, src := range sources {
		if at, ok := t.head.Clocks[clockName(src)]; ok {
			t.highest[i] = at
		}
		if mark, ok := t.head.Watermarks[clockName(src)]; ok {
			t.flow.Restore(i, mark)
		}
		// Where the records have no time of their own, that is the watermark, or later.
		for _, name := range []string{src.Stream, streamTimeName(src)} {
			if at, ok := t.head.Watermarks[name]; ok {
				t.flow.RestoreStream(i, at)
			}
		}
	}
}

// putClocks writes into a head the highest times up to its positions, and how far
// the task has come. A map of its own: the committer has the last one.
func (l *lane) putClocks(t *task, h *kvsnap.Head) {
	if !l.s.flow.Timed() || t.id.Stage > 0 {
		return
	}
	h.Clocks, h.Watermarks = map[string]int64{}, map[string]int64{}
	for i, at := range l.highestOf(t)[:len(l.s.sources)] {
		if name := clockName(l.s.sources[i]); at != noTime {
			h.Clocks[name] = at
		}
		if mark := t.flow.Watermark(i); mark != noTime {
			h.Watermarks[clockName(l.s.sources[i])] = mark
		}
		switch at := t.flow.StreamTime(i); {
		case at == noTime:
		case l.s.sources[i].Clock != nil:
			h.Watermarks[l.s.sources[i].Stream] = at
		case at > t.flow.Watermark(i):
			h.Watermarks[streamTimeName(l.s.sources[i])] = at
		}
	}
}

// highestOf returns the highest time of each source up to the positions of a task.
// Like positions they never go down.
func (l *lane) highestOf(t *task) []int64 {
	if t.end != nil {
		return t.lastHighest
	}
	h := make([]int64, len(l.highest))
	for i := range h {
		h[i] = max(l.highest[i], t.highest[i])
	}
	return h
}

// advance moves the watermarks to that of what was read, and the time of the source,
// for all tasks that stay.
func (l *lane) advance(c chunk) error {
	if !l.s.flow.Timed() {
		return nil
	}
	defer l.showDue()
	if l.s.inputs[c.source].stage > 0 {
		return nil // its watermarks come with the batches
	}
	l.highest[c.source] = max(l.highest[c.source], c.highest)
	for _, t := range l.tasks {
		if t.end != nil || t.id.Stage > 0 {
			continue
		}
		clean := !t.flow.Dirty()
		err := t.flow.AdvanceStream(c.source, c.stream, c.ticks)
		if err == nil {
			err = t.flow.Advance(c.source, c.mark)
		}
		if err != nil {
			return err
		}
		if clean {
			t.dirtySince = time.Now()
		}
	}
	return nil
}

// showDue lets the readers see when something is due.
func (l *lane) showDue() {
	due, behind := nothingDue, nothingDue
	for _, t := range l.tasks {
		if t.end != nil {
			continue
		}
		of := &due
		if t.id.Stage > 0 {
			of = &behind
		}
		of[byMark], of[byStream] = min(of[byMark], t.flow.Due()), min(of[byStream], t.flow.StreamDue())
	}
	for by := range due {
		l.due[by].Store(due[by])
		l.dueBehind[by].Store(behind[by])
	}
}

// restart sets the clock of the source for reading on from where seek went.
func (r *reader) restart(highest int64) {
	r.router.Restart(highest)
	r.mark, r.quiet, r.lastTime = noTime, noTime, 0
}

// at is the watermark of what was read, streamAt the time of the source there.
func (r *reader) at() int64       { return max(r.mark, r.router.Watermark()) }
func (r *reader) streamAt() int64 { return max(r.quiet, r.router.StreamTime()) }

// serverClock is what a reader knows of the server's clock.
type serverClock struct {
	// ahead of this machine's clock; asked when that was found out.
	ahead time.Duration
	asked time.Time
	// retry is when to ask again after a look that was of no use.
	retry time.Time
	// quiet is the server's time when a stream without messages was first seen.
	quiet time.Time
	count uint64
}

// followServer lets the watermark of a source of which all has been read follow the
// server's clock, when that makes something due: every later message gets a later
// timestamp. Without it a window would stay open until a record comes.
func (r *reader) followServer(ctx context.Context) {
	if !r.s.flow.Timed() || r.stage > 0 {
		return
	}
	t := time.NewTicker(clockEvery)
	defer t.Stop()
	var clock serverClock
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		// While records come, they bring the time.
		_, count := r.position()
		busy := count != clock.count
		clock.count = count
		if !busy && r.mayBeDue(&clock) && !r.askServer(ctx, &clock) {
			clock.retry = time.Now().Add(clockRetry)
		}
	}
}

// mayBeDue reports whether something is due by what is known of the server's clock.
func (r *reader) mayBeDue(clock *serverClock) bool {
	now := time.Now()
	if r.s.nothingDue() || now.Before(clock.retry) || !r.routing.TryLock() {
		return false
	}
	defer r.routing.Unlock()
	due, streamDue := r.s.dueAfter(byMark, r.at()), r.s.dueAfter(byStream, r.streamAt())
	if min(due, streamDue) == math.MaxInt64 {
		return false
	}
	if now.Sub(clock.asked) >= clockAnew {
		return true
	}
	then := now.Add(clock.ahead).UnixNano()
	return r.router.QuietWatermark(then, r.lastTime) >= due || then >= streamDue
}

// askServer asks for the time, and moves the watermark if all that the source had at
// that time has been read. It reports false if it did not get so far.
func (r *reader) askServer(ctx context.Context, clock *serverClock) bool {
	// In this order: what the source had at its time has been read if what is read
	// afterwards is all of it.
	info, err := r.s.conn.Stream(ctx, r.stream)
	if err != nil || !info.Created.Equal(r.created) {
		return false
	}
	ownTime := r.s.sources[r.source].Clock != nil
	if info.Mirror && !ownTime {
		// Its messages have the timestamps of its origin, and may come much later.
		return false
	}
	clock.ahead, clock.asked = time.Until(info.AsOf), time.Now()
	if through, err := r.caughtUp(ctx); err != nil || through < info.LastSeq {
		return false
	}
	if !r.routing.TryLock() {
		return false
	}
	defer r.routing.Unlock()
	until, ok := r.goesOn()
	if !ok {
		return false
	}
	if r.lastTime == 0 {
		r.lastTime = clock.lastOf(info)
	}
	margin := storeMargin
	if info.Replicas > 1 {
		margin = replicaMargin
	}
	clock.ahead -= margin
	now := info.AsOf.Add(-margin).UnixNano()
	known, moved := false, false
	// A drain wants what is due up to its cut, and no more. Where nothing is due, a move
	// would do nothing but commit for later stages.
	if mark := min(until, r.router.QuietWatermark(now, r.lastTime)); mark > r.at() && (until == math.MaxInt64 || !ownTime) {
		known = true
		if mark >= r.s.dueAfter(byMark, r.at()) {
			r.mark, moved = mark, true
		}
	}
	if at := min(until, now); r.s.flow.TwoTimes() && !info.Mirror && at > r.streamAt() {
		known = true
		if at >= r.s.dueAfter(byStream, r.streamAt()) {
			r.quiet, moved = at, true
		}
	}
	if moved {
		_ = r.flush(false) // errs only when it waits
	}
	return known
}

// lastOf returns the timestamp of the last message of a stream.
func (c *serverClock) lastOf(info bus.StreamInfo) int64 {
	switch {
	case info.Msgs > 0:
		return info.LastTime.UnixNano()
	case info.LastSeq == 0:
		return info.Created.UnixNano()
	case c.quiet.IsZero():
		c.quiet = info.AsOf
	}
	return c.quiet.UnixNano()
}

// goesOn reports that later messages of the source will be read, and up to which
// timestamp.
func (r *reader) goesOn() (until int64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.until, r.read < r.limit && !r.ended
}
