package flow

// The next delta is made while records are played: as soon as a few of them have
// changed their cells, these are encoded, still in the processor's cache. A seal
// then copies bytes that it reads in order and visits no cell, so that its pause
// depends neither on the size of the state nor on the cost of the codec. A cell
// that changes again after that is encoded again by the seal.

// encodeEvery is the number of records after which the changed cells are encoded,
// small enough that the cells of so many records fit into the first caches.
const encodeEvery = 256

// keepEncoded is the number of bytes that a table keeps for its next delta in any
// case; more only if the last one needed a quarter of it.
const keepEncoded = 64 << 10

// changedCell is an entry of the next delta.
type changedCell[S any] struct {
	cell *cell[S]
	// end is that of the entry in nextDelta.encoded, if it is early.
	end int
	// again says that the cell changed after it was, or could have been, encoded.
	again bool
}

// nextDelta is what has changed in a table since the last seal.
type nextDelta[S any] struct {
	// changed has the cells in the order of their first change. Marks are
	// numbered over the table's life: that of changed[0] is sealed+1. A seal
	// takes the marks of all cells by raising sealed, without visiting them.
	changed []changedCell[S]
	sealed  uint64
	// stale is the length of the last delta whose cells are still behind the end
	// of changed. To clear them in a seal while the garbage collector marks would
	// have it visit each cell, by its write barrier.
	stale int
	// encoded has the entries of changed[:early], one behind the other. Up to
	// visited they had the time to be encoded.
	encoded        []byte
	early, visited int
	// repeats counts the cells that changed again. late leaves all to the seal:
	// too many of them did in the last delta, or the codec has failed.
	repeats int
	late    bool
}

// mark makes the cell a part of the next delta. It reports whether it was not
// before. It is called for each record that changes the cell.
func (tab *table[S]) mark(c *cell[S]) bool {
	d := &tab.next
	if c.marked <= d.sealed {
		d.changed = append(d.changed, changedCell[S]{cell: c})
		c.marked = d.sealed + uint64(len(d.changed))
		return true
	}
	if i := int(c.marked - d.sealed - 1); i < d.visited && !d.changed[i].again {
		d.changed[i].again = true
		d.repeats++
	}
	return false
}

// unmark undoes the last mark, which must not have been encoded yet: it is that of
// the record that is being played.
func (tab *table[S]) unmark(c *cell[S]) {
	d := &tab.next
	n := len(d.changed) - 1
	d.changed[n] = changedCell[S]{}
	d.changed = d.changed[:n]
	c.marked = 0
}

func (tab *table[S]) dirty() int { return len(tab.next.changed) }

// encodeEarly encodes the cells that were marked since it last ran, and returns
// how many bytes are encoded by now. What a codec refuses, or panics at, is left to
// the seal, which reports it.
func (tab *table[S]) encodeEarly() int {
	d := &tab.next
	if n := len(d.changed); n < d.stale {
		clear(d.changed[n:d.stale])
	}
	d.stale = 0
	from := d.visited
	if d.visited = len(d.changed); d.late || from == d.visited {
		return len(d.encoded)
	}
	err := guard(func() error {
		for i := from; i < len(d.changed); i++ {
			e := &d.changed[i]
			dst, err := tab.appendCell(d.encoded, e.cell)
			if err != nil {
				return err
			}
			d.encoded, e.end, d.early = dst, len(dst), i+1
		}
		return nil
	})
	d.late = err != nil
	return len(d.encoded)
}

func (tab *table[S]) appendDelta(dst []byte) ([]byte, error) {
	d := &tab.next
	dst = tab.appendHead(dst, len(d.changed))
	// encoded[from:to] is due: early entries are copied in pieces as long as
	// can be.
	from, to := 0, 0
	for i := range d.changed {
		e := &d.changed[i]
		early := i < d.early
		if early && !e.again {
			to = e.end
			continue
		}
		dst = append(dst, d.encoded[from:to]...)
		var err error
		if dst, err = tab.appendCell(dst, e.cell); err != nil {
			return dst, err
		}
		if early {
			to = e.end
		}
		from = to
	}
	dst = append(dst, d.encoded[from:to]...)
	tab.startDelta()
	return dst, nil
}

// startDelta forgets what a seal has taken.
func (tab *table[S]) startDelta() {
	d := &tab.next
	// Keys that change in each batch would all be encoded twice.
	d.late = 2*d.repeats > len(d.changed)
	d.sealed += uint64(len(d.changed))
	if cap(d.encoded) > max(keepEncoded, 4*len(d.encoded)) {
		d.encoded = nil
	}
	d.stale = max(d.stale, len(d.changed))
	d.changed, d.encoded = d.changed[:0], d.encoded[:0]
	d.early, d.visited, d.repeats = 0, 0, 0
}
