package flowspec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/tidwall/gjson"

	"natsflow/flow"
)

// stateVersion is that of the encoding of an aggregate's state.
const stateVersion = 1

var errGroup = errors.New("not the state of an aggregate")

// codec stores groups:
//
//	group = uvarint records { member }
//	member = 1 byte: function (high 4 bits), kind of the value (low 4 bits)
//	         count, count_if: uvarint n
//	         sum, avg: uvarint n, varint sum of the integers [, 8 bytes sum of the floats]
//	         min, max, first, last: the value
//	       | 1 byte: 15 (high 4 bits), kind or form (low 4 bits), 1 byte: function
//	         stddev and the like: uvarint n [, 8 bytes mean, 8 bytes sum of squares]
//	         others: see their extension
//	value = bool: 1 byte | int: varint | uint: uvarint | float: 8 bytes | text, JSON: uvarint length, bytes
//
// The functions are stored so that a state is never read as that of others. The
// arguments of a function may change: what was counted before stays counted.
func (a *aggregate) codec() flow.StateCodec[group] {
	return flow.StateCodec[group]{Version: stateVersion, Append: a.appendGroup, Decode: a.decodeGroup}
}

func (a *aggregate) appendGroup(dst []byte, g *group) ([]byte, error) {
	dst = binary.AppendUvarint(dst, uint64(g.records))
	for i := range a.members {
		m := &a.members[i]
		if !m.keeps() {
			continue
		}
		if m.extends() {
			e := g.more.of(m)
			dst = append(dst, manyFunctions<<4|e.form(), byte(m.fn))
			var err error
			if dst, err = e.append(dst); err != nil {
				return dst, fmt.Errorf("%s: %v: %w", m.name, m, err)
			}
			continue
		}
		var c acc
		if g.accs != nil {
			c = g.accs[m.slot]
		}
		dst = appendTag(dst, m.fn, byte(c.val.kind))
		switch m.fn {
		case aggStddev, aggStddevPop, aggVariance, aggVariancePop:
			dst = appendMoments(dst, &c)
		case aggCount, aggCountIf:
			dst = binary.AppendUvarint(dst, uint64(c.n))
		case aggSum, aggAvg:
			dst = binary.AppendUvarint(dst, uint64(c.n))
			dst = binary.AppendVarint(dst, c.val.int())
			if c.val.kind == kindFloat {
				dst = binary.LittleEndian.AppendUint64(dst, math.Float64bits(c.float))
			}
		default:
			dst = appendValue(dst, c.val)
		}
	}
	return dst, nil
}

// manyFunctions stands in the first byte of a member whose function has a byte of its own.
const manyFunctions = 15

// appendTag appends what begins a member.
func appendTag(dst []byte, fn aggregateFn, form byte) []byte {
	if fn > aggLast {
		return append(dst, manyFunctions<<4|form, byte(fn.stored()))
	}
	return append(dst, byte(fn)<<4|form)
}

// tag reads what begins a member.
func (r *stateReader) tag() (fn aggregateFn, form byte) {
	tag := r.take(1)
	if r.bad {
		return 0, 0
	}
	if tag[0]>>4 != manyFunctions {
		return aggregateFn(tag[0] >> 4), tag[0] & 15
	}
	second := r.take(1)
	if r.bad {
		return 0, 0
	}
	return aggregateFn(second[0]), tag[0] & 15
}

// appendValues appends a list of values.
func appendValues(dst []byte, values []value) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(values)))
	for _, v := range values {
		dst = appendValue(append(dst, byte(v.kind)), v)
	}
	return dst
}

// values reads a list of values.
func (r *stateReader) values() []value {
	n := r.uvarint()
	// Each takes a byte at least.
	values := make([]value, 0, min(n, uint64(len(r.data))))
	for range n {
		k := r.take(1)
		if r.bad {
			return nil
		}
		values = append(values, r.value(kind(k[0])))
		r.bad = r.bad || values[len(values)-1].isNull()
	}
	return values
}

func appendValue(dst []byte, v value) []byte {
	switch v.kind {
	case kindBool:
		return append(dst, byte(v.bits))
	case kindInt:
		return binary.AppendVarint(dst, v.int())
	case kindUint:
		return binary.AppendUvarint(dst, v.bits)
	case kindFloat:
		return binary.LittleEndian.AppendUint64(dst, v.bits)
	case kindString, kindJSON:
		dst = binary.AppendUvarint(dst, uint64(len(v.str)))
		return append(dst, v.str...)
	}
	return dst
}

