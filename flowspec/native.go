package flowspec

import (
	"fmt"
	"regexp"

	"github.com/expr-lang/expr/ast"

	"natsflow/flow"
)

// native compiles an expression to closures over values that are not boxed:
// names, literals and operators. A part that needs more of the language, such
// as a function, runs in its virtual machine (see virtual). Both use the same
// operators.
func (c *exprCompiler) native(n ast.Node) eval {
	if names, _, ok := pathOf(n, nil); ok {
		p, _, _ := c.scope.lookup(names)
		return p.value
	}
	if v, ok := literal(n); ok {
		return func(*flow.Meta, record) (value, error) { return v, nil }
	}
	switch n := n.(type) {
	case *ast.UnaryNode:
		return c.unary(n)
	case *ast.BinaryNode:
		return c.binary(n)
	case *ast.ChainNode:
		return c.native(n.Node)
	case *ast.MemberNode:
		if n.Method {
			break
		}
		return both(c.native(n.Node), c.native(n.Property), item)
	case *ast.ConditionalNode:
		cond, yes, no := c.native(n.Cond), c.native(n.Exp1), c.native(n.Exp2)
		return func(m *flow.Meta, r record) (value, error) {
			v, err := cond(m, r)
			if err != nil {
				return value{}, err
			}
			ok, err := condition(v)
			switch {
			case err != nil:
				return value{}, err
			case ok:
				return yes(m, r)
			}
			return no(m, r)
		}
	}
	return c.virtual(n)
}

// literal returns the value of a literal.
func literal(n ast.Node) (value, bool) {
	switch n := n.(type) {
	case *ast.NilNode:
		return value{}, true
	case *ast.BoolNode:
		return boolValue(n.Value), true
	case *ast.IntegerNode:
		return intValue(int64(n.Value)), true
	case *ast.FloatNode:
		return floatValue(n.Value), true
	case *ast.StringNode:
		return stringValue(n.Value), true
	}
	return value{}, false
}

func (c *exprCompiler) unary(n *ast.UnaryNode) eval {
	of := c.native(n.Node)
	op := unaryOp(n.Operator)
	return func(m *flow.Meta, r record) (value, error) {
		v, err := of(m, r)
		if err != nil {
			return value{}, err
		}
		return op(v)
	}
}

func unaryOp(op string) func(value) (value, error) {
	switch op {
	case "-":
		return negate
	case "+":
		return plus
	}
	return not
}

// both evaluates two operands and applies an operator.
func both(left, right eval, op operator) eval {
	return func(m *flow.Meta, r record) (value, error) {
		a, err := left(m, r)
		if err != nil {
			return value{}, err
		}
		b, err := right(m, r)
		if err != nil {
			return value{}, err
		}
		return op(a, b)
	}
}

func (c *exprCompiler) binary(n *ast.BinaryNode) eval {
	switch n.Operator {
	case "and", "&&":
		return lazy(c.native(n.Left), c.native(n.Right), conjunction)
	case "or", "||":
		return lazy(c.native(n.Left), c.native(n.Right), disjunction)
	case "??":
		left, right := c.native(n.Left), c.native(n.Right)
		return func(m *flow.Meta, r record) (value, error) {
			if v, err := left(m, r); err != nil || !v.isNull() {
				return v, err
			}
			return right(m, r)
		}
	case "==", "!=":
		if of, ok := nullTest(n); ok {
			return isNullTest(c.native(of), n.Operator == "==")
		}
	case "in":
		if list, ok := literals(n.Right); ok {
			return inLiterals(c.native(n.Left), list)
		}
	case "matches":
		if s, ok := n.Right.(*ast.StringNode); ok {
			// checkPattern has compiled it before.
			if re, err := compilePattern(s.Value); err == nil {
				return one(c.native(n.Left), func(v value) (value, error) { return matchPattern(re, v) })
			}
		}
	}
	if op := binaryOp(n.Operator); op != nil {
		return both(c.native(n.Left), c.native(n.Right), op)
	}
	return c.virtual(n)
}

func one(of eval, op func(value) (value, error)) eval {
	return func(m *flow.Meta, r record) (value, error) {
		v, err := of(m, r)
		if err != nil {
			return value{}, err
		}
		return op(v)
	}
}

func lazy(left, right eval, op func(value, func() (value, error)) (value, error)) eval {
	return func(m *flow.Meta, r record) (value, error) {
		a, err := left(m, r)
		if err != nil {
			return value{}, err
		}
		return op(a, func() (value, error) { return right(m, r) })
	}
}

// nullTest tells whether a comparison has the word nil on one side, and returns
// the other side.
func nullTest(n *ast.BinaryNode) (of ast.Node, ok bool) {
	if _, null := n.Right.(*ast.NilNode); null {
		return n.Left, true
	}
	if _, null := n.Left.(*ast.NilNode); null {
		return n.Right, true
	}
	return nil, false
}

func isNullTest(of eval, want bool) eval {
	return one(of, func(v value) (value, error) { return boolValue(v.isNull() == want), nil })
}

// literals returns the values of a list that has nothing but literals.
func literals(n ast.Node) ([]value, bool) {
	array, ok := n.(*ast.ArrayNode)
	if !ok {
		return nil, false
	}
	var list []value
	for _, element := range array.Nodes {
		v, ok := literal(element)
		if !ok {
			return nil, false
		}
		list = append(list, v)
	}
	return list, true
}

func inLiterals(of eval, list []value) eval {
	return one(of, func(v value) (value, error) {
		if v.isNull() {
			return v, nil
		}
		null := false
		for _, l := range list {
			if l.isNull() {
				null = true
			} else if same(v, l) {
				return boolValue(true), nil
			}
		}
		if null {
			return value{}, nil
		}
		return boolValue(false), nil
	})
}

func compilePattern(s string) (*regexp.Regexp, error) {
	re, err := regexp.Compile(s)
	if err != nil {
		return nil, fmt.Errorf("matches: %w", err)
	}
	return re, nil
}

func matchPattern(re *regexp.Regexp, v value) (value, error) {
	switch v.kind {
	case kindNull:
		return v, nil
	case kindString:
		return boolValue(re.MatchString(v.str)), nil
	}
	return value{}, mismatch("matches", v, stringValue(""))
}
