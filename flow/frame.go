package flow

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"strconv"
)

// ErrFrame says that bytes which should be a frame of the exchange are not one, or one
// that the flow cannot read. Nothing of the frame is applied.
var ErrFrame = errors.New("not a frame that the flow can read")

// ErrLostFrames says that frames are missing in the exchange. Nothing behind them is
// applied.
var ErrLostFrames = errors.New("frames of the exchange are missing")

// A frame takes records to one task of the next stage: those of one commit of one
// task, or a part of them if there are many.
//
//	frame  = version | CRC-32C of the rest, 4 bytes | uvarint stage | uvarint partition
//	         | uvarint partition of the producer | uvarint number | uvarint records | { record }
//	record = flags | [ uvarint n, step id ] | [ uvarint n, stream ] | [ uvarint n, subject ]
//	         | varint sequence | varint timestamp | [ varint time ]
//	         | uvarint n, key | uvarint n, value
//
// The frames from one task to another have numbers from 1 on, which both keep with
// their state. So a frame that comes twice is dropped, and one that is missing is seen.
//
// What is in brackets is there unless a flag says that it is as in the record before.
// Sequence and timestamp are differences from the record before, the time, of an
// [EventTime], that from the timestamp. Before the first record all is empty or 0. One more
// flag says that the time is beyond the MaxAhead of its clock.
const (
	frameVersion = 1

	sameStep    = 1
	sameStream  = 2
	sameSubject = 4
	sameTime    = 8
	tooFarAhead = 16
	frameFlags  = sameStep | sameStream | sameSubject | sameTime | tooFarAhead

	// maxFrameHead is the most that comes before the records.
	maxFrameHead = 1 + 4 + 4*binary.MaxVarintLen32 + binary.MaxVarintLen64
	// maxRecordHead is the most that a record has besides its texts and its value.
	maxRecordHead = 1 + 8*binary.MaxVarintLen64
	// frameBytes is the size at which another frame is begun.
	frameBytes = 256 << 10
	// keepFrame is the memory that an empty frame keeps.
	keepFrame = 64 << 10
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// frameWriter collects what a task has for the tasks of the next stage.
type frameWriter struct {
	t *Task
	// open are the frames by the partition that they are for, touched those that have
	// had records since the last seal, in the order of the first one.
	open    []openFrame
	touched []int
	// sent has the number of the last frame for each partition.
	sent *table[uint64]
	// waiting is the number of bytes in them, frames the number of frames in the outbox
	// since the last seal.
	waiting, frames int
}

// openFrame is a frame that is being written.
type openFrame struct {
	body    []byte
	records int
	touched bool
	// Of the last record; the texts are pieces of body.
	step, stream, subject piece
	seq                   uint64
	nanos                 int64
}

type piece struct{ from, to int }

func (p piece) of(b []byte) string { return string(b[p.from:p.to]) }

func (t *Task) frameWriter() *frameWriter {
	if t.exchange == nil {
		t.exchange = &frameWriter{t: t, open: make([]openFrame, t.f.opts.Partitions), sent: t.sent}
	}
	return t.exchange
}

// add puts a record into the frame for its partition.
func (w *frameWriter) add(step string, m *Meta, key string, value []byte) error {
	size := maxRecordHead + len(step) + len(m.Stream) + len(m.Subject) + len(key) + len(value)
	if most := w.t.mostResult[w.t.f.exchange]; most > 0 && size+maxFrameHead > most {
		return fmt.Errorf("%w: %d bytes with its key and position, of at most %d to cross to the next stage", ErrResultTooLarge, size, most-maxFrameHead)
	}
	p := Partition(key, len(w.open))
	f := &w.open[p]
	if f.records > 0 && len(f.body)+size > w.most() {
		w.put(p)
	}
	if !f.touched {
		f.touched = true
		w.touched = append(w.touched, p)
	}
	was := len(f.body)
	f.append(step, m, key, value)
	w.waiting += len(f.body) - was
	return nil
}

// most is the size that the records of a frame may have.
func (w *frameWriter) most() int {
	if most := w.t.mostResult[w.t.f.exchange]; most > 0 {
		return min(frameBytes, most-maxFrameHead)
	}
	return frameBytes
}

func (f *openFrame) append(step string, m *Meta, key string, value []byte) {
	at := len(f.body)
	b := append(f.body, 0)
	var flags byte
	text := func(last *piece, s string, same byte) {
		if last.of(b) == s {
			flags |= same
			return
		}
		b = binary.AppendUvarint(b, uint64(len(s)))
		*last = piece{len(b), len(b) + len(s)}
		b = append(b, s...)
	}
	text(&f.step, step, sameStep)
	text(&f.stream, m.Stream, sameStream)
	text(&f.subject, m.Subject, sameSubject)
	b = binary.AppendVarint(b, int64(m.Seq-f.seq))
	b = binary.AppendVarint(b, m.nanos-f.nanos)
	if m.at == m.nanos {
		flags |= sameTime
	} else {
		b = binary.AppendVarint(b, m.at-m.nanos)
	}
	if m.ahead {
		flags |= tooFarAhead
	}
	b[at] = flags
	b = binary.AppendUvarint(b, uint64(len(key)))
	b = append(b, key...)
	b = appendBytes(b, value)
	f.body, f.seq, f.nanos = b, m.Seq, m.nanos
	f.records++
}

// close puts all frames into the outbox.
func (w *frameWriter) close() {
	for _, p := range w.touched {
		w.put(p)
		w.open[p].touched = false
	}
	w.touched = w.touched[:0]
}

// put puts the frame for a partition into the outbox, and empties it.
func (w *frameWriter) put(p int) {
	f, t := &w.open[p], w.t
	var head [maxFrameHead]byte
	h := append(head[:0], frameVersion, 0, 0, 0, 0)
	h = binary.AppendUvarint(h, uint64(t.stage+1))
	h = binary.AppendUvarint(h, uint64(p))
	h = binary.AppendUvarint(h, uint64(t.partition))
	c, _ := w.sent.getOrAdd(strconv.Itoa(p))
	w.sent.mark(c)
	c.state++
	h = binary.AppendUvarint(h, c.state)
	h = binary.AppendUvarint(h, uint64(f.records))
	binary.LittleEndian.PutUint32(h[1:], crc32.Update(crc32.Checksum(h[5:], castagnoli), castagnoli, f.body))
	t.outbox = appendOutputHead(t.outbox, t.f.exchange, []byte(ExchangeSubject(t.f.name, t.stage+1, p)))
	t.outbox = binary.AppendUvarint(t.outbox, uint64(len(h)+len(f.body)))
	t.outbox = append(append(t.outbox, h...), f.body...)
	t.outputs++
	w.frames++
	w.waiting -= len(f.body)
	body := f.body[:0]
	if cap(body) > keepFrame {
		body = nil
	}
	*f = openFrame{body: body, touched: f.touched}
}

// The numbers of frames are stored like the state of steps. An id of a step has no
// control characters.
const framesSent, framesReceived = "\x00sent", "\x00received"

var numberCodec = StateCodec[uint64]{
	Append: func(dst []byte, n *uint64) ([]byte, error) { return binary.AppendUvarint(dst, *n), nil },
	Decode: func(data []byte, n *uint64) error {
		v, size := binary.Uvarint(data)
		if size != len(data) || size <= 0 {
			return errNotANumber
		}
		*n = v
		return nil
	},
}

var errNotANumber = errors.New("not a number")

// frameRef is a frame in a batch: its runs begin at run. Or it is a mark, which comes
// behind the runs before.
type frameRef struct {
	producer    int
	number, seq uint64
	run         int

	mark   bool
	clocks clocks
}

// receive takes the number of a frame into account. It reports false for one that was
// applied before.
func (t *Task) receive(f frameRef) (bool, error) {
	c, fresh := t.received.getOrAdd(strconv.Itoa(f.producer))
	if f.number <= c.state {
		t.repeats++
		return false, nil
	}
	if f.number > c.state+1 && !t.acceptLost {
		last := c.state
		if fresh {
			t.received.forget(c)
		}
		return false, fmt.Errorf("%w: before sequence %d, frames %d to %d from task %d.%d to task %d.%d: somebody has removed them",
			ErrLostFrames, f.seq, last+1, f.number-1, t.stage-1, f.producer, t.stage, t.partition)
	}
	t.received.mark(c)
	c.state = f.number
	return true, nil
}

// AcceptLostFrames makes the task go on where frames of the exchange are missing.
func (t *Task) AcceptLostFrames() { t.acceptLost = true }

// playFrames is Play for a batch of the exchange.
func (t *Task) playFrames(b *Batch) error {
	next, played := make([]int, len(b.columns)), 0
	for i, f := range b.frames {
		if f.mark {
			if t.heard.take(f.producer, f.clocks); t.in.halted != nil {
				return t.in.halted
			}
			continue
		}
		end := len(b.runs)
		if i+1 < len(b.frames) {
			end = b.frames[i+1].run
		}
		apply, err := t.receive(f)
		if err != nil {
			return err
		}
		for _, r := range b.runs[f.run:end] {
			from := next[r.column]
			next[r.column] += r.n
			if !apply {
				t.records -= r.n
				continue
			}
			b.columns[r.column].play(t, from, from+r.n)
			if t.in.halted != nil {
				return t.in.halted
			}
			played += r.n
		}
		if played >= encodeEvery {
			t.encodeEarly()
			played = 0
		}
	}
	return t.endBatch()
}

// frameHead is what a frame says of itself.
type frameHead struct {
	stage, partition, producer int
	number                     uint64
	records                    int
}

// frameRecord is a record of a frame.
type frameRecord struct {
	step, stream, subject, key string
	seq                        uint64
	nanos, at                  int64
	ahead                      bool
	value                      []byte
}

// frameReader reads the records of a frame. The texts are pieces of one string, the
// values pieces of the frame.
type frameReader struct {
	head frameHead
	text string
	r    reader
	size int
	left int
	last frameRecord
}

// openFrameReader looks at the head of a frame and checks its bytes.
func openFrameReader(data []byte) (*frameReader, error) {
	if err := checkFrameBytes(data, frameVersion); err != nil {
		return nil, err
	}
	f := &frameReader{r: reader{data: data[5:]}, size: len(data)}
	stage, partition, producer := f.r.uvarint(), f.r.uvarint(), f.r.uvarint()
	number, records := f.r.uvarint(), f.r.uvarint()
	if f.r.bad || number == 0 || max(stage, partition, producer, records) > math.MaxInt32 {
		return nil, fmt.Errorf("%w: its head is damaged", ErrFrame)
	}
	f.head = frameHead{int(stage), int(partition), int(producer), number, int(records)}
	f.left = int(records)
	f.text = string(data)
	return f, nil
}

// checkFrameBytes checks the version and the checksum of what came by the exchange.
func checkFrameBytes(data []byte, want byte) error {
	if len(data) == 0 || data[0] != want {
		version := -1
		if len(data) > 0 {
			version = int(data[0])
		}
		return fmt.Errorf("%w: it has version %d, this natsflow reads version %d there: use the natsflow that wrote it until the flow is drained", ErrFrame, version, want)
	}
	if len(data) < 5 || binary.LittleEndian.Uint32(data[1:]) != crc32.Checksum(data[5:], castagnoli) {
		return fmt.Errorf("%w: its checksum does not match its %d bytes", ErrFrame, len(data))
	}
	return nil
}

// str takes a text.
func (f *frameReader) str() string {
	n := f.r.uvarint()
	at := f.size - len(f.r.data)
	if f.r.take(n) == nil && f.r.bad {
		return ""
	}
	return f.text[at : at+int(n)]
}

// next returns the next record, which is valid until the call after this; nil at the
// end.
func (f *frameReader) next() (*frameRecord, error) {
	if f.left == 0 {
		if len(f.r.data) > 0 {
			return nil, fmt.Errorf("%w: %d bytes come behind its records", ErrFrame, len(f.r.data))
		}
		return nil, nil //nolint:nilnil // the end
	}
	f.left--
	rec := &f.last
	flags := f.r.take(1)
	if f.r.bad || flags[0]&^frameFlags != 0 {
		return nil, f.damaged()
	}
	if flags[0]&sameStep == 0 {
		rec.step = f.str()
	}
	if flags[0]&sameStream == 0 {
		rec.stream = f.str()
	}
	if flags[0]&sameSubject == 0 {
		rec.subject = f.str()
	}
	rec.seq += uint64(f.r.varint())
	rec.nanos += f.r.varint()
	rec.at = rec.nanos
	if flags[0]&sameTime == 0 {
		rec.at += f.r.varint()
	}
	rec.ahead = flags[0]&tooFarAhead != 0
	rec.key = f.str()
	rec.value = f.r.bytes()
	if f.r.bad {
		return nil, f.damaged()
	}
	return rec, nil
}

func (f *frameReader) damaged() error {
	return fmt.Errorf("%w: record %d of %d is damaged", ErrFrame, f.head.records-f.left, f.head.records)
}
