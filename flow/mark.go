package flow

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Where a later stage waits for times, a commit of a task whose watermark has moved
// ends with a mark: a message of the exchange to all tasks of the next stage, that no
// record with an earlier time comes any more from this one. Records that the task has
// sent before stand before it in the exchange. The watermark of a task of a later stage
// is the lowest of all tasks of the stage before; so it is a function of what stands
// in the exchange up to a position, and the same in every replay.
//
//	mark = version | CRC-32C of the rest, 4 bytes | uvarint stage
//	       | uvarint partition of the producer | varint watermark | varint stream time
//
// A mark has no number, unlike a frame: it says all that those before it said.
const (
	markVersion = 2

	// maxMark is the most bytes that a mark has.
	maxMark = 1 + 4 + 2*binary.MaxVarintLen32 + 2*binary.MaxVarintLen64
)

// AllPartitions stands for the partition of a mark in [Router.RouteFrame].
const AllPartitions = -1

// allTasks is the last token of the subject of marks.
const allTasks = "all"

// clocks are how far the two clocks of an input are: the watermark of its records'
// times, and the time of the streams, which is not known where the flow has one time.
type clocks struct{ event, stream int64 }

// clocks are those of the task, as the next stage is told them.
func (t *Task) clocks() clocks { return clocks{event: t.low, stream: t.StreamNow()} }

// behind reports that others are later, by one clock at least.
func (c clocks) behind(o clocks) bool { return c.event < o.event || c.stream < o.stream }

// TimedStage reports whether steps of a stage above 0, or of one behind it, wait for
// times: then the tasks of the stage before have to tell it their watermarks.
func (f *Flow) TimedStage(stage int) bool { return stage > 0 && stage <= f.lastTimed }

// waits notes that a step of a stage waits for times.
func (b *Builder) waits(stage int) {
	b.timed = true
	b.lastTimed = max(b.lastTimed, stage)
}

// Untold reports whether the watermark of the task, or its time of the streams, has moved
// and the tasks of the next stage, which wait for it, have not been told by a Seal.
func (t *Task) Untold() bool { return t.tells && t.told.behind(t.clocks()) }

// Unsealed reports whether a Seal would store or publish anything: what makes the task
// [Task.Dirty] or [Task.Untold], and watermarks that came by the exchange. These alone
// are no reason for a commit, but as long as one is unsealed, no position behind it may
// be stored: after a crash it would be lost.
func (t *Task) Unsealed() bool { return t.Dirty() || t.Untold() || t.heard.dirty() > 0 }

// TellLater makes Seal leave the watermark untold unless it has frames for the next
// stage: for a task that commits more often than anybody wants to know.
func (t *Task) TellLater(later bool) { t.tellLater = later }

// tell puts the mark of the task into the outbox, behind the frames.
func (t *Task) tell() {
	if !t.Untold() || t.tellLater && t.exchange.frames == 0 {
		return
	}
	t.told = t.clocks()
	var buf [maxMark]byte
	data := appendMark(buf[:0], t.stage+1, t.partition, t.clocks())
	t.outbox = appendOutputHead(t.outbox, t.f.exchange, []byte(ExchangeMarks(t.f.name, t.stage+1)))
	t.outbox = appendBytes(t.outbox, data)
	t.outputs++
	t.exchange.frames++
}

func appendMark(dst []byte, stage, producer int, c clocks) []byte {
	at := len(dst)
	dst = append(dst, markVersion, 0, 0, 0, 0)
	dst = binary.AppendUvarint(dst, uint64(stage))
	dst = binary.AppendUvarint(dst, uint64(producer))
	dst = binary.AppendVarint(dst, c.event)
	dst = binary.AppendVarint(dst, c.stream)
	binary.LittleEndian.PutUint32(dst[at+1:], crc32.Checksum(dst[at+5:], castagnoli))
	return dst
}

// readMark reads what appendMark wrote.
func readMark(data []byte) (stage, producer int, c clocks, err error) {
	if err := checkFrameBytes(data, markVersion); err != nil {
		return 0, 0, c, err
	}
	r := reader{data: data[5:]}
	s, p := r.uvarint(), r.uvarint()
	c.event, c.stream = r.varint(), r.varint()
	if r.bad || len(r.data) > 0 || max(s, p) > math.MaxInt32 {
		return 0, 0, c, fmt.Errorf("%w: a watermark of %d bytes is damaged", ErrFrame, len(data))
	}
	return int(s), int(p), c, nil
}

// routeMark routes a mark to all tasks that have not had it.
func (r *Router) routeMark(seq uint64, data []byte) error {
	stage, producer, c, err := readMark(data)
	if err == nil && (stage != r.stage || producer >= len(r.seen)) {
		err = fmt.Errorf("%w: a watermark of partition %d for stage %d, under the subject of those for stage %d", ErrFrame, producer, stage, r.stage)
	}
	if err != nil {
		return fmt.Errorf("sequence %d: %w", seq, err)
	}
	if !r.f.TimedStage(r.stage) {
		return r.halted() // nobody waits for it in this definition of the flow
	}
	for p, seen := range r.seen {
		if seq > seen {
			b := r.batch(p)
			b.frames = append(b.frames, frameRef{producer: producer, seq: seq, run: len(b.runs), mark: true, clocks: c})
		}
	}
	return r.halted()
}

