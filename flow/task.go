package flow

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Names of the headers of a dead letter.
const (
	HeaderDeadFlow    = "Natsflow-Flow"
	HeaderDeadStep    = "Natsflow-Step"
	HeaderDeadError   = "Natsflow-Error"
	HeaderDeadStream  = "Natsflow-Source-Stream"
	HeaderDeadSubject = "Natsflow-Source-Subject"
	HeaderDeadSeq     = "Natsflow-Source-Sequence"
	// HeaderDeadStage is there when the record failed behind a change of key: the
	// payload is then the value as it crossed to that stage, by the codec of the
	// Rekey, and not that of the source record, whose position the others are.
	HeaderDeadStage = "Natsflow-Stage"
	// HeaderDeadKey stands in place of the last three where a window failed that
	// was closing, a timer, or what a drain does at its end: that comes of no single
	// record.
	HeaderDeadKey = "Natsflow-Key"
)

// StepError says which record failed in which step.
type StepError struct {
	// Step is the id of the step.
	Step string
	// Stream, Subject and Seq are the record's position. They are not set where
	// a window failed that was closing, a timer, or what a drain does at its end.
	Stream  string
	Subject string
	Seq     uint64
	// Key is that of the record, if it has one yet, or of what failed without one.
	Key string
	// Frame is the sequence in the exchange of the flow by which the record came to
	// a later stage; 0 in the first one.
	Frame uint64
	// Err is what the step returned, or the panic it raised.
	Err error
}

// Error names step, stream and sequence.
func (e *StepError) Error() string {
	if e.Frame > 0 {
		return fmt.Sprintf("step %q, stream %s, sequence %d, sequence %d of the exchange: %v", e.Step, e.Stream, e.Seq, e.Frame, e.Err)
	}
	if e.Seq == 0 {
		return fmt.Sprintf("step %q, key %q, of no single record: %v", e.Step, e.Key, e.Err)
	}
	return fmt.Sprintf("step %q, stream %s, sequence %d: %v", e.Step, e.Stream, e.Seq, e.Err)
}

// Unwrap returns what the step returned.
func (e *StepError) Unwrap() error { return e.Err }

// ErrResultTooLarge is wrapped by the error of a record that made a result larger
// than the runtime can publish; see [Task.LimitResults].
var ErrResultTooLarge = errors.New("result too large for a message")

// Task runs the keyed steps of one stage for one partition and keeps their state. It
// belongs to one goroutine at a time.
type Task struct {
	f         *Flow
	in        *instance
	stage     int
	partition int
	// exchange writes what goes on to the next stage, nil if nothing does.
	exchange *frameWriter
	// sent and received have the numbers of the last frames to each task of the next
	// stage, and from each of the one before. They are there in any case: what a former
	// definition has counted must not be forgotten.
	sent, received *table[uint64]
	// drained says how far the steps have come with the end of a drain.
	drained    *table[drainMark]
	repeats    int
	acceptLost bool
	// heard has the watermarks of the tasks of the stage before.
	heard    *heard
	byKey    []any
	tables   []stateTable
	byStep   map[string]stateTable
	leftOut  []string
	flushers []flusher
	meta     Meta
	stopped  bool

	outbox        []byte
	outputs, dead int
	records       int
	mostResult    []int // by sink, 0 for no limit
	imageTable    int
	imageSlot     int
	// delta is the memory of the next delta, deltaHint a size that is enough for
	// one like the last.
	delta     []byte
	deltaHint int

	// source and stream are those of the batch that is played.
	source int
	stream string
	// marks are the watermarks of the inputs: the sources, or, in a later stage, the
	// tasks of the stage before. low is the lowest of them, atLow how many are that. now
	// is low, and while something is done that is due, the time at which it was due.
	marks    []int64
	low, now int64
	atLow    int
	// tells: the next stage wants to know low, and that of second; told is what it was
	// told.
	tells, tellLater bool
	told             clocks
	// timers are the steps that wait for times, in their order; firing is the index
	// of the one that does what is due, else -1.
	timers   []timedStep
	firing   int
	late     int
	sweepers []sweeper
	// lookups are what steps look keys up in, nil without any.
	lookups Tables
	// endings are what steps do for each key at the end of a drain, draining is how far
	// that is, nil if no drain has come to its end. finishing: what waits for times is
	// fired for the end of the input, and not for the watermark.
	endings   []*keyedEnding
	draining  *draining
	finishing bool
	// open count the open windows of each step.
	open []func() int
	// second is the clock for the time of the streams where that is not the watermark,
	// else nil; ticks are those of the batch that is played which are still ahead.
	second *streamClock
	ticks  Ticks
	// overdue: a timer was set for a time that has passed. unknown begin what waits for
	// the time of the streams to be known.
	overdue bool
	unknown []func(now int64)
}

