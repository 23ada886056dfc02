// Package flowtest runs a flow in memory, for the tests of its users: without a
// server, without waiting, in a millisecond or so.
//
// A [Runner] pushes records through the routers and tasks that a worker runs, and
// keeps what they seal as a worker keeps it in JetStream. Time is what the records
// say, and what [Runner.Pause] lets pass. In between a test can stop the flow at its
// cut and let it go on ([Runner.Drain]), or lose all that was not committed
// ([Runner.Crash]): neither may change the results. [Runner.Finish] ends the input.
//
//	r := flowtest.New(t, f)
//	r.Push(flowtest.Record{Stream: "ORDERS", Subject: "orders.eu", Data: `{"id": 1}`})
//	r.Pause(time.Hour)
//	r.Crash()
//	for _, res := range r.Results("TOTALS") { … }
package flowtest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"natsflow/flow"
)

// TB is the part of testing.TB that a Runner uses.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
}

// panicking stands for the test of an Example.
type panicking struct{}

func (panicking) Helper()                           {}
func (panicking) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// Record is a message of a source stream.
type Record struct {
	// Stream may be left out where the flow has one source.
	Stream string
	// Subject defaults to the name of the stream.
	Subject string
	// Time is the timestamp that the stream gives the message. Defaults to the time
	// of the Runner, which moves to it otherwise; timestamps never go back.
	Time time.Time
	// Data is the payload.
	Data string
}

// Result is what a flow has published.
type Result struct {
	// Sink is the name of the stream or of the bucket, Kind says which. Dead
	// letters have neither a name.
	Sink string
	Kind flow.SinkKind
	// Subject that it was published on; of a bucket, $KV.<bucket>.<key>.
	Subject string
	// Headers by their names, as dead letters have them.
	Headers map[string]string
	Data    string
}

// Start is the time at which a Runner begins.
var Start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// Runner runs a flow. It belongs to one test.
type Runner struct {
	tb      TB
	f       *flow.Flow
	now     time.Time
	sources []*source
	// tasks of the first stage, by partition, and later those of the others, by stage
	// from 1 on.
	tasks   []*task
	later   [][]*task
	routers []*flow.Router
	// exchange has the frames that the tasks have published, each at its sequence.
	exchange []flow.Output
	results  []Result
	late     int
	tables   tables
	// quiet: time has passed since the last record.
	quiet bool
	// epoch is the number of drains.
	epoch uint64
}

// source is a source stream and its reader.
type source struct {
	info    flow.SourceInfo
	router  *flow.Router
	records []message
	// routed is the number of records that have been read.
	routed int
}

type message struct {
	subject string
	nanos   int64
	data    []byte
	// gone: the bucket has replaced it.
	gone bool
}

// task is a task with its log.
type task struct {
	*flow.Task
	// log is what is committed: images of state, and with the last of them the
	// position in each source, the highest time up to there, and the watermark.
	log    [][]byte
	at     []mark
	played []uint64
	// crossed is the position in the exchange of a task of a later stage.
	crossed int
}

type mark struct {
	seq     uint64
	highest int64
	mark    int64
	stream  int64
}

// New starts a flow at [Start], without records. tb is the *testing.T of the test; an
// Example has none and passes nil, so that what goes wrong is a panic.
func New(tb TB, f *flow.Flow) *Runner {
	if tb == nil {
		tb = panicking{}
	}
	r := &Runner{tb: tb, f: f, now: Start, tables: newTables(f)}
	for i, info := range f.Sources() {
		r.sources = append(r.sources, &source{info: info, router: f.Router(i)})
	}
	for p := range f.Options().Partitions {
		t := &task{Task: r.newTask(0, p), played: make([]uint64, len(r.sources))}
		for i := range r.sources {
			t.at = append(t.at, mark{highest: r.sources[i].router.HighestTime(), mark: t.Watermark(i), stream: t.StreamTime(i)})
		}
		r.tasks = append(r.tasks, t)
	}
	for stage := 1; stage < f.Stages(); stage++ {
		r.routers = append(r.routers, f.ExchangeRouter(stage))
		var tasks []*task
		for p := range f.Options().Partitions {
			tasks = append(tasks, &task{Task: r.newTask(stage, p)})
		}
		r.later = append(r.later, tasks)
	}
	return r
}

