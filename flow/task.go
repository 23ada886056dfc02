package flow

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
)

// Names of the headers of a dead letter.
const (
	HeaderDeadFlow    = "Natsflow-Flow"
	HeaderDeadStep    = "Natsflow-Step"
	HeaderDeadError   = "Natsflow-Error"
	HeaderDeadStream  = "Natsflow-Source-Stream"
	HeaderDeadSubject = "Natsflow-Source-Subject"
	HeaderDeadSeq     = "Natsflow-Source-Sequence"
)

// StepError says which record failed in which step.
type StepError struct {
	// Step is the id of the step.
	Step string
	// Stream, Subject and Seq are the record's position.
	Stream  string
	Subject string
	Seq     uint64
	// Err is what the step returned, or the panic it raised.
	Err error
}

// Error names step, stream and sequence.
func (e *StepError) Error() string {
	return fmt.Sprintf("step %q, stream %s, sequence %d: %v", e.Step, e.Stream, e.Seq, e.Err)
}

// Unwrap returns what the step returned.
func (e *StepError) Unwrap() error { return e.Err }

// ErrPanic is wrapped by the error of a record whose step panicked.
var ErrPanic = errors.New("step panicked")

func panicError(p any) error {
	return fmt.Errorf("%w: %v\n%s", ErrPanic, p, debug.Stack())
}

// Task runs the keyed steps of one partition and keeps their state. It belongs
// to one goroutine at a time.
type Task struct {
	f         *Flow
	in        *instance
	partition int
	byKey     []any
	tables    []stateTable
	byStep    map[string]stateTable
	flushers  []func()
	meta      Meta
	halted    *StepError
	stopped   bool

	delta, outbox  []byte
	outputs, dead  int
	records        int
	imageTable     int
	imageSlot      int
	deltaHint      int
	outboxHint     int
	subjectScratch []byte
}

// Task makes the task of a partition, without state.
func (f *Flow) Task(partition int) *Task {
	t := &Task{f: f, partition: partition, byStep: map[string]stateTable{}}
	t.in = &instance{f: f, memo: map[any]any{}, task: t}
	t.byKey = make([]any, len(f.keys))
	for i, k := range f.keys {
		t.byKey[i] = k.bindTask(t.in)
	}
	return t
}

// keyed returns the closure behind a key step; column 0 is the dead letters'.
func (in *instance) keyed(column int) any {
	if column == 0 {
		return emit[*StepError](func(m *Meta, e *StepError) { in.task.deadLetter(m, e) })
	}
	return in.task.byKey[column-1]
}

// Partition returns the partition of the task.
func (t *Task) Partition() int { return t.partition }

// Play runs a batch. With [Stop] it returns the *StepError of the first record
// that fails; the task must then be thrown away, since the record may have
// changed a part of the state.
func (t *Task) Play(b *Batch) error {
	t.meta.Stream = b.source
	t.records += b.records
	var at [8]int
	next := at[:]
	if len(b.columns) > len(at) {
		next = make([]int, len(b.columns))
	}
	for _, r := range b.runs {
		from := next[r.column]
		b.columns[r.column].play(t, from, from+r.n)
		next[r.column] = from + r.n
		if t.halted != nil {
			return t.halted
		}
	}
	return nil
}

// panicked deals with a panic while a record was played.
func (t *Task) panicked(p any) {
	if h, ok := p.(halt); ok {
		t.halted = h.err
		return
	}
	m := &t.meta
	e := &StepError{Step: t.f.stepID(t.in.step), Stream: m.Stream, Subject: m.Subject, Seq: m.Seq, Err: panicError(p)}
	if t.f.opts.OnError == Stop {
		t.halted = e
		return
	}
	t.deadLetter(m, e)
}

// deadLetter puts the record into the outbox, so that it is published exactly
// once like any result.
func (t *Task) deadLetter(m *Meta, e *StepError) {
	t.outbox = appendOutputHead(t.outbox, t.f.dead, []byte("natsflow.dlq."+t.f.name),
		HeaderDeadFlow, t.f.name,
		HeaderDeadStep, e.Step,
		HeaderDeadError, headerText(e.Err.Error()),
		HeaderDeadStream, m.Stream,
		HeaderDeadSubject, m.Subject,
		HeaderDeadSeq, strconv.FormatUint(m.Seq, 10))
	t.outbox = appendBytes(t.outbox, m.raw)
	t.outputs++
	t.dead++
}

// headerText makes one line of at most 1,024 bytes of a text.
func headerText(s string) string {
	const most = 1024
	if len(s) > most {
		s = s[:most]
	}
	b := []byte(s)
	for i, c := range b {
		if c < ' ' {
			b[i] = ' '
		}
	}
	return string(b)
}

// Dirty reports whether there is state or output that no commit holds.
func (t *Task) Dirty() bool {
	if len(t.outbox) > 0 {
		return true
	}
	for _, tab := range t.tables {
		if tab.dirty() > 0 {
			return true
		}
	}
	return false
}

// Pending returns about how many bytes of output wait for a commit.
func (t *Task) Pending() int { return len(t.outbox) }

// Sealed is what one commit stores and publishes.
type Sealed struct {
	// Delta holds the changed state, see [Task.Load]; nil if none changed.
	Delta []byte
	// Outbox holds the results, see [Outputs]; nil if there are none.
	Outbox []byte
	// Outputs counts them, DeadLetters those among them that are dead letters.
	Outputs, DeadLetters int
	// Records counts the records played since the last seal.
	Records int
}

// Seal takes what has changed since the last one. The byte strings belong to the
// caller. An error is that of a state codec: the task cannot go on.
func (t *Task) Seal() (Sealed, error) {
	for _, flush := range t.flushers {
		flush()
		if t.halted != nil {
			return Sealed{}, t.halted
		}
	}
	if t.deltaHint > 0 {
		t.delta = make([]byte, 0, t.deltaHint)
	}
	for _, tab := range t.tables {
		var err error
		if t.delta, err = tab.appendDelta(t.delta); err != nil {
			return Sealed{}, fmt.Errorf("step %q: encode state: %w", tab.stepID(), err)
		}
	}
	s := Sealed{Delta: t.delta, Outbox: t.outbox, Outputs: t.outputs, DeadLetters: t.dead, Records: t.records}
	t.deltaHint, t.outboxHint = len(t.delta), len(t.outbox)
	t.delta, t.outbox = nil, nil
	if t.outboxHint > 0 {
		t.outbox = make([]byte, 0, t.outboxHint)
	}
	t.outputs, t.dead, t.records, t.stopped = 0, 0, 0, false
	return s, nil
}
