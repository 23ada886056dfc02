package flowspec

import (
	"fmt"
	"strings"

	"natsflow/flow"
)

// aggregateFn is a function of an aggregate. The numbers are stored with the
// state.
type aggregateFn uint8

const (
	aggRecords aggregateFn = iota // count()
	aggCount                      // count(x)
	aggCountIf
	aggSum
	aggMin
	aggMax
	aggAvg
	aggFirst
	aggLast
	aggStddev
	aggStddevPop
	aggVariance
	aggVariancePop
	aggCollect
	aggTop
	aggBottom
	aggDistinct
	aggApproxDistinct
	aggPercentile
)

// lastFn is the last one.
const lastFn = aggPercentile

var aggregateNames = []string{
	"count", "count_if", "sum", "min", "max", "avg", "first", "last",
	"stddev", "stddev_pop", "variance", "variance_pop",
	"collect", "top", "bottom", "distinct", "approx_distinct", "percentile",
}

func (fn aggregateFn) String() string {
	switch fn {
	case aggRecords:
		return "count()"
	case aggCount:
		return "count"
	}
	if fn <= lastFn {
		return aggregateNames[fn-1]
	}
	return fmt.Sprintf("function %d", uint8(fn))
}

func aggregateByName(name string) (aggregateFn, bool) {
	for fn := aggCount; fn <= lastFn; fn++ {
		if fn.String() == name {
			return fn, true
		}
	}
	return 0, false
}

// stored is the function under whose number the state is stored: those that keep
// the same can take each other's place.
func (fn aggregateFn) stored() aggregateFn {
	if fn >= aggStddev && fn <= aggVariancePop {
		return aggStddev
	}
	return fn
}

// aggregate is the work of an aggregate step.
type aggregate struct {
	members []aggregateMember
	// slots are the members that keep an accumulator, extended those that keep an
	// extension; count() shares the number of records.
	slots, extended []*aggregateMember
}

type aggregateMember struct {
	name string
	// prefix of the member in a result, such as `,"flights":`.
	prefix string
	fn     aggregateFn
	arg    *expression
	// by is what top and bottom order the records by; nil for arg itself.
	by *expression
	// limit is the number of values that collect, top and bottom keep at most, and
	// distinct counts. limitText is it as the file says it; empty for the default.
	limit     int
	limitText string
	// percent is that of percentile.
	percent percentage
	// slot is the index in the group's accumulators or in its extensions; -1 for
	// count().
	slot int
}

// String is the call as the file has it, but for spaces. It is a part of the definition
// of the flow.
func (m *aggregateMember) String() string {
	if m.arg == nil {
		return m.fn.String()
	}
	text := m.fn.String() + "(" + m.arg.text
	if m.limitText != "" {
		text += ", " + m.limitText
	}
	if m.by != nil {
		text += ", " + m.by.text
	}
	return text + ")"
}

// keeps reports whether the state of a group has something of the member.
func (m *aggregateMember) keeps() bool { return m.slot >= 0 }

// finish fills in what follows from the members.
func (a *aggregate) finish() {
	for i := range a.members {
		m := &a.members[i]
		m.prefix = "," + string(appendString(nil, m.name)) + ":"
		switch {
		case m.fn == aggRecords:
			m.slot = -1
		case m.extends():
			m.slot = len(a.extended)
			a.extended = append(a.extended, m)
		default:
			m.slot = len(a.slots)
			a.slots = append(a.slots, m)
		}
	}
}

// group is the state of one key.
type group struct {
	records int64
	accs    []acc
	// more is nil where no member has an extension. It is a pointer because most
	// groups have none.
	more *extensions
}

// acc is what one member keeps for one key. Which fields are used depends on the
// function.
type acc struct {
	// n counts the values that were not null, or the records that satisfied the
	// condition.
	n int64
	// float is the sum of the values that are floats.
	// For stddev and the like it is the mean.
	float float64
	// val is the value of min, max, first and last. For sum and avg its bits are
	// the sum of the integers, and its kind is that of the whole sum. For stddev and
	// the like it is the sum of the squares of the differences from the mean.
	val value
}

// maxStack is the number of accumulators that are tried on the stack.
const maxStack = 8

// add folds a record into a group. It changes nothing when it returns an error:
// the new accumulators take their place when all of them are there.
func (a *aggregate) add(m *flow.Meta, g *group, r record) error {
	if len(a.extended) > 0 {
		return a.addExtended(m, g, r)
	}
	if len(a.slots) == 0 {
		g.records++
		return nil
	}
	var stack [maxStack]acc
	next := append(stack[:0], g.accs...)
	if g.accs == nil {
		next = append(next, make([]acc, len(a.slots))...)
	}
	for i, member := range a.slots {
		v, err := member.arg.eval(m, r)
		if err == nil {
			err = next[i].add(member.fn, v)
		}
		if err != nil {
			return fmt.Errorf("%s: %v: %w", member.name, member, err)
		}
	}
	g.records++
	if g.accs == nil {
		g.accs = make([]acc, len(a.slots))
	}
	copy(g.accs, next)
	return nil
}

