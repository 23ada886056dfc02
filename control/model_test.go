package control

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// simEntry is a key of simStore.
type simEntry struct {
	rev    uint64
	ttl    time.Duration
	stored time.Time

	member     MemberInfo
	task       TaskRecord
	assignment Assignment
}

// simStore is a bucket with compare-and-set and expiry, in its own words.
type simStore struct {
	now  time.Time
	seq  uint64
	keys map[string]simEntry
}

func (s *simStore) get(key string) (simEntry, bool) {
	e, ok := s.keys[key]
	if ok && e.ttl > 0 && !s.now.Before(e.stored.Add(e.ttl)) {
		delete(s.keys, key)
		return simEntry{}, false
	}
	return e, ok
}

func (s *simStore) cas(key string, rev uint64, e simEntry) (uint64, bool) {
	if was, _ := s.get(key); was.rev != rev {
		return 0, false
	}
	s.seq++
	e.rev, e.stored = s.seq, s.now
	s.keys[key] = e
	return s.seq, true
}

func (s *simStore) peers() (live []peer) {
	for _, key := range slices.Sorted(maps.Keys(s.keys)) {
		if e, ok := s.get(key); ok && strings.HasPrefix(key, "member.") {
			live = append(live, peer{e.member.Name, "h", e.member.Leaving})
		}
	}
	return live
}

// written are the revisions of all keys but those of members.
func (s *simStore) written() map[string]uint64 {
	revs := map[string]uint64{}
	for key, e := range s.keys {
		if !strings.HasPrefix(key, "member.") {
			revs[key] = e.rev
		}
	}
	return revs
}

var simTasks = []string{"0", "1", "2"}

// simClaim is a try to take a task, between its steps.
type simClaim struct {
	task  string
	claim claim
	both  bool // the owner's lease was read, too
	sent  bool // the write is on its way
	acked bool // it was stored
}

// simLook is a look at the assignment, between its steps.
type simLook struct {
	assignment Assignment
	rev        uint64
	listed     bool
	live       []peer
}

// simMember is a process, cut into the steps between which it may be frozen or
// its messages be late.
type simMember struct {
	store          *simStore
	name, instance string
	ttl, stored    time.Duration // its own, and what it told the store
	lease          *lease
	rev            uint64
	heldUntil      time.Time
	settled        bool
	leaving        bool
	ended          bool
	held           map[string]bool
	wanted         []string

	sent    *time.Time // a renewal that was started
	says    MemberInfo // what it carries
	acked   *uint64    // and has been stored
	claimed *simClaim
	looking *simLook
	// open are the tasks that a write of unknown end may have taken, with its
	// revision; late are those writes that may still arrive.
	open map[string]uint64
	late []*simClaim
}

func (m *simMember) key() string { return "member." + m.name }

func (m *simMember) info() MemberInfo {
	m.settled = m.settled || !m.store.now.Before(m.heldUntil)
	return MemberInfo{Name: m.name, Instance: m.instance, Settled: m.settled, Leaving: m.leaving}
}

func (m *simMember) join() {
	s := m.store
	former, there := s.get(m.key())
	m.stored = max(m.ttl, former.ttl)
	m.lease = newLease(s.now, m.ttl)
	m.held, m.open = map[string]bool{}, map[string]uint64{}
	if there {
		m.heldUntil = s.now.Add(heldFor(former.ttl, former.stored, s.now))
	}
	m.settled = !there
	rev, ok := s.cas(m.key(), former.rev, simEntry{member: m.info(), ttl: m.stored})
	if !ok {
		panic("nobody can have been in between")
	}
	m.rev = rev
}

func (m *simMember) end() {
	m.lease.end()
	m.ended = true
}

func (m *simMember) send() {
	if m.sent == nil && m.lease.trusted(m.store.now) {
		now := m.store.now
		m.sent, m.says = &now, m.info()
	}
}

func (m *simMember) arrive() {
	if m.sent == nil || m.acked != nil {
		return
	}
	rev, ok := m.store.cas(m.key(), m.rev, simEntry{member: m.says, ttl: m.stored})
	if !ok { // replaced, or expired
		m.end()
		return
	}
	m.acked = &rev
}

func (m *simMember) ack() {
	if m.acked == nil {
		return
	}
	m.rev = *m.acked
	if !m.lease.renewed(*m.sent, m.store.now, m.ttl) {
		m.ended = true
	}
	m.sent, m.acked = nil, nil
}

