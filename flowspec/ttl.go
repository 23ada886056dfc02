package flowspec

import "time"

// maxTTL is the longest time that flow takes.
const maxTTL = 20 * 365 * 24 * time.Hour

// checkTTL checks that a ttl stands beside what has one.
func (p *specParser) checkTTL(raw rawStep) {
	switch {
	case raw.ttl == nil:
	case raw.op.name == "dedupe":
		p.errorf(raw.ttl.at, "its field for says how long a value is kept", "ttl belongs to an aggregate")
	case raw.op.name != "aggregate":
		p.errorf(raw.ttl.at, "", "ttl belongs to an aggregate")
	case raw.window != nil:
		p.errorf(raw.ttl.at, "", "ttl belongs to an aggregate without a window")
	}
}

// ttl reads how long the state of a key outlives its last record.
func (p *specParser) ttl(f field) time.Duration {
	d, ok := p.duration(f.value, "ttl")
	if ok && d > maxTTL {
		p.errorf(p.at(f.value), "leave it out to keep the state for ever", "ttl: at most %s", formatDuration(maxTTL))
		return 0
	}
	return d
}
