package flowspec

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/axiomhq/hyperloglog"
	"github.com/tidwall/gjson"
)

// The number of values that distinct counts at most: by default, and with a limit of its
// own.
const (
	defaultDistinct = 10_000
	maxDistinct     = 100_000
)

// fewValues is the number of values that are searched one by one.
const fewValues = 16

// distinctValues is the extension of distinct: the identities of the values, in the order
// of their first record.
//
//	distinct = uvarint number { uvarint length, identity }
type distinctValues struct {
	order []string
	// index is there for more than a few.
	index map[string]struct{}
	// found is the identity of the value that was checked last, if it is a new one.
	found string
}

func (d *distinctValues) check(m *aggregateMember, v, _ value) error {
	var buf [64]byte
	id := appendIdentity(buf[:0], v)
	if d.found = ""; d.has(id) {
		return nil
	}
	if len(d.order) >= m.limit {
		return fmt.Errorf("there are more than %d distinct values: use approx_distinct, or a higher limit as the second argument", m.limit)
	}
	d.found = string(id)
	return nil
}

func (d *distinctValues) has(id []byte) bool {
	if d.index != nil {
		_, ok := d.index[string(id)]
		return ok
	}
	return slices.ContainsFunc(d.order, func(have string) bool { return have == string(id) })
}

func (d *distinctValues) add(*aggregateMember, value, value) {
	// An identity is never empty.
	if d.found != "" {
		d.insert(d.found)
	}
}

func (d *distinctValues) insert(id string) {
	d.order = append(d.order, id)
	if d.index == nil && len(d.order) > fewValues {
		d.index = make(map[string]struct{}, 2*len(d.order))
		for _, id := range d.order {
			d.index[id] = struct{}{}
		}
	}
	if d.index != nil {
		d.index[id] = struct{}{}
	}
}

func (d *distinctValues) merge(m *aggregateMember, later extension) error {
	for _, id := range later.(*distinctValues).order {
		if d.has([]byte(id)) {
			continue
		}
		if len(d.order) >= m.limit {
			return fmt.Errorf("there are more than %d distinct values in two sessions that are one", m.limit)
		}
		d.insert(id)
	}
	return nil
}

func (d *distinctValues) clone() extension {
	return &distinctValues{order: slices.Clone(d.order), index: maps.Clone(d.index)}
}

func (d *distinctValues) value(*aggregateMember) value { return intValue(int64(len(d.order))) }

func (d *distinctValues) appendJSON(dst []byte, m *aggregateMember) []byte {
	return d.value(m).appendJSON(dst)
}

func (d *distinctValues) form() byte { return 0 }

func (d *distinctValues) append(dst []byte) ([]byte, error) {
	dst = binary.AppendUvarint(dst, uint64(len(d.order)))
	for _, id := range d.order {
		dst = binary.AppendUvarint(dst, uint64(len(id)))
		dst = append(dst, id...)
	}
	return dst, nil
}

func (d *distinctValues) read(r *stateReader, _ *aggregateMember, form byte) error {
	r.bad = r.bad || form != 0
	for range r.uvarint() {
		id := r.take(r.uvarint())
		r.bad = r.bad || len(id) == 0 || d.has(id)
		if r.bad {
			return nil
		}
		d.insert(string(id))
	}
	return nil
}

// approxDistinct is the extension of approx_distinct: a HyperLogLog of 2^14 registers
// (Flajolet et al. 2007; a list of hashes as long as they are few). What it estimates
// depends on the set of values only, not on their order, or on what was merged.
//
//	approx_distinct = uvarint length, the sketch in the format of its library
type approxDistinct struct{ sketch *hyperloglog.Sketch }

func newApproxDistinct() *approxDistinct { return &approxDistinct{hyperloglog.New14()} }

func (d *approxDistinct) check(*aggregateMember, value, value) error { return nil }

