package flowspec

import "natsflow/flow"

// redistributeStep spreads records without a key over the tasks.
type redistributeStep struct{ stepHead }

// redistribute reads the step. It has no fields yet.
func (p *specParser) redistribute(f field) step {
	if !isMapping(f.value) {
		p.errorf(p.at(f.value), "write redistribute: {}", "redistribute is an empty mapping, this is %s", describe(f.value))
		return nil
	}
	fields, _ := p.mapping(f.value, "redistribute")
	for _, stray := range fields {
		p.errorf(stray.at, "write redistribute: {}", "redistribute: it has no fields, so no %q", stray.name)
	}
	switch {
	case p.scope.lost:
	case p.scope.spread:
		p.errorf(f.at, "", "redistribute: the records are redistributed already")
	case p.scope.keyed:
		p.errorf(f.at, "put it before the key step, which then begins another stage", "redistribute: the records have a key, so that they are with the tasks of their keys")
	default:
		p.scope.spread = true
	}
	return &redistributeStep{}
}

func (st *redistributeStep) text() string { return "over the tasks by sequence" }

func (st *redistributeStep) build(in flow.Stream[record]) flow.Stream[record] {
	return flow.Redistribute(in, st.options()...)
}
