package flowspec

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
	"unsafe"

	"github.com/tidwall/gjson"

	"natsflow/flow"
)

// The names of what is known of a record besides its payload's members.
const (
	nameKey     = "_key"
	nameSubject = "_subject"
	nameTime    = "_time"
	nameSeq     = "_seq"
	nameStream  = "_stream"
	nameValue   = "_value"
	// Of the records of a bucket only: elsewhere these are names of members.
	nameBucketKey = "_kv_key"
	nameDeleted   = "_deleted"
)

var (
	recordNames = []string{nameKey, nameSubject, nameTime, nameSeq, nameStream, nameValue}
	bucketNames = []string{nameBucketKey, nameDeleted}
)

// timeLayout prints _time: always nine digits of a second, so that the texts
// sort as the times do.
const timeLayout = "2006-01-02T15:04:05.000000000Z07:00"

// record is what flows between the steps: a payload, whose members are looked up
// when a step asks for them, or the result of an aggregate, which is written as
// JSON only where it leaves the flow.
type record struct {
	data []byte
	// of is the aggregate that made the result in group; nil for a payload.
	of    *aggregate
	group *group
	// window is that of the result, nil if there is none to tell.
	window *windowOf
}

// windowOf is the window of a result, and what kind of result it is.
type windowOf struct {
	flow.Span
	pane flow.Pane
}

// payload returns the record as bytes.
func (r record) payload(m *flow.Meta) []byte {
	if r.of != nil {
		return r.of.appendResult(nil, m, r)
	}
	return r.data
}

// text views bytes as a string. They are never modified: a payload belongs to
// the record for as long as it lives.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// path names a member of the payload, or one of the record's own names.
type path struct {
	// names from the outermost to the innermost; the first may be a record's
	// own name, see special.
	names []string
	// escaped are the names as gjson wants them.
	escaped []string
	special string
	// plain is true where the payload is not JSON but text.
	plain bool
}

func newPath(names []string) *path {
	p := &path{names: names}
	for _, n := range names {
		p.escaped = append(p.escaped, gjson.Escape(n))
	}
	if slices.Contains(recordNames, names[0]) || slices.Contains(bucketNames, names[0]) {
		p.special = names[0]
	}
	return p
}

func (p *path) String() string { return strings.Join(p.names, ".") }

// value looks the path up. What is not there is null. The value may point into
// the payload.
func (p *path) value(m *flow.Meta, r record) (value, error) {
	if p.special == "" && r.of == nil {
		return jsonValue(p.find(text(r.data), 0))
	}
	v, err := p.first(m, r)
	if err != nil || len(p.names) == 1 {
		return v, err
	}
	if v.kind != kindJSON {
		return value{}, nil
	}
	return jsonValue(p.find(v.str, 1))
}

// first looks up the first name of the path where it is not a member of the
// payload's bytes.
func (p *path) first(m *flow.Meta, r record) (value, error) {
	switch p.special {
	case "":
		return r.of.member(m, r, p.names[0]), nil
	case nameKey:
		return stringValue(m.Key), nil
	case nameSubject:
		return stringValue(m.Subject), nil
	case nameTime:
		return stringValue(time.Unix(0, m.UnixNano()).UTC().Format(timeLayout)), nil
	case nameSeq:
		return uintValue(m.Seq), nil
	case nameStream:
		return stringValue(m.Stream), nil
	case nameBucketKey:
		if key := m.BucketKey(); key != "" {
			return stringValue(key), nil
		}
		return value{}, nil
	case nameDeleted:
		return boolValue(r.deletion(m)), nil
	}
	if p.plain && r.deletion(m) {
		return value{}, nil
	}
	if p.plain {
		return stringValue(text(r.data)), nil
	}
	return jsonValue(gjson.Parse(text(r.payload(m))))
}

// find descends from the name with that index. Of members with one name the
// first counts, at each level.
func (p *path) find(s string, from int) gjson.Result {
	if !isObject(s) {
		return gjson.Result{}
	}
	res := gjson.Get(s, p.escaped[from])
	for _, name := range p.escaped[from+1:] {
		if res.Type != gjson.JSON || res.Raw[0] != '{' {
			return gjson.Result{}
		}
		res = gjson.Get(res.Raw, name)
	}
	return res
}

