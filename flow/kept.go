package flow

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// The state of a join is records: those of its two inputs that may still meet others.
// Each is a cell of its own, so that a record costs its own bytes in a delta, whatever
// else its key has. The lists of a key are made anew when a task is loaded.
//
//	key of a cell = uvarint n, key | side, 1 byte | uvarint number
//	value         = version of this | side, 1 byte | flags, 1 byte | varint time
//	                | varint timestamp - time | uvarint sequence | uvarint n, stream
//	                | uvarint n, subject | value, by the codec of the side
//
// Numbers count the records of a task, so that those of one time keep their order.
const keptVersion = 1

// joinSide says which input a kept record is of. What one kind of join has stored is
// nothing for another.
type joinSide byte

const (
	sideLeft joinSide = 1 + iota
	sideRight
	sideStream
	sideTable
	sideLatest
)

// list is the index of the side's list in a key.
func (s joinSide) list() int {
	if s == sideLeft || s == sideStream {
		return 0
	}
	return 1
}

const (
	// keptMatched: nothing more is to be said of the record when it goes.
	keptMatched = 1 << iota
	// keptDeleted: a record of a table that deletes the key.
	keptDeleted
)

// keptRecord is a record that a join keeps. The value is kept as its bytes, since what
// came may be a part of state that changes.
type keptRecord struct {
	side            joinSide
	flags           byte
	at, nanos       int64
	seq, number     uint64
	stream, subject string
	data            []byte
	// value points to what data is; nil until somebody has asked for it.
	value any
}

// meta puts the position of the record into m, whose key and watermark stay.
func (r *keptRecord) meta(m *Meta) {
	m.Stream, m.Subject, m.Seq, m.nanos, m.at, m.raw = r.stream, r.subject, r.seq, r.nanos, r.at, r.data
}

// goes is the position of a record of a key whose time has come.
func (t *Task) goes(key string, r *keptRecord) *Meta {
	m := &t.meta
	*m = Meta{Key: key, mark: t.now, pane: t.firedPane()}
	r.meta(m)
	return m
}

// keptValue returns the value of a record. m has its position.
func keptValue[T any](r *keptRecord, m *Meta, codec Codec[T]) (*T, error) {
	if v, ok := r.value.(*T); ok {
		return v, nil
	}
	v, err := codec.Decode(m, r.data)
	if err != nil {
		return nil, fmt.Errorf("decode what was kept: %w", err)
	}
	r.value = &v
	return &v, nil
}

type keptCell = cell[keptRecord]

// keptKey has the records of a key, of each side in the order of their times and
// numbers.
type keptKey struct {
	key   string
	lists [2][]*keptCell
	// queued is the time of the valid entry in the heap, if it is in there.
	queued int64
	isIn   bool
}

// keptDue is a key with the time at which something is to be done for it. The order is
// by that, and by the key.
type keptDue struct {
	due int64
	of  *keptKey
}

func (e keptDue) before(o keptDue) bool {
	if e.due != o.due {
		return e.due < o.due
	}
	return strings.Compare(e.of.key, o.of.key) < 0
}

// keptRecords is what a join keeps in a task.
type keptRecords struct {
	table  *table[keptRecord]
	keys   map[string]*keptKey
	number uint64
	heap   heap[keptDue]
	// due says at which watermark something is to be done for a key; the highest
	// number for never.
	due func(k *keptKey) int64
	// scratch is for keys of cells. The texts are those of the last record: most
	// records have them from the one before.
	scratch         []byte
	stream, subject string
}

// newKept makes the state of a join. check looks at the bytes of a loaded value.
func newKept(t *Task, id string, version int, sides []joinSide, check func(side joinSide, m *Meta, data []byte) error) *keptRecords {
	k := &keptRecords{keys: map[string]*keptKey{}}
	k.table = newTable(t, id, keptCodec(version))
	k.table.check = func(key []byte, r *keptRecord) error {
		if !slices.Contains(sides, r.side) {
			return fmt.Errorf("%w of this join: what is stored is that of another kind; give the changed step another id", errKept)
		}
		if r.flags&keptDeleted != 0 {
			return nil
		}
		of := reader{data: key}
		m := Meta{Key: string(of.bytes())}
		r.meta(&m)
		return check(r.side, &m, r.data)
	}
	k.table.validKey, k.table.onLoaded = validKeptKey, k.loaded
	return k
}

// add keeps a record of the key of m. data is copied.
func (k *keptRecords) add(m *Meta, side joinSide, flags byte, data []byte) (*keptKey, *keptCell) {
	of := k.keys[m.Key]
	if of == nil {
		of = &keptKey{key: strings.Clone(m.Key)}
		k.keys[of.key] = of
	}
	k.number++
	k.scratch = binary.AppendUvarint(k.scratch[:0], uint64(len(m.Key)))
	k.scratch = append(k.scratch, m.Key...)
	k.scratch = append(k.scratch, byte(side))
	k.scratch = binary.AppendUvarint(k.scratch, k.number)
	c := k.table.add(string(k.scratch))
	k.table.mark(c)
	k.set(c, m, side, flags, data)
	c.state.number = k.number
	of.insert(c)
	k.queue(of)
	return of, c
}

// set puts a record into a cell.
func (k *keptRecords) set(c *keptCell, m *Meta, side joinSide, flags byte, data []byte) {
	// The texts may be pieces of a message, which the record must not keep.
	if m.Stream != k.stream {
		k.stream = strings.Clone(m.Stream)
	}
	if m.Subject != k.subject {
		k.subject = strings.Clone(m.Subject)
	}
	c.state = keptRecord{
		side: side, flags: flags, at: m.at, nanos: m.nanos, seq: m.Seq, number: c.state.number,
		stream: k.stream, subject: k.subject, data: bytes.Clone(data),
	}
}

