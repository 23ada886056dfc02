package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"natsflow/bus"
)

func taskKey(flow, task string) string { return flow + ".task." + task }

// taskOf decodes the record of a task.
func taskOf(item bus.Item) (TaskRecord, error) {
	rec, err := decodeTask(item.Value)
	if err != nil {
		return rec, fmt.Errorf("key %s of bucket %s: %w", item.Key, BucketName, err)
	}
	rec.Revision = item.Seq
	return rec, nil
}

// Tasks returns the records of all tasks that were ever taken, by task.
func (c *Control) Tasks(ctx context.Context) (map[string]TaskRecord, error) {
	items, err := c.bucket.List(ctx, taskKey(c.cfg.Flow, ">"))
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", err)
	}
	tasks := make(map[string]TaskRecord, len(items))
	for _, item := range items {
		rec, err := taskOf(item)
		if err != nil {
			return nil, fmt.Errorf("list tasks: %w", err)
		}
		tasks[strings.TrimPrefix(item.Key, taskKey(c.cfg.Flow, ""))] = rec
	}
	return tasks, nil
}

// readTask returns the record of a task, the zero record when there is none.
func (c *Control) readTask(ctx context.Context, task string) (TaskRecord, error) {
	item, err := c.bucket.Get(ctx, taskKey(c.cfg.Flow, task))
	if errors.Is(err, bus.ErrNotFound) {
		return TaskRecord{}, nil
	}
	if err != nil {
		return TaskRecord{}, err
	}
	return taskOf(item)
}

// writeTask writes the record of a task if its revision is that of rec, and
// returns it as it is now.
func (c *Control) writeTask(ctx context.Context, task string, rec TaskRecord) (TaskRecord, error) {
	value, err := encodeTask(rec)
	if err != nil {
		return rec, err
	}
	key := taskKey(c.cfg.Flow, task)
	if rec.Revision == 0 {
		rec.Revision, err = c.bucket.Create(ctx, key, value, 0)
	} else {
		rec.Revision, err = c.bucket.Update(ctx, key, value, rec.Revision, 0)
	}
	return rec, err
}

// holderOf tells who has the lease of a name.
func (c *Control) holderOf(ctx context.Context, name string) (holder, error) {
	item, err := c.bucket.Get(ctx, memberKey(c.cfg.Flow, name))
	if errors.Is(err, bus.ErrNotFound) {
		return holder{}, nil
	}
	if err != nil {
		return holder{}, err
	}
	h := holder{present: true}
	if info, err := memberOf(item); err == nil {
		h.instance, h.settled = info.Instance, info.Settled
	}
	return h, nil
}

// Acquire makes one try to take a task. held says that it is ours, now or since
// before; the record tells who has it otherwise, also when another was faster. It
// does not ask whether the task is assigned to this member. Errors of the server
// are returned and not retried; a repetition does no harm. ErrLeaseLost and
// ErrReplaced say that this member must end.
//
// Whoever holds a task still has to look at Trusted before it does anything that
// others see. After an error the task may be ours all the same: a task that is
// wanted is to be acquired again, and any other the member releases by itself. One
// task is to be acquired and released by one goroutine at a time.
func (m *Member) Acquire(ctx context.Context, task string) (rec TaskRecord, held bool, err error) {
	if err := ValidTask(task); err != nil {
		return TaskRecord{}, false, fmt.Errorf("acquire: %w", err)
	}
	if !m.beginClaim(task) {
		return TaskRecord{}, false, nil // it is just being given back
	}
	rec, held, err = m.acquire(ctx, task)
	if errors.Is(err, bus.ErrFenced) || errors.Is(err, bus.ErrExists) {
		// Another was faster; or we were, with a try of which the answer was lost.
		rec, err = m.c.readTask(ctx, task)
		held = err == nil && m.holds(rec)
	}
	m.endClaim(task, rec, held, err)
	if err == nil && !m.Trusted() {
		held, err = false, ErrLeaseLost
	}
	if err != nil {
		return rec, false, fmt.Errorf("acquire task %s: %w", task, err)
	}
	return rec, held, nil
}

// claimNote is what is known of a task that is being taken.
type claimNote struct {
	// sent: a write at revision rev was sent, and its end is not known.
	sent bool
	rev  uint64
	// busy: Acquire is under way; ending: the member gives the task back.
	busy, ending bool
}

