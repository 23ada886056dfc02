package flowspec

import (
	"fmt"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"
)

// stepList is a list of steps. A flow without named lists is one list without a
// name.
type stepList struct {
	name string
	at   position
	// from are the names of what it reads, in the order of the file: sources and
	// other lists. Several are merged.
	from  []string
	steps []step
}

// prefix is what the ids of its steps begin with. An id in a file has no dot, so
// that the two cannot meet.
func (l *stepList) prefix() string {
	if l.name == "" {
		return ""
	}
	return l.name + "."
}

// reads tells whether the list reads what has that name, or a join of it does.
func (l *stepList) reads(name string) bool {
	return slices.Contains(l.from, name) || slices.ContainsFunc(l.steps, func(st step) bool {
		join, ok := st.(*joinStep)
		return ok && join.with == name
	})
}

// named tells whether the flow has named lists.
func (s *Spec) named() bool { return len(s.lists) > 0 && s.lists[0].name != "" }

// place is what a list can read: a source, or another list.
type place struct {
	at position
	// scope is what is known of the records that come out of it; of a list, when
	// its steps have been read.
	scope scope
	// list is nil for a source.
	list *listSource
	read bool
	// done is false for a list whose steps have not been read.
	done bool
}

// listSource is a named list that is being read from the file.
type listSource struct {
	field field
	// from are the entries that name something.
	from []scalar
	// joins are the lists that its joins name.
	joins []scalar
	// lost is true where an entry is wrong.
	lost  bool
	steps *field
	list  *stepList
}

func isMapping(n ast.Node) bool {
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return true
	}
	return false
}

// parseSteps reads the steps: a list, or a mapping of named lists where the flow
// has named sources.
func (p *specParser) parseSteps(f field, sources *field) {
	switch {
	case isMapping(f.value) && sources != nil:
		p.namedLists(f)
		return
	case isMapping(f.value):
		p.errorf(p.at(f.value), "named lists need named sources: write sources instead of source", "steps is a list, this is a mapping")
		return
	}
	nodes, ok := p.list(f.value, "steps")
	if !ok {
		return
	}
	l := &stepList{at: f.at, from: []string{""}}
	p.scope = scope{format: JSON}
	if len(p.spec.Sources) == 1 {
		src := &p.spec.Sources[0]
		l.from[0] = src.Name
		p.scope = p.places[src.Name].scope
	}
	if n := len(p.spec.Sources); n > 1 {
		p.errorf(f.at, fmt.Sprintf("such as {NAME: {from: %s, steps: […]}}", p.spec.Sources[0].Name), "steps: a flow with %d sources has named lists", n)
	}
	if len(nodes) == 0 {
		p.errorf(f.at, "", "steps: there is none")
	}
	p.stepsOf(l, nodes)
	p.nameSteps([]*stepList{l})
	p.checkEnd(l, "steps", "")
	p.spec.lists = []*stepList{l}
}

// checkEnd reports a list that nothing reads and whose results go nowhere.
func (p *specParser) checkEnd(l *stepList, what, hint string) {
	switch {
	case len(l.steps) == 0:
	case !slices.ContainsFunc(l.steps, func(s step) bool { return s.head().kind == "to" }):
		p.errorf(l.at, hint, "%s: none of them is a to: the results go nowhere", what)
	case l.steps[len(l.steps)-1].head().kind != "to":
		h := l.steps[len(l.steps)-1].head()
		p.errorf(h.at, "", "the results of this %s go nowhere: the last step is a to", h.kind)
	}
}

// namedLists reads the steps of a flow with named lists, each list behind those
// that it reads.
func (p *specParser) namedLists(f field) {
	fields, _ := p.mapping(f.value, "steps")
	if len(fields) == 0 {
		p.errorf(f.at, "", "steps: there is none")
	}
	var lists []*listSource
	for _, named := range fields {
		p.placeName(named, "steps")
		if have := p.places[named.name]; have != nil {
			p.errorf(named.at, "", "steps: %q is the name of a source", named.name)
			continue
		}
		l := &listSource{field: named, list: &stepList{name: named.name, at: named.at}}
		p.places[named.name] = &place{at: named.at, list: l}
		lists = append(lists, l)
	}
	for _, l := range lists {
		p.listFields(l)
	}
	for _, l := range p.inOrder(lists) {
		p.parseList(l)
		p.spec.lists = append(p.spec.lists, l.list)
	}
	p.nameSteps(p.spec.lists)
	for _, l := range lists {
		if !p.places[l.field.name].read {
			p.checkEnd(l.list, "steps."+l.field.name, "end it with a to, or name it in the from of another list")
		}
	}
	p.unreadSources()
}