// insert puts a cell into its list, behind those of the same time.
func (of *keptKey) insert(c *keptCell) {
	list := &of.lists[c.state.side.list()]
	i := len(*list)
	if i > 0 && (*list)[i-1].state.at > c.state.at {
		i = of.behind(c.state.side, c.state.at)
	}
	*list = slices.Insert(*list, i, c)
}

// behind returns the index of the first record of a side that is later than a time.
func (of *keptKey) behind(side joinSide, at int64) int {
	if at == math.MaxInt64 {
		return len(of.lists[side.list()])
	}
	return of.from(side, at+1)
}

// from returns the index of the first record of a side that is not before a time.
func (of *keptKey) from(side joinSide, at int64) int {
	i, _ := slices.BinarySearchFunc(of.lists[side.list()], at, func(c *keptCell, at int64) int {
		if c.state.at < at {
			return -1
		}
		return 1
	})
	return i
}

// removeFirst forgets the first record of a side.
func (k *keptRecords) removeFirst(of *keptKey, side joinSide) {
	list := &of.lists[side.list()]
	k.table.remove((*list)[0])
	// The place is left to the next growth of the list: to move the others up would
	// cost the more the more there are.
	(*list)[0] = nil
	*list = (*list)[1:]
	if len(of.lists[0])+len(of.lists[1]) == 0 {
		of.isIn = false
		delete(k.keys, of.key)
		return
	}
	k.queue(of)
}

// matched notes that nothing more is to be said of a record.
func (k *keptRecords) matched(c *keptCell) {
	if c.state.flags&keptMatched == 0 {
		c.state.flags |= keptMatched
		k.table.mark(c)
	}
}

// queue makes sure that the heap has an entry for a key that is not too late.
func (k *keptRecords) queue(of *keptKey) {
	due := k.due(of)
	if due < noDue && (!of.isIn || due < of.queued) {
		of.queued, of.isIn = due, true
		k.heap.push(keptDue{due, of})
	}
}

// next returns when something is due first. Entries of the heap may be stale, and
// never too late.
func (k *keptRecords) next() int64 {
	for len(k.heap) > 0 {
		top := k.heap[0]
		of := top.of
		if of.isIn && of.queued == top.due {
			if k.due(of) == top.due {
				return top.due
			}
			of.isIn = false
			k.heap.pop()
			k.queue(of)
			continue
		}
		k.heap.pop()
	}
	return noDue
}

// pop takes the key that is due first off the heap; next has been called.
func (k *keptRecords) pop() *keptKey {
	of := k.heap.pop().of
	of.isIn = false
	return of
}

func validKeptKey(key []byte) bool {
	r := reader{data: key}
	r.bytes()
	r.take(1)
	r.uvarint()
	return !r.bad && len(r.data) == 0
}

// loaded makes the lists of what was loaded.
func (k *keptRecords) loaded() {
	k.keys, k.heap, k.number = map[string]*keptKey{}, k.heap[:0], 0
	for _, c := range k.table.slots {
		if c == nil {
			continue
		}
		r := reader{data: []byte(c.key)}
		key := string(r.bytes())
		r.take(1)
		c.state.number = r.uvarint()
		k.number = max(k.number, c.state.number)
		of := k.keys[key]
		if of == nil {
			of = &keptKey{key: key}
			k.keys[key] = of
		}
		list := &of.lists[c.state.side.list()]
		*list = append(*list, c)
	}
	for _, of := range k.keys {
		for _, list := range of.lists {
			slices.SortFunc(list, func(a, b *keptCell) int {
				return cmp.Or(cmp.Compare(a.state.at, b.state.at), cmp.Compare(a.state.number, b.state.number))
			})
		}
		k.queue(of)
	}
}

var errKept = errors.New("not the state")

func keptCodec(version int) StateCodec[keptRecord] {
	var stream, subject string // most records have those of the one before
	text := func(last *string, b []byte) string {
		if string(b) != *last {
			*last = string(b)
		}
		return *last
	}
	return StateCodec[keptRecord]{
		Version: version,
		Append: func(dst []byte, s *keptRecord) ([]byte, error) {
			dst = append(dst, keptVersion, byte(s.side), s.flags)
			dst = binary.AppendVarint(dst, s.at)
			dst = binary.AppendVarint(dst, s.nanos-s.at)
			dst = binary.AppendUvarint(dst, s.seq)
			dst = binary.AppendUvarint(dst, uint64(len(s.stream)))
			dst = append(dst, s.stream...)
			dst = binary.AppendUvarint(dst, uint64(len(s.subject)))
			dst = append(dst, s.subject...)
			return append(dst, s.data...), nil
		},
		Decode: func(data []byte, s *keptRecord) error {
			r := reader{data: data}
			head := r.take(3)
			if r.bad || head[0] != keptVersion || head[1] == 0 || joinSide(head[1]) > sideLatest || head[2] > keptMatched|keptDeleted {
				return fmt.Errorf("%w of a join", errKept)
			}
			s.side, s.flags = joinSide(head[1]), head[2]
			s.at = r.varint()
			s.nanos = s.at + r.varint()
			s.seq = r.uvarint()
			s.stream, s.subject = text(&stream, r.bytes()), text(&subject, r.bytes())
			if r.bad || s.at < minTime.UnixNano() {
				return fmt.Errorf("%w of a join", errKept)
			}
			s.data = bytes.Clone(r.data)
			return nil
		},
	}
}
