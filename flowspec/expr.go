package flowspec

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/builtin"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/parser"

	"natsflow/flow"
)

// maxExpression bounds the length of an expression in bytes: its parser descends
// by recursion.
const maxExpression = 16 << 10

// eval computes an expression for a record. What it returns may point into the
// record's payload.
type eval func(m *flow.Meta, r record) (value, error)

// expression is a checked expression.
type expression struct {
	// text as the language prints it, whatever the spaces in the file.
	text string
	eval eval
	// path is set where the expression is a name and nothing else.
	path *path
	// result is the kind that the expression always yields when it is not null,
	// kindFloat for any number; kindNull where that is not known.
	result kind
}

// condition evaluates the expression where a record is to pass or not.
func (e *expression) condition(m *flow.Meta, r record) (bool, error) {
	v, err := e.eval(m, r)
	if err != nil {
		return false, e.failed(err)
	}
	ok, err := condition(v)
	if err != nil {
		return false, e.failed(err)
	}
	return ok, nil
}

func (e *expression) failed(err error) error { return fmt.Errorf("%s: %w", e.text, err) }

// appendJSON evaluates the expression and appends its value. A member of the
// payload is copied byte for byte.
func (e *expression) appendJSON(dst []byte, m *flow.Meta, r record) ([]byte, error) {
	if e.path != nil {
		return e.path.appendRaw(dst, m, r)
	}
	v, err := e.eval(m, r)
	if err != nil {
		return dst, e.failed(err)
	}
	return v.appendJSON(dst), nil
}

// scope is what is known of the records at a step.
type scope struct {
	format Format
	keyed  bool
	// spread: they have no key and are redistributed.
	spread bool
	// stage is how often the key was changed on the way here.
	stage int
	// members are those that a step before has made; unknown for a payload.
	members []string
	known   bool
	// from says which step made them.
	from string
	// reads are the sources that the records come from.
	reads []*Source
	// others are the sources of records that joins have added to them: the positions are
	// not of these, but the times depend on them.
	others []*Source
	// lost is true where the list reads something that is reported as a mistake,
	// so that nothing is known of the records. keyed is true then: what needs a
	// key is not a second mistake.
	lost bool
	// windowed: they are results of windows, which come of no single record.
	windowed bool
	// panes are the members that only some of them have: those that say what kind of
	// result it is.
	panes []string
	// joined: they do not come in the order of their times, though they may be of one
	// source.
	joined bool
}

// lookup checks that a path can name something and returns it. The mistake, if
// any, comes with a hint.
func (sc *scope) lookup(names []string) (p *path, mistake, hint string) {
	p = newPath(names)
	if slices.Contains(bucketNames, p.special) && !sc.ofBucket() {
		p.special = ""
	}
	switch {
	case p.special == nameKey && !sc.keyed:
		return nil, "there is no _key before a key step", ""
	case sc.windowed && slices.Contains([]string{nameSubject, nameSeq, nameStream, nameTime, nameBucketKey, nameDeleted}, p.special):
		hint := "window.start and window.end are its times"
		if !slices.Contains(sc.members, nameWindow) {
			hint = ""
		}
		return nil, fmt.Sprintf("the result of a window has no %s: it comes of no single record", p.special), hint
	case p.special == nameValue && sc.format == Bytes:
		return nil, "format bytes has no _value: expressions do not look into the payload", "use format: text or json"
	case p.special != "" && len(names) > 1 && (p.special != nameValue || sc.format == Text):
		return nil, fmt.Sprintf("%s has no members", p.special), ""
	case p.special != "":
		p.plain = sc.format == Text
		return p, "", ""
	case sc.known && !slices.Contains(sc.members, names[0]) && !slices.Contains(sc.panes, names[0]):
		if len(sc.members) == 0 {
			return nil, fmt.Sprintf("there is no member %q: %s", names[0], sc.from), "the payload is _value in format text"
		}
		return nil, fmt.Sprintf("there is no member %q: %s made %s", names[0], sc.from, strings.Join(sc.members, ", ")),
			didYouMeanOnly(names[0], append(slices.Clone(sc.members), recordNames...))
	}
	return p, "", ""
}

func didYouMeanOnly(word string, possible []string) string {
	if best := nearest(word, possible); best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	return ""
}

// exprCompiler checks and compiles one expression.
type exprCompiler struct {
	doc   *document
	scope *scope
	// place maps an offset in the expression's text to the file.
	place func(offset int) position
	what  string
	bad   bool
	// time is true where the expression works on times or durations, which only
	// the virtual machine has.
	time bool
	text string
}

