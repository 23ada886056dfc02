package flowspec

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"natsflow/flow"
)

// step is one operator of a flow.
type step interface {
	// head is what every step has.
	head() *stepHead
	// text describes what the step does in one line; it is a part of the
	// definition that a flow's hash covers.
	text() string
	// build adds the step to the flow and returns what comes out of it.
	build(in flow.Stream[record]) flow.Stream[record]
}

type stepHead struct {
	id       string
	kind     string
	at       position
	idAt     position
	stateful bool
	// stage that the step runs in.
	stage int
}

func (h *stepHead) head() *stepHead { return h }

// sinksOf returns what a step publishes to.
func sinksOf(st step) []*toStep {
	switch st := st.(type) {
	case *toStep:
		return []*toStep{st}
	case *aggregateStep:
		if st.windows != nil && st.windows.late != nil {
			return []*toStep{st.windows.late}
		}
	case *joinStep:
		return st.sinks()
	}
	return nil
}

func (h *stepHead) options() []flow.StepOption {
	return []flow.StepOption{flow.ID(h.id), flow.Kind(h.kind)}
}

type filterStep struct {
	stepHead
	cond *expression
}

type mapStep struct {
	stepHead
	members []mapMember
}

type mapMember struct {
	name string
	// prefix of the member in the payload, such as `,"delay":`.
	prefix string
	expr   *expression
}

type expandStep struct {
	stepHead
	path *path
}

type keyStep struct {
	stepHead
	// One of these is set: token counts from 1.
	path  *path
	token int
	expr  *expression
	// change: the records have another key already, or are redistributed, and go on to
	// the next stage.
	change bool
}

type aggregateStep struct {
	stepHead
	aggregate aggregate
	emit      flow.EmitMode
	// windows is nil for an aggregate over all records of a key.
	windows *windows
	// ttl is how long the state of a key outlives its last record, 0 for ever.
	ttl time.Duration
}

type dedupeStep struct {
	stepHead
	by     *expression
	within time.Duration
}

type toStep struct {
	stepHead
	sink     flow.SinkKind
	name     string
	template *template
	stopWhen *expression
	// inTask is false where the records have no key, and are not redistributed.
	inTask bool
}

var operators = []string{"filter", "map", "expand", "redistribute", "key", "lookup", "aggregate", "dedupe", "join", "to"}

// rawStep is a step whose fields have been told apart.
type rawStep struct {
	op                               field
	id, emit, stopWhen, window, late *field
	onDrain, ttl                     *field
}

// stepsOf reads the steps of a list.
func (p *specParser) stepsOf(l *stepList, nodes []ast.Node) {
	p.current = l
	for _, n := range nodes {
		raw, ok := p.rawStep(n)
		if !ok {
			continue
		}
		stage := p.scope.stage
		if s := p.step(raw); s != nil {
			h := s.head()
			h.stage = stage
			h.kind, h.at = raw.op.name, raw.op.at
			h.stateful = h.kind == "aggregate" || h.kind == "dedupe" || h.kind == "join"
			if raw.id != nil {
				h.id, h.idAt = p.stepID(*raw.id)
			}
			l.steps = append(l.steps, s)
		}
	}
}