// Now returns the time of the Runner.
func (r *Runner) Now() time.Time { return r.now }

// Push plays records, as one batch. It ends the test where the flow stops at one of
// them.
func (r *Runner) Push(records ...Record) {
	r.tb.Helper()
	if err := r.Try(records...); err != nil {
		r.tb.Fatalf("push: %v", err)
	}
}

// Try is Push for a flow that stops at a record that fails: it returns the
// *flow.StepError. What was not committed before is to be thrown away then, by
// [Runner.Crash].
func (r *Runner) Try(records ...Record) error {
	r.tb.Helper()
	r.quiet = false
	for _, rec := range records {
		src := r.source(rec.Stream)
		if rec.Time.After(r.now) {
			r.now = rec.Time
		}
		if rec.Subject == "" {
			rec.Subject = src.info.Stream
		}
		src.records = append(src.records, message{subject: rec.Subject, nanos: r.now.UnixNano(), data: []byte(rec.Data)})
	}
	return r.read()
}

func (r *Runner) source(stream string) *source {
	r.tb.Helper()
	if stream == "" && len(r.sources) == 1 {
		return r.sources[0]
	}
	for _, s := range r.sources {
		if s.info.Stream == stream {
			return s
		}
	}
	r.tb.Fatalf("push: the flow does not read a stream %q", stream)
	return nil
}

// read plays what is there to read, and moves the watermarks.
func (r *Runner) read() error {
	for i, src := range r.sources {
		for ; src.routed < len(src.records); src.routed++ {
			m := src.records[src.routed]
			if m.gone {
				continue
			}
			if err := src.router.Route(m.subject, uint64(src.routed+1), m.nanos, m.data); err != nil {
				return err
			}
		}
		var failed error
		note := func(err error) {
			if failed == nil {
				failed = err
			}
		}
		src.router.Take(func(b *flow.Batch) {
			note(r.tasks[b.Partition].Play(b))
			b.Release()
		})
		ticks, stream := src.router.TakeTicks()
		for _, t := range r.tasks {
			note(t.AdvanceStream(i, stream, ticks))
			if r.f.Timed() {
				note(t.Advance(i, src.router.Watermark()))
			}
			t.played[i] = max(t.played[i], uint64(src.routed))
		}
		if failed != nil {
			return failed
		}
	}
	return nil
}

// Pause lets time pass without a record. The clock of the server goes on, and the
// watermarks of the sources follow as they do in a worker that has read all there
// is. The time of the streams goes on in any case: timers of it fire, and state
// whose TTL is over is dropped. Later stages learn of it with the next commit, as they
// learn of records.
func (r *Runner) Pause(d time.Duration) {
	r.tb.Helper()
	r.now, r.quiet = r.now.Add(d), true
	r.followServer()
}

// followServer lets the watermarks follow the clock of the server.
func (r *Runner) followServer() {
	r.tb.Helper()
	if !r.f.Timed() {
		return
	}
	for i, src := range r.sources {
		last := Start.UnixNano()
		if n := len(src.records); n > 0 {
			last = src.records[n-1].nanos
		}
		for _, t := range r.tasks {
			err := t.AdvanceStream(i, r.now.UnixNano(), nil)
			if err == nil {
				err = t.Advance(i, src.router.QuietWatermark(r.now.UnixNano(), last))
			}
			if err != nil {
				r.tb.Fatalf("pause: %v", err)
			}
		}
	}
}

// Commit commits all tasks: their results are published. What goes on to a later
// stage is processed and committed there, too. It ends the test where the flow stops
// at a record there.
func (r *Runner) Commit() {
	r.tb.Helper()
	if err := r.TryCommit(); err != nil {
		r.tb.Fatalf("commit: %v", err)
	}
}

// TryCommit is Commit for a flow that stops at a record that fails in a later stage:
// it returns the *flow.StepError. The stages before are committed.
func (r *Runner) TryCommit() error {
	r.tb.Helper()
	for _, t := range r.tasks {
		r.seal(t)
		for i, src := range r.sources {
			// A task may be ahead of the reader, which has gone back for another.
			t.at[i] = mark{t.played[i], max(t.at[i].highest, src.router.HighestTime()), t.Watermark(i), t.StreamTime(i)}
		}
	}
	for i := range r.later {
		if err := r.commitLater(i); err != nil {
			return err
		}
	}
	return nil
}

