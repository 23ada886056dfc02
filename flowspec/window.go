package flowspec

import (
	"fmt"
	"slices"
	"time"

	"github.com/goccy/go-yaml/ast"

	"natsflow/flow"
)

// windows is what an aggregate has besides its functions when it works on windows.
type windows struct {
	flow.Windows
	// late takes the records that come after their windows; nil for none.
	late *toStep
}

// nameWindow is the member of a result that holds the bounds of the window.
const nameWindow = "window"

// kindWindow is the kind of an aggregate on windows: its state is another one than that
// of an aggregate without.
const kindWindow = "window"

// windowVersion is added to the version of an aggregate's state: with windows it is
// another one.
const windowVersion = 100

var windowForms = []string{"tumbling", "sliding", "session", "count", "global"}

// window reads the window of an aggregate.
func (p *specParser) window(f field) *windows {
	w := &windows{}
	if n, ok := f.value.(*ast.StringNode); ok {
		if w.Global = n.Value == "global"; !w.Global {
			p.errorf(p.at(n), "such as {tumbling: 1h}, {sliding: {size: 1h, every: 10m}}, {session: {gap: 30m}}, {count: 100} or global", "window: unknown value %q", n.Value)
		}
		return w
	}
	fields, ok := p.mapping(f.value, "window")
	if !ok {
		return w
	}
	var form, zone, offset *field
	for _, f := range fields {
		switch f.name {
		case "tumbling", "sliding", "session", "count", "global":
			if form != nil {
				p.errorf(f.at, "", "window: it is %s already", form.name)
				continue
			}
			form = &f
		case "offset":
			offset = &f
			w.Offset, _ = p.duration(f.value, "window.offset")
		case "timezone":
			zone = &f
			w.Location = p.timezone(f)
		case "allowed_lateness":
			w.AllowedLateness, _ = p.duration(f.value, "window.allowed_lateness")
		case "emit", "late":
			p.errorf(f.at, "as a field of the step, at the same depth as window", "window: %s stands beside window, not in it", f.name)
		default:
			p.unknown(f, "window", append([]string{"offset", "timezone", "allowed_lateness"}, windowForms...)...)
		}
	}
	if form == nil {
		p.errorf(f.at, "such as {tumbling: 1h}, {sliding: {size: 1h, every: 10m}}, {session: {gap: 30m}}, {count: 100} or global", "window: which one is not said")
		return w
	}
	before := len(p.errors)
	p.windowForm(*form, w)
	if zone != nil && w.Days == 0 && len(p.errors) == before {
		p.errorf(zone.at, "such as {tumbling: 1d, timezone: Europe/Paris}", "window: a timezone belongs to tumbling and sliding windows of whole days")
		return w
	}
	if offset != nil && (w.Gap != 0 || w.Count != 0 || w.Global) {
		p.errorf(offset.at, "", "window: an offset belongs to tumbling and sliding windows")
		return w
	}
	if len(p.errors) == before {
		if err := w.Validate(); err != nil {
			p.errorf(form.at, "", "window.%s: %v", form.name, err)
		}
	}
	return w
}

// windowForm reads what kind of window it is.
func (p *specParser) windowForm(f field, w *windows) {
	what := "window." + f.name
	switch f.name {
	case "tumbling":
		size, _ := p.duration(f.value, what)
		w.fixed(size, size)
	case "sliding":
		var size, every time.Duration
		if p.durations(f, what, map[string]*time.Duration{"size": &size, "every": &every}, "size", "every") {
			w.fixed(size, every)
		}
	case "session":
		p.durations(f, what, map[string]*time.Duration{"gap": &w.Gap, "max": &w.Max}, "gap")
	case "count":
		n, ok := p.integer(f.value, what)
		if ok && n < 1 {
			p.errorf(p.at(f.value), "", "%s: %d is not a number of records", what, n)
		}
		w.Count = n
	case "global":
		if n, ok := f.value.(*ast.BoolNode); !ok || !n.Value {
			p.errorf(p.at(f.value), "write window: global", "%s is true: one window with all records of a key", what)
		}
		w.Global = true
	}
}

// fixed sets the size. Whole days are those of a place.
func (w *windows) fixed(size, every time.Duration) {
	const day = 24 * time.Hour
	if size%day == 0 && every%day == 0 {
		w.Days, w.EveryDays = int(size/day), int(every/day)
		return
	}
	w.Size, w.Every = size, every
}

