package flowspec

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
)

// maxValues bounds the limit of collect, top and bottom.
const maxValues = 10_000

// owned returns the value with a text of its own: it may point into a payload.
func (v value) owned() value {
	v.str = strings.Clone(v.str)
	return v
}

// collected is the extension of collect: the first values in their order.
//
//	collected = uvarint number { value with its kind }
type collected struct{ values []value }

func (c *collected) check(*aggregateMember, value, value) error { return nil }

func (c *collected) add(m *aggregateMember, v, _ value) {
	if len(c.values) < m.limit {
		c.values = append(c.values, v.owned())
	}
}

func (c *collected) merge(m *aggregateMember, later extension) error {
	for _, v := range later.(*collected).values {
		c.add(m, v, value{})
	}
	return nil
}

func (c *collected) clone() extension { return &collected{slices.Clone(c.values)} }

func (c *collected) value(m *aggregateMember) value {
	return value{kind: kindJSON, str: string(c.appendJSON(nil, m))}
}

func (c *collected) appendJSON(dst []byte, _ *aggregateMember) []byte {
	return appendArray(dst, c.values)
}

func (c *collected) form() byte { return 0 }

func (c *collected) append(dst []byte) ([]byte, error) { return appendValues(dst, c.values), nil }

func (c *collected) read(r *stateReader, m *aggregateMember, form byte) error {
	r.bad = r.bad || form != 0
	c.values = r.values()
	c.values = c.values[:min(len(c.values), m.limit)]
	return nil
}

// ranked is the extension of top and bottom: the values with the highest or the lowest
// ranks, the best one first, of equal ones the earlier one first.
//
//	ranked = values of the ranks [values]; the second ones where the ranks are another expression
type ranked struct {
	// ranks order the values; where they are the values, values is empty.
	ranks, values []value
	// apart tells whether the values are apart from the ranks, as far as that is known
	// of them.
	apart bool
}

var errOtherOrder = errors.New("what is stored is ordered by another expression")

func (k *ranked) check(m *aggregateMember, v, by value) error {
	rank := v
	if m.by != nil {
		rank = by
	}
	if rank.kind == kindJSON {
		return fmt.Errorf("%v has no order", rank.kind)
	}
	if len(k.ranks) > 0 {
		// They are all of one type.
		_, err := compareScalars(rank, k.ranks[0])
		return err
	}
	return nil
}

func (k *ranked) add(m *aggregateMember, v, by value) {
	k.apart = m.by != nil
	rank := v
	if k.apart {
		rank = by
	}
	at := sort.Search(len(k.ranks), func(i int) bool { return m.before(rank, k.ranks[i]) })
	if at == m.limit {
		return
	}
	k.ranks = insertAt(k.ranks, at, rank.owned(), m.limit)
	if k.apart {
		k.values = insertAt(k.values, at, v.owned(), m.limit)
	}
}

// before reports whether a rank comes before another one of its type.
func (m *aggregateMember) before(a, b value) bool {
	// check has compared them.
	order, _ := compareScalars(a, b)
	return m.fn == aggTop && order > 0 || m.fn == aggBottom && order < 0
}

// insertAt inserts a value into a list that has at most that many.
func insertAt(list []value, at int, v value, most int) []value {
	if len(list) == most {
		list = list[:most-1]
	}
	return slices.Insert(list, at, v)
}

func (k *ranked) merge(m *aggregateMember, later extension) error {
	other := later.(*ranked)
	for i, rank := range other.ranks {
		v := rank
		if other.apart {
			v = other.values[i]
		}
		if err := k.check(m, v, rank); err != nil {
			return err
		}
		k.add(m, v, rank)
	}
	return nil
}

func (k *ranked) clone() extension {
	return &ranked{slices.Clone(k.ranks), slices.Clone(k.values), k.apart}
}

func (k *ranked) value(m *aggregateMember) value {
	return value{kind: kindJSON, str: string(k.appendJSON(nil, m))}
}

func (k *ranked) appendJSON(dst []byte, _ *aggregateMember) []byte {
	if k.apart {
		return appendArray(dst, k.values)
	}
	return appendArray(dst, k.ranks)
}

func (k *ranked) form() byte {
	if k.apart {
		return 1
	}
	return 0
}

func (k *ranked) append(dst []byte) ([]byte, error) {
	dst = appendValues(dst, k.ranks)
	if k.apart {
		dst = appendValues(dst, k.values)
	}
	return dst, nil
}

func (k *ranked) read(r *stateReader, m *aggregateMember, form byte) error {
	k.ranks, k.apart = r.values(), form == 1
	if k.apart {
		k.values = r.values()
	}
	r.bad = r.bad || form > 1 || k.apart && len(k.values) != len(k.ranks) || !k.sorted(m)
	if r.bad {
		return nil
	}
	if len(k.ranks) > 0 && k.apart != (m.by != nil) {
		return errOtherOrder
	}
	k.ranks = k.ranks[:min(len(k.ranks), m.limit)]
	k.values = k.values[:min(len(k.values), m.limit)]
	return nil
}

// sorted reports whether the ranks can have come from add.
func (k *ranked) sorted(m *aggregateMember) bool {
	for i, rank := range k.ranks {
		if rank.kind == kindJSON || rank.isNull() {
			return false
		}
		if i == 0 {
			continue
		}
		if _, err := compareScalars(k.ranks[i-1], rank); err != nil || m.before(rank, k.ranks[i-1]) {
			return false
		}
	}
	return true
}

// appendArray appends values as a JSON array.
func appendArray(dst []byte, values []value) []byte {
	dst = append(dst, '[')
	for i, v := range values {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = v.appendJSON(dst)
	}
	return append(dst, ']')
}