// compileExpression compiles the text from the offset on. It reports what is
// wrong and returns nil then.
func (d *document) compileExpression(s scalar, offset int, source, what string, sc *scope) *expression {
	c := &exprCompiler{
		doc: d, scope: sc, what: what, text: source,
		place: func(i int) position { return s.at(offset + i) },
	}
	if strings.TrimSpace(source) == "" {
		c.errorf(0, "", "an expression is missing")
		return nil
	}
	if len(source) > maxExpression {
		c.errorf(0, "", "the expression has more than %d bytes", maxExpression)
		return nil
	}
	return c.compile(source)
}

func (c *exprCompiler) compile(source string) (e *expression) {
	// A panic of the language's compiler must not take the program down.
	defer func() {
		if p := recover(); p != nil {
			c.errorf(0, "", "the expression cannot be compiled: %v", p)
			e = nil
		}
	}()
	tree, err := parser.Parse(source)
	if err != nil {
		c.syntaxError(err)
		return nil
	}
	c.check(tree.Node, nil, 0)
	if c.bad {
		return nil
	}
	// The whole is compiled for the virtual machine even where it is not used:
	// its checker knows the arguments of the functions.
	whole := c.virtual(tree.Node)
	if c.bad {
		return nil
	}
	e = &expression{text: tree.Node.String(), eval: whole, result: resultKind(tree.Node)}
	if !c.time {
		e.eval = c.native(tree.Node)
	}
	if names, _, ok := pathOf(tree.Node, nil); ok {
		e.path, _, _ = c.scope.lookup(names)
	}
	if c.bad {
		return nil
	}
	return e
}

func (c *exprCompiler) errorf(offset int, hint, format string, args ...any) {
	c.bad = true
	c.doc.errorf(c.place(offset), hint, "%s: %s", c.what, fmt.Sprintf(format, args...))
}

var tokenRE = regexp.MustCompile(`unexpected token [A-Za-z]+\((".*")\)`)

func (c *exprCompiler) syntaxError(err error) {
	var fe *file.Error
	if !errors.As(err, &fe) {
		c.errorf(0, "", "%v", err)
		return
	}
	hint := ""
	switch {
	case strings.Contains(fe.Message, `Operator("=")`):
		hint = "== compares"
	case strings.Contains(fe.Message, "EOF"):
		fe.Message = "the expression ends too early"
	case strings.Contains(fe.Message, "value out of range"):
		fe.Message = "the number is out of range"
	}
	// unexpected token Operator("=") is unexpected "=".
	msg := tokenRE.ReplaceAllString(fe.Message, "unexpected $1")
	c.errorf(fe.From, hint, "%s", msg)
}

// pathOf returns the names of a path, such as those of a.b.c, and the place of
// the first one.
func pathOf(n ast.Node, vars []string) (names []string, at int, ok bool) {
	switch n := n.(type) {
	case *ast.IdentifierNode:
		if slices.Contains(vars, n.Value) || n.Value == "$env" {
			return nil, 0, false
		}
		return []string{n.Value}, n.Location().From, true
	case *ast.ChainNode:
		return pathOf(n.Node, vars)
	case *ast.MemberNode:
		name, isName := n.Property.(*ast.StringNode)
		if !isName || n.Method || name.Value == "" {
			return nil, 0, false
		}
		// $env["a name with spaces"] is the way to names that are no words.
		if id, isEnv := n.Node.(*ast.IdentifierNode); isEnv && id.Value == "$env" {
			return []string{name.Value}, name.Location().From, true
		}
		names, at, ok = pathOf(n.Node, vars)
		return append(names, name.Value), at, ok
	}
	return nil, 0, false
}

