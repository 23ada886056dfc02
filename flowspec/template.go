package flowspec

import (
	"fmt"
	"slices"
	"strings"

	"natsflow/flow"
)

// template is a subject or a key of a bucket with placeholders such as
// "delays.{key}".
type template struct {
	// text as in the file.
	text string
	// wildcard is the text with "*" for each token that has a placeholder.
	wildcard string
	parts    []templatePart
	escape   func(dst []byte, s string) []byte
}

// templatePart is a literal, the record's key or a path.
type templatePart struct {
	literal string
	key     bool
	path    *path
}

// append fills the placeholders in. Each value becomes (a part of) one token. A
// value that is missing, or no scalar, is an error.
func (t *template) append(dst []byte, m *flow.Meta, r record) ([]byte, error) {
	for i := range t.parts {
		p := &t.parts[i]
		switch {
		case p.key:
			dst = t.escape(dst, m.Key)
		case p.path == nil:
			dst = append(dst, p.literal...)
		default:
			v, err := p.path.value(m, r)
			if err != nil {
				return dst, err
			}
			switch v.kind {
			case kindNull:
				return dst, fmt.Errorf("%q: the record has no %s", t.text, p.path)
			case kindJSON:
				return dst, fmt.Errorf("%q: %s is %v", t.text, p.path, v.kind)
			}
			dst = t.escape(dst, v.text())
		}
	}
	return dst, nil
}

// templateKind says what a template is for.
type templateKind int

const (
	subjectTemplate templateKind = iota
	bucketTemplate
	// feedTemplate is for the lines of a file, which have no key yet.
	feedTemplate
)

// template reads a template. It reports what is wrong and returns nil then.
func (d *document) template(s scalar, what string, kind templateKind, sc *scope) *template {
	t := &template{text: s.text, escape: flow.AppendToken}
	if kind == bucketTemplate {
		t.escape = flow.AppendKVKey
	}
	before := len(d.errors)
	// The literal characters, with a placeholder as one '*'.
	var shape strings.Builder
	for rest, at := s.text, 0; rest != ""; {
		open := strings.IndexAny(rest, "{}")
		if open < 0 {
			open = len(rest)
		}
		if open > 0 {
			t.parts = append(t.parts, templatePart{literal: rest[:open]})
			d.templateLiteral(s, rest[:open], at, what, kind)
			shape.WriteString(rest[:open])
			at += len([]rune(rest[:open]))
			rest = rest[open:]
			continue
		}
		end := strings.IndexByte(rest, '}')
		if rest[0] == '}' || end < 0 {
			d.errorf(s.at(at), "a placeholder is {key} or {name}", "%s: a brace without its other half", what)
			return nil
		}
		if p, ok := d.placeholder(s, rest[1:end], at+1, what, kind, sc); ok {
			t.parts = append(t.parts, p)
		}
		shape.WriteByte('*')
		at += len([]rune(rest[:end+1]))
		rest = rest[end+1:]
	}
	t.wildcard = wildcard(shape.String())
	d.templateShape(s, shape.String(), what, kind)
	if len(d.errors) > before {
		return nil
	}
	return t
}

// wildcard replaces each token that has a placeholder.
func wildcard(shape string) string {
	tokens := strings.Split(shape, ".")
	for i, token := range tokens {
		if strings.Contains(token, "*") {
			tokens[i] = "*"
		}
	}
	return strings.Join(tokens, ".")
}

func (d *document) templateLiteral(s scalar, literal string, at int, what string, kind templateKind) {
	for i, c := range []rune(literal) {
		switch {
		case kind == bucketTemplate && !bucketKeyRune(c):
			d.errorf(s.at(at+i), "a key has letters, digits and - / _ = .", "%s: %q cannot be in a key of a bucket", what, c)
			return
		case c <= ' ' || c == '*' || c == '>' || c == 0x7f:
			d.errorf(s.at(at+i), "", "%s: %q cannot be in a subject to publish on", what, c)
			return
		}
	}
}

func bucketKeyRune(c rune) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	return strings.ContainsRune("-/_=.", c)
}

func (d *document) templateShape(s scalar, shape, what string, kind templateKind) {
	switch {
	case shape == "":
		d.errorf(s.start, "", "%s is empty", what)
	case slices.Contains(strings.Split(shape, "."), ""):
		d.errorf(s.start, "", "%s %q has an empty token", what, s.text)
	case shape[0] == '$' && kind != bucketTemplate:
		d.errorf(s.start, "", "%s: subjects that start with $ belong to the server", what)
	}
}

// placeholder reads what is between the braces.
func (d *document) placeholder(s scalar, name string, at int, what string, kind templateKind, sc *scope) (templatePart, bool) {
	if name == "key" && kind != feedTemplate {
		if !sc.keyed {
			d.errorf(s.at(at), "put a key step before", "%s: the record has no key here", what)
			return templatePart{}, false
		}
		return templatePart{key: true}, true
	}
	names, mistake := pathNames(name)
	if mistake != "" {
		d.errorf(s.at(at), "", "%s: {%s}: %s", what, name, mistake)
		return templatePart{}, false
	}
	p, mistake, hint := sc.lookup(names)
	if mistake == "" && kind == feedTemplate && p.special != "" {
		mistake, hint = fmt.Sprintf("a line of a file has no %s", p.special), ""
	}
	if mistake != "" {
		d.errorf(s.at(at), hint, "%s: {%s}: %s", what, name, mistake)
		return templatePart{}, false
	}
	return templatePart{path: p}, true
}

// pathNames splits a path such as a.b.c.
func pathNames(s string) (names []string, mistake string) {
	if s == "" {
		return nil, "a name is missing"
	}
	names = strings.Split(s, ".")
	for _, n := range names {
		switch {
		case n == "":
			return nil, "a name is missing beside a dot"
		case strings.ContainsAny(n, " \t\r\n\"'`()[]{}+*/%<>=!?&|,;:#^\\"):
			return nil, fmt.Sprintf("%q is not the path of a member", s)
		case strings.Trim(n, "0123456789") == "":
			return nil, fmt.Sprintf("%q is a number: a path names members of objects, not elements of arrays", n)
		}
	}
	return names, ""
}

// path reads the path of a member.
func (d *document) path(s scalar, what, hint string, sc *scope) *path {
	names, mistake := pathNames(s.text)
	if mistake != "" {
		d.errorf(s.start, hint, "%s: %s", what, mistake)
		return nil
	}
	p, mistake, hint := sc.lookup(names)
	if mistake != "" {
		d.errorf(s.at(0), hint, "%s: %s", what, mistake)
		return nil
	}
	return p
}

// validSubject tells what is wrong with a subject that may have wildcards.
func validSubject(subject string) (mistake string) {
	tokens := strings.Split(subject, ".")
	for i, t := range tokens {
		switch {
		case t == "":
			return "an empty token"
		case strings.ContainsAny(t, " \t\r\n"):
			return "white space"
		case t == ">" && i < len(tokens)-1:
			return "> before the end"
		case len(t) > 1 && strings.ContainsAny(t, "*>"):
			return "a wildcard inside a token"
		}
	}
	return ""
}

// overlap tells whether a subject could match both patterns.
func overlap(a, b string) bool {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; i < len(x) && i < len(y); i++ {
		switch {
		case x[i] == ">" || y[i] == ">":
			return true
		case x[i] != y[i] && x[i] != "*" && y[i] != "*":
			return false
		}
	}
	return len(x) == len(y)
}