// appendRaw appends the member as JSON, byte for byte as it stands in the
// payload.
func (p *path) appendRaw(dst []byte, m *flow.Meta, r record) ([]byte, error) {
	if p.special == "" && r.of == nil {
		if res := p.find(text(r.data), 0); res.Exists() {
			return append(dst, res.Raw...), nil
		}
		return append(dst, "null"...), nil
	}
	v, err := p.value(m, r)
	if err != nil {
		return dst, err
	}
	return v.appendJSON(dst), nil
}

func isObject(s string) bool {
	for i := range len(s) {
		switch s[i] {
		case ' ', '\t', '\n', '\r':
		case '{':
			return true
		default:
			return false
		}
	}
	return false
}

func jsonValue(res gjson.Result) (value, error) {
	switch res.Type {
	case gjson.String:
		return stringValue(res.Str), nil
	case gjson.Number:
		return parseNumber(res.Raw)
	case gjson.True:
		return boolValue(true), nil
	case gjson.False:
		return boolValue(false), nil
	case gjson.JSON:
		return value{kind: kindJSON, str: strings.TrimSpace(res.Raw)}, nil
	}
	return value{}, nil
}

// maxDepth bounds how deep a payload may be nested, as encoding/json does: what
// looks into it descends by recursion.
const maxDepth = 10000

// decodeJSON checks that a payload is one JSON value and nothing else.
func decodeJSON(_ *flow.Meta, data []byte) (record, error) {
	if !utf8.Valid(data) {
		return record{}, fmt.Errorf("the payload is not UTF-8: %s", excerpt(data))
	}
	if tooDeep(text(data), maxDepth) {
		return record{}, fmt.Errorf("the payload is nested deeper than %d", maxDepth)
	}
	if !gjson.ValidBytes(data) {
		return record{}, fmt.Errorf("the payload is not JSON: %s", excerpt(data))
	}
	return record{data: data}, nil
}

// tooDeep tells whether a JSON text is nested deeper than most.
func tooDeep(s string, most int) bool {
	if len(s) <= most {
		return false
	}
	depth, quoted := 0, false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			quoted = !quoted
		case quoted && c == '\\':
			i++
		case quoted:
		case c == '[' || c == '{':
			if depth++; depth > most {
				return true
			}
		case c == ']' || c == '}':
			depth--
		}
	}
	return false
}

func decodeText(_ *flow.Meta, data []byte) (record, error) {
	if !utf8.Valid(data) {
		return record{}, fmt.Errorf("the payload is not UTF-8: %s", excerpt(data))
	}
	return record{data: data}, nil
}

func decodeBytes(_ *flow.Meta, data []byte) (record, error) { return record{data: data}, nil }

// excerpt shows the beginning of a payload in an error.
func excerpt(data []byte) string {
	const most = 40
	more := ""
	if len(data) > most {
		data, more = data[:most], "…"
	}
	if !utf8.Valid(data) && more == "" {
		return "base64 " + base64.StdEncoding.EncodeToString(data)
	}
	return fmt.Sprintf("%q%s", data, more)
}

// eachElement calls fn with each element of a JSON array as a payload of its
// own, byte for byte.
func eachElement(array string, fn func(record)) {
	gjson.Parse(array).ForEach(func(_, element gjson.Result) bool {
		raw := strings.TrimSpace(element.Raw)
		fn(record{data: unsafe.Slice(unsafe.StringData(raw), len(raw))})
		return true
	})
}

// appendOthers appends a JSON object without its last brace, byte for byte, but without
// the members of one name.
func appendOthers(dst, payload []byte, but *path) []byte {
	object := strings.TrimSpace(text(payload))
	if !gjson.Get(object, but.escaped[0]).Exists() {
		return append(dst, strings.TrimRight(object[:len(object)-1], " \t\r\n")...)
	}
	dst = append(dst, '{')
	from := len(dst)
	gjson.Parse(object).ForEach(func(name, v gjson.Result) bool {
		if name.Str == but.names[0] {
			return true
		}
		if len(dst) > from {
			dst = append(dst, ',')
		}
		dst = append(append(dst, name.Raw...), ':')
		dst = append(dst, strings.TrimSpace(v.Raw)...)
		return true
	})
	return dst
}
