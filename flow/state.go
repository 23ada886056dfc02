package flow

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// ErrState says that stored state cannot be read: its bytes are not an image,
// its step is unknown, or its codec refuses it. What is stored stays as it is.
var ErrState = errors.New("state cannot be read")

// State is stored in images: a delta is the image of what changed, a base is a
// number of images that together hold all of it. Values are absolute, so that
// images can be loaded one after another, and an image twice.
//
//	image   = { section }
//	section = uvarint n, step id | uvarint codec version | uvarint entries
//	          { uvarint n, key | 0 (deleted) or uvarint n+1, value }

// stateTable is the state of one step in one task, seen from the task.
type stateTable interface {
	stepID() string
	dirty() int
	encodeEarly() int
	appendDelta(dst []byte) ([]byte, error)
	// appendImage appends a section with at most n cells from slot on and
	// returns the slot to go on from, -1 at the end.
	appendImage(dst []byte, slot, n int) ([]byte, int, error)
	load(version int, key, value []byte) error
	loaded()
	size() int
}

// cell is the state of one key.
type cell[S any] struct {
	key  string
	slot int32
	// waiting is the place, from 1, among the results that wait for the commit.
	waiting int32
	// marked is the number of the cell's last mark, see nextDelta.
	marked uint64
	gone   bool
	state  S
}

// table keeps cells by key, and in slots, so that an image of all of them can be
// taken in slices while records change them.
type table[S any] struct {
	id      string
	codec   StateCodec[S]
	cells   map[string]*cell[S]
	slots   []*cell[S]
	free    []int32
	next    nextDelta[S]
	scratch []byte
	// validKey, if it is set, tells the keys of cells from other bytes.
	validKey func(key []byte) bool
	// check, if it is set, looks at what was loaded.
	check func(key []byte, s *S) error
	// onLoaded is called when recovery has loaded all images.
	onLoaded func()
}

func newTable[S any](t *Task, id string, codec StateCodec[S]) *table[S] {
	tab := &table[S]{id: id, codec: codec, cells: map[string]*cell[S]{}}
	t.tables = append(t.tables, tab)
	t.byStep[id] = tab
	return tab
}

// getOrAdd returns the cell of a key and whether it is new.
func (tab *table[S]) getOrAdd(key string) (c *cell[S], fresh bool) {
	if c := tab.cells[key]; c != nil {
		return c, false
	}
	// The key may be a piece of a payload, which the cell must not keep.
	return tab.add(strings.Clone(key)), true
}

// add makes a cell with the zero value. The key must not be there.
func (tab *table[S]) add(key string) *cell[S] {
	c := &cell[S]{key: key}
	if n := len(tab.free); n > 0 {
		c.slot = tab.free[n-1]
		tab.free = tab.free[:n-1]
		tab.slots[c.slot] = c
	} else {
		c.slot = int32(len(tab.slots))
		tab.slots = append(tab.slots, c)
	}
	tab.cells[key] = c
	return c
}

// takeBack undoes what a record that changed nothing has done: the mark, which
// must be the last one, and the making of the cell.
func (tab *table[S]) takeBack(c *cell[S], marked, fresh bool) {
	if marked {
		tab.unmark(c)
	}
	if fresh {
		tab.forget(c)
	}
}

// remove forgets a cell. It is marked, so that the next delta deletes the key.
func (tab *table[S]) remove(c *cell[S]) {
	tab.mark(c)
	c.gone = true
	tab.forget(c)
}

func (tab *table[S]) forget(c *cell[S]) {
	delete(tab.cells, c.key)
	tab.slots[c.slot] = nil
	tab.free = append(tab.free, c.slot)
}

func (tab *table[S]) stepID() string { return tab.id }
func (tab *table[S]) size() int      { return len(tab.cells) }

func (tab *table[S]) appendHead(dst []byte, entries int) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(tab.id)))
	dst = append(dst, tab.id...)
	dst = binary.AppendUvarint(dst, uint64(tab.codec.Version))
	return binary.AppendUvarint(dst, uint64(entries))
}

func (tab *table[S]) appendCell(dst []byte, c *cell[S]) ([]byte, error) {
	dst = binary.AppendUvarint(dst, uint64(len(c.key)))
	dst = append(dst, c.key...)
	if c.gone {
		return append(dst, 0), nil
	}
	var err error
	if tab.scratch, err = tab.codec.Append(tab.scratch[:0], &c.state); err != nil {
		return dst, fmt.Errorf("key %q: %w", c.key, err)
	}
	dst = binary.AppendUvarint(dst, uint64(len(tab.scratch))+1)
	return append(dst, tab.scratch...), nil
}

