package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"natsflow/bus"
)

var (
	// ErrReplaced says that another process joined under the same name. The older one
	// must stop.
	ErrReplaced = errors.New("another process took the name")
	// ErrLeaseLost says that the lease could not be renewed in time, so that others may
	// take its tasks. The caller stops its work and may join again.
	ErrLeaseLost = errors.New("the lease is lost")
)

// JoinOption is an option of Join.
type JoinOption interface{ join(*Member) }

// WithSameName says what to do when a process under the same name held tasks, has
// been replaced and may not have noticed yet (or is frozen).
type WithSameName struct {
	// Immediate vouches for it that whatever the former process still publishes
	// is refused, because every sink has a fence subject: its tasks may be taken
	// over at once. Without it Acquire has them wait until the former lease has run
	// out.
	Immediate bool
}

func (o WithSameName) join(m *Member) { m.immediate = o.Immediate }

// Member is this process among the processes of a flow.
type Member struct {
	c         *Control
	key       string
	immediate bool
	// joined is the sequence of our first entry: one of another instance that is
	// later than it has replaced us.
	joined uint64
	// heldUntil is when the process of our name that we replaced cannot trust its
	// lease any more. Ours must not end before that (so info.TTL is not less than
	// the former one's): others take tasks as soon as ours is gone.
	heldUntil time.Time
	lease     *lease
	kick      chan struct{} // capacity 1: write the status soon
	urgent    chan struct{} // capacity 1: renew at once
	looks     chan struct{} // capacity 1: something changed, look at everything
	checks    chan struct{} // capacity 1: there may be something to tidy

	mu      sync.Mutex
	info    MemberInfo
	stop    context.CancelCauseFunc // of Run, nil before it
	stopped chan struct{}           // closed when Run has returned
	left    bool
	// said counts what Tell and Yield changed in info, and acked is how much of
	// that the server has. heard is closed and renewed when acked rises.
	said, acked uint64
	heard       chan struct{}
	// seen is the revision of the assignment that wanted and neighbour are of.
	// wanted is nil until an assignment has this member.
	seen      uint64
	wanted    []string
	rewanted  chan struct{} // closed and renewed when wanted changes
	ring      int           // how many members the assignment has
	neighbour string
	rewatch   context.CancelCauseFunc // of the watch, nil when there is none
	// claims are the tasks that are being acquired, and those of which that had an
	// unknown end, so that the record may come to name us without anybody knowing.
	claims map[string]claimNote

	// rev is the sequence of our entry. Run's goroutine has it while Run runs,
	// Leave's after that.
	rev uint64
	// wrote is when the last renewal was started.
	wrote time.Time
}

// Join takes a lease under the configured name. When another process has it, this
// one takes it over; the older finds out at its next look and ends with
// ErrReplaced. One that joins again, since it lost its lease, takes it from nobody:
// whoever has it by then is the younger, and Join fails with ErrReplaced. The lease
// lasts only if Run is called.
func (c *Control) Join(ctx context.Context, opts ...JoinOption) (*Member, error) {
	if c.cfg.Flow == "" {
		return nil, fmt.Errorf("join: %w: no flow was named", ErrNoFlow)
	}
	if err := validTasks(c.cfg.Tasks); err != nil {
		return nil, fmt.Errorf("join flow %s: %w", c.cfg.Flow, err)
	}
	m := &Member{
		c: c, key: memberKey(c.cfg.Flow, c.cfg.Name),
		kick: make(chan struct{}, 1), urgent: make(chan struct{}, 1), looks: make(chan struct{}, 1), checks: make(chan struct{}, 1),
		stopped: make(chan struct{}), heard: make(chan struct{}), rewanted: make(chan struct{}),
		claims: make(map[string]claimNote),
		info: MemberInfo{
			Name: c.cfg.Name, Instance: c.cfg.Instance, Host: hostname(), PID: os.Getpid(), Started: time.Now().UTC(),
			Hash: c.cfg.Hash, Process: c.process,
		},
	}
	if m.info.Instance == "" {
		m.info.Instance = uuid.NewString()
	}
	for _, o := range opts {
		o.join(m)
	}
	if err := retry(ctx, c.log, "join", func() error { return m.join(ctx) }); err != nil {
		return nil, fmt.Errorf("join flow %s as %s: %w", c.cfg.Flow, c.cfg.Name, err)
	}
	c.joined.Store(true)
	return m, nil
}

