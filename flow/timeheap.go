package flow

import "strings"

// timeHeap is a heap of things by the time at which something is to be done for
// them, and by the key.
type timeHeap[T any] []timeEntry[T]

type timeEntry[T any] struct {
	due int64
	key string
	of  T
}

func (e timeEntry[T]) before(o timeEntry[T]) bool {
	if e.due != o.due {
		return e.due < o.due
	}
	return strings.Compare(e.key, o.key) < 0
}

func (h *timeHeap[T]) push(e timeEntry[T]) {
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

func (h *timeHeap[T]) pop() timeEntry[T] {
	s := *h
	top, last := s[0], s[len(s)-1]
	s[len(s)-1] = timeEntry[T]{}
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