// claim takes the next step of a try to take a task. It does not ask whether the
// task is assigned: safety must not depend on that.
func (m *simMember) claim(task string) {
	s, c := m.store, m.claimed
	switch {
	case c == nil:
		e, _ := s.get("task." + task)
		m.claimed = &simClaim{task: task, claim: claim{task: e.task, heldUntil: m.heldUntil}}
		m.claimed.claim.task.Revision = e.rev
	case !c.both:
		if e, ok := s.get("member." + c.claim.task.Owner); ok {
			c.claim.owner = holder{true, e.member.Instance, e.member.Settled}
		}
		c.both = true
	case !c.sent:
		verdict := mayTake(m.name, m.instance, c.claim, s.now)
		switch {
		case verdict == claimLost:
			m.end()
		case verdict == claimOurs && m.lease.trusted(s.now):
			m.held[c.task] = true
			delete(m.open, c.task)
		case verdict == claimTake && m.lease.trusted(s.now):
			c.sent = true
			return
		case c.claim.task.Revision != m.open[c.task]:
			delete(m.open, c.task)
		}
		m.claimed = nil
	case !c.acked:
		m.claimed = nil
		if c.store(m) {
			c.acked, m.claimed = true, c
		}
	default:
		if m.lease.trusted(s.now) {
			m.held[c.task] = true
		}
		delete(m.open, c.task)
		m.claimed = nil
	}
}

// lose gives the try up that is under way: its answer does not come, and its write
// arrives later, or never.
func (m *simMember) lose() {
	if c := m.claimed; c != nil && c.sent {
		m.open[c.task] = c.claim.task.Revision
		if !c.acked {
			m.late = append(m.late, c)
		}
	}
	m.claimed = nil
}

// tidy gives back what is not wanted and may have been taken.
func (m *simMember) tidy() {
	for task, rev := range m.open {
		if slices.Contains(m.wanted, task) {
			continue
		}
		delete(m.open, task)
		e, _ := m.store.get("task." + task)
		e.task.Revision = e.rev
		if next, write := disowned(m.name, m.instance, e.task, rev); write {
			m.store.cas("task."+task, e.rev, simEntry{task: next})
		}
	}
}

// store is when the write of m arrives, which may be after m's end.
func (c *simClaim) store(m *simMember) bool {
	_, ok := m.store.cas("task."+c.task, c.claim.task.Revision, simEntry{task: TaskRecord{Owner: m.name, Instance: m.instance}})
	return ok
}

func (m *simMember) release(task string) {
	if m.claimed != nil && m.claimed.task == task {
		return // one of the two at a time
	}
	delete(m.held, task)
	e, _ := m.store.get("task." + task)
	if e.task.Owner == m.name && e.task.Instance == m.instance {
		m.store.cas("task."+task, e.rev, simEntry{})
	}
}

// look takes the next step of a look.
func (m *simMember) look() {
	l := m.looking
	switch {
	case l == nil:
		e, _ := m.store.get("assignment")
		m.looking = &simLook{assignment: e.assignment, rev: e.rev}
	case !l.listed:
		l.live, l.listed = m.store.peers(), true
	default:
		m.looking = nil
		next, changed, err := rebalanced(l.assignment, l.live, m.name, "h", simTasks)
		if err != nil {
			panic(err) // there is one definition
		}
		if changed {
			if _, ok := m.store.cas("assignment", l.rev, simEntry{assignment: next}); !ok {
				return
			}
		}
		m.wanted = next.Owners[m.name]
	}
}

func (m *simMember) leave() {
	m.end()
	if e, ok := m.store.get(m.key()); ok && e.member.Instance == m.instance && !m.store.now.Before(m.heldUntil) {
		delete(m.store.keys, m.key())
	}
}

// through takes the usual way without an interruption, so that take-overs are not
// too rare among the random steps.
func (m *simMember) through() {
	m.send()
	m.arrive()
	m.ack()
	m.lose()
	m.looking = nil
	for range 3 {
		if !m.ended {
			m.look()
		}
	}
	m.tidy()
	for _, task := range simTasks {
		switch wants := slices.Contains(m.wanted, task); {
		case !wants && m.held[task]:
			m.release(task)
		case wants && !m.held[task]:
			for range 5 {
				if !m.ended {
					m.claim(task)
				}
			}
			m.claimed = nil
		}
	}
}

// sim is the store and the processes.
type sim struct {
	store   *simStore
	members []*simMember
}

func (s *sim) alive() (alive []*simMember) {
	for _, m := range s.members {
		if !m.ended && m.lease.trusted(s.store.now) {
			alive = append(alive, m)
		}
	}
	return alive
}

func (s *sim) pass(d time.Duration) { s.store.now = s.store.now.Add(d) }

func (s *sim) join(t *rapid.T) {
	if len(s.alive()) == 4 { // more of them only dilute what the others do
		return
	}
	m := &simMember{
		store: s.store, name: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name"), instance: fmt.Sprint(len(s.members)),
		ttl: time.Duration(rapid.SampledFrom([]int{2, 4}).Draw(t, "ttl")) * time.Second,
	}
	m.join()
	s.members = append(s.members, m)
}