// younger reports whether an entry under our name is of a process that joined
// after this one did.
func (c *Control) younger(entry MemberInfo) bool {
	return c.joined.Load() && entry.Process != c.process
}

// join makes one try to take the lease.
func (m *Member) join(ctx context.Context) error {
	former, err := m.c.bucket.Get(ctx, m.key)
	vacant := errors.Is(err, bus.ErrNotFound)
	if err != nil && !vacant {
		return err
	}
	var old MemberInfo
	if !vacant && (json.Unmarshal(former.Value, &old) != nil || old.TTL <= 0) {
		// What cannot be read is replaced all the same, and waited for as long as
		// for a lease of our own.
		old = MemberInfo{TTL: m.c.cfg.LeaseTTL}
	}
	foreign := !vacant && old.Instance != m.info.Instance
	switch {
	case foreign && m.c.younger(old):
		return m.replacedBy(former.Value)
	case vacant:
		m.info.TTL, m.heldUntil = m.c.cfg.LeaseTTL, time.Time{}
	case foreign:
		// Set before the write: when its outcome remains unknown, the next try
		// finds our own entry and could not tell any more whom it replaced.
		m.info.TTL = roundUpSecond(max(m.c.cfg.LeaseTTL, m.info.TTL, old.TTL))
		m.heldUntil = time.Now().Add(old.TTL)
	}
	m.info.Settled = m.immediate || m.heldUntil.IsZero()
	value, err := json.Marshal(m.info)
	if err != nil {
		return err
	}
	started := time.Now()
	if vacant {
		m.rev, err = m.c.bucket.Create(ctx, m.key, value, m.info.TTL)
	} else {
		m.rev, err = m.c.bucket.Update(ctx, m.key, value, former.Seq, m.info.TTL)
	}
	if err != nil {
		return err
	}
	m.wrote, m.joined = started, m.rev
	m.lease = newLease(started, m.c.cfg.LeaseTTL)
	if foreign {
		m.hold(ctx, old, former)
	}
	if m.immediate {
		m.heldUntil = time.Time{}
	}
	return nil
}

// hold shortens the wait for the process that we replaced to what was left of its
// lease, by the server's times of its last renewal and of our entry. When the
// latter cannot be read, all of the lease is waited for.
func (m *Member) hold(ctx context.Context, old MemberInfo, former bus.Item) {
	wait := old.TTL
	if item, err := m.c.bucket.Get(ctx, m.key); err == nil && item.Seq == m.joined {
		wait = heldFor(old.TTL, former.Time, item.Time)
		m.heldUntil = time.Now().Add(wait)
	}
	m.c.log.InfoContext(ctx, "replaced a process of the same name", "member", m.Name(), "host", old.Host, "pid", old.PID, "lease_left", wait)
}

func roundUpSecond(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}

// Name is the member's name.
func (m *Member) Name() string { return m.c.cfg.Name }

// Instance tells this process from others of the same name.
func (m *Member) Instance() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.info.Instance
}

// Trusted reports whether this process may rely on its lease at this moment: no
// other can have taken over. It takes no lock and is cheap enough to be called
// before each write to the network. Once Run has ended it is false for ever.
func (m *Member) Trusted() bool { return m.lease.trusted(time.Now()) }

// Wanted returns the tasks that the flow's assignment gives to this member, in
// order, and a channel that is closed when that changes. nil is "not known yet",
// before the first look; known and none is not nil. It is what to try to acquire
// and, if it is missing here, to release, not a permission.
func (m *Member) Wanted() ([]string, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.wanted), m.rewanted
}

// SetStatus sets what the member tells of itself, with the next renewal. status
// must be valid JSON and is kept.
func (m *Member) SetStatus(status json.RawMessage) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.info.Status = status
}

// PushStatus sends the status that was set last without waiting for the next
// renewal, at most every 200 ms.
func (m *Member) PushStatus() {
	poke(m.kick)
}