func (c *acc) add(fn aggregateFn, v value) error {
	if fn == aggCountIf {
		ok, err := condition(v)
		if ok {
			c.n++
		}
		return err
	}
	if v.isNull() {
		return nil
	}
	switch fn {
	case aggCount:
		c.n++
	case aggSum, aggAvg:
		return c.addNumber(v)
	case aggStddev, aggStddevPop, aggVariance, aggVariancePop:
		return c.addMoment(v)
	case aggFirst:
		if c.val.isNull() {
			c.keep(v)
		}
	case aggLast:
		c.keep(v)
	case aggMin, aggMax:
		if c.val.isNull() {
			if v.kind == kindJSON {
				return fmt.Errorf("%v has no order", v.kind)
			}
			c.keep(v)
			return nil
		}
		order, err := compareScalars(v, c.val)
		if err != nil {
			return err
		}
		if fn == aggMin && order < 0 || fn == aggMax && order > 0 {
			c.keep(v)
		}
	}
	return nil
}

// addNumber keeps the integers apart from the floats, so that a sum of integers
// is exact; floats are added in the order of the records.
func (c *acc) addNumber(v value) error {
	switch v.kind {
	case kindInt:
		sum, ok := addInt(c.val.int(), v.int())
		if !ok {
			return errOverflow
		}
		if c.val.kind == kindNull {
			c.val.kind = kindInt
		}
		c.val.bits = uint64(sum)
	case kindUint:
		return errOverflow
	case kindFloat:
		c.float += v.float()
		c.val.kind = kindFloat
		if _, err := finite(c.float); err != nil {
			return err
		}
	default:
		return fmt.Errorf("%v is not a number", v.kind)
	}
	c.n++
	return nil
}

// keep stores a value; a text is copied, since it may point into a payload.
func (c *acc) keep(v value) {
	if v == c.val {
		return
	}
	v.str = strings.Clone(v.str)
	c.val = v
}

// compareScalars orders two values of one type: numbers, texts by their bytes,
// and false before true.
func compareScalars(a, b value) (int, error) {
	switch {
	case a.isNumber() && b.isNumber():
		return compareNumbers(a, b), nil
	case a.kind == b.kind && a.kind == kindString:
		return strings.Compare(a.str, b.str), nil
	case a.kind == b.kind && a.kind == kindBool:
		return compare(a.bits, b.bits), nil
	}
	return 0, fmt.Errorf("%v cannot be ordered with %v", a.kind, b.kind)
}

// value is the result of a member.
func (m *aggregateMember) value(g *group) value {
	if m.slot < 0 {
		return intValue(g.records)
	}
	if m.extends() {
		return g.more.of(m).value(m)
	}
	c := &g.accs[m.slot]
	switch m.fn {
	case aggCount, aggCountIf:
		return intValue(c.n)
	case aggSum:
		if c.val.kind == kindFloat {
			return floatValue(c.float + float64(c.val.int()))
		}
	case aggAvg:
		if c.n == 0 {
			return value{}
		}
		return floatValue((c.float + float64(c.val.int())) / float64(c.n))
	case aggStddev, aggStddevPop, aggVariance, aggVariancePop:
		return c.spread(m.fn)
	}
	return c.val
}

// member looks a member of a result up by its name.
func (a *aggregate) member(m *flow.Meta, r record, name string) value {
	if name == "key" {
		return stringValue(m.Key)
	}
	if name == nameWindow && r.window.bounded() {
		return value{kind: kindJSON, str: string(appendWindow(nil, r.window.Span))}
	}
	for i := range a.members {
		if a.members[i].name == name {
			return a.members[i].value(r.group)
		}
	}
	if r.window.is(name) {
		return boolValue(true)
	}
	return value{}
}

// appendResult appends the result of a group as JSON.
func (a *aggregate) appendResult(dst []byte, m *flow.Meta, r record) []byte {
	dst = append(dst, `{"key":`...)
	dst = appendString(dst, m.Key)
	if r.window != nil {
		dst = a.appendWindowOf(dst, r.window)
	}
	for i := range a.members {
		member := &a.members[i]
		dst = append(dst, member.prefix...)
		if member.extends() {
			dst = r.group.more.of(member).appendJSON(dst, member)
			continue
		}
		dst = member.value(r.group).appendJSON(dst)
	}
	return append(dst, '}')
}
