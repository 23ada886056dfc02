package flowspec

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"strings"

	"github.com/tidwall/gjson"
)

// The operators follow SQL where a value is null: what is compared or computed
// with null is null, and so is the negation of null; "and" and "or" know three
// truth values. Only == nil and != nil, with the word itself, test for it.

var errOverflow = errors.New("the integer result does not fit 64 bits")

// operator is one on two values.
type operator func(a, b value) (value, error)

// binaryOp returns an operator by its sign in the language, nil for one that is
// not a function of its two values (and, or, ??, ..).
func binaryOp(op string) operator {
	switch op {
	case "+":
		return add
	case "-", "*":
		return func(a, b value) (value, error) { return arithmetic(op[0], a, b) }
	case "/":
		return divide
	case "%":
		return modulo
	case "**", "^":
		return power
	case "==":
		return func(a, b value) (value, error) { return equal(a, b, true) }
	case "!=":
		return func(a, b value) (value, error) { return equal(a, b, false) }
	case "<":
		return func(a, b value) (value, error) { return order(op, a, b, func(c int) bool { return c < 0 }) }
	case "<=":
		return func(a, b value) (value, error) { return order(op, a, b, func(c int) bool { return c <= 0 }) }
	case ">":
		return func(a, b value) (value, error) { return order(op, a, b, func(c int) bool { return c > 0 }) }
	case ">=":
		return func(a, b value) (value, error) { return order(op, a, b, func(c int) bool { return c >= 0 }) }
	case "in":
		return member
	case "contains":
		return func(a, b value) (value, error) { return texts(op, a, b, strings.Contains) }
	case "startsWith":
		return func(a, b value) (value, error) { return texts(op, a, b, strings.HasPrefix) }
	case "endsWith":
		return func(a, b value) (value, error) { return texts(op, a, b, strings.HasSuffix) }
	case "matches":
		return matches
	}
	return nil
}

func mismatch(op string, a, b value) error {
	return fmt.Errorf("%s between %v and %v", op, a.kind, b.kind)
}

func add(a, b value) (value, error) {
	if a.kind == kindString && b.kind == kindString {
		return stringValue(a.str + b.str), nil
	}
	return arithmetic('+', a, b)
}

func arithmetic(op byte, a, b value) (value, error) {
	if a.isNull() || b.isNull() {
		return value{}, nil
	}
	if !a.isNumber() || !b.isNumber() {
		return value{}, mismatch(string(op), a, b)
	}
	if a.kind == kindFloat || b.kind == kindFloat {
		x, y := a.float(), b.float()
		switch op {
		case '+':
			x += y
		case '-':
			x -= y
		default:
			x *= y
		}
		return finite(x)
	}
	if a.kind == kindUint || b.kind == kindUint {
		return value{}, errOverflow
	}
	var r int64
	var ok bool
	switch op {
	case '+':
		r, ok = addInt(a.int(), b.int())
	case '-':
		r, ok = subInt(a.int(), b.int())
	default:
		r, ok = mulInt(a.int(), b.int())
	}
	if !ok {
		return value{}, errOverflow
	}
	return intValue(r), nil
}

func addInt(a, b int64) (int64, bool) {
	r := a + b
	return r, (r > a) == (b > 0)
}

func subInt(a, b int64) (int64, bool) {
	r := a - b
	return r, (r < a) == (b > 0)
}

func mulInt(a, b int64) (int64, bool) {
	if a == 0 || b == 0 {
		return 0, true
	}
	r := a * b
	return r, r/b == a && (a != math.MinInt64 || b != -1) && (b != math.MinInt64 || a != -1)
}

// finite refuses a float that JSON does not have.
func finite(f float64) (value, error) {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return value{}, errors.New("the result is not a finite number")
	}
	return floatValue(f), nil
}

