package flowspec

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"natsflow/flow"
)

// joinStep joins the records of its list with those of another list.
type joinStep struct {
	stepHead
	with   string
	kind   flow.JoinKind
	as     string
	leftAs string
	// path finds a member of the left record with the name of the right one, which is
	// replaced.
	path     *path
	when     *expression
	lateness time.Duration
	// before and after are the bounds of a join without windows.
	before, after time.Duration
	windows       *windows
	// table: the other list is a table. Then latest and deletes are possible.
	table, latest bool
	deletes       *expression
	// left and right are the formats of the payloads.
	left, right Format
	// late and lateWith take the late records of the list, and of the other one; nil
	// for none.
	late, lateWith *toStep
}

// kindTable is the kind of a join with a table: its state is another one than that of
// a join.
const kindTable = "join-table"

// joinVersion is that of the state of a join.
const joinVersion = 1

// longestBound is the longest time between two records that meet.
const longestBound = 7300 * 24 * time.Hour

var joinFields = []string{"with", "within", "type", "as", "left_as", "when", "allowed_lateness", "table", "latest", "deletes"}

// joinedLists returns the lists that the joins among steps name, without a look at
// anything else in them.
func (p *specParser) joinedLists(steps ast.Node) []scalar {
	seq, ok := steps.(*ast.SequenceNode)
	if !ok {
		return nil
	}
	var names []scalar
	for _, n := range seq.Values {
		with := memberOf(memberOf(n, "join"), "with")
		if text, ok := textOf(with); ok {
			names = append(names, scalar{text: text, start: p.at(with), doc: p.document})
		}
	}
	return names
}

// textOf returns the text of a node, in whichever of YAML's styles.
func textOf(n ast.Node) (text string, ok bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, true
	case *ast.LiteralNode:
		return n.Value.Value, true
	}
	return "", false
}

// memberOf returns a member of a mapping, nil if it is not there.
func memberOf(n ast.Node, name string) ast.Node {
	var values []*ast.MappingValueNode
	switch n := n.(type) {
	case *ast.MappingNode:
		values = n.Values
	case *ast.MappingValueNode:
		values = []*ast.MappingValueNode{n}
	}
	for _, v := range values {
		if key, ok := v.Key.(*ast.StringNode); ok && key.Value == name {
			return v.Value
		}
	}
	return nil
}

// joinStep reads a join. What its records have is known of both lists.
func (p *specParser) joinStep(raw rawStep) step {
	f := raw.op
	p.needKey(f.at, "join")
	fields, ok := p.mapping(f.value, "join")
	if !ok {
		return nil
	}
	forms := map[string]field{}
	for _, form := range fields {
		switch {
		case slices.Contains(joinFields, form.name):
			forms[form.name] = form
		case form.name == "window" || form.name == "late" || form.name == "id":
			p.errorf(form.at, "as a field of the step, at the same depth as join", "join: %s stands beside join, not in it", form.name)
		default:
			p.unknown(form, "join", joinFields...)
		}
	}
	left := p.scope
	right := p.joinWith(f, forms)
	st := &joinStep{left: left.format, right: right.format}
	if with, ok := forms["with"]; ok {
		st.with, _ = textOf(with.value)
	}
	p.joinKind(f, forms, st)
	if st.table {
		p.joinTable(raw, forms, st, right)
	} else {
		p.joinTimes(raw, forms, st)
	}
	p.joinNames(f, forms, st, left, right)
	if when, ok := forms["when"]; ok {
		st.when = p.conditionField(when)
	}
	if raw.late != nil {
		st.late, st.lateWith = p.joinLate(*raw.late, st, left, right)
	}
	p.joinStops(raw, st, left, right)
	return st
}

