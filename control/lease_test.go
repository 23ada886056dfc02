package control

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestValidLeaseTTL(t *testing.T) {
	for ttl, ok := range map[time.Duration]bool{
		0: false, time.Second: false, 2 * time.Second: true, 2500 * time.Millisecond: false, 5 * time.Second: true, -5 * time.Second: false,
	} {
		if err := validLeaseTTL(ttl); (err == nil) != ok {
			t.Errorf("%v: %v", ttl, err)
		}
	}
}

func TestLease(t *testing.T) {
	const ttl = 4 * time.Second
	start := time.Now()
	at := func(d time.Duration) time.Time { return start.Add(d) }
	l := newLease(start, ttl)
	for d, want := range map[time.Duration]bool{0: true, 2999 * time.Millisecond: true, 3 * time.Second: false, time.Hour: false} {
		if got := l.trusted(at(d)); got != want {
			t.Errorf("at %v: trusted %v", d, got)
		}
	}
	// Counted from the start of the renewal, not from its acknowledgement.
	if !l.renewed(at(time.Second), at(2900*time.Millisecond), ttl) || !l.trusted(at(3999*time.Millisecond)) || l.trusted(at(4*time.Second)) {
		t.Error("a renewal that took long")
	}
	// One that comes when the trust has run out does not bring it back.
	if l.renewed(at(3500*time.Millisecond), at(4*time.Second), ttl) || l.trusted(at(3*time.Second)) {
		t.Error("a renewal that came too late")
	}
	if l.renewed(at(time.Second), at(time.Second), ttl) || !l.until().IsZero() {
		t.Error("renewed after its end")
	}
}

func TestTrusts_eitherClock(t *testing.T) {
	now := time.Now()
	deadline := now.Add(time.Second)
	if !trusts(deadline, now) {
		t.Error("not trusted before the deadline")
	}
	// The machine slept: its wall clock went on, the monotonic one did not.
	if wall := deadline.Round(0).Add(time.Millisecond); trusts(deadline, wall) {
		t.Error("trusted after a sleep of the machine")
	}
}

func TestHeldFor(t *testing.T) {
	renewed := scriptTime(0)
	for taken, want := range map[time.Duration]time.Duration{
		0: 5 * time.Second, 2 * time.Second: 3 * time.Second, 5 * time.Second: 0, time.Hour: 0, -time.Second: 5 * time.Second,
	} {
		if got := heldFor(5*time.Second, renewed, renewed.Add(taken)); got != want {
			t.Errorf("taken after %v: %v, want %v", taken, got, want)
		}
	}
}

func TestDecide(t *testing.T) {
	now := scriptTime(0)
	a := Assignment{Owner: "a", Instance: "a1", Generation: 7}
	mine := func(g uint64) action {
		return action{kind: actTake, next: Assignment{Owner: "b", Instance: "b1", Generation: g}}
	}
	tests := []struct {
		name string
		s    situation
		want action
	}{
		{"nobody", situation{}, mine(1)},
		{"owner there", situation{assigned: true, assignment: a, owner: holder{true, "a1"}}, action{kind: actStandBy}},
		{"owner replaced by one of its name", situation{assigned: true, assignment: a, owner: holder{true, "a2"}}, action{kind: actStandBy}},
		{"owner gone", situation{assigned: true, assignment: a}, mine(8)},
		{"ours", situation{assigned: true, assignment: Assignment{"b", "b1", 3}, owner: holder{true, "b1"}}, action{kind: actStart}},
		{"of our name, may be trusted", situation{assigned: true, assignment: Assignment{"b", "b0", 3}, owner: holder{true, "b1"}, heldUntil: now.Add(1)}, action{kind: actWait, until: now.Add(1)}},
		{"of our name, run out", situation{assigned: true, assignment: Assignment{"b", "b0", 3}, owner: holder{true, "b1"}, heldUntil: now}, mine(4)},
		{"of our name, which a younger process has", situation{assigned: true, assignment: Assignment{"b", "b2", 3}, owner: holder{true, "b2"}}, action{kind: actLost}},
		{"of our name, which nobody has", situation{assigned: true, assignment: Assignment{"b", "b2", 3}}, action{kind: actLost}},
		{"our instance under another name", situation{assigned: true, assignment: Assignment{"a", "b1", 3}, owner: holder{true, "b1"}}, action{kind: actStandBy}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := decide("b", "b1", tt.s, now); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

// simEntry is a key of simStore.
type simEntry struct {
	rev      uint64
	instance string
	owner    string // of the assignment
	ttl      time.Duration
	stored   time.Time
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

// simMember is a process, cut into the steps between which it may be frozen or
// its messages be late.
type simMember struct {
	name, instance string
	ttl, stored    time.Duration // its own, and what it told the store
	lease          *lease
	rev            uint64
	heldUntil      time.Time
	active, ended  bool

	sent  *time.Time // a renewal that was started
	acked *uint64    // and has been stored
	seen  *situation // what was read
	seenR uint64
	both  bool // the owner's lease was read, too
}

const simAssignment = "assignment"

// TestTakeOver_model lets processes join, renew, look, take over, freeze and die
// in any order, with any delay between any two of their steps. At no time may two
// of them be active and trust their leases.
func TestTakeOver_model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		store := &simStore{now: scriptTime(0), keys: map[string]simEntry{}}
		var members []*simMember
		pass := func(t *rapid.T, most int) {
			ms := rapid.IntRange(1, most).Draw(t, "ms")
			store.now = store.now.Add(time.Duration(ms) * time.Millisecond)
		}
		pick := func(t *rapid.T) *simMember {
			var alive []*simMember
			for _, m := range members {
				if !m.ended {
					alive = append(alive, m)
				}
			}
			if len(alive) == 0 {
				t.Skip()
			}
			return rapid.SampledFrom(alive).Draw(t, "member")
		}
		t.Repeat(map[string]func(*rapid.T){
			"time passes":      func(t *rapid.T) { pass(t, 400) },
			"much time passes": func(t *rapid.T) { pass(t, 3000) },
			"join": func(t *rapid.T) {
				alive := 0
				for _, m := range members {
					if !m.ended {
						alive++
					}
				}
				if alive == 3 { // more of them only dilute what the others do
					t.Skip()
				}
				m := &simMember{
					name: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "name"), instance: fmt.Sprint(len(members)),
					ttl: time.Duration(rapid.SampledFrom([]int{2, 4}).Draw(t, "ttl")) * time.Second,
				}
				m.join(store)
				members = append(members, m)
			},
			"renewal sent":   func(t *rapid.T) { pick(t).send(store) },
			"renewal stored": func(t *rapid.T) { pick(t).arrive(store) },
			"renewal acked":  func(t *rapid.T) { pick(t).ack(store) },
			"read":           func(t *rapid.T) { pick(t).read(store) },
			"act":            func(t *rapid.T) { pick(t).act(store) },
			"steps on":       func(t *rapid.T) { pick(t).through(store) },
			"steps on too":   func(t *rapid.T) { pick(t).through(store) },
			"leave":          func(t *rapid.T) { pick(t).leave(store) },
			"die":            func(t *rapid.T) { pick(t).ended = true },
			"": func(t *rapid.T) {
				var active []string
				for _, m := range members {
					if m.active && !m.ended && m.lease.trusted(store.now) {
						active = append(active, m.name+m.instance)
					}
				}
				if len(active) > 1 {
					t.Fatalf("active at once: %v", active)
				}
			},
		})
	})
}

