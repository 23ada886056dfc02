// Package flow is the dataflow API of natsflow: sources, steps with and without
// state, and sinks, typed and pure.
//
// # A flow
//
// A flow is built once and run by package worker:
//
//	b := flow.New("orders", flow.Options{})
//	orders := flow.From(b, flow.Source{Stream: "ORDERS"}, flow.DecodeJSON[Order]())
//	paid := flow.Filter(orders, func(_ *flow.Meta, o Order) (bool, error) { return o.Paid, nil })
//	keyed := flow.KeyBy(paid, func(_ *flow.Meta, o Order) (string, error) { return o.Customer, nil })
//	totals := flow.Stateful(keyed, "total", flow.JSONState[Total](1, nil), addOrder)
//	flow.To(totals, flow.Sink[Total]{...})
//	f, err := b.Build()
//
// Mistakes, such as a step id that is used twice, are reported by Build.
//
// # Purity
//
// The package knows no clock, no goroutine and no I/O: records go in, state and
// an outbox come out. What a function of a step sees besides the value is in
// [Meta]. A function must depend on nothing else that changes, or the results
// after a crash differ from those before it. It must not change anything that
// another call may see either: the tasks of a flow call it at the same time.
//
// # How it runs
//
// A [Router] runs the steps before the key for one source and sorts the records
// by partition; a [Task] runs the others for one partition and owns its state.
// Both bind the steps to closures that call each other with typed values, so
// that no record is boxed and nothing is looked up on its way. A task is sealed
// now and then: what changed since the last seal is a [Sealed], a byte string of
// state and one of results, which the runtime stores in one write. Loading the
// images of state in order brings a new task to the same point.
//
// # Stages
//
// [Rekey] gives a stream another key, also behind state. The records cross to the
// tasks of a further stage, by the codec that it is given, in frames: results of
// the task that they come from, for a stream that is a source of the tasks they go
// to. [Flow.StageTask] makes the tasks of a stage, and [Flow.ExchangeRouter] the router
// that takes frames apart. [Redistribute] lets costly steps before a key run in the tasks
// instead of in every router; the key behind it is one of a Rekey.
//
// # Buckets
//
// A source can be a KV bucket in place of a stream ([Source.Bucket]): its records are
// the changes of the keys, and [DecodeKV] tells values from deletions. [Lookup] enriches
// values by what a bucket has now; the runtime hands the tasks what it knows of the
// buckets ([Tables]).
//
// # Time
//
// A source has a [Clock]: the timestamps of its stream, or a time in the records,
// [EventTime]. Its watermark says up to when all records have come; it is a function
// of the records before, and the watermark of a task is the lowest of its sources'.
// [Window] closes windows when the watermark passes them: what is due at the
// watermark before a record is done before the record. So the results are the same
// in every replay, whoever makes it. A stop closes nothing. Behind a [Rekey] the
// watermark is the lowest of the tasks of the stage before, which tell it with their
// commits: see [Task.Untold].
//
// # The end of a drain
//
// A drain stops the flow at its cut. With [Suspend] all that is open stays for the resume;
// windows may emit what they have so far ([Windows.OnDrain]), and StatefulConfig.OnDrain
// lets a step of yours do so. With [Finish] the input ends: windows close, what waits for
// a time happens, aggregates emit what they have once more. [Meta.Pane] tells such
// results from ordinary ones. [Task.Drain] is what a runtime calls for that.
//
// # Joins
//
// [Join] brings together the records of two keyed streams that have the same key and
// times that are close; [JoinTable] those of a stream with what a table had at their
// time. What has come is kept for as long as a record that is not late may meet it. So
// which results there are does not depend on how the two streams are read.
//
// [StatefulWith] has timers, which wait for the watermark ([Meta.SetTimer]) or for the
// time of the streams ([Meta.SetStreamTimer]) and are a part of the key's state; and its
// state, like that of [Aggregate], can have a TTL, which goes by the time of the streams.
//
// Package natsflow/flow/flowtest runs a flow in memory, for tests.
//
// # Failures
//
// A record that cannot be decoded, or whose step returns an error or panics, is
// put into the outbox as a dead letter, with the original payload; with [Stop]
// the flow stops before it. What the record has changed and emitted until then
// stays. After an error the other steps that follow the same stream get the
// record all the same; a panic ends its way.
package flow