// joinWith finds the other list. Where it is not there, or cannot be joined, that is
// reported, and nothing is known of its records.
func (p *specParser) joinWith(f field, forms map[string]field) scope {
	lost := scope{format: JSON, keyed: true, lost: true}
	with, ok := forms["with"]
	if !ok {
		p.errorf(f.at, "the name of another list", "join: the field \"with\" is missing")
		return lost
	}
	s, ok := p.text(with.value, "join.with")
	if !ok {
		return lost
	}
	if p.current.name == "" {
		p.errorf(s.start, "write sources instead of source, and steps as {NAME: {from: …, steps: […]}, …}", "join.with: only a named list can be joined with another")
		return lost
	}
	other := p.places[s.text]
	switch {
	case other == nil:
		p.unknownPlace(s, "join.with")
		return lost
	case !other.done || other.scope.lost:
		return lost // which is reported
	case !other.scope.keyed:
		p.errorf(s.start, "give it a key step: records with the same key meet", "join.with: %q has no key", s.text)
		return lost
	case !p.scope.lost && other.scope.stage != p.scope.stage:
		p.errorf(s.start, "give the records of the list with fewer changes another key step; the same key will do",
			"join.with: the key of this list was changed %s and that of %q %s: lists that are joined have changed it as often", times(p.scope.stage), s.text, times(other.scope.stage))
		return lost
	case other.scope.format == Bytes:
		p.errorf(s.start, "use format: text or json", "join.with: %q has payloads of format bytes, which cannot be a member of a result", s.text)
		return lost
	}
	return other.scope
}

// joinKind reads what kind of join it is.
func (p *specParser) joinKind(f field, forms map[string]field, st *joinStep) {
	flag := func(name string) bool {
		form, ok := forms[name]
		return ok && p.boolean(form.value, "join."+name)
	}
	st.table, st.latest = flag("table"), flag("latest")
	if kind, ok := forms["type"]; ok {
		st.kind = flow.JoinKind(p.choice(kind, "inner", "left", "outer"))
		if st.table && st.kind == flow.OuterJoin {
			p.errorf(p.at(kind.value), "", "join.type: a join with a table is inner or left")
		}
	}
	if p.scope.format == Bytes && !p.scope.lost {
		p.errorf(f.at, "use format: text or json", "join: payloads of format bytes cannot be a part of a result")
	}
	if st.table {
		return
	}
	for _, name := range []string{"latest", "deletes"} {
		if form, ok := forms[name]; ok {
			p.errorf(form.at, "", "join: %s belongs to a join with table: true", name)
		}
	}
}

// joinTable reads what a join with a table has.
func (p *specParser) joinTable(raw rawStep, forms map[string]field, st *joinStep, right scope) {
	if within, ok := forms["within"]; ok {
		p.errorf(within.at, "", "join: within belongs to a join without table: a record meets what the table had at its time")
	}
	if raw.window != nil {
		p.errorf(raw.window.at, "", "window belongs to a join without table: a record meets what the table had at its time")
	}
	if d, ok := forms["allowed_lateness"]; ok {
		st.lateness = p.bounded(d, "join.allowed_lateness")
		if st.latest {
			p.errorf(d.at, "", "join: with latest no record is late")
		}
	}
	if raw.late != nil && st.latest {
		p.errorf(raw.late.at, "", "late: with latest no record is late")
	}
	if deletes, ok := forms["deletes"]; ok {
		left := p.scope
		p.scope = right
		st.deletes = p.conditionField(deletes)
		p.scope = left
	}
}

// joinTimes reads which records meet by their times.
func (p *specParser) joinTimes(raw rawStep, forms map[string]field, st *joinStep) {
	within, ok := forms["within"]
	lateness, late := forms["allowed_lateness"]
	switch {
	case ok && raw.window != nil:
		p.errorf(raw.window.at, "", "join: it has within already")
	case !ok && raw.window == nil:
		p.errorf(raw.op.at, "such as within: 1h, within: {before: 5m, after: 1h}, or window: {tumbling: 1h} beside join", "join: which times meet is not said")
	case ok:
		p.joinWithin(within, st)
	default:
		before := len(p.errors)
		w := p.window(*raw.window)
		st.windows, st.lateness = w, w.AllowedLateness
		w.AllowedLateness = 0
		if len(p.errors) == before && (w.Size == 0 && w.Days == 0 || w.Size != w.Every || w.Days != w.EveryDays) {
			p.errorf(raw.window.at, "such as {tumbling: 1h}", "window: the windows of a join are tumbling")
		}
	}
	if !late {
		return
	}
	if st.windows != nil {
		p.errorf(lateness.at, "", "join: with a window allowed_lateness is a field of it")
	}
	st.lateness = p.bounded(lateness, "join.allowed_lateness")
}