func (m *simMember) join(s *simStore) {
	former, there := s.get(m.name)
	m.stored = max(m.ttl, former.ttl)
	m.lease = newLease(s.now, m.ttl)
	rev, ok := s.cas(m.name, former.rev, simEntry{instance: m.instance, ttl: m.stored})
	if !ok {
		panic("nobody can have been in between")
	}
	m.rev = rev
	if there {
		m.heldUntil = s.now.Add(heldFor(former.ttl, former.stored, s.now))
	}
}

func (m *simMember) send(s *simStore) {
	if m.sent == nil && m.lease.trusted(s.now) {
		now := s.now
		m.sent = &now
	}
}

func (m *simMember) arrive(s *simStore) {
	if m.sent == nil || m.acked != nil {
		return
	}
	rev, ok := s.cas(m.name, m.rev, simEntry{instance: m.instance, ttl: m.stored})
	if !ok { // replaced, or expired
		m.lease.end()
		m.ended = true
		return
	}
	m.acked = &rev
}

func (m *simMember) ack(s *simStore) {
	if m.acked == nil {
		return
	}
	m.rev = *m.acked
	if !m.lease.renewed(*m.sent, s.now, m.ttl) {
		m.ended = true
	}
	m.sent, m.acked = nil, nil
}

// read reads the assignment, and in a second step the lease of its owner.
func (m *simMember) read(s *simStore) {
	if m.seen == nil {
		e, ok := s.get(simAssignment)
		m.seen = &situation{heldUntil: m.heldUntil, assigned: ok}
		if ok {
			m.seen.assignment = Assignment{Owner: e.owner, Instance: e.instance, Generation: e.rev}
		}
		m.seenR, m.both = e.rev, false
		return
	}
	e, ok := s.get(m.seen.assignment.Owner)
	m.seen.owner, m.both = holder{ok, e.instance}, true
}

func (m *simMember) act(s *simStore) {
	if m.seen == nil || !m.both {
		return
	}
	seen := *m.seen
	m.seen = nil
	act := decide(m.name, m.instance, seen, s.now)
	if act.kind == actLost || m.active && act.kind != actStart {
		m.lease.end()
		m.ended = true
		return
	}
	switch {
	case act.kind == actTake && m.lease.trusted(s.now):
		if _, ok := s.cas(simAssignment, m.seenR, simEntry{instance: m.instance, owner: m.name}); ok {
			m.active = true
		}
	case act.kind == actStart && m.lease.trusted(s.now):
		m.active = true
	}
}

// through takes the usual way without an interruption, so that take-overs are
// not too rare among the random steps.
func (m *simMember) through(s *simStore) {
	m.send(s)
	m.arrive(s)
	m.ack(s)
	if m.ended {
		return
	}
	m.seen = nil
	m.read(s)
	m.read(s)
	m.act(s)
}

func (m *simMember) leave(s *simStore) {
	m.lease.end()
	m.ended = true
	if e, ok := s.get(m.name); ok && e.instance == m.instance && !s.now.Before(m.heldUntil) {
		delete(s.keys, m.name)
	}
}