// rawStep tells the operator of a step from its options.
func (p *specParser) rawStep(n ast.Node) (raw rawStep, ok bool) {
	fields, isMapping := p.mapping(n, "a step")
	if !isMapping {
		return raw, false
	}
	var stray []field
	for _, f := range fields {
		switch {
		case slices.Contains(operators, f.name):
			if ok {
				p.errorf(f.at, "start another step with \"- \"", "a step does one thing: it is a %s already", raw.op.name)
				continue
			}
			raw.op, ok = f, true
		case f.name == "id":
			raw.id = &f
		case f.name == "emit":
			raw.emit = &f
		case f.name == "stop_when":
			raw.stopWhen = &f
		case f.name == "window":
			raw.window = &f
		case f.name == "late":
			raw.late = &f
		case f.name == "on_drain":
			raw.onDrain = &f
		case f.name == "ttl":
			raw.ttl = &f
		default:
			stray = append(stray, f)
		}
	}
	p.strayFields(raw, stray, ok)
	if !ok {
		if len(stray) == 0 {
			p.errorf(p.at(n), "possible: "+strings.Join(operators, ", "), "a step without an operator")
		}
		return raw, false
	}
	if raw.emit != nil && raw.op.name != "aggregate" {
		p.errorf(raw.emit.at, "", "emit belongs to an aggregate")
	}
	if raw.window != nil && raw.op.name != "aggregate" && raw.op.name != "join" {
		p.errorf(raw.window.at, "", "window belongs to an aggregate or a join")
	}
	if raw.late != nil && raw.window == nil && raw.op.name != "join" {
		p.errorf(raw.late.at, "", "late belongs to an aggregate with a window, or to a join")
	}
	if raw.onDrain != nil && (raw.window == nil || raw.op.name != "aggregate") {
		p.errorf(raw.onDrain.at, "", "on_drain belongs to an aggregate with a window")
	}
	p.checkTTL(raw)
	if raw.stopWhen != nil && raw.op.name != "to" {
		p.errorf(raw.stopWhen.at, "", "stop_when belongs to a to")
	}
	return raw, true
}

func (p *specParser) strayFields(raw rawStep, stray []field, isStep bool) {
	options := []string{"id"}
	switch raw.op.name {
	case "aggregate":
		options = append(options, "emit", "window", "late", "on_drain", "ttl")
	case "join":
		options = append(options, "window", "late")
	case "to":
		options = append(options, "stop_when")
	}
	for _, f := range stray {
		if isStep {
			p.unknown(f, raw.op.name, options...)
			continue
		}
		p.unknown(f, "step", operators...)
	}
}

var idRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`)

// mergeRE is what package flow names the step that merges lists.
var mergeRE = regexp.MustCompile(`^merge-[0-9]+$`)

func (p *specParser) stepID(f field) (string, position) {
	s, ok := p.text(f.value, "id")
	if !ok {
		return "", f.at
	}
	switch {
	case !idRE.MatchString(s.text):
		p.errorf(s.start, "", "id %q: letters, digits, - and _, at most 64", s.text)
	case s.text == sourceID:
		p.errorf(s.start, "", "id %q is that of the source", s.text)
	case p.current.name != "" && mergeRE.MatchString(s.text):
		p.errorf(s.start, "", "id %q: ids such as merge-1 are those of merged lists", s.text)
	default:
		return s.text, s.start
	}
	return "", f.at
}

const sourceID = "source"

// nameSteps checks the ids over all lists and gives the steps without one that of
// their list, their kind and a number. It counts the steps of the kind, so that
// the name of a stateful step does not change with steps of other kinds or of
// other lists.
func (p *specParser) nameSteps(lists []*stepList) {
	var named []*stepHead
	for _, l := range lists {
		for _, s := range l.steps {
			if h := s.head(); h.id != "" {
				named = append(named, h)
			}
		}
	}
	slices.SortFunc(named, func(a, b *stepHead) int { return a.at.compare(b.at) })
	defer func() {
		for _, l := range lists {
			for _, s := range l.steps {
				// An id in a file has no dot.
				switch late := sinksOf(s); s.(type) {
				case *aggregateStep, *joinStep:
					for i, name := range []string{".late", ".late-with"}[:len(late)] {
						late[i].id = s.head().id + name
					}
				}
			}
		}
	}()
	used := map[string]*stepHead{}
	for _, h := range named {
		if first := used[h.id]; first != nil {
			p.errorf(h.idAt, "", "id %q is used twice, first for the step in line %d", h.id, first.at.line)
			continue
		}
		used[h.id] = h
	}
	for _, l := range lists {
		count := map[string]int{}
		for _, s := range l.steps {
			h := s.head()
			count[h.kind]++
			if h.id != "" {
				continue
			}
			h.id = l.prefix() + h.kind + "-" + strconv.Itoa(count[h.kind])
			if other := used[h.id]; other != nil {
				p.errorf(h.at, "give this step an id too", "the step would be named %q, which is the id of the step in line %d", h.id, other.at.line)
			}
		}
	}
}

// step reads an operator. It returns nil if it cannot be used.
func (p *specParser) step(raw rawStep) step {
	f := raw.op
	switch f.name {
	case "filter":
		return &filterStep{cond: p.conditionField(f)}
	case "map":
		return p.mapStep(f)
	case "expand":
		return p.expandStep(f)
	case "redistribute":
		return p.redistribute(f)
	case "key":
		return p.keyStep(f)
	case "lookup":
		return p.lookupStep(f)
	case "aggregate":
		return p.aggregateStep(raw)
	case "dedupe":
		return p.dedupeStep(f)
	case "join":
		return p.joinStep(raw)
	}
	return p.toStep(f, raw.stopWhen)
}

// conditionField reads an expression that is true or false.
func (p *specParser) conditionField(f field) *expression {
	s, ok := p.expressionText(f.value, f.name)
	if !ok {
		return nil
	}
	e := p.compileExpression(s, 0, s.text, f.name, &p.scope)
	if e != nil && e.result != kindNull && e.result != kindBool {
		p.errorf(s.start, "", "%s: a condition is true or false, this is a %v", f.name, e.result)
	}
	return e
}

// produce makes the members that a step makes known to the steps after it.
func (p *specParser) produce(from position, kind string, members []string) {
	p.scope.format, p.scope.known, p.scope.members, p.scope.panes = JSON, true, members, nil
	p.scope.from = fmt.Sprintf("the %s in line %d", kind, from.line)
}

func (p *specParser) mapStep(f field) step {
	fields, ok := p.mapping(f.value, "map")
	if !ok {
		return nil
	}
	st := &mapStep{}
	var names []string
	for _, m := range fields {
		names = append(names, m.name)
		what := "map." + m.name
		if m.name == "" {
			p.errorf(m.at, "", "map: a member without a name")
		}
		s, ok := p.expressionText(m.value, what)
		if !ok {
			continue
		}
		prefix := string(appendString(nil, m.name)) + ":"
		if len(st.members) > 0 {
			prefix = "," + prefix
		}
		st.members = append(st.members, mapMember{m.name, prefix, p.compileExpression(s, 0, s.text, what, &p.scope)})
	}
	if len(fields) == 0 {
		p.errorf(f.at, "", "map: there is no member")
	}
	p.produce(f.at, "map", names)
	return st
}

func (p *specParser) expandStep(f field) step {
	s, ok := p.text(f.value, "expand")
	if !ok {
		return nil
	}
	if p.scope.format != JSON {
		p.errorf(f.at, "", "expand: payloads of format %s have no members", p.scope.format)
		return nil
	}
	st := &expandStep{path: p.path(s, "expand", "", &p.scope)}
	p.scope.known, p.scope.members, p.scope.from = false, nil, ""
	return st
}

func (p *specParser) keyStep(f field) step {
	st := &keyStep{change: (p.scope.keyed || p.scope.spread) && !p.scope.lost}
	defer func() {
		p.scope.keyed, p.scope.spread = true, false
		if st.change {
			p.scope.stage++
		}
	}()
	if st.change && p.scope.stage+2 > flow.MaxStages {
		p.errorf(f.at, "", "key: the key of the records is changed %d times, at most %d times are possible", p.scope.stage+1, flow.MaxStages-1)
	}
	switch f.value.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		p.keyForm(f, st)
	default:
		if s, ok := p.text(f.value, "key"); ok {
			st.path = p.path(s, "key", "for an expression write {expr: '…'}", &p.scope)
		}
	}
	if !st.change {
		p.checkPartitionKey(f.at, st)
	}
	return st
}

// keyForm reads {subject: N} or {expr: E}.
func (p *specParser) keyForm(f field, st *keyStep) {
	fields, _ := p.mapping(f.value, "key")
	for _, form := range fields {
		switch form.name {
		case "subject":
			n, ok := p.integer(form.value, "key.subject")
			if ok && n < 1 {
				p.errorf(p.at(form.value), "", "key.subject: tokens count from 1, this is %d", n)
			}
			for _, src := range p.scope.reads {
				if most := mostTokens(src.Subjects); ok && n > most {
					p.errorf(p.at(form.value), "", "key.subject: the subjects of %s have at most %d tokens, this is %d", src.title(), most, n)
				}
			}
			st.token = n
		case "expr":
			if s, ok := p.expressionText(form.value, "key.expr"); ok {
				st.expr = p.compileExpression(s, 0, s.text, "key.expr", &p.scope)
			}
		default:
			p.unknown(form, "key", "subject", "expr")
		}
	}
	if len(fields) != 1 {
		p.errorf(f.at, "", "key is a path, {subject: N} or {expr: '…'}")
	}
}

// mostTokens returns how many tokens a subject of the source can have.
func mostTokens(subjects []string) int {
	most := 0
	for _, s := range subjects {
		if strings.HasSuffix(s, ">") {
			return math.MaxInt
		}
		most = max(most, strings.Count(s, ".")+1)
	}
	if most == 0 {
		return math.MaxInt
	}
	return most
}

// needKey reports a step that keeps state for keys that are not there.
func (p *specParser) needKey(at position, kind string) {
	if !p.scope.keyed {
		p.errorf(at, "", "%s keeps state for each key: put a key step before it", kind)
		p.scope.keyed = true
	}
}

func (p *specParser) aggregateStep(raw rawStep) step {
	f, before := raw.op, p.scope
	p.needKey(f.at, "aggregate")
	before.keyed = true
	st := &aggregateStep{}
	if raw.emit != nil && raw.window == nil {
		st.emit = p.emit(*raw.emit)
	}
	if raw.ttl != nil {
		st.ttl = p.ttl(*raw.ttl)
	}
	fields, ok := p.mapping(f.value, "aggregate")
	if !ok {
		return nil
	}
	names := []string{"key"}
	if raw.window != nil {
		names = append(names, nameWindow)
	}
	for _, m := range fields {
		switch {
		case m.name == "key":
			p.errorf(m.at, "", "aggregate: key is in the result already: the record's key")
		case m.name == nameWindow && raw.window != nil:
			p.errorf(m.at, "", "aggregate: window is in the result already: the bounds of the window")
		case m.name == "":
			p.errorf(m.at, "", "aggregate: a member without a name")
		default:
			names = append(names, m.name)
		}
		if member, ok := p.aggregateMember(m); ok {
			st.aggregate.members = append(st.aggregate.members, member)
		}
	}
	if len(fields) == 0 {
		p.errorf(f.at, "", "aggregate: there is no member")
	}
	st.aggregate.finish()
	panes := []string{flow.PaneFinal.String()}
	if raw.window != nil {
		p.windowed(st, raw, before)
		p.scope.windowed = true
		panes = st.windows.panes()
		if st.windows.Global {
			names = slices.DeleteFunc(names, func(name string) bool { return name == nameWindow })
		}
		p.checkPanes(fields, st.windows)
	}
	p.produce(f.at, "aggregate", names)
	p.scope.panes = panes
	return st
}

// emit reads when an aggregate without a window emits.
func (p *specParser) emit(f field) flow.EmitMode {
	if isMapping(f.value) {
		p.errorf(f.at, "window: global is one window with all records of a key", "emit: early results belong to an aggregate with a window")
		return flow.EmitUpdate
	}
	return flow.EmitMode(p.choice(f, "update", "commit"))
}

func (p *specParser) dedupeStep(f field) step {
	p.needKey(f.at, "dedupe")
	fields, ok := p.mapping(f.value, "dedupe")
	if !ok {
		return nil
	}
	st := &dedupeStep{}
	var by, within bool
	for _, form := range fields {
		switch form.name {
		case "by":
			by = true
			if s, ok := p.expressionText(form.value, "dedupe.by"); ok {
				st.by = p.compileExpression(s, 0, s.text, "dedupe.by", &p.scope)
			}
		case "for":
			within = true
			st.within, _ = p.duration(form.value, "dedupe.for")
			if st.within > flow.MaxDedupe && (p.scope.stage > 0 || p.scope.joined || len(p.scope.reads) > 1) {
				p.errorf(p.at(form.value), "", "dedupe.for: at most 7300 days are possible for records of several sources, and behind a change of key or a join")
			}
		default:
			p.unknown(form, "dedupe", "by", "for")
		}
	}
	if !by || !within {
		p.errorf(f.at, "such as {by: id, for: 24h}", "dedupe needs by and for")
	}
	return st
}

func (p *specParser) toStep(f field, stopWhen *field) step {
	fields, ok := p.mapping(f.value, "to")
	if !ok {
		return nil
	}
	st := &toStep{inTask: p.scope.keyed || p.scope.spread}
	forms := map[string]field{}
	for _, form := range fields {
		forms[form.name] = form
		switch form.name {
		case "stream", "subject", "kv", "key":
		case "stop_when", "id":
			p.errorf(form.at, "as a field of the step, at the same depth as to", "to: %s stands beside to, not in it", form.name)
		default:
			p.unknown(form, "to", "stream", "subject", "kv", "key")
		}
	}
	stream, isStream := forms["stream"]
	bucket, isBucket := forms["kv"]
	switch {
	case isStream == isBucket:
		p.errorf(f.at, "", "to is {stream: NAME, subject: TEMPLATE} or {kv: BUCKET, key: TEMPLATE}")
	case isStream:
		p.toStream(f, st, "to", stream, forms)
	default:
		p.toBucket(f, st, bucket, forms)
	}
	if stopWhen != nil {
		st.stopWhen = p.conditionField(*stopWhen)
	}
	return st
}

func (p *specParser) toStream(f field, st *toStep, what string, stream field, forms map[string]field) {
	st.sink = flow.SinkStream
	st.name = p.streamName(stream.value, what+".stream")
	if key, ok := forms["key"]; ok {
		p.errorf(key.at, "a stream has a subject", "to: key belongs to kv")
	}
	subject, ok := forms["subject"]
	if !ok {
		p.errorf(f.at, "", "%s: the field \"subject\" is missing", what)
		return
	}
	s, ok := p.text(subject.value, what+".subject")
	if !ok {
		return
	}
	st.template = p.template(s, what+".subject", subjectTemplate, &p.scope)
	for _, src := range p.spec.Sources {
		if st.template != nil && st.name == src.Stream && readsBack(src, st.template.wildcard) {
			p.errorf(s.start, "", "%s: the flow would read its own results: they go to the stream %q, which it reads", what, st.name)
		}
	}
}

func readsBack(src Source, wildcard string) bool {
	return len(src.Subjects) == 0 || slices.ContainsFunc(src.Subjects, func(s string) bool { return overlap(s, wildcard) })
}

func (p *specParser) toBucket(f field, st *toStep, bucket field, forms map[string]field) {
	st.sink = flow.SinkBucket
	st.name = p.bucketName(bucket.value, "to.kv")
	if subject, ok := forms["subject"]; ok {
		p.errorf(subject.at, "a bucket has a key", "to: subject belongs to stream")
	}
	key, ok := forms["key"]
	if !ok {
		p.errorf(f.at, `such as key: "{key}"`, "to: the field \"key\" is missing")
		return
	}
	if s, ok := p.text(key.value, "to.key"); ok {
		st.template = p.template(s, "to.key", bucketTemplate, &p.scope)
		p.checkBucketLoop(st, s)
	}
}