// joinWithin reads within: a duration, or {before: …, after: …}.
func (p *specParser) joinWithin(f field, st *joinStep) {
	if !isMapping(f.value) {
		st.before = p.bound(f.value, "join.within")
		st.after = st.before
	} else {
		fields, _ := p.mapping(f.value, "join.within")
		for _, form := range fields {
			switch form.name {
			case "before":
				st.before = p.bound(form.value, "join.within.before")
			case "after":
				st.after = p.bound(form.value, "join.within.after")
			default:
				p.unknown(form, "join.within", "before", "after")
			}
		}
		if len(fields) == 0 {
			p.errorf(f.at, "such as {before: 5m, after: 1h}", "join.within: there is none")
		}
	}
	switch {
	case st.after == flow.Forever && st.kind != flow.InnerJoin:
		p.errorf(f.at, "", "join.within: for ever after it is never known that a record met none: a join of type %v needs a bound", st.kind)
	case st.before == flow.Forever && st.kind == flow.OuterJoin:
		p.errorf(f.at, "", "join.within: for ever before it is never known that a record of the other list met none: a join of type outer needs a bound")
	}
}

// bound reads how far apart two records may be.
func (p *specParser) bound(n ast.Node, what string) time.Duration {
	if _, number := n.(*ast.IntegerNode); number {
		p.errorf(p.at(n), "write it with its unit, such as 100ms, 24h or 30d", "%s: a number without a unit is not a duration", what)
		return 0
	}
	s, ok := p.text(n, what)
	switch {
	case !ok:
		return 0
	case s.text == "forever":
		return flow.Forever
	}
	d, err := parseDuration(s.text)
	if err == nil && d > longestBound {
		err = fmt.Errorf("%q: at most %s is possible, or forever", s.text, formatDuration(longestBound))
	}
	if err != nil {
		p.errorf(s.start, "durations are such as 0s, 1h30m or 30d, or forever", "%s: %v", what, err)
		return 0
	}
	return d
}

// bounded reads a lateness.
func (p *specParser) bounded(f field, what string) time.Duration {
	d, ok := p.duration(f.value, what)
	if ok && d > longestBound {
		p.errorf(p.at(f.value), "", "%s: at most %s is possible", what, formatDuration(longestBound))
		return 0
	}
	return d
}

// joinNames reads the names that the two records have in a result, and tells what is
// known of it.
func (p *specParser) joinNames(f field, forms map[string]field, st *joinStep, left, right scope) {
	name := func(field string) string {
		form, ok := forms[field]
		if !ok {
			return ""
		}
		s, ok := p.text(form.value, "join."+field)
		if ok && (s.text == "" || slices.Contains(recordNames, s.text) || slices.Contains(bucketNames, s.text)) {
			p.errorf(s.start, "", "join.%s: %q cannot be the name of a member", field, s.text)
			return ""
		}
		return s.text
	}
	st.as, st.leftAs = name("as"), name("left_as")
	st.path = newPath([]string{st.as})
	if _, ok := forms["as"]; !ok {
		p.errorf(f.at, "the member that the record of the other list becomes", "join: the field \"as\" is missing")
	}
	members := []string{st.leftAs}
	switch {
	case st.as == "":
	case st.leftAs == st.as:
		p.errorf(forms["left_as"].at, "", "join.left_as: %q is as already", st.as)
	case st.leftAs != "":
	case left.format == Text:
		p.errorf(f.at, "such as left_as: line", "join: a text has no members: left_as says which one it becomes")
	case left.known && slices.Contains(left.members, st.as):
		p.errorf(forms["as"].at, "", "join.as: the records have a member %q already: %s made it", st.as, left.from)
	}
	if st.leftAs == "" {
		members = slices.Clone(left.members)
	}
	p.scope.windowed = left.windowed || st.kind == flow.OuterJoin && right.windowed
	p.scope.others = union(slices.Clip(left.others), slices.Concat(right.reads, right.others))
	if st.kind == flow.OuterJoin {
		p.scope.reads = union(slices.Clip(left.reads), right.reads)
	}
	p.scope.lost = left.lost || right.lost
	p.scope.joined = left.joined || !st.latest
	if st.leftAs == "" && !left.known {
		p.scope.format = JSON
		return
	}
	if st.as != "" {
		members = append(members, st.as)
	}
	p.produce(f.at, "join", members)
	if st.leftAs == "" {
		// What kind of result the left record is, it still says.
		p.scope.panes = left.panes
	}
}

