package flowspec

import (
	"fmt"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"natsflow/flow"
)

// title names the source in a message.
func (s Source) title() string {
	if s.Name == "" {
		return "the source"
	}
	return fmt.Sprintf("the source %q", s.Name)
}

// parseSources reads `source`, or `sources`; either may be nil. Where a file has
// both, the form of its steps tells which one they mean.
func (p *specParser) parseSources(one, many, steps *field) {
	if one != nil && many != nil {
		second := one
		if one.at.compare(many.at) < 0 {
			second = many
		}
		p.errorf(second.at, "sources has a name for each source", "a flow has source or sources, not both")
		if steps != nil && isMapping(steps.value) {
			one = nil
		}
	}
	var at []position
	switch {
	case one != nil:
		p.spec.Sources, at = []Source{p.parseSource(*one, "source")}, []position{one.at}
	case many != nil:
		at = p.namedSources(*many)
	}
	for i := range p.spec.Sources {
		src := &p.spec.Sources[i]
		p.places[src.Name] = &place{at: at[i], scope: sourceScope(src), done: true}
	}
}

// namedSources reads `sources` and returns where each of them stands.
func (p *specParser) namedSources(f field) (at []position) {
	fields, ok := p.mapping(f.value, "sources")
	if !ok {
		return nil
	}
	if len(fields) == 0 {
		p.errorf(f.at, "such as {orders: {stream: ORDERS}}", "sources: there is none")
	}
	streams := map[string]field{}
	for _, named := range fields {
		if !isMapping(named.value) && slices.Contains(sourceFields, named.name) {
			p.errorf(named.at, "such as {orders: {stream: ORDERS}}", "sources: a source has a name, %q is a field of it", named.name)
			break
		}
		p.placeName(named, "source")
		src := p.parseSource(named, "sources."+named.name)
		src.Name = named.name
		if first, twice := streams[src.Stream]; twice && src.Stream != "" {
			p.errorf(named.at, fmt.Sprintf("let several lists read %q, and tell its records apart by _subject", first.name),
				"sources.%s: stream %q is read by the source %q in line %d: a flow reads a stream once", named.name, src.Stream, first.name, first.at.line)
		} else {
			streams[src.Stream] = named
		}
		p.spec.Sources, at = append(p.spec.Sources, src), append(at, named.at)
	}
	return at
}

// placeName checks the name of a source or of a list.
func (p *specParser) placeName(f field, what string) {
	if !idRE.MatchString(f.name) {
		p.errorf(f.at, "", "%s %q: a name has letters, digits, - and _, at most 64", what, f.name)
	}
}

var sourceFields = []string{"stream", "subjects", "kv", "keys", "format", "partition_by", "time"}

// parseSource reads one source. What is wrong with it is reported.
func (p *specParser) parseSource(f field, what string) Source {
	src := Source{Format: JSON}
	fields, ok := p.mapping(f.value, what)
	if !ok {
		return src
	}
	var by, clock *field
	forms := map[string]field{}
	for _, f := range fields {
		forms[f.name] = f
		switch f.name {
		case "partition_by":
			by = &f
		case "time":
			clock = &f
		case "kv", "keys":
		case "stream":
			src.Stream = p.streamName(f.value, what+".stream")
		case "subjects":
			src.Subjects = p.subjects(f.value, what+".subjects")
		case "format":
			src.Format = []Format{JSON, Text, Bytes}[p.choice(f, "json", "text", "bytes")]
		default:
			p.unknown(f, what, sourceFields...)
		}
	}
	p.streamOrBucket(f, &src, what, forms)
	if clock != nil {
		p.sourceTime(*clock, &src, what+".time")
	}
	if by != nil {
		p.partitionBy(*by, &src, what+".partition_by")
	}
	if by != nil && clock != nil {
		p.errorf(clock.at, "leave out partition_by, or time to go by the timestamps of the stream",
			"%s: with partition_by a worker does not see the times of all records, which the watermark of the source is made of", what+".time")
	}
	return src
}

