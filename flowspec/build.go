package flowspec

import (
	"errors"
	"fmt"
	"strings"

	"natsflow/flow"
)

// Build makes the flow. Its errors are those of flow.Builder; a Spec that Parse
// has returned gives none.
func (s *Spec) Build() (*flow.Flow, error) {
	b := flow.New(s.Name, flow.Options{
		Partitions: s.Partitions, OnError: s.OnError, Delivery: s.Delivery,
		CommitInterval: s.CommitInterval, Definition: s.definition(),
	})
	streams := map[string]flow.Stream[record]{}
	for _, src := range s.Sources {
		streams[src.Name] = flow.From(b, src.of(), src.decoder(), flow.ID(s.sourceStep(src)))
	}
	for _, l := range s.lists {
		streams[l.name] = l.build(streams)
	}
	f, err := b.Build()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.File, err)
	}
	return f, nil
}

// sourceStep is the id of a source's step. The source of a flow without named
// lists has no name, or one that nothing refers to.
func (s *Spec) sourceStep(src Source) string {
	if !s.named() {
		return sourceID
	}
	return sourceID + "." + src.Name
}

// of is the source as package flow has it.
func (s Source) of() flow.Source {
	if s.Bucket != "" {
		return flow.Source{Bucket: s.Bucket, Keys: s.Keys, Time: s.clock()}
	}
	return flow.Source{Stream: s.Stream, Subjects: s.Subjects, PartitionBy: s.PartitionBy, Time: s.clock()}
}

func (s Source) decoder() flow.Decoder[record] {
	if s.Bucket != "" {
		return deletable(s.Format.decoder())
	}
	return s.Format.decoder()
}

func (f Format) decoder() flow.Decoder[record] {
	switch f {
	case Text:
		return decodeText
	case Bytes:
		return decodeBytes
	}
	return decodeJSON
}

// build adds the steps of the list behind what it reads.
func (l *stepList) build(streams map[string]flow.Stream[record]) flow.Stream[record] {
	in := streams[l.from[0]]
	if len(l.from) > 1 {
		var others []flow.Stream[record]
		for _, name := range l.from[1:] {
			others = append(others, streams[name])
		}
		in = flow.Merge(in, others...)
	}
	for _, st := range l.steps {
		if join, ok := st.(*joinStep); ok {
			in = join.buildWith(in, streams[join.with])
			continue
		}
		in = st.build(in)
	}
	return in
}

// definition is the canonical text of what the flow does: the same for files
// that differ only in layout, comments or settings.
func (s *Spec) definition() string {
	var b strings.Builder
	for _, src := range s.Sources {
		if s.named() {
			fmt.Fprintf(&b, "source %s ", src.Name)
		}
		fmt.Fprintf(&b, "format %s\n", src.Format)
		if src.Time != nil {
			fmt.Fprintf(&b, "time %s\n", src.Time.text())
		}
	}
	for _, l := range s.lists {
		if l.name != "" {
			fmt.Fprintf(&b, "list %s from %s\n", l.name, strings.Join(l.from, ", "))
		}
		for _, st := range l.steps {
			fmt.Fprintf(&b, "%s %s %s\n", st.head().id, st.head().kind, st.text())
		}
	}
	return b.String()
}

func (st *filterStep) text() string { return st.cond.text }

func (st *filterStep) build(in flow.Stream[record]) flow.Stream[record] {
	return flow.Filter(in, st.cond.condition, st.options()...)
}

func (st *mapStep) text() string {
	var parts []string
	for _, m := range st.members {
		parts = append(parts, m.name+" = "+m.expr.text)
	}
	return strings.Join(parts, ", ")
}

func (st *mapStep) build(in flow.Stream[record]) flow.Stream[record] {
	size := 2
	for _, m := range st.members {
		size += len(m.prefix) + 24
	}
	return flow.Map(in, func(m *flow.Meta, r record) (record, error) {
		dst := append(make([]byte, 0, size), '{')
		var err error
		for i := range st.members {
			member := &st.members[i]
			dst = append(dst, member.prefix...)
			if dst, err = member.expr.appendJSON(dst, m, r); err != nil {
				return record{}, fmt.Errorf("%s: %w", member.name, err)
			}
		}
		return record{data: append(dst, '}')}, nil
	}, st.options()...)
}

func (st *expandStep) text() string { return st.path.String() }

func (st *expandStep) build(in flow.Stream[record]) flow.Stream[record] {
	return flow.FlatMap(in, func(m *flow.Meta, r record, emit func(record)) error {
		v, err := st.path.value(m, r)
		switch {
		case err != nil:
			return err
		case v.isNull():
			return nil
		case v.kind != kindJSON || v.str[0] != '[':
			return fmt.Errorf("%s is not an array", st.path)
		}
		eachElement(v.str, emit)
		return nil
	}, st.options()...)
}

func (st *keyStep) text() string {
	switch {
	case st.path != nil:
		return st.path.String()
	case st.expr != nil:
		return st.expr.text
	}
	return fmt.Sprintf("token %d of the subject", st.token)
}

