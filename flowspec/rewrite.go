package flowspec

import (
	"regexp"
	"slices"
	"strconv"

	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/builtin"
	"github.com/expr-lang/expr/conf"
	"github.com/expr-lang/expr/vm/runtime"
)

// rewriter turns the tree of an expression into one for the virtual machine:
// names become variables that are filled from the record, and operators become
// the same functions that the native code uses.
type rewriter struct {
	scope   *scope
	program *program
	config  *conf.Config
	lets    int
}

func (w *rewriter) call(at ast.Node, name string, args ...ast.Node) ast.Node {
	callee := &ast.IdentifierNode{Value: name}
	callee.SetLocation(at.Location())
	n := &ast.CallNode{Callee: callee, Arguments: args}
	n.SetLocation(at.Location())
	return n
}

// rewrite returns the tree for the virtual machine. The original is not changed:
// parts of it may be shared.
func (w *rewriter) rewrite(n ast.Node, vars []string) ast.Node {
	if names, _, ok := pathOf(n, vars); ok {
		return w.variable(n, names)
	}
	var out ast.Node
	switch n := n.(type) {
	case *ast.UnaryNode:
		return w.call(n, "__unary"+n.Operator, w.rewrite(n.Node, vars))
	case *ast.BinaryNode:
		return w.binary(n, vars)
	case *ast.ChainNode:
		return w.rewrite(n.Node, vars)
	case *ast.MemberNode:
		return w.call(n, fnItem, w.rewrite(n.Node, vars), w.rewrite(n.Property, vars))
	case *ast.BuiltinNode:
		out = w.builtin(n, vars)
	case *ast.CallNode:
		method := *n.Callee.(*ast.MemberNode)
		method.Node = w.rewrite(method.Node, vars)
		out = &ast.CallNode{Callee: &method, Arguments: w.all(n.Arguments, vars)}
	case *ast.PredicateNode:
		out = &ast.PredicateNode{Node: w.rewrite(n.Node, vars)}
	case *ast.ConditionalNode:
		out = &ast.ConditionalNode{
			Ternary: n.Ternary, Cond: w.call(n.Cond, fnTrue, w.rewrite(n.Cond, vars)),
			Exp1: w.rewrite(n.Exp1, vars), Exp2: w.rewrite(n.Exp2, vars),
		}
	case *ast.VariableDeclaratorNode:
		out = &ast.VariableDeclaratorNode{
			Name: n.Name, Value: w.rewrite(n.Value, vars),
			Expr: w.rewrite(n.Expr, append(slices.Clone(vars), n.Name)),
		}
	default:
		out = w.plain(n, vars)
	}
	if out != n {
		out.SetLocation(n.Location())
	}
	return out
}

// plain copies the nodes that only hold others.
func (w *rewriter) plain(n ast.Node, vars []string) ast.Node {
	switch n := n.(type) {
	case *ast.SliceNode:
		s := &ast.SliceNode{Node: w.rewrite(n.Node, vars)}
		if n.From != nil {
			s.From = w.rewrite(n.From, vars)
		}
		if n.To != nil {
			s.To = w.rewrite(n.To, vars)
		}
		return s
	case *ast.SequenceNode:
		return &ast.SequenceNode{Nodes: w.all(n.Nodes, vars)}
	case *ast.ArrayNode:
		return &ast.ArrayNode{Nodes: w.all(n.Nodes, vars)}
	case *ast.MapNode:
		return &ast.MapNode{Pairs: w.all(n.Pairs, vars)}
	case *ast.PairNode:
		return &ast.PairNode{Key: w.rewrite(n.Key, vars), Value: w.rewrite(n.Value, vars)}
	case *ast.IntegerNode:
		return &ast.IntegerNode{Value: n.Value}
	}
	return n
}

func (w *rewriter) all(nodes []ast.Node, vars []string) []ast.Node {
	out := make([]ast.Node, len(nodes))
	for i, n := range nodes {
		out[i] = w.rewrite(n, vars)
	}
	return out
}

// variable makes a path a variable of the program.
func (w *rewriter) variable(n ast.Node, names []string) ast.Node {
	p, _, _ := w.scope.lookup(names)
	i := slices.IndexFunc(w.program.paths, func(have *path) bool { return slices.Equal(have.names, p.names) })
	if i < 0 {
		i = len(w.program.paths)
		w.program.paths = append(w.program.paths, p)
		w.program.names = append(w.program.names, "__path"+strconv.Itoa(i))
	}
	id := &ast.IdentifierNode{Value: w.program.names[i]}
	id.SetLocation(n.Location())
	return id
}