// partitionBy reads {subject: [N]}.
func (p *specParser) partitionBy(f field, src *Source, what string) {
	const hint = "such as {subject: [2]}"
	if !isMapping(f.value) {
		p.errorf(p.at(f.value), hint, "%s is a mapping, this is %s", what, describe(f.value))
		return
	}
	fields, _ := p.mapping(f.value, what)
	for _, f := range fields {
		if f.name != "subject" {
			p.unknown(f, what, "subject")
			continue
		}
		nodes, ok := p.list(f.value, what+".subject")
		for _, n := range nodes {
			token, isNumber := p.integer(n, what+".subject")
			src.PartitionBy = append(src.PartitionBy, token)
			ok = ok && isNumber
		}
		if !ok {
			src.PartitionBy = nil
			return
		}
	}
	if len(src.PartitionBy) == 0 {
		p.errorf(f.at, hint, "%s: no token of the subject is named", what)
		return
	}
	info := flow.SourceInfo{Subjects: src.Subjects, PartitionBy: src.PartitionBy}
	if _, err := info.Transforms(p.spec.Partitions); err != nil {
		p.errorf(f.at, "", "%s: %v", what, err)
	}
}

// tokensOf names tokens of the subject.
func tokensOf(by []int) string {
	if len(by) == 1 {
		return fmt.Sprintf("token %d of the subject", by[0])
	}
	return fmt.Sprintf("the tokens %s of the subject", strings.Trim(strings.ReplaceAll(fmt.Sprint(by), " ", ", "), "[]"))
}

// checkPartitionKey reports a key that is known not to be what the server has
// partitioned the records by. Of an expression it is not known; its results are
// checked as they come.
func (p *specParser) checkPartitionKey(at position, st *keyStep) {
	for _, src := range p.scope.reads {
		switch by := src.PartitionBy; {
		case len(by) == 0 || len(by) == 1 && st.token == by[0] || len(by) > 1 && st.expr != nil:
		case len(by) == 1:
			p.errorf(at, fmt.Sprintf("write key: {subject: %d}, or leave out partition_by", by[0]), "key: %s is partitioned by %s, so the key has to be just that", src.title(), tokensOf(by))
		default:
			p.errorf(at, "write key: {expr: '…'}, or leave out partition_by", "key: %s is partitioned by %s, so the key has to be these, one behind the other", src.title(), tokensOf(by))
		}
	}
}

// sourceScope is what is known of the records of a source.
func sourceScope(src *Source) scope {
	sc := scope{format: src.Format, reads: []*Source{src}}
	if src.Format != JSON {
		sc.known, sc.from = true, "format "+string(src.Format)
	}
	return sc
}

// streamName reads the name of a stream.
func (p *specParser) streamName(n ast.Node, what string) string {
	s, ok := p.text(n, what)
	if ok && (s.text == "" || len(s.text) > 255 || strings.ContainsFunc(s.text, notInStreamName)) {
		p.errorf(s.start, "", "%s: %q cannot be the name of a stream: no white space, . * > / \\", what, s.text)
	}
	return s.text
}

func notInStreamName(r rune) bool { return r <= ' ' || r == 0x7f || strings.ContainsRune(".*>/\\", r) }

func (p *specParser) subjects(n ast.Node, what string) []string {
	if s, isText := n.(*ast.StringNode); isText {
		p.errorf(p.at(n), fmt.Sprintf("write [%q]", s.Value), "%s is a list, this is text", what)
		return nil
	}
	nodes, ok := p.list(n, what)
	if !ok {
		return nil
	}
	var subjects []string
	for _, n := range nodes {
		s, ok := p.text(n, "a subject")
		if !ok {
			continue
		}
		if mistake := validSubject(s.text); mistake != "" {
			p.errorf(s.start, "", "%s: %q has %s", what, s.text, mistake)
			continue
		}
		for _, other := range subjects {
			if overlap(other, s.text) {
				p.errorf(s.start, "", "%s: %q and %q overlap, which the server refuses", what, other, s.text)
			}
		}
		subjects = append(subjects, s.text)
	}
	return subjects
}