func (st *keyStep) build(in flow.Stream[record]) flow.Stream[record] {
	key := func(m *flow.Meta, _ record) (string, error) { return subjectToken(m.Subject, st.token) }
	eval := eval(nil)
	switch {
	case st.path != nil:
		eval = st.path.value
	case st.expr != nil:
		eval = st.expr.eval
	}
	if eval != nil {
		key = func(m *flow.Meta, r record) (string, error) {
			v, err := eval(m, r)
			if err == nil && v.kind == kindString {
				return v.str, nil
			}
			return st.keyText(v, err)
		}
	}
	if st.change {
		return flow.Rekey(in, key, crossing, st.options()...)
	}
	return flow.KeyBy(in, key, st.options()...)
}

// crossing is how a record crosses to the next stage: as it would leave the flow. It
// was looked at when it came into the flow, or made here.
var crossing = flow.Codec[record]{Encode: encode, Decode: decodeBytes}

// keyText makes a key of what is not text, or says why it is none.
func (st *keyStep) keyText(v value, err error) (string, error) {
	switch {
	case err != nil:
		return "", fmt.Errorf("%s: %w", st.text(), err)
	case v.isNull():
		return "", fmt.Errorf("%s: the record has no key, it is null or absent", st.text())
	case v.kind == kindJSON:
		return "", fmt.Errorf("%s: %v cannot be a key", st.text(), v.kind)
	}
	return v.text(), nil
}

var errNoToken = errors.New("the subject has fewer tokens")

// subjectToken returns the token with that number, from 1.
func subjectToken(subject string, n int) (string, error) {
	rest := subject
	for ; n > 1; n-- {
		_, after, ok := strings.Cut(rest, ".")
		if !ok {
			return "", fmt.Errorf("key: %w", errNoToken)
		}
		rest = after
	}
	token, _, _ := strings.Cut(rest, ".")
	return token, nil
}

func (st *aggregateStep) text() string {
	var parts []string
	for i := range st.aggregate.members {
		m := &st.aggregate.members[i]
		parts = append(parts, m.name+" = "+m.String())
	}
	text := strings.Join(parts, ", ")
	if st.windows != nil {
		return text + "; " + st.windows.text()
	}
	if st.emit == flow.EmitCommit {
		text += "; emit: commit"
	}
	if st.ttl > 0 {
		text += "; ttl: " + formatDuration(st.ttl)
	}
	return text
}

func (st *aggregateStep) build(in flow.Stream[record]) flow.Stream[record] {
	if st.windows != nil {
		return st.windows.build(st, in)
	}
	a := &st.aggregate
	return flow.Aggregate(in, st.id, flow.Aggregator[record, group, record]{
		State: a.codec(),
		Add:   a.add,
		Result: func(m *flow.Meta, g *group) (record, error) {
			r := record{of: a, group: g}
			if pane := m.Pane(); pane != flow.PaneNone {
				r.window = &windowOf{pane: pane}
			}
			return r, nil
		},
		Emit: st.emit,
		TTL:  st.ttl,
	}, st.options()...)
}

func (st *dedupeStep) text() string {
	return fmt.Sprintf("by %s for %s", st.by.text, formatDuration(st.within))
}

func (st *dedupeStep) build(in flow.Stream[record]) flow.Stream[record] {
	return flow.Dedupe(in, st.id, st.within, func(m *flow.Meta, r record) (string, error) {
		v, err := st.by.eval(m, r)
		switch {
		case err != nil:
			return "", st.by.failed(err)
		case v.isNull():
			return "", fmt.Errorf("dedupe by %s: it is null or absent", st.by.text)
		case v.kind == kindJSON:
			return "", fmt.Errorf("dedupe by %s: %v has no identity", st.by.text, v.kind)
		case v.kind == kindString:
			return "s" + v.str, nil
		}
		// The text 1 and the number 1 are different values.
		return "n" + v.text(), nil
	}, st.options()...)
}

func (st *toStep) text() string {
	what := "stream " + st.name + ", subject "
	if st.sink == flow.SinkBucket {
		what = "bucket " + st.name + ", key "
	}
	what += st.template.text
	if st.stopWhen != nil {
		what += "; stop when " + st.stopWhen.text
	}
	return what
}

func (st *toStep) build(in flow.Stream[record]) flow.Stream[record] {
	out := in
	if !st.inTask {
		// As flow.To does where there is no key. Its step would take the place of an
		// id that a later step of the file may have.
		in = flow.KeyBySubject(in, flow.ID(st.id+".key"))
	}
	if st.sink == flow.SinkStream {
		flow.To(in, flow.Sink[record]{
			Stream: st.name, Subjects: []string{st.template.wildcard},
			Subject: st.template.append, Encode: encode,
		}, st.options()...)
	} else {
		flow.ToKV(in, flow.KVSink[record]{Bucket: st.name, Key: st.template.append, Encode: encode}, st.options()...)
	}
	if st.stopWhen != nil {
		flow.StopWhen(in, st.stopWhen.condition, flow.ID(st.stopID()))
	}
	return out
}

// stopID names the step that a stop_when makes. An id in a file has no dot.
func (st *toStep) stopID() string { return st.id + ".stop-when" }

// encode appends the payload of a record as it leaves the flow.
func encode(dst []byte, m *flow.Meta, r record) ([]byte, error) {
	if r.of != nil {
		return r.of.appendResult(dst, m, r), nil
	}
	return append(dst, r.data...), nil
}
