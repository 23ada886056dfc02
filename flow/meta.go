package flow

import "time"

// Meta is what is known of a record besides its value: where it stands in its
// source and, after a KeyBy, its key. A step gets a pointer to it that is valid
// during the call only, and must not change it.
//
// The result of a window that has closed, or of a timer, comes of no single record: it
// has a key and times, and neither Stream, Subject, Seq nor Raw. So has what comes of a
// drain.
type Meta struct {
	// Stream is the name of the source stream.
	Stream string
	// Subject is the subject under which the source holds the record.
	Subject string
	// Seq is the record's sequence in the source stream.
	Seq uint64
	// Key is the record's key; empty before a KeyBy.
	Key string

	nanos int64
	// at is the time of the record by the clock of its source, mark the watermark
	// before it.
	at, mark int64
	raw      []byte
	// ahead: at is beyond the MaxAhead of the clock.
	ahead bool
	// frame is the sequence in the exchange by which the record came, 0 in the first
	// stage.
	frame uint64
	// timers is the step whose function runs, if that has timers.
	timers    timerSetter
	drop      bool
	unchanged bool
	pane      Pane
}

// Time returns the timestamp that the source stream gave the record. It never
// goes back within one stream.
func (m *Meta) Time() time.Time { return time.Unix(0, m.nanos).UTC() }

// UnixNano returns [Meta.Time] in nanoseconds since 1970.
func (m *Meta) UnixNano() int64 { return m.nanos }

// EventTime returns the time of the record by the [Clock] of its source: that of
// [Meta.Time] unless the source has an [EventTime]. Of a result of a window it is
// the last moment of the window. Of one that a drain or the watermark makes of a step
// that knows no end, it is the watermark, or the last record of the window if that is
// later; 1970 in a flow without either.
func (m *Meta) EventTime() time.Time { return time.Unix(0, m.at).UTC() }

// Pane returns what kind of result the value is; [PaneNone] for all ordinary ones.
func (m *Meta) Pane() Pane { return m.pane }

// Raw returns the payload of the source record, unchanged by the steps before; behind
// a [Rekey] the value as it crossed, in the bytes of the codec. It must not be
// modified.
func (m *Meta) Raw() []byte { return m.raw }

// DropState makes the stateful step that is running forget the state of this
// key, and its timers, when its function returns; the next record of the key starts
// anew.
func (m *Meta) DropState() { m.drop = true }

// Unchanged tells the stateful step that is running that its function did not
// change the state, so that nothing has to be stored for this record. It is an
// optimisation; a change made all the same is not stored until the next one.
func (m *Meta) Unchanged() { m.unchanged = true }