func (a *aggregate) decodeGroup(data []byte, g *group) error {
	r := stateReader{data: data}
	g.records = r.count()
	if len(a.slots) > 0 {
		g.accs = make([]acc, len(a.slots))
	}
	if len(a.extended) > 0 {
		all := g.more.all(a.extended)
		g.more = &all
	}
	for i := range a.members {
		m := &a.members[i]
		if !m.keeps() {
			continue
		}
		if len(r.data) == 0 || r.bad {
			return fmt.Errorf("%w: it ends before %s", errGroup, m)
		}
		fn, form := r.tag()
		if fn != m.fn.stored() {
			return fmt.Errorf("%w of this step: what is stored is %v where the step has %v; give the changed step another id", errGroup, fn, m)
		}
		if !m.extends() {
			r.acc(&g.accs[m.slot], m.fn, kind(form))
		} else if err := g.more.of(m).read(&r, m, form); err != nil {
			return fmt.Errorf("%w of this step: %v: %w; give the changed step another id", errGroup, m, err)
		}
	}
	if r.bad {
		return errGroup
	}
	if len(r.data) > 0 {
		return fmt.Errorf("%w of this step: it has more functions than the step; give the changed step another id", errGroup)
	}
	return nil
}

// stateReader takes fields off a stored group. After the first bad one all
// further ones are zero.
type stateReader struct {
	data []byte
	bad  bool
}

func (r *stateReader) acc(c *acc, fn aggregateFn, k kind) {
	switch fn {
	case aggStddev, aggStddevPop, aggVariance, aggVariancePop:
		r.moments(c, k)
	case aggCount, aggCountIf:
		c.n = r.count()
		r.bad = r.bad || k != kindNull
	case aggSum, aggAvg:
		c.n = r.count()
		c.val = value{kind: k, bits: uint64(r.varint())}
		switch k {
		case kindNull:
			r.bad = r.bad || c.n != 0 || c.val.bits != 0
		case kindInt:
		case kindFloat:
			c.float = r.float()
		default:
			r.bad = true
		}
		r.bad = r.bad || k != kindNull && c.n == 0
	default:
		c.val = r.value(k)
		r.bad = r.bad || k == kindJSON && fn != aggFirst && fn != aggLast
	}
}

func (r *stateReader) value(k kind) value {
	switch k {
	case kindNull:
		return value{}
	case kindBool:
		b := r.take(1)
		if r.bad || b[0] > 1 {
			r.bad = true
			return value{}
		}
		return boolValue(b[0] == 1)
	case kindInt:
		return intValue(r.varint())
	case kindUint:
		u := r.uvarint()
		r.bad = r.bad || u <= math.MaxInt64
		return uintValue(u)
	case kindFloat:
		return floatValue(r.float())
	case kindString, kindJSON:
		s := string(r.take(r.uvarint()))
		r.bad = r.bad || k == kindJSON && !compositeJSON(s)
		return value{kind: k, str: s}
	}
	r.bad = true
	return value{}
}

func compositeJSON(s string) bool {
	return s != "" && (s[0] == '{' || s[0] == '[') && strings.TrimSpace(s) == s &&
		!tooDeep(s, maxDepth+maxExpression) && gjson.Valid(s)
}

func (r *stateReader) uvarint() uint64 {
	v, n := binary.Uvarint(r.data)
	if r.bad || n <= 0 {
		r.bad = true
		return 0
	}
	r.data = r.data[n:]
	return v
}

func (r *stateReader) varint() int64 {
	v, n := binary.Varint(r.data)
	if r.bad || n <= 0 {
		r.bad = true
		return 0
	}
	r.data = r.data[n:]
	return v
}

func (r *stateReader) count() int64 {
	v := r.uvarint()
	if v > math.MaxInt64 {
		r.bad = true
		return 0
	}
	return int64(v)
}

func (r *stateReader) float() float64 {
	b := r.take(8)
	if r.bad {
		return 0
	}
	f := math.Float64frombits(binary.LittleEndian.Uint64(b))
	if math.IsNaN(f) || math.IsInf(f, 0) {
		r.bad = true
		return 0
	}
	return f
}

func (r *stateReader) take(n uint64) []byte {
	if r.bad || n > uint64(len(r.data)) {
		r.bad = true
		return nil
	}
	b := r.data[:n]
	r.data = r.data[n:]
	return b
}
