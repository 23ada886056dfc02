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
	// Due is a watermark, in nanoseconds since 1970; nil when nothing waits.
	Due *int64 `json:"due,omitempty"`
}

// dueElsewhere is what the other workers have said.
type dueElsewhere struct {
	mu sync.Mutex
	by map[string]heardDue
	// all are the watermarks that are believed now.
	all atomic.Pointer[[]int64]
}

type heardDue struct {
	due   int64
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
	if h.Due == nil {
		delete(d.by, h.Worker)
	} else {
		if d.by == nil {
			d.by = map[string]heardDue{}
		}
		d.by[h.Worker] = heardDue{*h.Due, time.Now().Add(dueKept)}
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
	var all []int64
	for _, h := range d.by {
		all = append(all, h.due)
	}
	d.all.Store(&all)
}

// after returns the first of the watermarks above a number; the highest number if there
// is none.
func (d *dueElsewhere) after(mark int64) int64 {
	first := int64(math.MaxInt64)
	if all := d.all.Load(); all != nil {
		for _, due := range *all {
			if due > mark {
				first = min(first, due)
			}
		}
	}
	return first
}

// dueAfter is the first watermark above that of a source at which something is to be
// done: here, or behind the exchange elsewhere. The highest number if nothing waits.
// What is due at or before it waits for another source, or for another task.
func (s *session) dueAfter(mark int64) int64 {
	due := s.elsewhere.after(mark)
	for _, l := range s.lanes {
		for _, at := range []int64{l.due.Load(), l.dueBehind.Load()} {
			if at > mark {
				due = min(due, at)
			}
		}
	}
	return due
}

// dueBehind is the watermark at which something is to be done first in a later stage
// here.
func (s *session) dueBehind() int64 {
	due := int64(math.MaxInt64)
	for _, l := range s.lanes {
		due = min(due, l.dueBehind.Load())
	}
	return due
}

// awaited reports that something waits for a watermark in a later stage, here or
// elsewhere.
func (s *session) awaited(mark int64) bool {
	return s.dueBehind() <= mark || s.elsewhere.after(math.MinInt64) <= mark
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
	told, toldAt := int64(math.MaxInt64), time.Time{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		s.elsewhere.forget()
		due := s.dueBehind()
		if due == told && (due == math.MaxInt64 || time.Since(toldAt) < dueRepeat) {
			continue
		}
		hint := dueHint{Worker: s.cfg.Name}
		if due != math.MaxInt64 {
			hint.Due = &due
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
	return since >= l.s.tellEvery || since >= l.s.interval && l.s.awaited(t.flow.Now())
}