// Tell stores what the member says of its stop for a cut with its lease, and
// returns when the server has it: whoever lists the members after that sees it.
// nil takes it back. It needs Run to be running and waits as long as the lease can
// be renewed; ErrLeaseLost when Run has ended.
func (m *Member) Tell(ctx context.Context, s *Stopped) error {
	if err := m.tell(ctx, func(info *MemberInfo) { info.Stopped = s }); err != nil {
		return fmt.Errorf("tell of the stop: %w", err)
	}
	return nil
}

// Yield takes this member out of the assignment while it still has its lease and
// holds its tasks, so that its successors know what they will get while the tasks
// are being released. It is assigned nothing until it joins again. It needs Run to
// be running; ErrLeaseLost when that has ended.
func (m *Member) Yield(ctx context.Context) error {
	// The entry first: whoever computes the assignment after that leaves us out.
	err := m.tell(ctx, func(info *MemberInfo) { info.Leaving = true })
	if err == nil {
		err = retry(ctx, m.c.log, "yield", func() error { return m.look(ctx) })
	}
	if err != nil {
		return fmt.Errorf("yield: %w", err)
	}
	return nil
}

// tell changes our entry and waits until the server has it.
func (m *Member) tell(ctx context.Context, change func(*MemberInfo)) error {
	m.mu.Lock()
	change(&m.info)
	m.said++
	said := m.said
	m.mu.Unlock()
	poke(m.urgent)
	for {
		m.mu.Lock()
		acked, heard := m.acked, m.heard
		m.mu.Unlock()
		if acked >= said {
			return nil
		}
		select {
		case <-heard:
		case <-m.stopped:
			return fmt.Errorf("%w: it is not renewed any more", ErrLeaseLost)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// poke leaves a note in a channel of capacity 1, if there is none yet.
func poke(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Leave gives up the lease: Trusted becomes false, Run returns nil, and only then
// the lease is removed. The caller has released its tasks before; those that it
// did not release are free when the lease is gone, as after a death. It does
// nothing when another process has the name.
func (m *Member) Leave(ctx context.Context) error {
	m.lease.end()
	m.mu.Lock()
	m.left, m.info.Leaving = true, true
	stop := m.stop
	m.mu.Unlock()
	if stop != nil {
		stop(errLeft)
		select {
		case <-m.stopped:
		case <-ctx.Done():
			return fmt.Errorf("leave: %w", context.Cause(ctx))
		}
	}
	m.withdraw(ctx)
	if time.Now().Before(m.heldUntil) {
		// Whoever sees our lease gone takes tasks at once, but the process that we
		// replaced may still trust its own. Ours outlasts that one: let it run out.
		return nil
	}
	err := retry(ctx, m.c.log, "leave", func() error { return m.deleteKey(ctx) })
	if err != nil {
		return fmt.Errorf("leave: %w", err)
	}
	return nil
}

// withdraw makes one try to leave the assignment, so that the others take over at
// once and need not be told that our lease is gone.
func (m *Member) withdraw(ctx context.Context) {
	try, cancel := context.WithTimeout(ctx, m.c.cfg.LeaseTTL/4)
	defer cancel()
	if err := m.look(try); err != nil {
		m.c.log.DebugContext(ctx, "leave the assignment", "err", err)
	}
}

func (m *Member) deleteKey(ctx context.Context) error {
	err := m.c.bucket.Delete(ctx, m.key, m.rev)
	if err == nil || errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	item, own, rerr := m.readOwn(ctx)
	switch {
	case errors.Is(rerr, bus.ErrNotFound), rerr == nil && !own:
		return nil // gone already, or another's
	case rerr == nil:
		m.rev = item.Seq
	}
	return err
}

// readOwn reads the entry of our name and tells whether it is of this instance.
func (m *Member) readOwn(ctx context.Context) (bus.Item, bool, error) {
	item, err := m.c.bucket.Get(ctx, m.key)
	if err != nil {
		return item, false, err
	}
	return item, m.isOwn(item.Value), nil
}

func (m *Member) isOwn(value []byte) bool {
	var info MemberInfo
	return json.Unmarshal(value, &info) == nil && info.Instance == m.Instance()
}