// durations reads a mapping of durations, some of which have to be there.
func (p *specParser) durations(f field, what string, into map[string]*time.Duration, required ...string) bool {
	fields, ok := p.mapping(f.value, what)
	if !ok {
		return false
	}
	names := []string{"size", "every"}
	if into["gap"] != nil {
		names = []string{"gap", "max"}
	}
	have := map[string]bool{}
	for _, f := range fields {
		to := into[f.name]
		if to == nil {
			p.unknown(f, what, names...)
			ok = false
			continue
		}
		have[f.name] = true
		var good bool
		*to, good = p.duration(f.value, what+"."+f.name)
		ok = ok && good
	}
	for _, name := range required {
		if !have[name] {
			p.errorf(f.at, "", "%s: the field %q is missing", what, name)
			ok = false
		}
	}
	return ok
}

func (p *specParser) timezone(f field) *time.Location {
	s, ok := p.text(f.value, "window.timezone")
	if !ok {
		return nil
	}
	// Local would be another place on another worker.
	loc, err := time.LoadLocation(s.text)
	if err != nil || s.text == "" || s.text == "Local" {
		p.errorf(s.start, "such as Europe/Paris or America/New_York", "window.timezone: there is no time zone %q", s.text)
		return nil
	}
	return loc
}

// windowed makes an aggregate one on windows: its emit and late are others.
func (p *specParser) windowed(st *aggregateStep, raw rawStep, before scope) {
	w := p.window(*raw.window)
	st.windows = w
	if raw.emit != nil {
		p.windowEmit(*raw.emit, w)
	}
	if raw.onDrain != nil {
		w.OnDrain = flow.WindowOnDrain(p.choice(*raw.onDrain, "keep", "emit"))
	}
	if raw.late != nil {
		w.late = p.late(*raw.late, before)
	}
	if p.spec.OnError != flow.Stop || raw.late != nil {
		return
	}
	if before.mayBeLate() {
		p.errorf(raw.window.at, "such as late: {stream: LATE, subject: late}", "window: with on_error: stop the first late record would stop the flow for good: say in late where late records go")
	}
}

// windowEmit reads when windows emit: at their close, for each record, or every so often
// besides.
func (p *specParser) windowEmit(f field, w *windows) {
	if !isMapping(f.value) {
		w.Emit = flow.WindowEmit(p.choice(f, "close", "update"))
		return
	}
	fields, _ := p.mapping(f.value, "emit")
	for _, f := range fields {
		if f.name != "early" {
			p.unknown(f, "emit", "early")
			continue
		}
		before := len(p.errors)
		w.Early, _ = p.duration(f.value, "emit.early")
		if len(p.errors) > before {
			continue
		}
		// The windows themselves have been looked at.
		if err := (flow.Windows{Global: true, Early: w.Early}).Validate(); err != nil {
			p.errorf(p.at(f.value), "", "emit.early: %v", err)
		}
	}
	if len(fields) == 0 {
		p.errorf(f.at, "such as {early: 10s}", "emit: the field \"early\" is missing")
	}
}

// panes are the members that some of the results have, and that say what kind they are.
func (w *windows) panes() []string {
	panes := []string{flow.PaneFinal.String()}
	if w.Early > 0 {
		panes = append(panes, flow.PaneEarly.String())
	}
	if w.OnDrain == flow.EmitPartial {
		panes = append(panes, flow.PanePartial.String())
	}
	return panes
}

// checkPanes refuses a member with the name of one that the windows make because they are
// told to. One that is named final was there before that was made: it stands in its place.
func (p *specParser) checkPanes(members []field, w *windows) {
	for _, m := range members {
		if m.name != flow.PaneFinal.String() && slices.Contains(w.panes(), m.name) {
			p.errorf(m.at, "", "aggregate: %s is in the result already: it says what kind of result it is", m.name)
		}
	}
}

// late reads where late records go: what they are is known from before the
// aggregate.
func (p *specParser) late(f field, before scope) *toStep {
	after := p.scope
	defer func() { p.scope = after }()
	p.scope = before
	fields, ok := p.mapping(f.value, "late")
	if !ok {
		return nil
	}
	st := &toStep{stepHead: stepHead{kind: "to", at: f.at}, inTask: true}
	forms := map[string]field{}
	for _, form := range fields {
		if form.name != "stream" && form.name != "subject" {
			p.unknown(form, "late", "stream", "subject")
			continue
		}
		forms[form.name] = form
	}
	stream, isStream := forms["stream"]
	if !isStream {
		p.errorf(f.at, "such as {stream: LATE, subject: late}", "late: the field \"stream\" is missing")
		return nil
	}
	p.toStream(f, st, "late", stream, forms)
	return st
}