// heard has the clocks that a task knows of the tasks of the stage before, by their
// partitions. They are stored like the state of a step, under a key that stands for the
// clocks of the sources: with other clocks, the watermarks of the former ones mean nothing.
type heard struct {
	*table[[]clocks]
	t   *Task
	key string
	// of is the cell, nil if nothing was heard yet.
	of *cell[[]clocks]
}

const marksHeard = "\x00marks"

func newHeard(t *Task) *heard {
	h := &heard{t: t, key: t.f.clocksID()}
	h.table = newTable(t, marksHeard, clocksCodec(t.f.opts.Partitions))
	h.onLoaded = h.loaded
	return h
}

// take takes a mark, and does what is due then.
func (h *heard) take(producer int, c clocks) {
	if h.of == nil {
		h.of, _ = h.getOrAdd(h.key)
		h.of.state = slices.Repeat([]clocks{{noTime, noTime}}, h.t.f.opts.Partitions)
	}
	is := &h.of.state[producer]
	if !is.behind(c) {
		return
	}
	is.event, is.stream = max(is.event, c.event), max(is.stream, c.stream)
	h.mark(h.of)
	if h.t.second != nil {
		h.t.raiseStream(producer, is.stream)
	}
	if h.t.in.halted == nil {
		h.t.raise(producer, is.event)
	}
}

func (h *heard) loaded() {
	for _, c := range slices.Clone(h.slots) {
		if c != nil && c.key != h.key {
			h.remove(c)
		}
	}
	h.of = h.cells[h.key]
	if h.of == nil || h.t.stage == 0 {
		return
	}
	for producer, c := range h.of.state {
		h.t.Restore(producer, c.event)
		h.t.RestoreStream(producer, c.stream)
	}
}

// clocksID stands for the clocks of the sources.
func (f *Flow) clocksID() string {
	var names []string
	for _, s := range f.sources {
		inf := s.info()
		names = append(names, fmt.Sprintf("%q %v", inf.Stream, inf.Clock != nil))
	}
	slices.Sort(names)
	h := fnv.New32a()
	_, _ = h.Write([]byte(strings.Join(names, "\n"))) // which never fails
	return strconv.FormatUint(uint64(h.Sum32()), 16)
}

// clocksCodec stores clocks of a number of tasks, each relative to one that is known.
//
//	clocks = varint lowest watermark { uvarint watermark-lowest+1 | uvarint zigzag(stream time-watermark)+1 }
//
// A 0 is for one that is not known; the stream time is then not relative. In version 0
// there was a varint for each watermark that is known, which repeated it.
func clocksCodec(n int) StateCodec[[]clocks] {
	return StateCodec[[]clocks]{
		Version: 1,
		Append: func(dst []byte, s *[]clocks) ([]byte, error) {
			low := int64(math.MaxInt64)
			for _, c := range *s {
				if c.event != noTime {
					low = min(low, c.event)
				}
			}
			dst = binary.AppendVarint(dst, low)
			for _, c := range *s {
				base := int64(0)
				if c.event == noTime {
					dst = append(dst, 0)
				} else {
					base = c.event
					dst = binary.AppendUvarint(dst, uint64(c.event-low)+1)
				}
				if c.stream == noTime {
					dst = append(dst, 0)
				} else {
					by := c.stream - base
					dst = binary.AppendUvarint(dst, uint64(by<<1^by>>63)+1)
				}
			}
			return dst, nil
		},
		Decode: func(data []byte, s *[]clocks) error {
			return decodeClocks(data, s, n, func(r *reader, c *clocks) {
				base := int64(0)
				if c.event != noTime {
					base = c.event
				}
				if by := r.uvarint(); by > 0 {
					by--
					c.stream = base + (int64(by>>1) ^ -int64(by&1))
				}
			})
		},
		Migrate: func(version int, data []byte, s *[]clocks) error {
			if version != 0 {
				return errNotClocks
			}
			return decodeClocks(data, s, n, func(r *reader, c *clocks) {
				if c.event != noTime {
					r.varint()
				}
			})
		},
	}
}

func decodeClocks(data []byte, s *[]clocks, n int, stream func(r *reader, c *clocks)) error {
	r := reader{data: data}
	low := r.varint()
	all := slices.Repeat([]clocks{{noTime, noTime}}, n)
	for i := range all {
		if v := r.uvarint(); v > 0 {
			all[i].event = low + int64(v-1)
		}
		stream(&r, &all[i])
	}
	if r.bad || len(r.data) > 0 {
		return fmt.Errorf("%w of %d tasks", errNotClocks, n)
	}
	*s = all
	return nil
}

var errNotClocks = errors.New("not the watermarks")
