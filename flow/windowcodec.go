package flow

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// windowCodec stores the open windows of a key:
//
//	windows = 1 byte kind | uvarint number { window }
//	window  = varint start | uvarint end - start | [count: uvarint records] | [early] | uvarint n, state
//	early   = 0, or 1 | varint watermark
//
// Start and end, and the watermark of the next early result, are nanoseconds since 1970.
// That is there if the kind has the bit withEarly: what is stored by a step with early
// results can be read by one without, and the other way round. The version is that of
// the states.
func windowCodec[S any](kind windowKind, early bool, state StateCodec[S]) StateCodec[keyWindows[S]] {
	var scratch []byte // a codec belongs to one table
	head := byte(kind)
	if early {
		head |= withEarly
	}
	return StateCodec[keyWindows[S]]{
		Version: state.Version,
		Append: func(dst []byte, k *keyWindows[S]) ([]byte, error) {
			dst = append(dst, head)
			dst = binary.AppendUvarint(dst, uint64(len(k.open)))
			for i := range k.open {
				w := &k.open[i]
				dst = binary.AppendVarint(dst, w.start)
				dst = binary.AppendUvarint(dst, uint64(w.end-w.start))
				if kind == kindCount {
					dst = binary.AppendUvarint(dst, w.records)
				}
				if early {
					dst = appendEarly(dst, w.early)
				}
				var err error
				if scratch, err = state.Append(scratch[:0], &w.state); err != nil {
					return dst, err
				}
				dst = appendBytes(dst, scratch)
			}
			return dst, nil
		},
		Decode: func(data []byte, k *keyWindows[S]) error {
			return decodeWindows(kind, data, k, state.Decode)
		},
		Migrate: func(version int, data []byte, k *keyWindows[S]) error {
			return decodeWindows(kind, data, k, func(data []byte, s *S) error { return state.decode(version, data, s) })
		},
	}
}

const withEarly = 0x80

func appendEarly(dst []byte, early int64) []byte {
	if early == 0 {
		return append(dst, 0)
	}
	return binary.AppendVarint(append(dst, 1), early)
}

func (r *reader) early() int64 {
	switch is := r.take(1); {
	case r.bad || is[0] == 0:
		return 0
	case is[0] > 1:
		r.bad = true
	}
	return r.varint()
}

var errWindows = errors.New("not the windows of a key")

func decodeWindows[S any](kind windowKind, data []byte, k *keyWindows[S], state func([]byte, *S) error) error {
	if len(data) == 0 {
		return errWindows
	}
	if stored := windowKind(data[0] &^ withEarly); stored != kind {
		return fmt.Errorf("%w of this step: what is stored are %v windows where the step has %v ones; give the changed step another id", errWindows, stored, kind)
	}
	r := reader{data: data[1:]}
	for n := r.uvarint(); n > 0 && !r.bad; n-- {
		w := openWindow[S]{}
		w.start = r.varint()
		length := r.uvarint()
		w.end = w.start + int64(length)
		if kind == kindCount {
			w.records = r.uvarint()
		}
		if data[0]&withEarly != 0 {
			w.early = r.early()
		}
		value := r.bytes()
		if r.bad || w.end < w.start || int64(length) < 0 {
			return errWindows
		}
		if err := state(value, &w.state); err != nil {
			return err
		}
		k.open = append(k.open, w)
	}
	if r.bad || len(r.data) > 0 {
		return errWindows
	}
	return nil
}