func (w *rewriter) binary(n *ast.BinaryNode, vars []string) ast.Node {
	switch n.Operator {
	case "and", "&&":
		return w.lazy(n, vars, fnFalsy, "__and")
	case "or", "||":
		return w.lazy(n, vars, fnTruthy, "__or")
	case "??", "..":
		out := &ast.BinaryNode{Operator: n.Operator, Left: w.rewrite(n.Left, vars), Right: w.rewrite(n.Right, vars)}
		out.SetLocation(n.Location())
		return out
	case "==", "!=":
		if of, ok := nullTest(n); ok {
			name := fnIsNull
			if n.Operator == "!=" {
				name = fnNotNull
			}
			return w.call(n, name, w.rewrite(of, vars))
		}
	case "matches":
		if s, ok := n.Right.(*ast.StringNode); ok {
			if re, err := compilePattern(s.Value); err == nil {
				return w.call(n, w.pattern(re), w.rewrite(n.Left, vars))
			}
		}
	}
	return w.call(n, "__"+n.Operator, w.rewrite(n.Left, vars), w.rewrite(n.Right, vars))
}

// pattern makes a function that matches one compiled pattern.
func (w *rewriter) pattern(re *regexp.Regexp) string {
	name := "__pattern" + strconv.Itoa(len(w.config.Functions))
	w.function(name, func(args ...any) (any, error) {
		v, err := unbox(args[0])
		if err == nil {
			v, err = matchPattern(re, v)
		}
		if err != nil {
			return nil, err
		}
		return v.box(), nil
	})
	return name
}

// lazy keeps the right side of "and" and "or" from being computed where the left
// side decides:
//
//	let l = left; decides(l) ? l : op(l, right)
func (w *rewriter) lazy(n *ast.BinaryNode, vars []string, decides, op string) ast.Node {
	name := w.variableName()
	left, right := w.rewrite(n.Left, vars), w.rewrite(n.Right, vars)
	use := func() ast.Node {
		id := &ast.IdentifierNode{Value: name}
		id.SetLocation(n.Left.Location())
		return id
	}
	out := &ast.VariableDeclaratorNode{
		Name: name, Value: left,
		Expr: &ast.ConditionalNode{
			Ternary: true, Cond: w.call(n, decides, use()), Exp1: use(), Exp2: w.call(n, op, use(), right),
		},
	}
	out.SetLocation(n.Location())
	return out
}

// conditions are the functions whose predicate is a condition.
var conditions = map[string]bool{
	"all": true, "none": true, "any": true, "one": true, "filter": true, "count": true,
	"find": true, "findIndex": true, "findLast": true, "findLastIndex": true,
}

// builtin rewrites a function of the language. As in SQL, a function of null is
// null, except for those that say something about it.
func (w *rewriter) builtin(n *ast.BuiltinNode, vars []string) ast.Node {
	args := w.all(n.Arguments, vars)
	switch n.Name {
	case "keys":
		return w.call(n, fnKeys, args...)
	case "values":
		return w.call(n, fnValues, args...)
	case "toPairs":
		return w.call(n, fnPairs, args...)
	case "get":
		if len(args) == 2 {
			return w.call(n, fnItem, args...)
		}
	case "type", "toJSON":
		return &ast.BuiltinNode{Name: n.Name, Arguments: args}
	}
	if len(args) == 0 {
		return &ast.BuiltinNode{Name: n.Name}
	}
	if i, ok := builtin.Index[n.Name]; ok {
		if f := builtin.Builtins[i]; !f.Predicate && (f.Fast != nil || f.Func != nil) {
			return w.call(n, w.nullable(f), args...)
		}
	}
	if conditions[n.Name] && len(args) > 1 {
		if p, ok := args[1].(*ast.PredicateNode); ok {
			p.Node = w.call(p.Node, fnTrue, p.Node)
		}
	}
	return w.unlessNull(n, args)
}

// nullable makes a function that is null where one of its arguments is.
func (w *rewriter) nullable(f *builtin.Function) string {
	name := "__call_" + f.Name
	if _, ok := w.config.Functions[name]; ok {
		return name
	}
	w.config.Functions[name] = &builtin.Function{
		Name: f.Name, Types: f.Types, Validate: f.Validate,
		Func: func(args ...any) (any, error) {
			if slices.ContainsFunc(args, runtime.IsNil) {
				return nil, nil
			}
			if f.Fast != nil {
				return f.Fast(args[0]), nil
			}
			return f.Func(args...)
		},
	}
	return name
}

// unlessNull guards a function that goes through a list:
//
//	let l = list; l == nil ? nil : fn(l, predicate)
func (w *rewriter) unlessNull(n *ast.BuiltinNode, args []ast.Node) ast.Node {
	name := w.variableName()
	use := func() ast.Node {
		id := &ast.IdentifierNode{Value: name}
		id.SetLocation(n.Location())
		return id
	}
	call := &ast.BuiltinNode{Name: n.Name, Arguments: append([]ast.Node{use()}, args[1:]...)}
	call.SetLocation(n.Location())
	return &ast.VariableDeclaratorNode{
		Name: name, Value: args[0],
		Expr: &ast.ConditionalNode{Ternary: true, Cond: w.call(n, fnIsNull, use()), Exp1: &ast.NilNode{}, Exp2: call},
	}
}

func (w *rewriter) variableName() string {
	w.lets++
	return "__let" + strconv.Itoa(w.lets)
}