// divide gives a float always, as the language has it.
func divide(a, b value) (value, error) {
	if a.isNull() || b.isNull() {
		return value{}, nil
	}
	if !a.isNumber() || !b.isNumber() {
		return value{}, mismatch("/", a, b)
	}
	if b.float() == 0 {
		return value{}, errors.New("division by zero")
	}
	return finite(a.float() / b.float())
}

func modulo(a, b value) (value, error) {
	if a.isNull() || b.isNull() {
		return value{}, nil
	}
	if a.kind != kindInt || b.kind != kindInt {
		if a.isNumber() && b.isNumber() {
			return value{}, errors.New("% is for 64-bit integers")
		}
		return value{}, mismatch("%", a, b)
	}
	switch b.int() {
	case 0:
		return value{}, errors.New("division by zero")
	case -1:
		return intValue(0), nil
	}
	return intValue(a.int() % b.int()), nil
}

// power gives a float always, as the language has it.
func power(a, b value) (value, error) {
	if a.isNull() || b.isNull() {
		return value{}, nil
	}
	if !a.isNumber() || !b.isNumber() {
		return value{}, mismatch("**", a, b)
	}
	return finite(math.Pow(a.float(), b.float()))
}

func negate(v value) (value, error) {
	switch v.kind {
	case kindNull:
		return v, nil
	case kindInt:
		if v.int() == math.MinInt64 {
			return value{}, errOverflow
		}
		return intValue(-v.int()), nil
	case kindUint:
		if v.bits == 1<<63 {
			return intValue(math.MinInt64), nil
		}
		return value{}, errOverflow
	case kindFloat:
		return floatValue(-v.float()), nil
	}
	return value{}, fmt.Errorf("- before %v", v.kind)
}

func plus(v value) (value, error) {
	if v.isNull() || v.isNumber() {
		return v, nil
	}
	return value{}, fmt.Errorf("+ before %v", v.kind)
}

func not(v value) (value, error) {
	switch v.kind {
	case kindNull:
		return v, nil
	case kindBool:
		return boolValue(v.bits == 0), nil
	}
	return value{}, fmt.Errorf("not before %v", v.kind)
}

// conjunction and disjunction see the left value first: it may decide alone.
func conjunction(a value, right func() (value, error)) (value, error) {
	return logic("and", false, a, right)
}

func disjunction(a value, right func() (value, error)) (value, error) {
	return logic("or", true, a, right)
}

func logic(op string, decisive bool, a value, right func() (value, error)) (value, error) {
	if a.kind != kindBool && a.kind != kindNull {
		return value{}, fmt.Errorf("%s after %v", op, a.kind)
	}
	if a.kind == kindBool && (a.bits != 0) == decisive {
		return a, nil
	}
	b, err := right()
	if err != nil {
		return value{}, err
	}
	if b.kind != kindBool && b.kind != kindNull {
		return value{}, fmt.Errorf("%s before %v", op, b.kind)
	}
	if b.kind == kindBool && (b.bits != 0) == decisive {
		return b, nil
	}
	if a.isNull() {
		return a, nil
	}
	return b, nil
}

// condition tells whether a record passes: null counts as false.
func condition(v value) (bool, error) {
	switch v.kind {
	case kindNull:
		return false, nil
	case kindBool:
		return v.bits != 0, nil
	}
	return false, fmt.Errorf("a condition is true or false, this is %v", v.kind)
}

// same tells whether two values that are not null are equal. Values of
// different types are not.
func same(a, b value) bool {
	switch {
	case a.isNumber() && b.isNumber():
		return compareNumbers(a, b) == 0
	case a.kind != b.kind:
		return false
	case a.kind == kindJSON:
		return sameJSON(a.str, b.str)
	}
	return a.bits == b.bits && a.str == b.str
}

func sameJSON(a, b string) bool {
	return a == b || reflect.DeepEqual(unfold(gjson.Parse(a)), unfold(gjson.Parse(b)))
}