func (d *approxDistinct) add(_ *aggregateMember, v, _ value) {
	var buf [64]byte
	d.sketch.Insert(appendIdentity(buf[:0], v))
}

func (d *approxDistinct) merge(_ *aggregateMember, later extension) error {
	return d.sketch.Merge(later.(*approxDistinct).sketch)
}

func (d *approxDistinct) clone() extension { return &approxDistinct{d.sketch.Clone()} }

func (d *approxDistinct) value(*aggregateMember) value {
	return uintValue(d.sketch.Estimate())
}

func (d *approxDistinct) appendJSON(dst []byte, m *aggregateMember) []byte {
	return d.value(m).appendJSON(dst)
}

func (d *approxDistinct) form() byte { return 0 }

func (d *approxDistinct) append(dst []byte) ([]byte, error) {
	data, err := d.sketch.MarshalBinary()
	if err != nil {
		return dst, err
	}
	dst = binary.AppendUvarint(dst, uint64(len(data)))
	return append(dst, data...), nil
}

func (d *approxDistinct) read(r *stateReader, _ *aggregateMember, form byte) error {
	data := r.take(r.uvarint())
	if r.bad = r.bad || form != 0; r.bad {
		return nil
	}
	err := d.sketch.UnmarshalBinary(data)
	// The second byte is the precision.
	r.bad = err != nil || data[1] != 14
	return nil //nolint:nilerr // It is bad like any other.
}

// The first byte of an identity.
const (
	idBool  = 'b'
	idInt   = 'i'
	idUint  = 'u'
	idFloat = 'f'
	idText  = 's'
	idJSON  = 'j'
)

// appendIdentity appends bytes that are the same for values that are the same: 1 and
// 1.0, objects with the same members. Those of different types differ. They are stored, and
// so are hashes of them: the form of an identity must not change.
func appendIdentity(dst []byte, v value) []byte {
	switch v = plainNumber(v); v.kind {
	case kindBool:
		return append(dst, idBool, byte(v.bits))
	case kindInt:
		return binary.AppendVarint(append(dst, idInt), v.int())
	case kindUint:
		return binary.AppendUvarint(append(dst, idUint), v.bits)
	case kindFloat:
		return binary.BigEndian.AppendUint64(append(dst, idFloat), v.bits)
	case kindJSON:
		return appendCanonical(append(dst, idJSON), gjson.Parse(v.str))
	}
	return append(append(dst, idText), v.str...)
}

// plainNumber makes an integer of a float that is one.
func plainNumber(v value) value {
	if v.kind != kindFloat {
		return v
	}
	const two63, two64 = float64(1 << 63), float64(1<<63) * 2
	f := v.float()
	switch {
	case f != math.Trunc(f) || f < -two63 || f >= two64:
		return v
	case f >= two63:
		return uintValue(uint64(f))
	}
	return intValue(int64(f))
}

// appendCanonical appends JSON in one form: members by their names, of those with one name
// the first, numbers and texts as they are printed here.
func appendCanonical(dst []byte, res gjson.Result) []byte {
	switch {
	case res.IsObject():
		members := map[string]gjson.Result{}
		res.ForEach(func(k, v gjson.Result) bool {
			if _, twice := members[k.Str]; !twice {
				members[k.Str] = v
			}
			return true
		})
		dst = append(dst, '{')
		for i, name := range slices.Sorted(maps.Keys(members)) {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(appendString(dst, name), ':')
			dst = appendCanonical(dst, members[name])
		}
		return append(dst, '}')
	case res.IsArray():
		dst = append(dst, '[')
		first := true
		res.ForEach(func(_, v gjson.Result) bool {
			if !first {
				dst = append(dst, ',')
			}
			first = false
			dst = appendCanonical(dst, v)
			return true
		})
		return append(dst, ']')
	}
	v, err := jsonValue(res)
	if err != nil {
		// A number out of range: its text is all that is left.
		return append(dst, res.Raw...)
	}
	return plainNumber(v).appendJSON(dst)
}
