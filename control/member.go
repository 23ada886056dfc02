package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/google/uuid"

	"natsflow/bus"
)

var (
	// ErrReplaced: another process joined under the name of this one.
	ErrReplaced = errors.New("another process took the name of this one")
	// ErrLeaseLost: the trust in the own lease ran out. The caller may join again.
	ErrLeaseLost = errors.New("the lease was lost")
)

// statusThrottle is the least time between two renewals that carry an urgent
// status.
const statusThrottle = 200 * time.Millisecond

func memberKey(flow, name string) string { return flow + ".member." + name }
func assignmentKey(flow string) string   { return flow + ".assignment" }

// MemberInfo is a member as its lease describes it.
type MemberInfo struct {
	// Name and Instance tell which process it is, Host and PID where it runs.
	Name     string `json:"name"`
	Instance string `json:"instance"`
	Host     string `json:"host"`
	PID      int    `json:"pid"`
	// Started is when the process joined.
	Started time.Time `json:"started"`
	// TTL of its lease, in nanoseconds.
	TTL time.Duration `json:"ttl"`
	// Status is what the process says of itself.
	Status json.RawMessage `json:"status,omitempty"`
	// Renewed is when the lease was last renewed, by the server's clock.
	Renewed time.Time `json:"-"`
}

// JoinConfig says how to join.
type JoinConfig struct {
	// Immediate lets the process start at once when a process of its name was
	// active before. The caller vouches that the sinks keep out what that one
	// may still publish. Otherwise it waits until the former lease is over.
	Immediate bool
}

// Member is a process that takes part in a flow, active or standing by. Run has
// to run for as long as it does.
type Member struct {
	c         *Control
	key       string
	lease     *lease
	heldUntil time.Time
	active    chan struct{}
	look      chan struct{}
	urgent    chan struct{}

	mu   sync.Mutex
	info MemberInfo
	rev  uint64
	left bool
}

// Join makes this process a member. A process that is there under the same name
// is replaced: it ends with ErrReplaced.
func (c *Control) Join(ctx context.Context, cfg JoinConfig) (*Member, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	instance := c.cfg.Instance
	if instance == "" {
		instance = uuid.NewString()
	}
	m := &Member{
		c: c, key: memberKey(c.cfg.Flow, c.cfg.Name), active: make(chan struct{}), look: make(chan struct{}, 1), urgent: make(chan struct{}, 1),
		info: MemberInfo{Name: c.cfg.Name, Instance: instance, Host: host, PID: os.Getpid(), Started: time.Now().UTC(), TTL: c.cfg.LeaseTTL},
	}
	err = retry(ctx, c.log, "join", func() error { return m.join(ctx, cfg) })
	if err != nil {
		return nil, fmt.Errorf("join flow %s as %s: %w", c.cfg.Flow, c.cfg.Name, err)
	}
	return m, nil
}

func (m *Member) join(ctx context.Context, cfg JoinConfig) error {
	value, err := json.Marshal(m.info)
	if err != nil {
		return err
	}
	former, err := m.c.bucket.Get(ctx, m.key)
	started := time.Now()
	switch {
	case errors.Is(err, bus.ErrNotFound):
		m.rev, err = m.c.bucket.Create(ctx, m.key, value, m.c.cfg.LeaseTTL)
	case err == nil:
		m.rev, err = m.c.bucket.Update(ctx, m.key, value, former.Seq, m.c.cfg.LeaseTTL)
	}
	if err != nil {
		return err
	}
	m.lease = newLease(started, m.c.cfg.LeaseTTL)
	if former.Key == "" || cfg.Immediate {
		return nil
	}
	// The former process of this name may not know yet that it is replaced.
	now := time.Now()
	ttl := m.c.cfg.LeaseTTL
	var was MemberInfo
	if json.Unmarshal(former.Value, &was) == nil && was.TTL > 0 {
		ttl = was.TTL
	}
	own, err := m.c.bucket.Get(ctx, m.key)
	taken := own.Time
	if err != nil {
		taken = former.Time
	}
	m.heldUntil = now.Add(heldFor(ttl, former.Time, taken))
	return nil
}

// Trusted reports whether the lease may still be relied on; it only looks at a
// clock. Once false it stays so.
func (m *Member) Trusted() bool { return m.lease.trusted(time.Now()) }