// joinLate reads where late records go: those of the list, and those of the other one,
// which may have other members.
func (p *specParser) joinLate(f field, st *joinStep, left, right scope) (late, lateWith *toStep) {
	before := len(p.errors)
	late = p.late(f, left)
	if st.table || late == nil || len(p.errors) > before {
		return late, nil
	}
	lateWith = p.late(f, right)
	for _, e := range p.errors[before:] {
		e.Hint = fmt.Sprintf("late takes the late records of both lists, and this is of those of %q", st.with)
	}
	return late, lateWith
}

// joinStops reports a flow that a late record would stop for good.
func (p *specParser) joinStops(raw rawStep, st *joinStep, left, right scope) {
	forever := st.windows == nil && st.before == flow.Forever && st.after == flow.Forever
	if p.spec.OnError != flow.Stop || raw.late != nil || st.latest || forever && !st.table {
		return
	}
	if left.mayBeLate() || !st.table && right.mayBeLate() {
		p.errorf(raw.op.at, "such as late: {stream: LATE, subject: late}", "join: with on_error: stop the first late record would stop the flow for good: say in late where late records go")
	}
}

func (st *joinStep) text() string {
	s := st.kind.String() + " join with " + st.with
	switch {
	case st.table && st.latest:
		s += " as the latest table"
	case st.table:
		s += " as a table"
	case st.windows != nil:
		s += " in " + st.windows.text()
	case st.before == st.after:
		s += " within " + boundText(st.before)
	default:
		s += fmt.Sprintf(" from %s before to %s after", boundText(st.before), boundText(st.after))
	}
	if st.deletes != nil {
		s += ", deleted by " + st.deletes.text
	}
	if st.when != nil {
		s += ", when " + st.when.text
	}
	if st.leftAs != "" {
		s += ", left as " + st.leftAs
	}
	s += ", as " + st.as
	if st.lateness > 0 {
		s += "; open for " + formatDuration(st.lateness) + " more"
	}
	if st.late != nil {
		s += "; late records to " + st.late.text()
	}
	return s
}

func boundText(d time.Duration) string {
	if d == flow.Forever {
		return "forever"
	}
	return formatDuration(d)
}

// state says what the join keeps, for a plan.
func (st *joinStep) state(key string) string {
	switch {
	case st.table && st.latest:
		return "the entry of " + st.with + " of each key (" + key + ")"
	case st.table:
		return "the entries of " + st.with + " of each key (" + key + ") that may be needed, and the records that wait"
	}
	return "the records of both lists of each key (" + key + ") that may meet others"
}

// build is that of a step; a list builds a join by buildWith.
func (st *joinStep) build(in flow.Stream[record]) flow.Stream[record] { return in }