// beginClaim reports whether the task can be acquired now.
func (m *Member) beginClaim(task string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	note := m.claims[task]
	if note.ending {
		return false
	}
	note.busy = true
	m.claims[task] = note
	return true
}

func (m *Member) sendClaim(task string, rev uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.claims[task] = claimNote{sent: true, rev: rev, busy: true}
}

// endClaim forgets the claim unless its write, or that of an earlier one, can still
// take effect.
func (m *Member) endClaim(task string, rec TaskRecord, held bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	note := m.claims[task]
	note.busy = false
	if !note.sent || err == nil && (held || rec.Revision != note.rev) {
		delete(m.claims, task)
		return
	}
	m.claims[task] = note
	poke(m.checks)
}

// tidy gives back what may be ours without anybody knowing and is not wanted.
func (m *Member) tidy(ctx context.Context) error {
	m.mu.Lock()
	open := make(map[string]uint64)
	for task, note := range m.claims {
		if !note.busy && m.wanted != nil && !slices.Contains(m.wanted, task) {
			open[task] = note.rev
			note.ending = true
			m.claims[task] = note
		}
	}
	m.mu.Unlock()
	var errs []error
	for task, rev := range open {
		err := m.disown(ctx, task, rev)
		m.mu.Lock()
		if err == nil || errors.Is(err, ErrRecord) {
			delete(m.claims, task)
		} else {
			m.claims[task] = claimNote{sent: true, rev: rev}
			errs = append(errs, err)
		}
		m.mu.Unlock()
	}
	return errors.Join(errs...)
}

func (m *Member) disown(ctx context.Context, task string, rev uint64) error {
	rec, err := m.c.readTask(ctx, task)
	if err != nil {
		return fmt.Errorf("give task %s back: %w", task, err)
	}
	next, write := disowned(m.Name(), m.Instance(), rec, rev)
	if !write {
		return nil
	}
	if _, err := m.c.writeTask(ctx, task, next); err != nil {
		return fmt.Errorf("give task %s back: %w", task, err)
	}
	return nil
}

func (m *Member) acquire(ctx context.Context, task string) (TaskRecord, bool, error) {
	c, err := m.claim(ctx, task)
	if err != nil {
		return c.task, false, err
	}
	switch verdict := mayTake(m.Name(), m.Instance(), c, time.Now()); {
	case verdict == claimOurs:
		return c.task, true, nil
	case verdict == claimLost && c.owner.present:
		return c.task, false, ErrReplaced
	case verdict == claimLost || !m.Trusted():
		return c.task, false, ErrLeaseLost
	case verdict != claimTake:
		return c.task, false, nil
	}
	m.sendClaim(task, c.task.Revision)
	next := TaskRecord{Owner: m.Name(), Instance: m.Instance(), Since: time.Now().UTC(), Revision: c.task.Revision}
	rec, err := m.c.writeTask(ctx, task, next)
	return rec, err == nil, err
}

// claim reads the task's record first and its owner's lease after it.
func (m *Member) claim(ctx context.Context, task string) (claim, error) {
	rec, err := m.c.readTask(ctx, task)
	c := claim{task: rec, heldUntil: m.heldUntil}
	if err != nil || rec.Free() || m.holds(rec) {
		return c, err
	}
	c.owner, err = m.c.holderOf(ctx, rec.Owner)
	return c, err
}

func (m *Member) holds(rec TaskRecord) bool {
	return rec.Owner == m.Name() && rec.Instance == m.Instance()
}

// Release gives a task up. final, if not nil, says that the task has its final
// entry of a drain; it stays in the record until the next owner. It does nothing
// when the task is not ours, or not any more. It goes on trying while the server
// is away, until ctx ends.
func (m *Member) Release(ctx context.Context, task string, final *Final) error {
	err := retry(ctx, m.c.log, "release a task", func() error {
		rec, err := m.c.readTask(ctx, task)
		if err != nil || !m.holds(rec) {
			return err
		}
		_, err = m.c.writeTask(ctx, task, TaskRecord{Final: final, Since: time.Now().UTC(), Revision: rec.Revision})
		return err
	})
	if err != nil {
		return fmt.Errorf("release task %s: %w", task, err)
	}
	return nil
}