// Active is closed when this process is the active one of the flow.
func (m *Member) Active() <-chan struct{} { return m.active }

// SetStatus sets what the lease says of this process. It goes out with the next
// renewal, within 200 ms if it is urgent.
func (m *Member) SetStatus(status json.RawMessage, urgent bool) {
	m.mu.Lock()
	m.info.Status = status
	m.mu.Unlock()
	if urgent {
		poke(m.urgent)
	}
}

func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Run renews the lease and looks whether this process is to be the active one,
// until ctx ends (it returns nil then) or the place is lost: ErrReplaced,
// ErrLeaseLost. When it returns the lease is not trusted any more.
func (m *Member) Run(ctx context.Context) error {
	inner, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	for _, f := range []func(context.Context) error{m.renew, m.decide, m.watch} {
		wg.Go(func() {
			if err := f(inner); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	err := context.Cause(inner)
	cancel(nil)
	if ctx.Err() != nil {
		// The caller may still have to publish before it leaves.
		return nil
	}
	m.lease.end()
	return err
}

// renew renews the lease by compare-and-set, every third of its time.
func (m *Member) renew(ctx context.Context) error {
	every := m.c.cfg.LeaseTTL / 3
	t := time.NewTimer(every)
	defer t.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		case <-m.urgent:
			if wait := statusThrottle - time.Since(last); wait > 0 {
				pause := time.NewTimer(wait)
				select {
				case <-pause.C:
				case <-ctx.Done():
					pause.Stop()
					return nil
				}
			}
		}
		started := time.Now()
		// A renewal that is not answered is tried again while there is trust.
		within, stop := context.WithDeadline(ctx, started.Add(every))
		err := m.renewOnce(within)
		stop()
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			last = started
			if !m.lease.renewed(started, time.Now(), m.c.cfg.LeaseTTL) {
				return fmt.Errorf("%w: the renewal came too late", ErrLeaseLost)
			}
			t.Reset(every)
		case errors.Is(err, ErrReplaced), errors.Is(err, ErrLeaseLost):
			return err
		case !m.Trusted():
			return fmt.Errorf("%w: it could not be renewed in time: %w", ErrLeaseLost, err)
		default:
			t.Reset(statusThrottle)
		}
	}
}

func (m *Member) renewOnce(ctx context.Context) error {
	m.mu.Lock()
	value, err := json.Marshal(m.info)
	rev, left := m.rev, m.left
	m.mu.Unlock()
	if err != nil {
		return err
	}
	if left {
		return nil
	}
	next, err := m.c.bucket.Update(ctx, m.key, value, rev, m.c.cfg.LeaseTTL)
	if err == nil {
		m.setRev(next)
		return nil
	}
	if !errors.Is(err, bus.ErrFenced) {
		return err
	}
	// The key is not as we left it: replaced, expired, or renewed by a try of ours
	// whose answer was lost.
	item, gerr := m.c.bucket.Get(ctx, m.key)
	if errors.Is(gerr, bus.ErrNotFound) {
		return fmt.Errorf("%w: it had expired", ErrLeaseLost)
	}
	if gerr != nil {
		return gerr
	}
	var held MemberInfo
	if err := json.Unmarshal(item.Value, &held); err != nil {
		return fmt.Errorf("%w: key %s: %w", ErrRecord, m.key, err)
	}
	if held.Instance != m.info.Instance {
		return fmt.Errorf("%w: %s is now process %d on %s, since %s", ErrReplaced, held.Name, held.PID, held.Host, held.Started.Format(time.RFC3339))
	}
	m.setRev(item.Seq)
	return err
}

func (m *Member) setRev(rev uint64) {
	m.mu.Lock()
	m.rev = max(m.rev, rev)
	m.mu.Unlock()
}

// watch wakes decide when a lease or the assignment changes.
func (m *Member) watch(ctx context.Context) error {
	flow := m.c.cfg.Flow
	var wg sync.WaitGroup
	defer wg.Wait()
	errs := make(chan error, 2)
	for _, filter := range []string{flow + ".member.>", assignmentKey(flow)} {
		wg.Go(func() {
			errs <- m.c.bucket.Watch(ctx, filter, func(bus.Item) error {
				poke(m.look)
				return nil
			})
		})
	}
	err := <-errs
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("watch the members: %w", err)
}

