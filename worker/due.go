package worker

import (
	"context"
	"encoding/json"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"natsflow/flow"
)

// Bounds of what workers tell each other of what is due.
const (
	// dueRepeat is how often a worker says again when something is due, dueKept how long
	// that is believed.
	dueRepeat, dueKept = 2 * time.Second, 5 * time.Second
	// tellEvery is how often a task that has nothing else for the next stage tells it its
	// watermark, if nothing waits for that; tellPartition bounds how many tasks of a flow
	// do so in a time.
	tellEvery, tellPartition = time.Second, 5 * time.Millisecond
)

// What is due in a later stage is seen by the worker that has the task, and the
// watermarks come from the tasks of the first stage, which others have too. Their
// sources may be quiet, and then their watermarks move only when something is due (see
// followServer). So the workers of a flow tell each other, by plain messages, when
// something is due in their later stages. One that is lost costs time and nothing else:
// it is repeated, and what comes to a source brings the time as well.

// dueHint is such a message.
type dueHint struct {
	Worker string `json:"worker"`
	// Due is a watermark, Stream a time of the streams, in nanoseconds since 1970; nil
	// when nothing waits for it.
	Due    *int64 `json:"due,omitempty"`
	Stream *int64 `json:"stream,omitempty"`
}

// The clocks by which something is due: the watermark, and where the flow goes by that,
// too, the time of the streams, see flow.Flow.TwoTimes.
const (
	byMark = iota
	byStream
	clockKinds
)

// dueTimes are when something is to be done first, by each clock; the highest number if
// nothing waits.
type dueTimes [clockKinds]int64

var nothingDue = dueTimes{math.MaxInt64, math.MaxInt64}

// dueElsewhere is what the other workers have said.
type dueElsewhere struct {
	mu sync.Mutex
	by map[string]heardDue
	// all are those that are believed now.
	all atomic.Pointer[[]dueTimes]
}

type heardDue struct {
	due   dueTimes
	until time.Time
}

// hear takes a message.
func (d *dueElsewhere) hear(data []byte, self string) {
	var h dueHint
	if json.Unmarshal(data, &h) != nil || h.Worker == self {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	due := nothingDue
	for by, at := range [clockKinds]*int64{h.Due, h.Stream} {
		if at != nil {
			due[by] = *at
		}
	}
	if due == nothingDue {
		delete(d.by, h.Worker)
	} else {
		if d.by == nil {
			d.by = map[string]heardDue{}
		}
		d.by[h.Worker] = heardDue{due, time.Now().Add(dueKept)}
	}
	d.show()
}

// forget forgets what was not repeated.
func (d *dueElsewhere) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, h := range d.by {
		if time.Now().After(h.until) {
			delete(d.by, name)
		}
	}
	d.show()
}

func (d *dueElsewhere) show() {
	var all []dueTimes
	for _, h := range d.by {
		all = append(all, h.due)
	}
	d.all.Store(&all)
}

// after returns the first of the times of a clock above a number; the highest number if
// there is none.
func (d *dueElsewhere) after(by int, mark int64) int64 {
	first := int64(math.MaxInt64)
	if all := d.all.Load(); all != nil {
		for _, due := range *all {
			if due[by] > mark {
				first = min(first, due[by])
			}
		}
	}
	return first
}

// dueAfter is the first time above that of a source, by a clock, at which something is to
// be done: here, or behind the exchange elsewhere. The highest number if nothing waits.
// What is due at or before it waits for another source, or for another task.
func (s *session) dueAfter(by int, mark int64) int64 {
	due := s.elsewhere.after(by, mark)
	for _, l := range s.lanes {
		for _, at := range []int64{l.due[by].Load(), l.dueBehind[by].Load()} {
			if at > mark {
				due = min(due, at)
			}
		}
	}
	return due
}

// nothingDue reports that nothing waits for any time, here or elsewhere.
func (s *session) nothingDue() bool {
	return s.dueAfter(byMark, math.MinInt64) == math.MaxInt64 && s.dueAfter(byStream, math.MinInt64) == math.MaxInt64
}

// dueBehind is when something is to be done first in a later stage here.
func (s *session) dueBehind() dueTimes {
	due := nothingDue
	for _, l := range s.lanes {
		for by := range due {
			due[by] = min(due[by], l.dueBehind[by].Load())
		}
	}
	return due
}

// awaited reports that something waits for the watermark of a task in a later stage, or
// for its time of the streams, here or elsewhere.
func (s *session) awaited(t *flow.Task) bool {
	here := s.dueBehind()
	for by, now := range [clockKinds]int64{byMark: t.Now(), byStream: t.StreamNow()} {
		if here[by] <= now || s.elsewhere.after(by, math.MinInt64) <= now {
			return true
		}
	}
	return false
}

// tellDue tells the other workers what is due here in later stages, and listens to them.
func (s *session) tellDue(ctx context.Context) {
	if !s.flow.TimedStage(1) {
		return
	}
	subject := serviceSubject(s.flow.Name(), "due")
	stop, err := s.side.Subscribe(subject, func(_ string, data []byte) { s.elsewhere.hear(data, s.cfg.Name) })
	if err != nil {
		s.log.Warn("what is due in the tasks of other workers may be late when no records come", "err", err)
	} else {
		defer stop()
	}
	t := time.NewTicker(clockEvery)
	defer t.Stop()
	told, toldAt := nothingDue, time.Time{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		s.elsewhere.forget()
		due := s.dueBehind()
		if due == told && (due == nothingDue || time.Since(toldAt) < dueRepeat) {
			continue
		}
		hint := dueHint{Worker: s.cfg.Name}
		for by, at := range [clockKinds]**int64{&hint.Due, &hint.Stream} {
			if due[by] != math.MaxInt64 {
				*at = &due[by]
			}
		}
		data, err := json.Marshal(hint)
		if err == nil {
			err = s.side.Notify(subject, data)
		}
		if err != nil {
			s.log.Debug("the other workers were not told what is due", "err", err)
			continue
		}
		told, toldAt = due, time.Now()
	}
}

// tellPeriod is how often the tasks of a flow tell their watermarks in any case.
func tellPeriod(f *flow.Flow) time.Duration {
	return max(tellEvery, f.Options().CommitInterval, time.Duration(f.Options().Partitions)*tellPartition)
}

// tellNow reports that a task is to tell its watermark, by a commit if there is nothing
// else: the next stage waits for it, or it is time. An empty partition must not hold the
// others up for ever.
func (l *lane) tellNow(t *task) bool {
	if !t.flow.Untold() {
		return false
	}
	since := time.Since(t.toldAt)
	return since >= l.s.tellEvery || since >= l.s.interval && l.s.awaited(t.flow)
}