// commitLater processes what goes on to a later stage, and commits its tasks.
func (r *Runner) commitLater(i int) error {
	r.tb.Helper()
	if err := r.cross(i); err != nil {
		return err
	}
	for _, t := range r.later[i] {
		r.seal(t)
		t.crossed = len(r.exchange)
	}
	return nil
}

// seal commits one task.
func (r *Runner) seal(t *task) {
	r.tb.Helper()
	s, err := t.Seal()
	if err != nil {
		r.tb.Fatalf("commit of task %d.%d: %v", t.Stage(), t.Partition(), err)
	}
	if s.Delta != nil {
		t.log = append(t.log, s.Delta)
	}
	r.late += s.Late
	r.publish(s.Outbox)
}

// cross plays what is in the exchange for the tasks of a stage.
func (r *Runner) cross(i int) error {
	r.tb.Helper()
	router, tasks := r.routers[i], r.later[i]
	from := len(r.exchange)
	for p, t := range tasks {
		router.Seen(p, uint64(t.crossed))
		from = min(from, t.crossed)
	}
	stage := strings.TrimSuffix(flow.ExchangeSubjects(r.f.Name(), i+1), "*")
	for k, o := range r.exchange[from:] {
		if !strings.HasPrefix(string(o.Subject), stage) {
			continue
		}
		p, err := flow.ExchangePartition(string(o.Subject))
		if err == nil {
			err = router.RouteFrame(p, uint64(from+k+1), o.Data)
		}
		if err != nil {
			return err
		}
	}
	var failed error
	router.Take(func(b *flow.Batch) {
		if err := tasks[b.Partition].Play(b); err != nil && failed == nil {
			failed = err
		}
		b.Release()
	})
	return failed
}

func (r *Runner) publish(outbox []byte) {
	r.tb.Helper()
	sinks := r.f.Sinks()
	err := flow.Outputs(outbox, func(_ int, o flow.Output) error {
		if sinks[o.Sink].Kind == flow.SinkExchange {
			o.Subject, o.Data = slices.Clone(o.Subject), slices.Clone(o.Data)
			r.exchange = append(r.exchange, o)
			return nil
		}
		res := Result{Sink: sinks[o.Sink].Name, Kind: sinks[o.Sink].Kind, Subject: string(o.Subject), Data: string(o.Data)}
		for h := 0; h+1 < len(o.Headers); h += 2 {
			if res.Headers == nil {
				res.Headers = map[string]string{}
			}
			res.Headers[o.Headers[h]] = o.Headers[h+1]
		}
		r.results = append(r.results, res)
		return nil
	})
	if err != nil {
		r.tb.Fatalf("results: %v", err)
	}
}

// Drain stops the flow at its cut, which is what was pushed so far, and lets it go
// on from there: all is committed, stored as a whole and loaded again. Windows stay
// open. It is a drain with [flow.Suspend].
func (r *Runner) Drain() {
	r.tb.Helper()
	r.drain(flow.Suspend)
}

// Finish is Drain with [flow.Finish]: the input ends. Then the flow goes on as after a
// resume.
func (r *Runner) Finish() {
	r.tb.Helper()
	r.drain(flow.Finish)
}

// commitBytes is the size of the results at which the end of a drain commits.
const commitBytes = 4 << 10

func (r *Runner) drain(mode flow.DrainMode) {
	r.tb.Helper()
	r.epoch++
	d := flow.Drain{Mode: mode, Epoch: r.epoch, Cut: map[string]uint64{}}
	for _, src := range r.sources {
		d.Cut[src.info.Stream] = uint64(src.routed)
	}
	r.Commit()
	all := append([][]*task{r.tasks}, r.later...)
	for stage, tasks := range all {
		if stage > 0 {
			if err := r.commitLater(stage - 1); err != nil {
				r.tb.Fatalf("drain: %v", err)
			}
		}
		for _, t := range tasks {
			r.end(t, d)
		}
	}
	for _, t := range slices.Concat(all...) {
		r.store(t)
	}
	r.Crash()
}

// end does what a task has to do at the end of a drain, and commits it.
func (r *Runner) end(t *task, d flow.Drain) {
	r.tb.Helper()
	for more := true; more; {
		var err error
		if more, err = t.Drain(d, commitBytes); err != nil {
			r.tb.Fatalf("drain of task %d.%d: %v", t.Stage(), t.Partition(), err)
		}
		r.seal(t)
	}
}

