package control

import "time"

// Assignment names the process that is active for a flow.
type Assignment struct {
	// Owner is the name of the member and Instance the process of that name.
	Owner    string `json:"owner"`
	Instance string `json:"instance"`
	// Generation rises by one with each change of instance.
	Generation uint64 `json:"generation"`
}

// holder is who has a lease now.
type holder struct {
	present  bool
	instance string // "" when it cannot be read or nobody has it
}

// situation is what a member sees when it looks: the assignment, and, read AFTER
// it, the lease of its owner. The order matters. A lease that is gone after the
// assignment was read was gone while that assignment was current, and if it has
// changed since, the compare-and-set on its revision fails. Read the other way
// round, an owner that rejoined in between would be robbed.
type situation struct {
	assigned   bool // there is an assignment
	assignment Assignment
	owner      holder
	// heldUntil is when the former process under our own name cannot trust its
	// lease any more; zero when there was none or the caller vouches for it.
	heldUntil time.Time
}

type actionKind string

const (
	actStandBy actionKind = "stand by"
	actTake    actionKind = "take" // write the assignment by compare-and-set
	actWait    actionKind = "wait" // look again at until
	actStart   actionKind = "start"
	actLost    actionKind = "lost" // our own lease is not ours any more
)

type action struct {
	kind  actionKind
	until time.Time  // of actWait
	next  Assignment // of actTake
}

// decide is what the member (name, instance) does in the situation s.
func decide(name, instance string, s situation, now time.Time) action {
	take := action{kind: actTake, next: Assignment{Owner: name, Instance: instance, Generation: s.assignment.Generation + 1}}
	switch {
	case !s.assigned:
		return take
	case s.assignment.Owner == name && s.assignment.Instance == instance:
		return action{kind: actStart}
	case s.assignment.Owner == name && s.owner.instance != instance:
		// We have been replaced and did not know: without this the older process
		// would take the flow from the younger one of its name.
		return action{kind: actLost}
	case s.assignment.Owner == name:
		// A process of our name was active and we hold its lease now. It may not
		// have noticed yet.
		if now.Before(s.heldUntil) {
			return action{kind: actWait, until: s.heldUntil}
		}
		return take
	case s.owner.present:
		// Also when the lease is held by a younger process of that name: it is
		// the one to take over, and it may have to wait before it does.
		return action{kind: actStandBy}
	}
	return take
}
