// Package control is the part of natsflow that decides whether a flow runs and
// who runs it: commands, the flow record, epochs, cuts, the drain, and the
// membership of worker processes.
//
// # Who is authoritative
//
// Two things are, and both live in NATS:
//
//   - the control stream (NATSFLOW_CONTROL, subjects control.>) holds the
//     commands in one total order. An empty message to control.drain, sent by
//     "nats pub" or anything else, is a command; a worker that was away finds it
//     there later;
//   - the flow record (bucket natsflow_control, key <flow>.flow) is the desired
//     and the actual state of a flow. It is changed by compare-and-set only and
//     remembers the sequence of the last command that was looked at, so that a
//     command takes effect once whichever process applies it.
//
// There is no leader. Any process may take the next step; the compare-and-set
// lets one of them do it, and every step is written so that taking it again
// changes nothing.
//
// # The states of a flow
//
//	            drain                FixCut               Drained
//	running ------------> draining ----------> draining ----------> drained
//	   ^                  (no cut)              (cut)     \-------> finished
//	   |                      |                   |                    |
//	   +----------------------+---- resume -------+--------------------+
//
// A drain opens the next epoch; the epoch never goes back, also when the drain
// is cancelled. The cut of an epoch never changes once it is fixed. A drained
// flow stays drained over restarts until a resume. The mode "finish" ends the
// input: what is open is closed at the cut, and the flow is finished instead of
// drained. It needs a flow that runs; one that is drained has kept what is open.
//
// # Members and the trust window of a lease
//
// Each process has a lease, the key <flow>.member.<name> with a time to live,
// renewed every third of it by compare-and-set. The process trusts its lease
// until the moment at which the last successful renewal was STARTED, plus the
// time to live, less a margin of a quarter of it. The server counts from the
// moment at which it stored the renewal, which is later, so trust always ends
// before the lease does, however long the acknowledgement or the process was
// held up. [Member.Trusted] only reads a clock: a process that was frozen finds
// itself not trusted at the first look after it wakes.
//
// # Who shall run a task, and who may
//
// Tasks are named by the caller. Two kinds of keys are about them:
//
//   - <flow>.assignment, one record: which member SHALL run which tasks. It is a
//     wish, computed by [Assign] over the live members of one definition: balanced,
//     with as few moves as possible, and the same whoever computes it. Any member
//     writes it by compare-and-set when it finds it out of date;
//   - <flow>.task.<task>, a record each ([TaskRecord]): which instance HOLDS the
//     task. It is the permission, and is only changed by compare-and-set: from free
//     to an owner and back, or to another owner when the former one's lease is gone.
//
// A member acquires what the assignment gives it ([Member.Wanted],
// [Member.Acquire]) and releases what it takes away ([Member.Release]). So a task
// moves at once when its owner releases it, and after the time to live when the
// owner died or froze. One who leaves says so first ([Member.Yield]), so that the
// others know what they will get while it still finishes.
//
// A process that joins under the name of another replaces it. What the former one
// held waits until its lease cannot be trusted any more; from then on the entry of
// the new one says "settled", and any member may take what it is not assigned.
//
// An acquisition of which the answer was lost may have succeeded without anybody
// knowing, or may still do so. If the task is not wanted by then, the member gives
// it back by itself, and writes its record again if it was not taken, which makes
// a late write fail. Otherwise its live owner would keep it for ever.
//
// # Who watches whom
//
// The members are a ring, by name. Each watches the assignment, its own key, and
// the key of its neighbour; when that is gone it computes the assignment anew. Two
// neighbours that die together are found one after the other: the look at the first
// death makes the second one the neighbour. A member that joins sees to its share
// itself. As hints can be lost, every member also reads the assignment and its
// neighbour's key about every fourth renewal, and the keys of all members now and
// then, so rarely that the cost for each does not grow with their number.
//
// Members of different definitions do not work on the same tasks: the assignment
// has the hash of its definition, and a process of another ends with ErrDefinition
// as long as one of those members lives. [Control.Define] refuses before that.
//
// Leases make take-overs fast and keep two processes from working against each
// other. They are not what makes a flow correct: that is the compare-and-set on
// the task logs.
//
// # The core and the driver
//
// [Record], [ParseCommand], the drain, the arithmetic of trust, [Assign], [CutOf]
// and the decision whether a task may be taken are pure: values in, values out, no
// clock, no goroutine, no I/O. [Control] and [Member] are the thin driver that
// feeds them from NATS.
package control
