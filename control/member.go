package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"natsflow/bus"
)

var (
	// ErrReplaced says that another process joined under the same name. The older one
	// must stop.
	ErrReplaced = errors.New("another process took the name")
	// ErrLeaseLost says that the lease could not be renewed in time, or another process
	// took over. The caller stops its work and may join again.
	ErrLeaseLost = errors.New("the lease is lost")
)

// MemberInfo is what a member tells of itself, stored with its lease.
type MemberInfo struct {
	Name     string    `json:"name"`
	Instance string    `json:"instance"`
	Host     string    `json:"host,omitempty"`
	PID      int       `json:"pid,omitempty"`
	Started  time.Time `json:"started"`
	// TTL is that of the lease on the server, in nanoseconds in JSON.
	TTL time.Duration `json:"ttl_ns"`
	// Status is the member's own; see [Member.SetStatus].
	Status json.RawMessage `json:"status,omitempty"`

	// Renewed is the server's time of the last renewal, Age how long ago that is
	// by the clock of this process (never below 0), and Active whether the flow
	// is assigned to this instance. Only [Control.Members] sets them.
	Renewed time.Time     `json:"-"`
	Age     time.Duration `json:"-"`
	Active  bool          `json:"-"`
}

// JoinOption is an option of Join.
type JoinOption interface{ join(*Member) }

// WithSameName says what to do when a process under the same name was active, has
// been replaced and may not have noticed yet (or is frozen).
type WithSameName struct {
	// Immediate vouches for it that whatever the former process still publishes
	// is refused, because every sink has a fence subject: the flow may be taken
	// over at once. Without it Active waits until the former lease has run out.
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
	// the former one's): a third process starts as soon as ours is gone.
	heldUntil time.Time
	lease     *lease
	active    chan struct{}
	kick      chan struct{} // capacity 1: write the status soon
	looks     chan struct{} // capacity 1: something changed, look at the assignment

	mu      sync.Mutex
	info    MemberInfo
	stop    context.CancelCauseFunc // of Run, nil before it
	stopped chan struct{}           // closed when Run has returned
	left    bool

	// rev is the sequence of our entry. Run's goroutine has it while Run runs,
	// Leave's after that.
	rev uint64
	// wrote is when the last renewal was started.
	wrote time.Time
	// said is what was logged last about the assignment.
	said string
}

func memberKey(flow, name string) string { return flow + ".member." + name }
func assignmentKey(flow string) string   { return flow + ".assignment" }

// Join takes a lease under the configured name. When another process has it, this
// one takes it over; the older finds out at its next look and ends with
// ErrReplaced. The lease lasts only if Run is called.
func (c *Control) Join(ctx context.Context, opts ...JoinOption) (*Member, error) {
	if c.cfg.Flow == "" {
		return nil, fmt.Errorf("join: %w: no flow was named", ErrNoFlow)
	}
	m := &Member{
		c: c, key: memberKey(c.cfg.Flow, c.cfg.Name),
		active: make(chan struct{}), kick: make(chan struct{}, 1), looks: make(chan struct{}, 1),
		stopped: make(chan struct{}),
		info: MemberInfo{
			Name: c.cfg.Name, Instance: c.cfg.Instance, Host: hostname(), PID: os.Getpid(), Started: time.Now().UTC(),
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
	return m, nil
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
	case vacant:
		m.info.TTL, m.heldUntil = m.c.cfg.LeaseTTL, time.Time{}
	case foreign:
		// Set before the write: when its outcome remains unknown, the next try
		// finds our own entry and could not tell any more whom it replaced.
		m.info.TTL = roundUpSecond(max(m.c.cfg.LeaseTTL, m.info.TTL, old.TTL))
		m.heldUntil = time.Now().Add(old.TTL)
	}
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

// Active is closed when the flow is assigned to this instance and it may start.
// Whether it still is then, Trusted and Run's return say.
func (m *Member) Active() <-chan struct{} { return m.active }

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
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// Leave gives up the lease: Trusted becomes false, Run returns nil, and only then
// the lease is removed, so that a successor takes over at once. The caller has
// stopped its work before. It does nothing when another process has the name.
func (m *Member) Leave(ctx context.Context) error {
	m.lease.end()
	m.mu.Lock()
	m.left = true
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
	if time.Now().Before(m.heldUntil) {
		// Whoever sees our lease gone starts at once, but the process that we
		// replaced may still trust its own. Ours outlasts that one: let it run out.
		return nil
	}
	err := retry(ctx, m.c.log, "leave", func() error { return m.deleteKey(ctx) })
	if err != nil {
		return fmt.Errorf("leave: %w", err)
	}
	return nil
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

// Members lists the members of the flow by name, and its assignment (zero when
// there is none).
func (c *Control) Members(ctx context.Context) ([]MemberInfo, Assignment, error) {
	assigned, _, err := c.readAssignment(ctx)
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return nil, assigned, fmt.Errorf("list members: %w", err)
	}
	items, err := c.bucket.List(ctx, memberKey(c.cfg.Flow, ">"))
	if err != nil {
		return nil, assigned, fmt.Errorf("list members: %w", err)
	}
	var members []MemberInfo
	for _, item := range items {
		if item.Deleted {
			continue
		}
		var info MemberInfo
		if err := json.Unmarshal(item.Value, &info); err != nil {
			return nil, assigned, fmt.Errorf("list members: key %s: %w: %w", item.Key, ErrRecord, err)
		}
		info.Renewed, info.Age = item.Time, max(0, time.Since(item.Time))
		info.Active = info.Name == assigned.Owner && info.Instance == assigned.Instance
		members = append(members, info)
	}
	slices.SortFunc(members, func(a, b MemberInfo) int { return strings.Compare(a.Name, b.Name) })
	return members, assigned, nil
}

// readAssignment returns the assignment and its revision, or bus.ErrNotFound.
func (c *Control) readAssignment(ctx context.Context) (Assignment, uint64, error) {
	item, err := c.bucket.Get(ctx, assignmentKey(c.cfg.Flow))
	if err != nil {
		return Assignment{}, 0, err
	}
	var a Assignment
	if err := json.Unmarshal(item.Value, &a); err != nil || a.Owner == "" || a.Instance == "" {
		return Assignment{}, 0, fmt.Errorf("key %s of bucket %s: %w: %w", item.Key, BucketName, ErrRecord, err)
	}
	return a, item.Seq, nil
}