func (tab *table[S]) appendImage(dst []byte, slot, n int) ([]byte, int, error) {
	end := slot + min(n, len(tab.slots)-slot)
	live := 0
	for _, c := range tab.slots[slot:end] {
		if c != nil {
			live++
		}
	}
	if live > 0 {
		dst = tab.appendHead(dst, live)
	}
	for _, c := range tab.slots[slot:end] {
		if c == nil {
			continue
		}
		var err error
		if dst, err = tab.appendCell(dst, c); err != nil {
			return dst, 0, err
		}
	}
	if end == len(tab.slots) {
		return dst, -1, nil
	}
	return dst, end, nil
}

func (tab *table[S]) load(version int, key, value []byte) error {
	if tab.validKey != nil && !tab.validKey(key) {
		return fmt.Errorf("key %q: not one of this step", key)
	}
	c := tab.cells[string(key)]
	if value == nil {
		if c != nil {
			tab.forget(c)
		}
		return nil
	}
	if c == nil {
		c = tab.add(string(key))
	} else {
		var zero S
		c.state = zero
	}
	if err := tab.codec.decode(version, value, &c.state); err != nil {
		return fmt.Errorf("key %q: %w", key, err)
	}
	if tab.check != nil {
		if err := tab.check(key, &c.state); err != nil {
			return fmt.Errorf("key %q: %w", key, err)
		}
	}
	return nil
}

func (tab *table[S]) loaded() {
	if tab.onLoaded != nil {
		tab.onLoaded()
	}
}

// Load applies an image: a part of a base, then the deltas after it, in order.
// It returns an error that wraps [ErrState]; the task is of no use then.
func (t *Task) Load(image []byte) error {
	r := reader{data: image}
	for len(r.data) > 0 {
		id := string(r.bytes())
		version, entries := r.uvarint(), r.uvarint()
		if r.bad || version > math.MaxInt32 {
			return fmt.Errorf("%w: not an image", ErrState)
		}
		tab := t.byStep[id]
		if tab == nil && !slices.Contains(t.leftOut, id) {
			return fmt.Errorf("%w: there is state of a step %q, which the flow does not have", ErrState, id)
		}
		err := guard(func() error { return loadSection(&r, tab, int(version), entries) })
		if err != nil {
			return fmt.Errorf("%w: step %q: %w", ErrState, id, err)
		}
	}
	return nil
}

// loadSection loads the entries of a section. Their number may be anything: each
// takes bytes, so that the loop ends with them.
func loadSection(r *reader, tab stateTable, version int, entries uint64) error {
	for ; entries > 0; entries-- {
		key, n := r.bytes(), r.uvarint()
		var value []byte
		if n > 0 {
			if value = r.take(n - 1); value == nil {
				value = []byte{}
			}
		}
		if r.bad {
			return errNotAnImage
		}
		if tab == nil {
			continue // left out
		}
		if err := tab.load(version, key, value); err != nil {
			return err
		}
	}
	return nil
}

var errNotAnImage = errors.New("not an image")

// Loaded ends the loading of images.
func (t *Task) Loaded() {
	for _, tab := range t.tables {
		tab.loaded()
	}
}

// Keys returns how many keys have state, over all steps.
func (t *Task) Keys() int {
	n := 0
	for _, tab := range t.tables {
		n += tab.size()
	}
	return n - t.sent.size() - t.received.size() - t.heard.size() - t.drained.size()
}

// BeginImage starts an image of the whole state, taken by NextImage.
func (t *Task) BeginImage() { t.imageTable, t.imageSlot = 0, 0 }

// NextImage returns a part of the image that BeginImage started, with at most
// the given number of keys, and whether there is more. Records may be played
// between the parts: each part holds the values of its own time, and what
// changed since BeginImage is in the deltas sealed since then.
//
// keys below one counts as one. An error is that of a state codec: the task
// cannot go on.
func (t *Task) NextImage(keys int) (part []byte, more bool, err error) {
	keys = max(keys, 1)
	for t.imageTable < len(t.tables) {
		tab := t.tables[t.imageTable]
		err = guard(func() (err error) {
			part, t.imageSlot, err = tab.appendImage(nil, t.imageSlot, keys)
			return err
		})
		if err != nil {
			return nil, false, fmt.Errorf("step %q: encode state: %w", tab.stepID(), err)
		}
		if t.imageSlot < 0 {
			t.imageTable, t.imageSlot = t.imageTable+1, 0
		}
		if len(part) > 0 {
			break
		}
	}
	return part, t.imageTable < len(t.tables), nil
}
