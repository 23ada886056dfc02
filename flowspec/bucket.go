package flowspec

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"natsflow/flow"
)

var bucketRE = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// bucketName reads the name of a bucket.
func (p *specParser) bucketName(n ast.Node, what string) string {
	s, ok := p.text(n, what)
	if ok && !bucketRE.MatchString(s.text) {
		p.errorf(s.start, "", "%s: %q cannot be the name of a bucket: letters, digits, - and _", what, s.text)
	}
	return s.text
}

// streamOrBucket checks what the fields of a source name, and reads a bucket.
func (p *specParser) streamOrBucket(f field, src *Source, what string, forms map[string]field) {
	_, stream := forms["stream"]
	subjects, isFiltered := forms["subjects"]
	bucket, isBucket := forms["kv"]
	keys, hasKeys := forms["keys"]
	switch {
	case stream && isBucket:
		p.errorf(bucket.at, "", "%s has stream or kv, not both", what)
		return
	case isBucket:
	case hasKeys && stream:
		p.errorf(keys.at, "a stream has subjects", "%s: keys belong to kv", what)
		return
	case hasKeys:
		p.errorf(f.at, "", "%s: the field \"kv\" is missing, the bucket of the keys", what)
		return
	case stream:
		return
	default:
		p.errorf(f.at, "or kv, for a bucket", "%s: the field \"stream\" is missing", what)
		return
	}
	if isFiltered {
		p.errorf(subjects.at, "a bucket has keys", "%s: subjects belong to stream", what)
	}
	if by, ok := forms["partition_by"]; ok {
		p.errorf(by.at, "", "%s.partition_by is for streams: a bucket is read whole by each worker", what)
	}
	src.Bucket = p.bucketName(bucket.value, what+".kv")
	src.Stream = flow.BucketStream(src.Bucket)
	if hasKeys {
		src.Keys = p.keyFilters(keys.value, what+".keys")
	}
	src.Subjects = nil
	for _, key := range src.Keys {
		src.Subjects = append(src.Subjects, flow.BucketSubject(src.Bucket, key))
	}
	if len(src.Keys) == 0 {
		src.Subjects = []string{flow.BucketSubject(src.Bucket, ">")}
	}
}

// keyFilters reads the keys of a bucket, with wildcards.
func (p *specParser) keyFilters(n ast.Node, what string) []string {
	if nodes, isList := n.(*ast.SequenceNode); isList && len(nodes.Values) == 0 {
		p.errorf(p.at(n), "leave it out to read all keys", "%s: there is none", what)
	}
	before := len(p.errors)
	keys := p.subjects(n, what)
	if len(p.errors) > before {
		return nil
	}
	for _, key := range keys {
		if strings.ContainsFunc(key, func(c rune) bool { return !bucketKeyRune(c) && c != '*' && c != '>' }) {
			p.errorf(p.at(n), "a key has letters, digits and - / _ = .; * stands for a token, > for all that follow", "%s: %q cannot match a key", what, key)
		}
	}
	return keys
}

// checkBucketLoop refuses results in a bucket that the flow reads.
func (p *specParser) checkBucketLoop(st *toStep, s scalar) {
	for _, src := range p.spec.Sources {
		if st.template != nil && src.Bucket != "" && src.Bucket == st.name && readsBack(src, flow.BucketSubject(st.name, st.template.wildcard)) {
			p.errorf(s.start, "", "to: the flow would read its own results: they go to the bucket %q, which it reads", st.name)
		}
	}
}

// ofBucket reports that some of the records come from a bucket.
func (sc *scope) ofBucket() bool {
	return slices.ContainsFunc(sc.reads, func(s *Source) bool { return s.Bucket != "" })
}

// deletable makes a decoder for a bucket, where a record without a payload is the
// deletion of a key.
func deletable(decode flow.Decoder[record]) flow.Decoder[record] {
	return func(m *flow.Meta, data []byte) (record, error) {
		if len(data) == 0 {
			return record{}, nil
		}
		return decode(m, data)
	}
}

// deletion reports that the record is the deletion of a key of a bucket, and no step
// has made another payload of it.
func (r record) deletion(m *flow.Meta) bool {
	return r.of == nil && len(r.data) == 0 && m.BucketKey() != ""
}

// PlanTable is a KV bucket that the flow looks keys up in.
type PlanTable struct {
	Bucket string `json:"kv"`
	// Steps that look up.
	Steps []string `json:"steps"`
}

// addTable adds a table, or the step to one that is there already.
func (p *Plan) addTable(st *lookupStep) {
	for i := range p.Tables {
		if p.Tables[i].Bucket == st.bucket {
			p.Tables[i].Steps = append(p.Tables[i].Steps, st.id)
			return
		}
	}
	p.Tables = append(p.Tables, PlanTable{Bucket: st.bucket, Steps: []string{st.id}})
}

// printTables prints the tables for people.
func (p Plan) printTables(b *strings.Builder, w interface {
	io.Writer
	Flush() error
},
) {
	if len(p.Tables) == 0 {
		return
	}
	b.WriteString("\ntables, a copy of each in every worker\n")
	for _, t := range p.Tables {
		_, _ = fmt.Fprintf(w, "  %s\tkv\tlooked up by %s\n", t.Bucket, strings.Join(t.Steps, ", "))
	}
	_ = w.Flush() // into a strings.Builder, which cannot fail
}

// filters says for people which records the source takes.
func (s PlanSource) filters() string {
	switch {
	case s.Bucket != "" && len(s.Keys) == 0:
		return "all keys"
	case s.Bucket != "":
		return "keys " + strings.Join(s.Keys, ", ")
	case len(s.Subjects) == 0:
		return "all subjects"
	}
	return strings.Join(s.Subjects, ", ")
}