// unfold turns JSON so that equal numbers are equal.
func unfold(res gjson.Result) any {
	switch {
	case res.IsObject():
		m := map[string]any{}
		res.ForEach(func(k, v gjson.Result) bool {
			if _, twice := m[k.Str]; !twice {
				m[k.Str] = unfold(v)
			}
			return true
		})
		return m
	case res.IsArray():
		list := []any{}
		res.ForEach(func(_, v gjson.Result) bool {
			list = append(list, unfold(v))
			return true
		})
		return list
	case res.Type == gjson.Number:
		v, err := parseNumber(res.Raw)
		if err != nil {
			return res.Raw
		}
		if f := v.float(); v.kind == kindFloat && f == math.Trunc(f) && math.Abs(f) < 1<<63 {
			return intValue(int64(f))
		}
		return v
	}
	return res.Value()
}

func equal(a, b value, want bool) (value, error) {
	if a.isNull() || b.isNull() {
		return value{}, nil
	}
	return boolValue(same(a, b) == want), nil
}

func order(op string, a, b value, holds func(int) bool) (value, error) {
	switch {
	case a.isNull() || b.isNull():
		return value{}, nil
	case a.isNumber() && b.isNumber():
		return boolValue(holds(compareNumbers(a, b))), nil
	case a.kind == kindString && b.kind == kindString:
		return boolValue(holds(strings.Compare(a.str, b.str))), nil
	}
	return value{}, mismatch(op, a, b)
}

func texts(op string, a, b value, holds func(s, sub string) bool) (value, error) {
	if a.isNull() || b.isNull() {
		return value{}, nil
	}
	if a.kind != kindString || b.kind != kindString {
		return value{}, mismatch(op, a, b)
	}
	return boolValue(holds(a.str, b.str)), nil
}

func matches(a, b value) (value, error) {
	if a.isNull() || b.isNull() {
		return value{}, nil
	}
	if a.kind != kindString || b.kind != kindString {
		return value{}, mismatch("matches", a, b)
	}
	re, err := regexp.Compile(b.str)
	if err != nil {
		return value{}, err
	}
	return boolValue(re.MatchString(a.str)), nil
}

// member is the operator in: an element of an array, or the name of a member of
// an object. As in SQL, a value that is not found among others of which one is
// null gives null.
func member(a, b value) (value, error) {
	if a.isNull() || b.isNull() {
		return value{}, nil
	}
	if b.kind != kindJSON {
		return value{}, mismatch("in", a, b)
	}
	list := gjson.Parse(b.str)
	if list.IsObject() {
		if a.kind != kindString {
			return value{}, mismatch("in", a, b)
		}
		return boolValue(gjson.Get(b.str, gjson.Escape(a.str)).Exists()), nil
	}
	var found, null bool
	var err error
	list.ForEach(func(_, res gjson.Result) bool {
		var v value
		if v, err = jsonValue(res); err != nil {
			return false
		}
		null = null || v.isNull()
		found = !v.isNull() && same(a, v)
		return !found
	})
	switch {
	case err != nil:
		return value{}, err
	case !found && null:
		return value{}, nil
	}
	return boolValue(found), nil
}

// item looks a member of an object or an element of an array up; what is not
// there is null. A negative index counts from the end.
func item(v, index value) (value, error) {
	if v.isNull() || index.isNull() {
		return value{}, nil
	}
	if v.kind != kindJSON {
		return value{}, fmt.Errorf("%v has no members", v.kind)
	}
	res := gjson.Parse(v.str)
	switch {
	case index.kind == kindString && res.IsObject():
		return jsonValue(gjson.Get(v.str, gjson.Escape(index.str)))
	case index.kind == kindInt && res.IsArray():
		list := res.Array()
		i := index.int()
		if i < 0 {
			i += int64(len(list))
		}
		if i < 0 || i >= int64(len(list)) {
			return value{}, nil
		}
		return jsonValue(list[i])
	case index.kind == kindString:
		return value{}, nil
	}
	return value{}, fmt.Errorf("an index of %v into %.1s…", index.kind, v.str)
}
