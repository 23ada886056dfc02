package flowspec

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"natsflow/flow"
)

// lookupStep adds a member with what a bucket has under a key.
type lookupStep struct {
	stepHead
	bucket string
	key    *expression
	as     string
	// prefix of the member in a payload that has others before it: `,"rate":`.
	prefix string
	// path finds a member of that name, which is replaced.
	path     *path
	format   Format
	required bool
}

var lookupFields = []string{"kv", "key", "as", "format", "required"}

func (p *specParser) lookupStep(f field) step {
	if p.scope.format != JSON {
		p.errorf(f.at, "a map step makes them json", "lookup: payloads of format %s have no members", p.scope.format)
	}
	if !p.scope.keyed && !p.scope.spread {
		p.errorf(f.at, "such as key: _subject, or redistribute: {}, where nothing else will do; to give records a key that was looked up, put a second key step behind the lookup",
			"lookup: put a key step before it: workers see a change of the bucket at different times, so that only the one that has the key may look a record up")
		p.scope.keyed = true
	}
	fields, ok := p.mapping(f.value, "lookup")
	if !ok {
		return nil
	}
	st := &lookupStep{format: JSON}
	have := map[string]bool{}
	for _, form := range fields {
		have[form.name] = true
		switch form.name {
		case "kv":
			st.bucket = p.bucketName(form.value, "lookup.kv")
		case "key":
			if s, ok := p.expressionText(form.value, "lookup.key"); ok {
				st.key = p.compileExpression(s, 0, s.text, "lookup.key", &p.scope)
			}
		case "as":
			p.lookupAs(form, st)
		case "format":
			st.format = []Format{JSON, Text}[p.choice(form, "json", "text")]
		case "required":
			st.required = p.boolean(form.value, "lookup.required")
		default:
			p.unknown(form, "lookup", lookupFields...)
		}
	}
	for _, name := range []string{"kv", "key", "as"} {
		if !have[name] {
			p.errorf(f.at, "such as {kv: RATES, key: currency, as: rate}", "lookup: the field %q is missing", name)
		}
	}
	p.addMember(f.at, "lookup", st.as)
	return st
}

// lookupAs reads the name of the member that a lookup adds.
func (p *specParser) lookupAs(f field, st *lookupStep) {
	s, ok := p.text(f.value, "lookup.as")
	switch {
	case !ok:
	case s.text == "":
		p.errorf(s.start, "", "lookup.as: a member without a name")
	case slices.Contains(recordNames, s.text) || slices.Contains(bucketNames, s.text):
		p.errorf(s.start, "", "lookup.as: %s is not the name of a member: it is what is known of the record", s.text)
	default:
		st.as, st.path = s.text, newPath([]string{s.text})
		st.prefix = "," + string(appendString(nil, s.text)) + ":"
	}
}

// addMember makes a member known that a step adds to the others.
func (p *specParser) addMember(from position, kind, name string) {
	sc := &p.scope
	if !sc.known || name == "" || slices.Contains(sc.members, name) {
		return
	}
	sc.members = append(slices.Clip(sc.members), name)
	sc.from += fmt.Sprintf(" and the %s in line %d", kind, from.line)
}

func (st *lookupStep) text() string {
	s := fmt.Sprintf("%s = %s of bucket %s", st.as, st.key.text, st.bucket)
	if st.format == Text {
		s += ", text"
	}
	if st.required {
		s += ", required"
	}
	return s
}

func (st *lookupStep) build(in flow.Stream[record]) flow.Stream[record] {
	return flow.Lookup(in, st.id, st.bucket, st.find, st.add, st.options()...)
}

// find returns the key to look for. A record has none where it is null, and then
// nothing is found: no key of a bucket is empty.
func (st *lookupStep) find(m *flow.Meta, r record) (string, error) {
	if r.deletion(m) {
		return "", nil
	}
	v, err := st.key.eval(m, r)
	switch {
	case err != nil:
		return "", st.key.failed(err)
	case v.kind == kindString:
		return v.str, nil
	case v.isNull():
		return "", nil
	case v.kind == kindJSON:
		return "", fmt.Errorf("%s: %v cannot be a key of a bucket", st.key.text, v.kind)
	}
	return v.text(), nil
}

var errNoObject = errors.New("the payload is no object, to which a member could be added")

// add adds the member.
func (st *lookupStep) add(m *flow.Meta, r record, found []byte, ok bool) (record, error) {
	if r.deletion(m) {
		return r, nil
	}
	if !ok && st.required {
		return r, st.missing(m, r)
	}
	payload := r.payload(m)
	if !isObject(text(payload)) {
		return r, errNoObject
	}
	dst := make([]byte, 0, len(payload)+len(st.prefix)+max(len(found)+2, len("null")))
	dst = appendOthers(dst, payload, st.path)
	prefix := st.prefix
	if len(dst) == 1 {
		prefix = prefix[1:] // it is the only one
	}
	dst, err := st.appendFound(append(dst, prefix...), found, ok)
	if err != nil {
		return r, err
	}
	return record{data: append(dst, '}')}, nil
}

// missing is the error of a record whose key is not in the bucket.
func (st *lookupStep) missing(m *flow.Meta, r record) error {
	v, err := st.key.eval(m, r)
	switch {
	case err != nil:
		return st.key.failed(err)
	case v.isNull():
		return fmt.Errorf("%s: there is nothing to look up in bucket %s, it is null or absent", st.key.text, st.bucket)
	}
	return fmt.Errorf("bucket %s has no key %.100q", st.bucket, v.text())
}

// appendFound appends what the bucket has as JSON.
func (st *lookupStep) appendFound(dst, found []byte, ok bool) ([]byte, error) {
	switch {
	case !ok:
		return append(dst, "null"...), nil
	case !utf8.Valid(found):
		return dst, fmt.Errorf("the value in bucket %s is not UTF-8: %s", st.bucket, excerpt(found))
	case st.format == Text:
		return appendString(dst, text(found)), nil
	case tooDeep(text(found), maxDepth-1):
		return dst, fmt.Errorf("the value in bucket %s is nested deeper than %d", st.bucket, maxDepth-1)
	case !gjson.ValidBytes(found):
		return dst, fmt.Errorf("the value in bucket %s is not JSON (format: text takes any text): %s", st.bucket, excerpt(found))
	}
	return append(dst, strings.TrimSpace(text(found))...), nil
}
