package flowspec

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/tidwall/gjson"
)

// box makes what the virtual machine works on.
func (v value) box() any {
	switch v.kind {
	case kindBool:
		return v.bits != 0
	case kindInt:
		return int(v.int())
	case kindUint:
		return v.bits
	case kindFloat:
		return v.float()
	case kindString:
		return v.str
	case kindJSON:
		return boxJSON(gjson.Parse(v.str))
	}
	return nil
}

func boxJSON(res gjson.Result) any {
	switch {
	case res.IsObject():
		m := map[string]any{}
		res.ForEach(func(k, v gjson.Result) bool {
			if _, twice := m[k.Str]; !twice {
				m[k.Str] = boxJSON(v)
			}
			return true
		})
		return m
	case res.IsArray():
		list := []any{}
		res.ForEach(func(_, v gjson.Result) bool {
			list = append(list, boxJSON(v))
			return true
		})
		return list
	}
	v, err := jsonValue(res)
	if err != nil {
		// Out of the range of a number: its text is all that is left.
		return res.Raw
	}
	return v.box()
}

// scalarOf takes a value that the virtual machine has as a scalar out of its
// box.
func scalarOf(x any) (v value, ok bool) {
	switch x := x.(type) {
	case nil:
		return value{}, true
	case bool:
		return boolValue(x), true
	case int:
		return intValue(int64(x)), true
	case int64:
		return intValue(x), true
	case int32:
		return intValue(int64(x)), true
	case uint8:
		return intValue(int64(x)), true
	case uint64:
		return uintValue(x), true
	case float64:
		return floatValue(x), true
	case string:
		return stringValue(x), true
	}
	return value{}, false
}

// unbox makes a value of anything that the virtual machine yields. A time
// becomes its text in UTC, a duration a text such as 1h30m0s.
func unbox(x any) (value, error) {
	if v, ok := scalarOf(x); ok {
		if v.kind == kindFloat {
			return finite(v.float())
		}
		return v, nil
	}
	switch x := x.(type) {
	case []byte:
		return stringValue(string(x)), nil
	case time.Time:
		return stringValue(x.UTC().Format(time.RFC3339Nano)), nil
	case time.Duration:
		return stringValue(x.String()), nil
	case fmt.Stringer:
		if v, ok := unboxInt(x); ok {
			return v, nil
		}
	}
	text, err := appendBoxed(nil, x)
	if err != nil {
		return value{}, err
	}
	return value{kind: kindJSON, str: string(text)}, nil
}

// unboxInt is for the months and weekdays of times.
func unboxInt(x fmt.Stringer) (value, bool) {
	switch x := x.(type) {
	case time.Month:
		return intValue(int64(x)), true
	case time.Weekday:
		return intValue(int64(x)), true
	}
	return value{}, false
}

// appendBoxed appends JSON; the members of objects are sorted by name.
func appendBoxed(dst []byte, x any) ([]byte, error) {
	var err error
	switch x := x.(type) {
	case []any:
		dst = append(dst, '[')
		for i, e := range x {
			if i > 0 {
				dst = append(dst, ',')
			}
			if dst, err = appendBoxed(dst, e); err != nil {
				return dst, err
			}
		}
		return append(dst, ']'), nil
	case map[string]any:
		dst = append(dst, '{')
		for i, name := range slices.Sorted(maps.Keys(x)) {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(appendString(dst, name), ':')
			if dst, err = appendBoxed(dst, x[name]); err != nil {
				return dst, err
			}
		}
		return append(dst, '}'), nil
	case map[any][]any:
		named := make(map[string]any, len(x))
		for k, v := range x {
			named[fmt.Sprint(k)] = v
		}
		return appendBoxed(dst, named)
	case []byte, time.Time, time.Duration, time.Month, time.Weekday:
		v, err := unbox(x)
		return v.appendJSON(dst), err
	}
	if v, ok := scalarOf(x); ok {
		if f := v.float(); v.kind == kindFloat && (math.IsNaN(f) || math.IsInf(f, 0)) {
			return dst, errors.New("the result is not a finite number")
		}
		return v.appendJSON(dst), nil
	}
	text, err := json.Marshal(x)
	if err != nil {
		return dst, fmt.Errorf("a result of type %T", x)
	}
	return append(dst, text...), nil
}
