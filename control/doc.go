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
// flow stays drained over restarts until a resume. The mode "finish" ends in
// finished instead of drained.
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
// The key <flow>.assignment names the one process that is active. A process
// that stands by takes it over, again by compare-and-set, when the owner's lease
// is gone: at once when the owner leaves (it deletes its key), after the time to
// live when it died or froze.
//
// Leases make take-overs fast and keep two processes from working against each
// other. They are not what makes a flow correct: that is the compare-and-set on
// the task logs.
//
// # The core and the driver
//
// [Record], [ParseCommand], the drain, the arithmetic of trust and the decision
// to take over are pure: values in, values out, no clock, no goroutine, no I/O.
// [Control] and [Member] are the thin driver that feeds them from NATS.
package control
