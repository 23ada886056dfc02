// Package worker runs a flow: it reads the sources, runs the tasks, commits
// their state with the positions and results, publishes the results and stops
// where it is told to.
//
// # The way of a record
//
//	stream ──cursor──> reader ──by partition──> lane: task: steps ──> state + outbox
//	                                              │ commit (one compare-and-set append)
//	                                              ▼
//	                                 task log ──> publish the outbox ──> note the position
//
// A reader takes the records of one source through the steps before the key and
// hands them, sorted by partition, to the lanes. A lane is a goroutine that runs
// the steps of its tasks. A task whose state or outbox has changed is sealed and
// given to its committer, a goroutine that appends the entry to the task's log,
// then publishes the entry's outbox, and only then reports back; meanwhile the
// lane goes on. So one commit of a task is on its way at any time, an idle lane
// commits at once and a busy one in large groups.
//
// Where a flow changes its keys, there are more stages: frames with the records for the
// tasks of the next one are results like any other, for a stream of the flow's own, and
// that stream is what the readers of the next stage read. Watermarks cross in the same
// way, and messages that nobody stores tell other workers what is due (due.go).
//
// A flow may look keys up in KV buckets. Each worker has a copy of them in memory,
// loaded before the first record and followed for as long as it has tasks.
//
// # Who is authoritative
//
//   - The task logs are: state, positions and results of a task change together
//     by one append, which only the owner of the log's last claim can make.
//   - The cursor is not: it is made anew from the positions at each start.
//   - The lease is not: it says when it is worth trying to take over. A worker
//     whose lease has run out can do no harm, since its appends are refused, and
//     since its results go out on a guarded connection that trusts no lease
//     that is over (see package bus), and with a fence where the sink has one.
//
// # Sessions, and tasks that come and go
//
// The workers of a flow share its tasks (see package control). The time in which
// a worker has some is a session. Its conductor, one goroutine, follows the
// assignment and the flow record: it takes tasks that are free, loads them beside
// the running ones, halts the readers for a moment to give them to the lanes, and
// lets the readers go on from where the new tasks are; it has the lanes commit and
// release the tasks that shall go elsewhere; and it stops the readers where a
// drain says.
//
// A session ends by leaving (everything read is committed, published and
// released), by a drain (the same at a cut), when it has no tasks left, or by an
// error, after which nothing in memory is trusted: the next session starts from
// the logs. What a former owner left unpublished, the next one publishes first,
// after it has looked in the sinks for what is there already.
//
// # What each failure does
//
// A connection or a server that is away makes the committers wait; the lanes
// stop at a bound and the readers with them. A lease that runs out meanwhile ends
// the session; the worker joins again. A full bucket makes commits wait, with a
// line in the log every now and then; so does a sink that refuses what was
// committed for it, for its subject or its size, and says what to do. A source that
// drops messages before they are read ends the session with [ErrGap], unless it is a
// bucket, which drops what was replaced. A record that fails is a dead letter, or,
// with on_error stop, ends the session before that record.
package worker