// flusher emits what a step has kept back until the seal.
type flusher struct {
	step  int
	flush func()
}

// Task makes the task of a partition in the first stage, without state.
func (f *Flow) Task(partition int) *Task { return f.StageTask(0, partition) }

// StageTask makes the task of a partition in a stage, below [Flow.Stages], without
// state. It has the steps of that stage only.
func (f *Flow) StageTask(stage, partition int) *Task {
	t := &Task{f: f, stage: stage, partition: partition, byStep: map[string]stateTable{}, mostResult: make([]int, len(f.sinks)), firing: -1}
	t.marks = slices.Repeat([]int64{noTime}, f.inputs(stage))
	t.low, t.now, t.told, t.atLow = noTime, noTime, clocks{noTime, noTime}, len(t.marks)
	if f.twoTimes {
		t.second = newStreamClock(len(t.marks))
	}
	t.in = &instance{f: f, memo: map[any]any{}, task: t}
	t.sent, t.received = newTable(t, framesSent, numberCodec), newTable(t, framesReceived, numberCodec)
	t.heard = newHeard(t)
	if t.tells = f.TimedStage(stage + 1); t.tells {
		t.frameWriter()
	}
	t.drained = newTable(t, drainMarks, drainMarkCodec)
	for _, k := range f.keysOf(stage) {
		t.byKey = append(t.byKey, k.bindTask(t.in))
	}
	// A step is made before those that follow it. In this order, what one step
	// emits at a seal is there when the next one emits.
	slices.SortFunc(t.flushers, func(a, b flusher) int { return a.step - b.step })
	byIndex := func(a, b timedStep) int { return a.index() - b.index() }
	slices.SortStableFunc(t.timers, byIndex)
	if t.second != nil {
		slices.SortStableFunc(t.second.timers, byIndex)
	}
	return t
}

// inputs is the number of inputs that have a watermark of their own.
func (f *Flow) inputs(stage int) int {
	if stage > 0 {
		return f.opts.Partitions
	}
	return len(f.sources)
}

// LimitResults makes a result for the sink with that index in [Flow.Sinks] fail
// its record, with [ErrResultTooLarge], when its payload has more than that many
// bytes. Once committed it could never be published, and everything behind it
// would wait for ever. 0, the default, is no limit.
func (t *Task) LimitResults(sink, bytes int) { t.mostResult[sink] = bytes }

// LeaveOut makes [Task.Load] skip the state of steps that the flow does not have
// any more, instead of refusing it. It has no effect on a step that the flow has.
func (t *Task) LeaveOut(stepIDs ...string) { t.leftOut = append(t.leftOut, stepIDs...) }

// keyed returns the closure behind a key step; column 0 is the dead letters'.
func (in *instance) keyed(column int) any {
	if column == 0 {
		return emit[*StepError](func(m *Meta, e *StepError) { in.task.deadLetter(m, e) })
	}
	return in.task.byKey[column-1]
}

// Stage returns the stage of the task.
func (t *Task) Stage() int { return t.stage }

// Partition returns the partition of the task.
func (t *Task) Partition() int { return t.partition }

// Play runs a batch. With [Stop] it returns the *StepError of the first record
// that fails; the task must then be thrown away, since the record may have
// changed a part of the state.
func (t *Task) Play(b *Batch) error {
	t.source, t.stream, t.meta.Stream = b.index, b.source, b.source
	t.records += b.records
	t.ticks = b.ticks
	if len(b.frames) > 0 {
		return t.playFrames(b)
	}
	var at [8]int
	next := at[:]
	if len(b.columns) > len(at) {
		next = make([]int, len(b.columns))
	}
	played := 0
	for _, r := range b.runs {
		for left := r.n; left > 0; {
			from, n := next[r.column], min(left, encodeEvery-played)
			b.columns[r.column].play(t, from, from+n)
			if t.in.halted != nil {
				return t.in.halted
			}
			next[r.column], left = from+n, left-n
			if played += n; played == encodeEvery {
				t.encodeEarly()
				played = 0
			}
		}
	}
	return t.endBatch()
}

// endBatch does what was left for the end of a batch.
func (t *Task) endBatch() error {
	if t.overdue {
		t.settle()
	}
	t.reserveDelta(t.encodeEarly())
	return t.haltedErr()
}

func (t *Task) encodeEarly() (size int) {
	for _, tab := range t.tables {
		size += tab.encodeEarly()
	}
	return size
}

// reserveDelta has the memory of the next delta ready, and written to once: the
// page faults of new memory would be most of the pause of a seal.
func (t *Task) reserveDelta(size int) {
	if size <= cap(t.delta) {
		return
	}
	// The next delta is about as large as the last one, if that was no burst.
	n := min(t.deltaHint, 4*size)
	if n < size {
		n = 2 * size
	}
	t.delta = make([]byte, 0, n)
	clear(t.delta[:cap(t.delta)])
}

