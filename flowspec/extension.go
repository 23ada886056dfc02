package flowspec

import (
	"fmt"
	"slices"

	"natsflow/flow"
)

// extension is what a member keeps for one key when a few numbers are not enough:
// a list, a set or a sketch. It is changed in place, so that a record costs what it
// adds and not what is there.
type extension interface {
	// check returns why a value, which is not null, cannot be added. Nothing that can
	// be seen changes.
	check(m *aggregateMember, v, by value) error
	// add adds the value that was checked last.
	add(m *aggregateMember, v, by value)
	// merge adds what the extension of a later session has. After an error it may
	// have done a part of it: it is called on a clone.
	merge(m *aggregateMember, later extension) error
	clone() extension
	// value is the result; appendJSON appends it.
	value(m *aggregateMember) value
	appendJSON(dst []byte, m *aggregateMember) []byte
	// form is stored beside the function, 4 bits; see codec. append and read store
	// the rest. What read finds may have been bound by other arguments.
	form() byte
	append(dst []byte) ([]byte, error)
	read(r *stateReader, m *aggregateMember, form byte) error
}

// extensions are those of one group, by the slots of their members.
type extensions []extension

// extends reports whether the member keeps an extension.
func (m *aggregateMember) extends() bool { return m.fn >= aggCollect }

func newExtension(m *aggregateMember) extension {
	switch m.fn {
	case aggCollect:
		return &collected{}
	case aggDistinct:
		return &distinctValues{}
	case aggApproxDistinct:
		return newApproxDistinct()
	case aggPercentile:
		return &histogram{}
	}
	return &ranked{}
}

// of returns the extension of a member; an empty one where the group is new.
func (e *extensions) of(m *aggregateMember) extension {
	if e == nil {
		return newExtension(m)
	}
	return (*e)[m.slot]
}

// all returns the extensions of a group, new ones where it has none.
func (e *extensions) all(members []*aggregateMember) extensions {
	if e != nil {
		return *e
	}
	made := make(extensions, len(members))
	for i, m := range members {
		made[i] = newExtension(m)
	}
	return made
}

// pending are values that have been checked and wait to be added.
type pending struct{ v, by value }

// addExtended is add for groups with extensions. All members are looked at before the
// first extension changes.
func (a *aggregate) addExtended(m *flow.Meta, g *group, r record) error {
	var stack [maxStack]acc
	next := append(stack[:0], g.accs...)
	if g.accs == nil {
		next = append(next, make([]acc, len(a.slots))...)
	}
	for i, member := range a.slots {
		v, err := member.arg.eval(m, r)
		if err == nil {
			err = next[i].add(member.fn, v)
		}
		if err != nil {
			return fmt.Errorf("%s: %v: %w", member.name, member, err)
		}
	}
	all := g.more.all(a.extended)
	var few [maxStack]pending
	waiting := few[:0]
	for i, member := range a.extended {
		p, err := member.evaluate(m, r)
		if err == nil && !p.v.isNull() {
			err = all[i].check(member, p.v, p.by)
		}
		if err != nil {
			return fmt.Errorf("%s: %v: %w", member.name, member, err)
		}
		waiting = append(waiting, p)
	}
	for i, p := range waiting {
		if !p.v.isNull() {
			all[i].add(a.extended[i], p.v, p.by)
		}
	}
	g.records++
	if g.accs == nil {
		g.accs = make([]acc, len(a.slots))
	}
	copy(g.accs, next)
	if g.more == nil {
		g.more = &all
	}
	return nil
}

// evaluate computes what a member is given. Where one of the two is null, both are.
func (m *aggregateMember) evaluate(meta *flow.Meta, r record) (p pending, err error) {
	if p.v, err = m.arg.eval(meta, r); err != nil || m.by == nil {
		return p, err
	}
	if p.by, err = m.by.eval(meta, r); err != nil || p.by.isNull() {
		return pending{}, err
	}
	return p, nil
}

// mergeExtensions returns those of two groups together and changes neither.
func (a *aggregate) mergeExtensions(into, later *extensions) (*extensions, error) {
	if len(a.extended) == 0 {
		return nil, nil
	}
	merged := slices.Clone(into.all(a.extended))
	for i, m := range a.extended {
		merged[i] = merged[i].clone()
		if err := merged[i].merge(m, later.of(m)); err != nil {
			return nil, fmt.Errorf("%s: %v: %w", m.name, m, err)
		}
	}
	return &merged, nil
}
