package flowspec

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// maxFile bounds the size of a flow file in bytes, and maxNesting how deep it
// may be nested: its reader descends by recursion.
const (
	maxFile    = 256 << 10
	maxNesting = 100
)

// document is a flow file that is being read.
type document struct {
	reporter
	lines [][]rune
}

// parseDocument reads the YAML. It reports mistakes of syntax and returns nil.
func parseDocument(file string, src []byte) (d *document, root ast.Node) {
	d = &document{reporter: reporter{file: file}}
	start := position{1, 1}
	if len(src) > maxFile {
		d.errorf(start, "", "the file has %d bytes, a flow file has at most %d", len(src), maxFile)
		return d, nil
	}
	for line := range strings.SplitSeq(string(src), "\n") {
		d.lines = append(d.lines, []rune(strings.TrimSuffix(line, "\r")))
	}
	if at, deep := tooNested(d.lines); deep {
		d.errorf(at, "", "nested deeper than %d", maxNesting)
		return d, nil
	}
	// The reader is known to panic on some texts that are not YAML.
	defer func() {
		if p := recover(); p != nil {
			d.errorf(start, "", "not YAML: %v", p)
			root = nil
		}
	}()
	tree, err := parser.ParseBytes(src, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		d.syntaxError(err)
		return d, nil
	}
	var docs []ast.Node
	for _, doc := range tree.Docs {
		if doc != nil && doc.Body != nil {
			docs = append(docs, doc.Body)
		}
	}
	if len(docs) == 0 {
		d.errorf(start, "it starts with flow: NAME", "the file is empty")
		return d, nil
	}
	if len(docs) > 1 {
		d.errorf(d.at(docs[1]), "", "a second document: a file holds one flow")
	}
	return d, docs[0]
}

func (d *document) syntaxError(err error) {
	at, msg := position{1, 1}, err.Error()
	var syntax *yaml.SyntaxError
	if errors.As(err, &syntax) {
		msg = syntax.Message
		if syntax.Token != nil && syntax.Token.Position != nil {
			at = position{syntax.Token.Position.Line, syntax.Token.Position.Column}
		}
	}
	msg, _, _ = strings.Cut(strings.TrimSpace(msg), "\n")
	d.errorf(d.clamp(at), "", "YAML: %s", msg)
}

// tooNested finds what would nest the reader deep: brackets, dashes and
// question marks that open something on one line, and indentation.
func tooNested(lines [][]rune) (position, bool) {
	brackets, indents := 0, []int{}
	for n, line := range lines {
		opens, inText := 0, false
		for i, c := range line {
			switch c {
			case '[', '{':
				brackets++
			case ']', '}':
				brackets = max(0, brackets-1)
			case '-', '?', '!', '&', ':':
				opens++
			}
			if c != ' ' && !inText {
				inText = true
				for len(indents) > 0 && indents[len(indents)-1] >= i {
					indents = indents[:len(indents)-1]
				}
				indents = append(indents, i)
			}
			if brackets > maxNesting || opens > 10*maxNesting || len(indents) > maxNesting {
				return position{n + 1, i + 1}, true
			}
		}
	}
	return position{}, false
}

// clamp keeps a position inside the file.
func (d *document) clamp(at position) position {
	at.line = min(max(at.line, 1), max(len(d.lines), 1))
	at.column = max(at.column, 1)
	return at
}

// at returns where a node begins.
func (d *document) at(n ast.Node) position {
	switch n := n.(type) {
	case nil:
		return position{1, 1}
	case *ast.MappingNode:
		if !n.IsFlowStyle && len(n.Values) > 0 {
			return d.at(n.Values[0].Key)
		}
	case *ast.MappingValueNode:
		return d.at(n.Key)
	case *ast.MappingKeyNode:
		return d.tokenAt(n)
	}
	return d.tokenAt(n)
}

func (d *document) tokenAt(n ast.Node) position {
	tk := n.GetToken()
	if tk == nil || tk.Position == nil {
		return position{1, 1}
	}
	return d.clamp(position{tk.Position.Line, tk.Position.Column})
}

// field is one entry of a mapping.
type field struct {
	name  string
	at    position
	value ast.Node
}

// describe names a node's type.
func describe(n ast.Node) string {
	switch n.(type) {
	case nil, *ast.NullNode:
		return "nothing"
	case *ast.MappingNode, *ast.MappingValueNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	case *ast.StringNode, *ast.LiteralNode:
		return "text"
	case *ast.IntegerNode:
		return "a number"
	case *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		return "a number with a fraction"
	case *ast.BoolNode:
		return "a boolean"
	case *ast.AnchorNode, *ast.AliasNode:
		return "an anchor or alias, which a flow file does not have"
	case *ast.TagNode:
		return "a tag, which a flow file does not have"
	}
	return "something else"
}