// buildWith adds the join to the flow.
func (st *joinStep) buildWith(in, with flow.Stream[record]) flow.Stream[record] {
	left := flow.Codec[record]{Encode: st.encodeLeft, Decode: decodeBytes}
	right := flow.Codec[record]{Encode: st.encodeRight, Decode: decodeBytes}
	if st.table {
		results, late := flow.JoinTable(in, with, st.id, flow.TableConfig[record, record, record]{
			Kind: st.kind, Latest: st.latest, AllowedLateness: st.lateness, Stream: left, Table: right,
			Version: joinVersion, Deletes: st.deleted, Join: st.join,
		}, flow.ID(st.id), flow.Kind(kindTable))
		if st.late != nil {
			st.late.build(late)
		}
		return results
	}
	cfg := flow.JoinConfig[record, record, record]{
		Kind: st.kind, Before: st.before, After: st.after, AllowedLateness: st.lateness, Left: left, Right: right,
		Version: joinVersion, Join: st.join,
	}
	if st.windows != nil {
		cfg.Windows = st.windows.Windows
	}
	results, lateLeft, lateRight := flow.Join(in, with, st.id, cfg, st.options()...)
	if st.late != nil {
		st.late.build(lateLeft)
		st.lateWith.build(lateRight)
	}
	return results
}

// sinks are those of the late records.
func (st *joinStep) sinks() []*toStep {
	switch {
	case st.late == nil:
		return nil
	case st.lateWith == nil:
		return []*toStep{st.late}
	}
	return []*toStep{st.late, st.lateWith}
}

var errNoPayload = errors.New("join: the payload is empty, as it is where a key of a bucket is deleted: let a filter come before the join")

// encodeLeft is encode for what the join can take.
func (st *joinStep) encodeLeft(dst []byte, m *flow.Meta, r record) ([]byte, error) {
	from := len(dst)
	dst, err := encode(dst, m, r)
	if err != nil {
		return dst, err
	}
	return dst, st.checkLeft(dst[from:])
}

func (st *joinStep) checkLeft(data []byte) error {
	switch {
	case st.left == Text:
	case len(data) == 0:
		return errNoPayload
	case st.leftAs == "" && !isObject(text(data)):
		return fmt.Errorf("join: the record is no object, so that it has no members: %s; left_as says which one it becomes", excerpt(data))
	}
	return nil
}

// encodeRight is encodeLeft for the other list.
func (st *joinStep) encodeRight(dst []byte, m *flow.Meta, r record) ([]byte, error) {
	from := len(dst)
	dst, err := encode(dst, m, r)
	if err == nil && len(dst) == from && st.right != Text {
		err = errNoPayload
	}
	return dst, err
}

// deleted tells whether a record of a table deletes its key.
func (st *joinStep) deleted(m *flow.Meta, r record) (bool, error) {
	if r.of == nil && len(r.data) == 0 {
		return true, nil
	}
	if st.deletes == nil {
		return false, nil
	}
	return st.deletes.condition(m, r)
}

// join makes the result of a pair, or of a record that met none.
func (st *joinStep) join(m *flow.Meta, left, right *record) (record, bool, error) {
	var l, r []byte
	if left != nil {
		l = left.payload(m)
		if err := st.checkLeft(l); err != nil {
			return record{}, false, err
		}
	}
	if right != nil {
		r = right.payload(m)
	}
	res := record{data: st.appendResult(make([]byte, 0, len(l)+len(r)+len(st.as)+len(st.leftAs)+24), l, r, left != nil, right != nil)}
	if st.when != nil && left != nil && right != nil {
		ok, err := st.when.condition(m, res)
		return res, ok, err
	}
	return res, true, nil
}

// appendResult appends the object of both.
func (st *joinStep) appendResult(dst, left, right []byte, hasLeft, hasRight bool) []byte {
	from := len(dst)
	switch {
	case st.leftAs != "":
		dst = appendMember(append(dst, '{'), st.leftAs, left, st.left, hasLeft)
	case hasLeft:
		dst = appendOthers(dst, left, st.path)
	default:
		dst = append(dst, '{')
	}
	if len(dst) > from+1 {
		dst = append(dst, ',')
	}
	return append(appendMember(dst, st.as, right, st.right, hasRight), '}')
}

// appendMember appends a payload as a member.
func appendMember(dst []byte, name string, payload []byte, format Format, there bool) []byte {
	dst = append(appendString(dst, name), ':')
	switch {
	case !there:
		return append(dst, "null"...)
	case format == Text:
		return appendString(dst, text(payload))
	}
	return append(dst, strings.TrimSpace(text(payload))...)
}