// deadLetter puts the record into the outbox, so that it is published exactly
// once like any result.
func (t *Task) deadLetter(m *Meta, e *StepError) {
	headers := []string{
		HeaderDeadFlow, t.f.name,
		HeaderDeadStep, e.Step,
		HeaderDeadError, headerText(e.Err.Error()),
	}
	if m.frame > 0 || t.stage > 0 && m.Seq > 0 {
		headers = append(headers, HeaderDeadStage, strconv.Itoa(t.stage))
	}
	if m.Seq == 0 {
		headers = append(headers, HeaderDeadKey, headerText(m.Key))
	} else {
		headers = append(headers,
			HeaderDeadStream, m.Stream,
			HeaderDeadSubject, m.Subject,
			HeaderDeadSeq, strconv.FormatUint(m.Seq, 10))
	}
	t.outbox = appendOutputHead(t.outbox, t.f.dead, []byte("natsflow.dlq."+t.f.name), headers...)
	t.outbox = appendBytes(t.outbox, m.raw)
	t.outputs++
	t.dead++
}

// headerText makes one line of at most 1,024 bytes of a text, valid UTF-8.
func headerText(s string) string {
	const most = 1024
	if len(s) > most {
		s = s[:most]
	}
	line := strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, ""))
	return strings.TrimSpace(line)
}

// Dirty reports whether there is state or output that no commit holds, other than
// watermarks; see [Task.Unsealed].
func (t *Task) Dirty() bool {
	if len(t.outbox) > 0 || t.exchange != nil && t.exchange.waiting > 0 {
		return true
	}
	for _, tab := range t.tables {
		if tab.dirty() > 0 && tab != stateTable(t.heard.table) {
			return true
		}
	}
	return false
}

// Pending returns about how many bytes of output wait for a commit.
func (t *Task) Pending() int {
	n := len(t.outbox)
	if t.exchange != nil {
		n += t.exchange.waiting
	}
	return n
}

// Sealed is what one commit stores and publishes.
type Sealed struct {
	// Delta holds the changed state, see [Task.Load]; nil if none changed.
	Delta []byte
	// Outbox holds the results, see [Outputs]; nil if there are none.
	Outbox []byte
	// Outputs counts them, DeadLetters those among them that are dead letters, Frames
	// those that take records and watermarks to the next stage.
	Outputs, DeadLetters, Frames int
	// Repeats counts frames that came again, after they had been applied: there should be
	// none.
	Repeats int
	// Records counts the records played since the last seal, Late those among them
	// that came after their window was closed.
	Records, Late int
}

// Seal takes what has changed since the last one. The byte strings belong to the
// caller. An error is that of a state codec, or, with [Stop], the *StepError of a
// step that emits with the commit: the task cannot go on.
func (t *Task) Seal() (Sealed, error) {
	if err := t.flush(); err != nil {
		return Sealed{}, err
	}
	if t.exchange != nil {
		t.exchange.close()
		t.tell()
	}
	s := Sealed{Outputs: t.outputs, DeadLetters: t.dead, Records: t.records, Late: t.late, Repeats: t.repeats}
	var err error
	if s.Delta, err = t.sealState(); err != nil {
		return Sealed{}, err
	}
	if t.exchange != nil {
		s.Frames, t.exchange.frames = t.exchange.frames, 0
	}
	if n := len(t.outbox); n > 0 {
		// The next commit is about as large.
		s.Outbox, t.outbox = t.outbox, make([]byte, 0, n+n/16)
	}
	t.outputs, t.dead, t.records, t.late, t.repeats, t.stopped = 0, 0, 0, 0, 0, false
	return s, nil
}

// flush makes the steps emit what they have kept back, and fires the timers that were
// set then for a time that has passed: nothing else may come that would.
func (t *Task) flush() error {
	for {
		for _, f := range t.flushers {
			f.flush()
			if t.in.halted != nil {
				return t.in.halted
			}
		}
		if !t.overdue {
			return nil
		}
		t.settle()
	}
}

func (t *Task) sealState() ([]byte, error) {
	delta := t.delta
	t.delta = nil
	for _, tab := range t.tables {
		if tab.dirty() == 0 {
			continue
		}
		if delta == nil {
			delta = make([]byte, 0, t.deltaHint)
		}
		err := guard(func() (err error) {
			delta, err = tab.appendDelta(delta)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("step %q: encode state: %w", tab.stepID(), err)
		}
	}
	t.deltaHint = len(delta) + len(delta)/16
	return delta, nil
}

// guard runs a function that calls state codecs. A panic of theirs is an error of
// the task like any other of theirs, not the end of the process.
func guard(fn func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicError(p)
		}
	}()
	return fn()
}