// mapping reads the fields of a mapping, in the order of the file. A field that
// is there twice is reported and left out.
func (d *document) mapping(n ast.Node, what string) ([]field, bool) {
	var values []*ast.MappingValueNode
	switch n := n.(type) {
	case *ast.MappingNode:
		values = n.Values
	case *ast.MappingValueNode:
		values = []*ast.MappingValueNode{n}
	default:
		d.errorf(d.at(n), "", "%s is a mapping, this is %s", what, describe(n))
		return nil, false
	}
	var fields []field
	first := map[string]position{}
	for _, v := range values {
		at := d.at(v.Key)
		name, ok := d.fieldName(v.Key)
		if !ok {
			d.errorf(at, "", "%s: the name of a field is a text", what)
			continue
		}
		if before, twice := first[name]; twice {
			d.errorf(at, "", "%s: %q is there twice, first in line %d", what, name, before.line)
			continue
		}
		first[name] = at
		fields = append(fields, field{name, at, v.Value})
	}
	return fields, true
}

func (d *document) fieldName(key ast.MapKeyNode) (string, bool) {
	switch k := key.(type) {
	case *ast.StringNode:
		return k.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.NullNode:
		if tk := k.GetToken(); tk != nil {
			return tk.Value, true
		}
	}
	return "", false
}

// list reads a list.
func (d *document) list(n ast.Node, what string) ([]ast.Node, bool) {
	seq, ok := n.(*ast.SequenceNode)
	if !ok {
		d.errorf(d.at(n), "", "%s is a list, this is %s", what, describe(n))
		return nil, false
	}
	return seq.Values, true
}

// scalar is a text of the file, with what is needed to find a place in it.
type scalar struct {
	text  string
	start position
	block bool
	doc   *document
}

// text reads a text. A bare number or boolean is one only where that is said.
func (d *document) text(n ast.Node, what string) (scalar, bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return scalar{text: n.Value, start: d.at(n), doc: d}, true
	case *ast.LiteralNode:
		return scalar{text: n.Value.Value, start: d.at(n), block: true, doc: d}, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		d.errorf(d.at(n), "put it into quotes", "%s is a text, this is %s", what, describe(n))
		return scalar{}, false
	}
	d.errorf(d.at(n), "", "%s is a text, this is %s", what, describe(n))
	return scalar{}, false
}

// expressionText reads the text of an expression, which may look like another
// type to YAML.
func (d *document) expressionText(n ast.Node, what string) (scalar, bool) {
	switch n.(type) {
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return scalar{text: n.GetToken().Value, start: d.at(n), doc: d}, true
	case *ast.NullNode, nil:
		d.errorf(d.at(n), "", "%s: an expression is missing", what)
		return scalar{}, false
	case *ast.MappingNode, *ast.MappingValueNode:
		d.errorf(d.at(n), "put an expression with \": \" or that starts with { into quotes", "%s is an expression, this is a mapping", what)
		return scalar{}, false
	case *ast.SequenceNode:
		d.errorf(d.at(n), "put an expression that starts with [ into quotes", "%s is an expression, this is a list", what)
		return scalar{}, false
	}
	return d.text(n, what)
}

// boolean reads true or false.
func (d *document) boolean(n ast.Node, what string) bool {
	b, ok := n.(*ast.BoolNode)
	if !ok {
		d.errorf(d.at(n), "", "%s is true or false, this is %s", what, describe(n))
		return false
	}
	return b.Value
}

// integer reads a number without a fraction.
func (d *document) integer(n ast.Node, what string) (int, bool) {
	i, ok := n.(*ast.IntegerNode)
	if !ok {
		d.errorf(d.at(n), "", "%s is a whole number, this is %s", what, describe(n))
		return 0, false
	}
	v, err := strconv.Atoi(fmt.Sprint(i.Value))
	if err != nil {
		d.errorf(d.at(n), "", "%s: the number is too large", what)
		return 0, false
	}
	return v, true
}

// at returns where the character of the text with that index stands in the
// file. Quotes, escapes and folded lines are followed.
func (s scalar) at(index int) position {
	at, quote := s.start, rune(0)
	if s.block {
		at = s.doc.nextText(position{at.line + 1, 1})
	} else if c := s.doc.runeAt(at); c == '\'' || c == '"' {
		quote = c
		at.column++
	}
	for range index {
		if at.line > len(s.doc.lines) {
			break
		}
		line := s.doc.lines[at.line-1]
		rest := line[min(at.column-1, len(line)):]
		switch {
		case strings.TrimSpace(string(rest)) == "" && at.line < len(s.doc.lines):
			// The line break is one character of the text.
			at = s.doc.nextText(position{at.line + 1, 1})
		case quote == '\'' && len(rest) > 1 && rest[0] == '\'' && rest[1] == '\'':
			at.column += 2
		case quote == '"' && rest[0] == '\\':
			at.column += escapeLength(rest)
		default:
			at.column++
		}
	}
	return s.doc.clamp(at)
}

func escapeLength(rest []rune) int {
	if len(rest) > 1 {
		switch rest[1] {
		case 'x':
			return 4
		case 'u':
			return 6
		case 'U':
			return 10
		}
	}
	return 2
}

func (d *document) runeAt(at position) rune {
	if at.line > len(d.lines) || at.column > len(d.lines[at.line-1]) {
		return 0
	}
	return d.lines[at.line-1][at.column-1]
}

// nextText moves to the first character that is not a space.
func (d *document) nextText(at position) position {
	for ; at.line <= len(d.lines); at.line++ {
		for i, c := range d.lines[at.line-1] {
			if c != ' ' && c != '\t' {
				return position{at.line, i + 1}
			}
		}
	}
	return d.clamp(at)
}