// store stores the state of a task as a whole.
func (r *Runner) store(t *task) {
	r.tb.Helper()
	t.BeginImage()
	t.log = nil
	for more := true; more; {
		part, next, err := t.NextImage(16)
		if err != nil {
			r.tb.Fatalf("image of task %d.%d: %v", t.Stage(), t.Partition(), err)
		}
		if part != nil {
			t.log = append(t.log, part)
		}
		more = next
	}
}

// Crash loses all that was not committed, loads what was, and reads the records
// behind that again. With partitions, only these tasks of each stage are lost, as when
// they go on in another worker.
func (r *Runner) Crash(partitions ...int) {
	r.tb.Helper()
	lost := func(p int) bool { return len(partitions) == 0 || slices.Contains(partitions, p) }
	for p, t := range r.tasks {
		if lost(p) {
			r.load(t)
		}
	}
	for i, tasks := range r.later {
		// A failing record has stopped it.
		r.routers[i] = r.f.ExchangeRouter(i + 1)
		for p, t := range tasks {
			if lost(p) {
				r.load(t)
			}
		}
	}
	for i, src := range r.sources {
		// The reader goes back to the task that is furthest behind, and its clock to
		// what that one knows. Those ahead of it drop what they have had.
		back := mark{seq: uint64(src.routed), highest: src.router.HighestTime()}
		for p, t := range r.tasks {
			if t.played[i] < back.seq {
				back = t.at[i]
			}
			src.router.Seen(p, t.played[i])
		}
		src.routed = int(back.seq)
		src.router.Restart(back.highest)
	}
	if err := r.read(); err != nil {
		r.tb.Fatalf("read again: %v", err)
	}
	if r.quiet {
		r.followServer()
	}
}

func (r *Runner) load(t *task) {
	r.tb.Helper()
	t.Task = r.newTask(t.Stage(), t.Partition())
	for _, image := range t.log {
		if err := t.Load(image); err != nil {
			r.tb.Fatalf("load task %d.%d: %v", t.Stage(), t.Partition(), err)
		}
	}
	t.Loaded()
	if t.Stage() > 0 {
		return
	}
	for i := range r.sources {
		t.Restore(i, t.at[i].mark)
		t.RestoreStream(i, t.at[i].stream)
		t.played[i] = t.at[i].seq
	}
}

// Results commits, and returns what was published to a stream or a bucket so far, in
// the order of the partitions and within one in the order of its making. It is an
// error if the flow has no such sink.
func (r *Runner) Results(sink string) []Result {
	r.tb.Helper()
	if !slices.ContainsFunc(r.f.Sinks(), func(s flow.SinkInfo) bool { return s.Name == sink && sink != "" }) {
		r.tb.Fatalf("results: the flow has no sink %q", sink)
	}
	r.Commit()
	return r.those(func(res Result) bool { return res.Sink == sink })
}

// Data is Results without anything but the payloads.
func (r *Runner) Data(sink string) []string {
	r.tb.Helper()
	var all []string
	for _, res := range r.Results(sink) {
		all = append(all, res.Data)
	}
	return all
}

// DeadLetters commits, and returns the dead letters so far.
func (r *Runner) DeadLetters() []Result {
	r.tb.Helper()
	r.Commit()
	return r.those(func(res Result) bool { return res.Kind == flow.SinkDead })
}

// Errors is DeadLetters without anything but "step: error".
func (r *Runner) Errors() []string {
	r.tb.Helper()
	var all []string
	for _, res := range r.DeadLetters() {
		all = append(all, fmt.Sprintf("%s: %s", res.Headers[flow.HeaderDeadStep], res.Headers[flow.HeaderDeadError]))
	}
	return all
}

func (r *Runner) those(is func(Result) bool) []Result {
	var all []Result
	for _, res := range r.results {
		if is(res) {
			all = append(all, res)
		}
	}
	return all
}

// Late returns how many records were late, as of the last commit.
func (r *Runner) Late() int { return r.late }

// Keys returns how many keys have state, over all stateful steps.
func (r *Runner) Keys() int {
	n := 0
	for _, t := range slices.Concat(append([][]*task{r.tasks}, r.later...)...) {
		n += t.Keys()
	}
	return n
}