// text describes the windows; it is a part of the definition of the flow.
func (w *windows) text() string {
	var s string
	size, every := w.Size, w.Every
	if w.Days > 0 {
		const day = 24 * time.Hour
		size, every = time.Duration(w.Days)*day, time.Duration(w.EveryDays)*day
	}
	switch {
	case w.Gap > 0:
		s = "sessions with a gap of " + formatDuration(w.Gap)
		if w.Max > 0 {
			s += ", at most " + formatDuration(w.Max)
		}
	case w.Count > 0:
		s = fmt.Sprintf("windows of %d records", w.Count)
	case w.Global:
		s = "one window with all records"
	case size == every:
		s = "windows of " + formatDuration(size)
	default:
		s = "windows of " + formatDuration(size) + " every " + formatDuration(every)
	}
	if w.Offset > 0 {
		s += " from " + formatDuration(w.Offset) + " on"
	}
	if w.Location != nil {
		s += " in " + w.Location.String()
	}
	if w.AllowedLateness > 0 {
		s += ", open for " + formatDuration(w.AllowedLateness) + " more"
	}
	if w.Emit == flow.EmitEach {
		s += "; emit: update"
	}
	if w.Early > 0 {
		s += "; early results every " + formatDuration(w.Early)
	}
	if w.OnDrain == flow.EmitPartial {
		s += "; partial results on a drain"
	}
	if w.late != nil {
		s += "; late records to " + w.late.text()
	}
	return s
}

// build adds the aggregate to the flow.
func (w *windows) build(st *aggregateStep, in flow.Stream[record]) flow.Stream[record] {
	a := &st.aggregate
	codec := a.codec()
	codec.Version += windowVersion
	loc := w.Location
	if loc == nil {
		loc = time.UTC
	}
	results, late := flow.Window(in, st.id, w.Windows, flow.WindowAggregator[record, group, record]{
		State: codec,
		Add:   a.add,
		Merge: a.merge,
		Result: func(m *flow.Meta, span flow.Span, g *group) (record, error) {
			of := &windowOf{pane: m.Pane()}
			if !w.Global {
				of.Span = flow.Span{Start: span.Start.In(loc), End: span.End.In(loc)}
			}
			return record{of: a, group: g, window: of}, nil
		},
	}, flow.ID(st.id), flow.Kind(kindWindow))
	if w.late != nil {
		w.late.build(late)
	}
	return results
}

// bounded reports whether a result has a window with bounds.
func (w *windowOf) bounded() bool { return w != nil && !w.End.IsZero() }

// is reports whether a name is that of the kind of the result.
func (w *windowOf) is(name string) bool {
	return w != nil && w.pane != flow.PaneNone && w.pane.String() == name
}

// appendWindowOf appends the members of a result that its window has.
func (a *aggregate) appendWindowOf(dst []byte, w *windowOf) []byte {
	if w.bounded() {
		dst = appendWindow(append(dst, `,"window":`...), w.Span)
	}
	own := func(m aggregateMember) bool { return w.is(m.name) }
	if w.pane == flow.PaneNone || slices.ContainsFunc(a.members, own) {
		return dst
	}
	dst = append(append(dst, `,"`...), w.pane.String()...)
	return append(dst, `":true`...)
}

// appendWindow appends the bounds of a window as JSON.
func appendWindow(dst []byte, w flow.Span) []byte {
	dst = append(dst, `{"start":"`...)
	dst = w.Start.AppendFormat(dst, time.RFC3339Nano)
	dst = append(dst, `","end":"`...)
	dst = w.End.AppendFormat(dst, time.RFC3339Nano)
	return append(dst, `"}`...)
}

// merge folds the group of a later session into that of an earlier one. After an
// error nothing has changed.
func (a *aggregate) merge(into, from *group) error {
	next := append([]acc(nil), into.accs...)
	for i, m := range a.slots {
		if err := next[i].merge(m.fn, from.accs[i]); err != nil {
			return fmt.Errorf("%s: %v: %w", m.name, m, err)
		}
	}
	more, err := a.mergeExtensions(into.more, from.more)
	if err != nil {
		return err
	}
	into.records += from.records
	into.accs, into.more = next, more
	return nil
}

func (c *acc) merge(fn aggregateFn, later acc) error {
	switch fn {
	case aggCount, aggCountIf:
		c.n += later.n
	case aggSum, aggAvg:
		if later.val.isNull() {
			return nil
		}
		sum, ok := addInt(c.val.int(), later.val.int())
		if !ok {
			return errOverflow
		}
		if later.val.kind == kindFloat || c.val.isNull() {
			c.val.kind = later.val.kind
		}
		c.val.bits = uint64(sum)
		c.float += later.float
		c.n += later.n
		_, err := finite(c.float)
		return err
	case aggStddev, aggStddevPop, aggVariance, aggVariancePop:
		return c.mergeMoments(later)
	case aggFirst:
		if c.val.isNull() {
			c.val = later.val
		}
	case aggLast, aggMin, aggMax:
		return c.add(fn, later.val)
	}
	return nil
}