// listFields tells what a list reads from its steps.
func (p *specParser) listFields(l *listSource) {
	what := "steps." + l.field.name
	if !isMapping(l.field.value) {
		p.errorf(p.at(l.field.value), "such as {from: NAME, steps: […]}", "%s is a mapping, this is %s", what, describe(l.field.value))
		l.lost = true
		return
	}
	fields, _ := p.mapping(l.field.value, what)
	from := false
	for _, f := range fields {
		switch f.name {
		case "from":
			from = true
			p.from(l, f, what+".from")
		case "steps":
			l.steps = &f
			l.joins = p.joinedLists(f.value)
			for _, s := range l.joins {
				if at := p.places[s.text]; at != nil {
					at.read = true
				}
			}
		default:
			p.unknown(f, what, "from", "steps")
		}
	}
	if !from {
		p.errorf(l.field.at, "a source, or another list, or several of them", "%s: the field \"from\" is missing", what)
		l.lost = true
	}
	if l.steps == nil {
		p.errorf(l.field.at, "", "%s: the field \"steps\" is missing", what)
	}
}

// from reads the names of what a list reads.
func (p *specParser) from(l *listSource, f field, what string) {
	nodes := []ast.Node{f.value}
	if seq, several := f.value.(*ast.SequenceNode); several {
		nodes = seq.Values
		if len(nodes) == 0 {
			p.errorf(f.at, "", "%s: there is none", what)
		}
	}
	for _, n := range nodes {
		s, ok := p.text(n, what)
		if !ok {
			l.lost = true
			continue
		}
		if slices.ContainsFunc(l.from, func(have scalar) bool { return have.text == s.text }) {
			p.errorf(s.start, "", "%s: %q is there twice", what, s.text)
			continue
		}
		at := p.places[s.text]
		if at == nil {
			p.unknownPlace(s, what)
			l.lost = true
			continue
		}
		at.read = true
		l.from = append(l.from, s)
	}
	l.lost = l.lost || len(l.from) == 0
}

func (p *specParser) unknownPlace(s scalar, what string) {
	names := sortedNames(p.places)
	p.errorf(s.start, didYouMean(s.text, names), "%s: there is no source and no list %q", what, s.text)
	if meant := p.places[nearest(s.text, names)]; meant != nil {
		// That nothing reads it is not a second mistake.
		meant.read = true
	}
}

