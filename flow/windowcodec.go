package flow

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// windowCodec stores the open windows of a key:
//
//	windows = 1 byte kind | uvarint number { window }
//	window  = varint start | uvarint end - start | [count: uvarint records] | uvarint n, state
//
// Start and end are nanoseconds since 1970. The version is that of the states.
func windowCodec[S any](kind windowKind, state StateCodec[S]) StateCodec[keyWindows[S]] {
	var scratch []byte // a codec belongs to one table
	return StateCodec[keyWindows[S]]{
		Version: state.Version,
		Append: func(dst []byte, k *keyWindows[S]) ([]byte, error) {
			dst = append(dst, byte(kind))
			dst = binary.AppendUvarint(dst, uint64(len(k.open)))
			for i := range k.open {
				w := &k.open[i]
				dst = binary.AppendVarint(dst, w.start)
				dst = binary.AppendUvarint(dst, uint64(w.end-w.start))
				if kind == kindCount {
					dst = binary.AppendUvarint(dst, w.records)
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

var errWindows = errors.New("not the windows of a key")

func decodeWindows[S any](kind windowKind, data []byte, k *keyWindows[S], state func([]byte, *S) error) error {
	if len(data) == 0 {
		return errWindows
	}
	if stored := windowKind(data[0]); stored != kind {
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
