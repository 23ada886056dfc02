package flowspec

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/vm/runtime"
)

// The names of the functions that operators become. A flow cannot call them:
// its calls are checked before.
const (
	fnTrue    = "__true"
	fnItem    = "__item"
	fnIsNull  = "__null"
	fnNotNull = "__some"
	fnKeys    = "__keys"
	fnValues  = "__values"
	fnPairs   = "__pairs"
	fnFalsy   = "__false"
	fnTruthy  = "__holds"
)

func (w *rewriter) function(name string, fn func(args ...any) (any, error)) {
	expr.Function(name, fn)(w.config)
}

func (w *rewriter) functions() {
	for _, op := range []string{
		"+", "-", "*", "/", "%", "**", "^", "==", "!=", "<", "<=", ">", ">=",
		"in", "contains", "startsWith", "endsWith", "matches",
	} {
		w.function("__"+op, boxedBinary(op))
	}
	for _, op := range []string{"-", "+", "not", "!"} {
		w.function("__unary"+op, boxedUnary(op))
	}
	w.function("__and", boxedLogic(conjunction))
	w.function("__or", boxedLogic(disjunction))
	w.function(fnTrue, func(args ...any) (any, error) {
		v, err := unbox(args[0])
		if err != nil {
			return nil, err
		}
		return condition(v)
	})
	w.function(fnFalsy, func(args ...any) (any, error) { return args[0] == false, nil })
	w.function(fnTruthy, func(args ...any) (any, error) { return args[0] == true, nil })
	w.function(fnIsNull, func(args ...any) (any, error) { return runtime.IsNil(args[0]), nil })
	w.function(fnNotNull, func(args ...any) (any, error) { return !runtime.IsNil(args[0]), nil })
	w.function(fnItem, boxedItem)
	w.function(fnKeys, sortedPairs(func(k string, _ any) any { return k }))
	w.function(fnValues, sortedPairs(func(_ string, v any) any { return v }))
	w.function(fnPairs, sortedPairs(func(k string, v any) any { return []any{k, v} }))
}

func boxedBinary(op string) func(args ...any) (any, error) {
	fn := binaryOp(op)
	return func(args ...any) (any, error) {
		a, okA := scalarOf(args[0])
		b, okB := scalarOf(args[1])
		if okA && a.isNull() || okB && b.isNull() {
			return nil, nil
		}
		if isTime(args[0]) || isTime(args[1]) {
			return timeOp(op, args[0], args[1])
		}
		var err error
		if !okA {
			if a, err = unbox(args[0]); err != nil {
				return nil, err
			}
		}
		if !okB {
			if b, err = unbox(args[1]); err != nil {
				return nil, err
			}
		}
		v, err := fn(a, b)
		if err != nil {
			return nil, err
		}
		return v.box(), nil
	}
}

func isTime(x any) bool {
	switch x.(type) {
	case time.Time, time.Duration, time.Month, time.Weekday:
		return true
	}
	return false
}

// timeOp leaves times and durations to the language. It panics where they do
// not fit; the virtual machine turns that into an error.
func timeOp(op string, a, b any) (any, error) {
	switch op {
	case "+":
		return runtime.Add(a, b), nil
	case "-":
		return runtime.Subtract(a, b), nil
	case "*":
		return runtime.Multiply(a, b), nil
	case "/":
		return runtime.Divide(a, b), nil
	case "==":
		return runtime.Equal(a, b), nil
	case "!=":
		return !runtime.Equal(a, b), nil
	case "<":
		return runtime.Less(a, b), nil
	case "<=":
		return runtime.LessOrEqual(a, b), nil
	case ">":
		return runtime.More(a, b), nil
	case ">=":
		return runtime.MoreOrEqual(a, b), nil
	}
	return nil, fmt.Errorf("%s with a time", op)
}

func boxedUnary(op string) func(args ...any) (any, error) {
	fn := unaryOp(op)
	return func(args ...any) (any, error) {
		if d, ok := args[0].(time.Duration); ok && op == "-" {
			return -d, nil
		}
		v, err := unbox(args[0])
		if err == nil {
			v, err = fn(v)
		}
		if err != nil {
			return nil, err
		}
		return v.box(), nil
	}
}

func boxedLogic(fn func(value, func() (value, error)) (value, error)) func(args ...any) (any, error) {
	return func(args ...any) (any, error) {
		a, err := unbox(args[0])
		if err != nil {
			return nil, err
		}
		v, err := fn(a, func() (value, error) { return unbox(args[1]) })
		if err != nil {
			return nil, err
		}
		return v.box(), nil
	}
}

// boxedItem is item for what the virtual machine has.
func boxedItem(args ...any) (any, error) {
	of, index := args[0], args[1]
	switch of := of.(type) {
	case nil:
		return nil, nil
	case map[string]any:
		if name, ok := index.(string); ok {
			return of[name], nil
		}
	case []any:
		if i, ok := index.(int); ok {
			if i < 0 {
				i += len(of)
			}
			if i < 0 || i >= len(of) {
				return nil, nil
			}
			return of[i], nil
		}
	case map[any][]any:
		if group, ok := of[index]; ok {
			return group, nil
		}
		return nil, nil
	}
	v, err := unbox(of)
	if err != nil {
		return nil, err
	}
	i, err := unbox(index)
	if err != nil {
		return nil, err
	}
	v, err = item(v, i)
	if err != nil {
		return nil, err
	}
	return v.box(), nil
}

// sortedPairs lists an object in the order of its names: the language's own
// order differs from run to run.
func sortedPairs(pick func(k string, v any) any) func(args ...any) (any, error) {
	return func(args ...any) (any, error) {
		if len(args) != 1 {
			return nil, fmt.Errorf("%d arguments instead of 1", len(args))
		}
		object := map[string]any{}
		switch x := args[0].(type) {
		case map[string]any:
			object = x
		case map[any][]any:
			for k, v := range x {
				object[fmt.Sprint(k)] = v
			}
		case nil:
			return nil, nil
		default:
			return nil, fmt.Errorf("%T is not an object", x)
		}
		list := make([]any, 0, len(object))
		for _, k := range slices.Sorted(maps.Keys(object)) {
			list = append(list, pick(k, object[k]))
		}
		return list, nil
	}
}