func sortedNames(places map[string]*place) []string {
	var names []string
	for name := range places {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// inOrder puts each list behind those that it reads, else in the order of the
// file. Lists that read each other in a circle are reported, and the circle is
// opened.
func (p *specParser) inOrder(lists []*listSource) []*listSource {
	var ordered []*listSource
	waiting := slices.Clone(lists)
	for len(waiting) > 0 {
		i := slices.IndexFunc(waiting, func(l *listSource) bool { return p.waitsFor(l, waiting) == nil })
		if i < 0 {
			p.openCircle(waiting)
			continue
		}
		ordered = append(ordered, waiting[i])
		waiting = slices.Delete(waiting, i, i+1)
	}
	return ordered
}

// waitsFor returns the first of the waiting lists that a list reads.
func (p *specParser) waitsFor(l *listSource, waiting []*listSource) *listSource {
	for _, s := range slices.Concat(l.from, l.joins) {
		if other := p.places[s.text]; other != nil && other.list != nil && slices.Contains(waiting, other.list) {
			return other.list
		}
	}
	return nil
}

// openCircle reports a circle among lists of which each waits for another one,
// at the list of the circle that comes first in the file.
func (p *specParser) openCircle(waiting []*listSource) {
	var way []*listSource
	at := waiting[0]
	for !slices.Contains(way, at) {
		way = append(way, at)
		at = p.waitsFor(at, waiting)
	}
	circle := way[slices.Index(way, at):]
	first := slices.IndexFunc(waiting, func(l *listSource) bool { return slices.Contains(circle, l) })
	start := slices.Index(circle, waiting[first])
	var names []string
	for i := range len(circle) + 1 {
		names = append(names, circle[(start+i)%len(circle)].field.name)
	}
	l := circle[start]
	next := func(s scalar) bool { return s.text == names[1] }
	if i := slices.IndexFunc(l.from, next); i >= 0 {
		p.errorf(l.from[i].start, "", "steps.%s.from: the lists read each other in a circle: %s", l.field.name, strings.Join(names, " reads "))
		l.from, l.lost = slices.Delete(l.from, i, i+1), true
		return
	}
	i := slices.IndexFunc(l.joins, next)
	p.errorf(l.joins[i].start, "", "join.with: the lists read each other in a circle: %s", strings.Join(names, " reads "))
	l.joins = slices.DeleteFunc(l.joins, next)
}

// parseList reads the steps of a list, behind those that it reads.
func (p *specParser) parseList(l *listSource) {
	p.scope = p.merged(l)
	for _, s := range l.from {
		l.list.from = append(l.list.from, s.text)
	}
	if l.steps != nil {
		if nodes, ok := p.list(l.steps.value, "steps."+l.field.name+".steps"); ok {
			if len(nodes) == 0 {
				p.errorf(l.steps.at, "", "steps.%s.steps: there is none", l.field.name)
			}
			p.stepsOf(l.list, nodes)
		}
	}
	p.places[l.field.name].scope, p.places[l.field.name].done = p.scope, true
}

// merged is what is known of the records that a list reads.
func (p *specParser) merged(l *listSource) scope {
	lost := scope{format: JSON, keyed: true, lost: true}
	if l.lost {
		return lost
	}
	var sum scope
	for i, s := range l.from {
		sc := p.places[s.text].scope
		if i == 0 {
			sum = sc
			// What a list adds to its own must not become the other readers'.
			sum.reads, sum.others, sum.members = slices.Clip(sc.reads), slices.Clip(sc.others), slices.Clip(sc.members)
			continue
		}
		if sc.lost || sum.lost {
			sum = lost
			continue
		}
		if !p.mergeable(l, i, sum, sc) {
			return lost
		}
		sum.merge(sc)
	}
	return sum
}

// mergeable reports records that cannot be merged with those of the lists before.
func (p *specParser) mergeable(l *listSource, i int, sum, sc scope) bool {
	what, s, first := "steps."+l.field.name+".from", l.from[i], l.from[0].text
	switch {
	case sum.keyed && !sc.keyed:
		p.errorf(s.start, "give both a key step, or put one behind the merge", "%s: %q has a key and %q has none: lists that are merged have all a key, or none", what, first, s.text)
	case !sum.keyed && sc.keyed:
		p.errorf(s.start, "give both a key step, or put one behind the merge", "%s: %q has a key and %q has none: lists that are merged have all a key, or none", what, s.text, first)
	case sum.spread != sc.spread:
		p.errorf(s.start, "redistribute both, or what comes out of the merge", "%s: of %q and %q one is redistributed and the other is not", what, first, s.text)
	case sum.stage != sc.stage:
		p.errorf(s.start, "give the records of the list with fewer changes another key step; the same key will do", "%s: the key of %q was changed %s and that of %q %s: lists that are merged have changed it as often", what, first, times(sum.stage), s.text, times(sc.stage))
	case sum.format != sc.format:
		p.errorf(s.start, "a map step makes them json", "%s: %q has payloads of format %s and %q of format %s", what, first, sum.format, s.text, sc.format)
	default:
		return true
	}
	return false
}

func times(n int) string {
	switch n {
	case 0:
		return "never"
	case 1:
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// merge adds what is known of other records. A member that some have and some
// have not is null where it is absent.
func (sc *scope) merge(other scope) {
	sc.reads, sc.others = union(sc.reads, other.reads), union(sc.others, other.others)
	sc.windowed, sc.joined = sc.windowed || other.windowed, sc.joined || other.joined
	if !sc.known || !other.known {
		sc.known, sc.members, sc.from = false, nil, ""
		return
	}
	for _, name := range other.members {
		if !slices.Contains(sc.members, name) {
			sc.members = append(sc.members, name)
		}
	}
	sc.panes = append(slices.Clone(sc.panes), other.panes...)
	if !slices.Contains(strings.Split(sc.from, " and "), other.from) {
		sc.from += " and " + other.from
	}
}

// mayBeLate reports whether records come from a source that has times of its own.
func (sc *scope) mayBeLate() bool {
	return slices.ContainsFunc(slices.Concat(sc.reads, sc.others), func(src *Source) bool { return src.Time != nil })
}

// unreadSources reports the sources that no list reads.
func (p *specParser) unreadSources() {
	for _, src := range p.spec.Sources {
		if at := p.places[src.Name]; !at.read {
			p.errorf(at.at, "name it in the from of a list", "sources.%s: no list reads it", src.Name)
		}
	}
}