// check refuses what a flow cannot have: what may run for too long, what differs
// from run to run, and names that are not there. depth counts the predicates
// around.
func (c *exprCompiler) check(n ast.Node, vars []string, depth int) {
	at := n.Location().From
	if names, from, ok := pathOf(n, vars); ok {
		if _, mistake, hint := c.scope.lookup(names); mistake != "" {
			c.errorf(from, hint, "%s", mistake)
		}
		return
	}
	switch n := n.(type) {
	case *ast.IdentifierNode:
		if n.Value == "$env" {
			c.errorf(at, `name a member: $env["name"]`, "$env alone is not a value")
		}
	case *ast.BinaryNode:
		if n.Operator == ".." {
			c.errorf(at, "", "ranges are not possible in a flow")
		}
		c.checkPattern(n)
	case *ast.BuiltinNode:
		c.checkBuiltin(n)
	case *ast.PredicateNode:
		if depth++; depth > 1 {
			c.errorf(at, "", "a predicate inside another one: one level is possible")
		}
	case *ast.CallNode:
		c.checkCall(n)
		if m, ok := n.Callee.(*ast.MemberNode); ok {
			c.check(m.Node, vars, depth)
		}
		for _, a := range n.Arguments {
			c.check(a, vars, depth)
		}
		return
	case *ast.VariableDeclaratorNode:
		c.check(n.Value, vars, depth)
		c.check(n.Expr, append(slices.Clone(vars), n.Name), depth)
		return
	}
	for _, child := range children(n) {
		c.check(child, vars, depth)
	}
}

func (c *exprCompiler) checkPattern(n *ast.BinaryNode) {
	if s, ok := n.Right.(*ast.StringNode); ok && n.Operator == "matches" {
		if _, err := compilePattern(s.Value); err != nil {
			c.errorf(s.Location().From, "", "%v", err)
		}
	}
}

func (c *exprCompiler) checkBuiltin(n *ast.BuiltinNode) {
	at := n.Location().From
	switch n.Name {
	case "now":
		c.errorf(at, "_time is the time of the record", "now() is not possible: a replay would give other results")
	case "date", "duration", "timezone":
		c.time = true
	}
}

// checkCall refuses calls of what is not a function of the language. Only a time
// or a duration, made in place, has methods.
func (c *exprCompiler) checkCall(n *ast.CallNode) {
	at := n.Location().From
	switch callee := n.Callee.(type) {
	case *ast.IdentifierNode:
		c.errorf(at, didYouMeanOnly(callee.Value, builtin.Names), "there is no function %q", callee.Value)
	case *ast.MemberNode:
		method, _ := callee.Property.(*ast.StringNode)
		made, isCall := callee.Node.(*ast.BuiltinNode)
		switch {
		case method == nil || !isCall || made.Name != "date" && made.Name != "duration":
			c.errorf(at, "", "only date(…) and duration(…) have methods")
		case method.Value == "Local" || method.Value == "In":
			c.errorf(at, "", "%s is not possible: it depends on the machine", method.Value)
		}
	default:
		c.errorf(at, "", "only a function can be called")
	}
}

// children returns the nodes below a node; those that hold no expression of
// their own are left out.
func children(n ast.Node) []ast.Node {
	switch n := n.(type) {
	case *ast.UnaryNode:
		return []ast.Node{n.Node}
	case *ast.BinaryNode:
		return []ast.Node{n.Left, n.Right}
	case *ast.ChainNode:
		return []ast.Node{n.Node}
	case *ast.MemberNode:
		return []ast.Node{n.Node, n.Property}
	case *ast.SliceNode:
		return present(n.Node, n.From, n.To)
	case *ast.BuiltinNode:
		return n.Arguments
	case *ast.PredicateNode:
		return []ast.Node{n.Node}
	case *ast.ConditionalNode:
		return []ast.Node{n.Cond, n.Exp1, n.Exp2}
	case *ast.SequenceNode:
		return n.Nodes
	case *ast.ArrayNode:
		return n.Nodes
	case *ast.MapNode:
		return n.Pairs
	case *ast.PairNode:
		return []ast.Node{n.Key, n.Value}
	}
	return nil
}

func present(nodes ...ast.Node) []ast.Node {
	return slices.DeleteFunc(nodes, func(n ast.Node) bool { return n == nil })
}

// resultKind tells what kind an expression yields, as far as its outermost
// operator says.
func resultKind(n ast.Node) kind {
	switch n := n.(type) {
	case *ast.BoolNode:
		return kindBool
	case *ast.IntegerNode, *ast.FloatNode:
		return kindFloat
	case *ast.StringNode:
		return kindString
	case *ast.ArrayNode, *ast.MapNode:
		return kindJSON
	case *ast.UnaryNode:
		if n.Operator == "not" || n.Operator == "!" {
			return kindBool
		}
		return kindFloat
	case *ast.BinaryNode:
		switch n.Operator {
		case "+":
			// Numbers, texts or times, as the operands are.
			if k := resultKind(n.Left); k != kindNull {
				return k
			}
			return resultKind(n.Right)
		case "??":
			return kindNull
		case "-", "*", "/", "%", "**", "^":
			return kindFloat
		}
		return kindBool
	}
	return kindNull
}
