package flow

import "strings"

// heap gives its elements out in their order.
type heap[E ordered[E]] []E

type ordered[E any] interface{ before(other E) bool }

func (h *heap[E]) push(e E) {
	*h = append(*h, e)
	s := *h
	i := len(s) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !e.before(s[parent]) {
			break
		}
		s[i] = s[parent]
		i = parent
	}
	s[i] = e
}

// pop takes the first element. There has to be one.
func (h *heap[E]) pop() E {
	s := *h
	top, last := s[0], s[len(s)-1]
	var none E
	s[len(s)-1] = none
	s = s[:len(s)-1]
	*h = s
	if len(s) == 0 {
		return top
	}
	i := 0
	for {
		child := 2*i + 1
		if child >= len(s) {
			break
		}
		if child+1 < len(s) && s[child+1].before(s[child]) {
			child++
		}
		if !s[child].before(last) {
			break
		}
		s[i] = s[child]
		i = child
	}
	s[i] = last
	return top
}

// dueEntry is a key with the time at which something of it is due first. The order is by
// that, and by the key. An entry in a heap may be stale: whoever takes it looks at the
// cell.
type dueEntry[S any] struct {
	due  int64
	cell *cell[S]
}

func (e dueEntry[S]) before(o dueEntry[S]) bool {
	if e.due != o.due {
		return e.due < o.due
	}
	return strings.Compare(e.cell.key, o.cell.key) < 0
}