// decide looks at the assignment at each change, and now and then by itself since
// a watcher can miss the end of a lease.
func (m *Member) decide(ctx context.Context) error {
	t := time.NewTicker(m.c.cfg.LeaseTTL / 2)
	defer t.Stop()
	var wake <-chan time.Time
	started := false
	for {
		act, rev, err := m.situation(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			if !bus.Retryable(err) {
				return fmt.Errorf("look at the assignment: %w", err)
			}
			wake = time.After(statusThrottle)
		case act.kind == actStart:
			if !started && m.Trusted() {
				started = true
				close(m.active)
			}
		case started:
			return fmt.Errorf("%w: another process is active", ErrLeaseLost)
		case act.kind == actWait:
			wake = time.After(time.Until(act.until))
		case act.kind == actTake && m.Trusted():
			if err := m.take(ctx, act.next, rev); err != nil {
				m.c.log.Debug("did not get the assignment", "err", err)
			}
			wake = time.After(firstPause)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-m.look:
		case <-t.C:
		case <-wake:
			wake = nil
		}
	}
}

func (m *Member) take(ctx context.Context, next Assignment, rev uint64) error {
	value, err := json.Marshal(next)
	if err != nil {
		return err
	}
	if rev == 0 {
		_, err = m.c.bucket.Create(ctx, assignmentKey(m.c.cfg.Flow), value, 0)
		return err
	}
	_, err = m.c.bucket.Update(ctx, assignmentKey(m.c.cfg.Flow), value, rev, 0)
	return err
}

// situation reads the assignment and then its owner's lease, in this order.
func (m *Member) situation(ctx context.Context) (action, uint64, error) {
	s := situation{heldUntil: m.heldUntil}
	item, err := m.c.bucket.Get(ctx, assignmentKey(m.c.cfg.Flow))
	switch {
	case errors.Is(err, bus.ErrNotFound):
	case err != nil:
		return action{}, 0, err
	default:
		s.assigned = true
		if err := json.Unmarshal(item.Value, &s.assignment); err != nil {
			return action{}, 0, fmt.Errorf("%w: key %s: %w", ErrRecord, item.Key, err)
		}
		held, err := m.c.bucket.Get(ctx, memberKey(m.c.cfg.Flow, s.assignment.Owner))
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return action{}, 0, err
		}
		s.owner.present = err == nil
		var info MemberInfo
		if err == nil && json.Unmarshal(held.Value, &info) == nil {
			s.owner.instance = info.Instance
		}
	}
	return decide(m.info.Name, m.info.Instance, s, time.Now()), item.Seq, nil
}

// Leave gives the lease back, so that another process takes over at once. The
// lease is not trusted from here on.
func (m *Member) Leave(ctx context.Context) error {
	m.lease.end()
	m.mu.Lock()
	m.left = true
	rev := m.rev
	m.mu.Unlock()
	err := m.c.bucket.Delete(ctx, m.key, rev)
	if errors.Is(err, bus.ErrFenced) || errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	return err
}

// Members returns the members of the flow and the assignment, which is zero when
// no process was ever active.
func (c *Control) Members(ctx context.Context) ([]MemberInfo, Assignment, error) {
	items, err := c.bucket.List(ctx, c.cfg.Flow+".member.>")
	if err != nil {
		return nil, Assignment{}, fmt.Errorf("list the members of %s: %w", c.cfg.Flow, err)
	}
	var members []MemberInfo
	for _, item := range items {
		if item.Deleted {
			continue
		}
		var info MemberInfo
		if err := json.Unmarshal(item.Value, &info); err != nil {
			return nil, Assignment{}, fmt.Errorf("%w: key %s: %w", ErrRecord, item.Key, err)
		}
		info.Renewed = item.Time
		members = append(members, info)
	}
	var assignment Assignment
	item, err := c.bucket.Get(ctx, assignmentKey(c.cfg.Flow))
	switch {
	case errors.Is(err, bus.ErrNotFound):
	case err != nil:
		return nil, Assignment{}, fmt.Errorf("read the assignment of %s: %w", c.cfg.Flow, err)
	default:
		if err := json.Unmarshal(item.Value, &assignment); err != nil {
			return nil, Assignment{}, fmt.Errorf("%w: key %s: %w", ErrRecord, item.Key, err)
		}
	}
	return members, assignment, nil
}