// pick lets a member do something, if there is one.
func (s *sim) pick(t *rapid.T, do func(*simMember)) {
	var going []*simMember
	for _, m := range s.members {
		if !m.ended {
			going = append(going, m)
		}
	}
	if len(going) > 0 {
		do(rapid.SampledFrom(going).Draw(t, "member"))
	}
}

// arrive lets the oldest late write of every process arrive, also of those that have
// ended.
func (s *sim) arrive(*rapid.T) {
	for _, m := range s.members {
		if m.ended && m.claimed != nil {
			m.lose()
		}
		if len(m.late) > 0 {
			m.late[0].store(m)
			m.late = m.late[1:]
		}
	}
}

// apart fails when a task is held by two that trust their leases.
func (s *sim) apart(t *rapid.T) {
	by := map[string]string{}
	for _, m := range s.alive() {
		for task := range m.held {
			if other, twice := by[task]; twice {
				t.Fatalf("task %s is held by %s and %s", task, other, m.name+m.instance)
			}
			by[task] = m.name + m.instance
		}
	}
}

// settle lets those that are left go on without a disturbance: they share the
// tasks, and then nothing but leases is written.
func (s *sim) settle(t *rapid.T) {
	for range 20 { // twice the longest lease
		for _, m := range s.alive() {
			m.through()
			s.apart(t)
		}
		s.arrive(t)
		s.pass(400 * time.Millisecond)
	}
	before := maps.Clone(s.store.written())
	for range 10 {
		for _, m := range s.alive() {
			m.through()
		}
		s.pass(400 * time.Millisecond)
	}
	if after := s.store.written(); !maps.Equal(before, after) {
		t.Fatalf("written: %v, then %v", before, after)
	}
	var going []*simMember
	held := 0
	for _, m := range s.alive() {
		if m.leaving {
			continue
		}
		going = append(going, m)
		held += len(m.held)
	}
	if len(going) == 0 {
		return
	}
	if held != len(simTasks) {
		t.Fatalf("%d of %d tasks are held: %+v", held, len(simTasks), s.store.keys)
	}
	for _, m := range going {
		if n := len(m.held); n < len(simTasks)/len(going) || n > (len(simTasks)+len(going)-1)/len(going) {
			t.Fatalf("%s holds %d of %d tasks among %d", m.name, n, len(simTasks), len(going))
		}
	}
}

// TestMembers_model lets processes join, renew, look, take over, yield, freeze and
// die in any order, with any delay between any two of their steps. At no time may
// two of them hold a task and trust their leases; and when they are left alone they
// come to share the tasks and to rest.
func TestMembers_model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := &sim{store: &simStore{now: scriptTime(0), keys: map[string]simEntry{}}}
		ms := func(t *rapid.T, most int) {
			s.pass(time.Duration(rapid.IntRange(1, most).Draw(t, "ms")) * time.Millisecond)
		}
		t.Repeat(map[string]func(*rapid.T){
			"time passes":      func(t *rapid.T) { ms(t, 400) },
			"much time passes": func(t *rapid.T) { ms(t, 3000) },
			"join":             s.join,
			"renewal sent":     func(t *rapid.T) { s.pick(t, func(m *simMember) { m.send() }) },
			"renewal stored":   func(t *rapid.T) { s.pick(t, func(m *simMember) { m.arrive() }) },
			"renewal acked":    func(t *rapid.T) { s.pick(t, func(m *simMember) { m.ack() }) },
			"claim": func(t *rapid.T) {
				s.pick(t, func(m *simMember) { m.claim(rapid.SampledFrom(simTasks).Draw(t, "task")) })
			},
			"claim on":          func(t *rapid.T) { s.pick(t, func(m *simMember) { m.claim("0") }) },
			"answer lost":       func(t *rapid.T) { s.pick(t, func(m *simMember) { m.lose() }) },
			"late claim stored": s.arrive,
			"release": func(t *rapid.T) {
				s.pick(t, func(m *simMember) { m.release(rapid.SampledFrom(simTasks).Draw(t, "task")) })
			},
			"look":         func(t *rapid.T) { s.pick(t, func(m *simMember) { m.look() }) },
			"steps on":     func(t *rapid.T) { s.pick(t, func(m *simMember) { m.through() }) },
			"steps on too": func(t *rapid.T) { s.pick(t, func(m *simMember) { m.through() }) },
			"yield":        func(t *rapid.T) { s.pick(t, func(m *simMember) { m.leaving = true }) },
			"leave":        func(t *rapid.T) { s.pick(t, func(m *simMember) { m.leave() }) },
			"die":          func(t *rapid.T) { s.pick(t, func(m *simMember) { m.ended = true }) },
			"":             s.apart,
		})
		s.settle(t)
	})
}
