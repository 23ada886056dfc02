package flow

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// withHead is added to the version of a state that is stored behind a head, see
// keyStateCodec. Versions of users are below it.
const withHead = 1 << 30

// keyState is the state of a key in a step that has timers or a TTL.
type keyState[S any] struct {
	state S
	// timers of the key, nil if it has none.
	timers *keyTimers
	// touched is the stream time of the last record, 0 if that is not known. Only
	// with a TTL.
	touched int64
	// expires says that the key has an entry in the heap of those that expire.
	expires bool
}

// What the head of a state has.
const (
	headTouched = 1 << iota
	headTimers
	headFlags = headTouched | headTimers
)

// keyStateCodec stores the state of a key with its timers and its last touch:
//
//	value  = flags | [ varint touched ] | [ timers event ] | [ timers stream ] | state
//	timers = uvarint number { varint time | uvarint n, name }
//
// The version of the section is that of the state with withHead added. A state without
// a head, of a step that had neither timers nor a TTL, is read as well.
func keyStateCodec[S any](state StateCodec[S], timers, ttl bool) StateCodec[keyState[S]] {
	c := StateCodec[keyState[S]]{Version: state.Version + withHead}
	c.Append = func(dst []byte, k *keyState[S]) ([]byte, error) {
		return state.Append(appendHeadOf(dst, k), &k.state)
	}
	if !timers && !ttl {
		c.Version = state.Version
		c.Append = func(dst []byte, k *keyState[S]) ([]byte, error) { return state.Append(dst, &k.state) }
	}
	c.read = func(version int, data []byte, k *keyState[S]) error {
		h, rest, err := splitHead(version, data)
		if err != nil {
			return err
		}
		if h.timers != nil && !timers {
			return errNoOnTimer
		}
		k.timers = h.timers
		if ttl {
			k.touched = h.touched
		}
		return state.decode(version&^withHead, rest, &k.state)
	}
	return c
}

var (
	errHead      = errors.New("not a state with timers or a TTL")
	errNoOnTimer = errors.New("the key has timers, and the step has no OnTimer: let them fire or cancel them before it goes")
)

func appendHeadOf[S any](dst []byte, k *keyState[S]) []byte {
	var flags byte
	if k.touched != 0 {
		flags |= headTouched
	}
	if k.timers != nil {
		flags |= headTimers
	}
	dst = append(dst, flags)
	if k.touched != 0 {
		dst = binary.AppendVarint(dst, k.touched)
	}
	if k.timers == nil {
		return dst
	}
	for _, list := range k.timers.list {
		dst = binary.AppendUvarint(dst, uint64(len(list)))
		for _, tm := range list {
			dst = binary.AppendVarint(dst, tm.at)
			dst = binary.AppendUvarint(dst, uint64(len(tm.name)))
			dst = append(dst, tm.name...)
		}
	}
	return dst
}

// stateHead is what stands before a state.
type stateHead struct {
	touched int64
	timers  *keyTimers
}

// splitHead takes the head off a state that has one.
func splitHead(version int, data []byte) (h stateHead, state []byte, err error) {
	if version&withHead == 0 {
		return h, data, nil
	}
	if len(data) == 0 || data[0]&^headFlags != 0 {
		return h, nil, errHead
	}
	r := reader{data: data[1:]}
	if data[0]&headTouched != 0 {
		h.touched = r.varint()
	}
	if data[0]&headTimers != 0 {
		h.timers = &keyTimers{}
		for kind := range h.timers.list {
			if err := h.timers.read(&r, timerKind(kind)); err != nil {
				return h, nil, err
			}
		}
		if h.timers.empty() {
			return h, nil, errHead
		}
	}
	if r.bad {
		return h, nil, errHead
	}
	return h, r.data, nil
}

// read takes the timers of a kind off a head.
func (k *keyTimers) read(r *reader, kind timerKind) error {
	for n := r.uvarint(); n > 0 && !r.bad; n-- {
		at := r.varint()
		tm := timer{at, string(r.bytes())}
		if _, there := k.find(tm.name); r.bad || there {
			return errHead
		}
		if list := k.list[kind]; len(list) > 0 && !list[len(list)-1].before(tm) {
			return errHead
		}
		k.list[kind] = append(k.list[kind], tm)
	}
	return nil
}

// plainState takes the head off a state for a step that has neither timers nor a TTL
// any more.
func plainState(version int, data []byte) (plain int, state []byte, err error) {
	h, state, err := splitHead(version, data)
	if err == nil && h.timers != nil {
		err = fmt.Errorf("%w: %d of them", errNoOnTimer, len(h.timers.list[eventTimer])+len(h.timers.list[streamTimer]))
	}
	return version &^ withHead, state, err
}

// keyTimers are the timers of a key. A name has one of them.
type keyTimers struct {
	// list has those of each kind in the order in which they fire.
	list [timerKinds][]timer
	// queued is, for each kind, the time of the key's valid entry in the heap, if it is
	// in. Others are stale.
	queued [timerKinds]int64
	isIn   [timerKinds]bool
}

// timerKind is the clock of a timer.
type timerKind int

const (
	eventTimer timerKind = iota
	streamTimer
	timerKinds
)

type timer struct {
	at   int64
	name string
}

func (t timer) before(o timer) bool {
	if t.at != o.at {
		return t.at < o.at
	}
	return strings.Compare(t.name, o.name) < 0
}

func (k *keyTimers) empty() bool { return len(k.list[eventTimer])+len(k.list[streamTimer]) == 0 }

// place of a timer.
type place struct {
	kind timerKind
	i    int
}

func (k *keyTimers) find(name string) (place, bool) {
	for kind, list := range k.list {
		for i := range list {
			if list[i].name == name {
				return place{timerKind(kind), i}, true
			}
		}
	}
	return place{}, false
}

func (k *keyTimers) remove(p place) { k.list[p.kind] = slices.Delete(k.list[p.kind], p.i, p.i+1) }

func (k *keyTimers) insert(kind timerKind, tm timer) {
	list := k.list[kind]
	i, _ := slices.BinarySearchFunc(list, tm, func(e, tm timer) int {
		switch {
		case e.before(tm):
			return -1
		case tm.before(e):
			return 1
		}
		return 0
	})
	k.list[kind] = slices.Insert(list, i, tm)
}
