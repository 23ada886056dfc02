package flowspec

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"natsflow/flow"
)

// Clock says where the records of a source have their time. It is a part of a Spec.
type Clock struct {
	// Path of the member.
	Path string
	// Format is rfc3339, unix, unix_ms, unix_us or unix_ns; empty with a Layout.
	Format string
	// Layout as package time has them; a time without a zone is in UTC.
	Layout string
	// Lateness, Idle and MaxAhead are those of flow.EventTime.
	Lateness, Idle, MaxAhead time.Duration

	path *path
}

var timeFormats = []string{"rfc3339", "unix", "unix_ms", "unix_us", "unix_ns"}

// sourceTime reads the time of a source.
func (p *specParser) sourceTime(f field, src *Source, what string) {
	fields, ok := p.mapping(f.value, what)
	if !ok {
		return
	}
	c := &Clock{Format: timeFormats[0], MaxAhead: flow.DefaultMaxAhead}
	src.Time = c
	var at, layout *field
	for _, f := range fields {
		name := what + "." + f.name
		switch f.name {
		case "path":
			at = &f
			if s, ok := p.text(f.value, name); ok {
				c.Path, c.path = s.text, p.timePath(s, name, src)
			}
		case "format":
			c.Format = timeFormats[p.choice(f, timeFormats...)]
		case "layout":
			layout = &f
			if s, ok := p.text(f.value, name); ok {
				c.Layout = p.layout(s, name)
			}
		case "lateness":
			c.Lateness, _ = p.duration(f.value, name)
		case "idle":
			c.Idle, _ = p.duration(f.value, name)
		case "max_ahead":
			c.MaxAhead, _ = p.duration(f.value, name)
		default:
			p.unknown(f, what, "path", "format", "layout", "lateness", "idle", "max_ahead")
		}
	}
	if layout != nil {
		if c.Format = ""; slices.ContainsFunc(fields, func(f field) bool { return f.name == "format" }) {
			p.errorf(layout.at, "", "%s: it has a format or a layout, not both", what)
		}
	}
	if at == nil {
		p.errorf(f.at, "such as {path: date}; leave out time to go by the timestamps of the stream", "%s: the field \"path\" is missing", what)
	}
}

// timePath reads the path of the member that holds the time.
func (p *specParser) timePath(s scalar, what string, src *Source) *path {
	sc := sourceScope(src)
	at := p.path(s, what, "", &sc)
	if at != nil && at.special != "" && at.special != nameValue {
		p.errorf(s.start, "leave out time to go by the timestamps of the stream", "%s: the time is a member of the payload, %s is none", what, at.special)
		return nil
	}
	return at
}

// layout reads a layout of package time. One that does not print the parts of a time
// would read all times as one.
func (p *specParser) layout(s scalar, what string) string {
	one := time.Date(2031, 11, 22, 13, 44, 55, 0, time.UTC)
	back, err := time.Parse(s.text, one.Format(s.text))
	if err != nil || back.Year() != one.Year() || back.YearDay() != one.YearDay() {
		p.errorf(s.start, `it shows the time Mon Jan 2 15:04:05 2006, as in "2006-01-02 15:04:05"`, "%s: %q is not a layout with a year, a month and a day", what, s.text)
	}
	return s.text
}

// clock is that of package flow; nil for the timestamps of the stream.
func (s Source) clock() flow.Clock {
	if s.Time == nil {
		return nil
	}
	c := s.Time
	return flow.EventTime[record]{Of: c.of, Lateness: c.Lateness, Idle: c.Idle, MaxAhead: c.MaxAhead}
}

// of returns the time of a record.
func (c *Clock) of(m *flow.Meta, r record) (time.Time, error) {
	v, err := c.path.value(m, r)
	if err == nil {
		var at time.Time
		if at, err = c.read(v); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("%s: %w", c.Path, err)
}

var (
	errNoTime   = errors.New("it is null or absent")
	errWideTime = errors.New("the number is out of range")
)

func (c *Clock) read(v value) (time.Time, error) {
	switch {
	case v.isNull():
		return time.Time{}, errNoTime
	case c.Layout != "" || c.Format == "rfc3339":
		if v.kind != kindString {
			return time.Time{}, fmt.Errorf("a text is wanted, this is a %v (format: unix_ms and the like read numbers)", v.kind)
		}
		layout := c.Layout
		if layout == "" {
			layout = time.RFC3339
		}
		return time.Parse(layout, v.str)
	case v.kind == kindString:
		n, err := parseNumber(v.str)
		if err != nil || strings.TrimSpace(v.str) != v.str || v.str == "" {
			return time.Time{}, fmt.Errorf("%.40q is not a number", v.str)
		}
		v = n
	}
	unit := map[string]int64{"unix": 1e9, "unix_ms": 1e6, "unix_us": 1e3, "unix_ns": 1}[c.Format]
	switch v.kind {
	case kindInt:
		if n := v.int(); n <= math.MaxInt64/unit && n >= math.MinInt64/unit {
			return time.Unix(0, n*unit), nil
		}
		return time.Time{}, errWideTime
	case kindFloat:
		whole := math.Floor(v.float())
		if math.Abs(whole) > float64(math.MaxInt64/unit)-1 {
			return time.Time{}, errWideTime
		}
		return time.Unix(0, int64(whole)*unit+int64((v.float()-whole)*float64(unit))), nil
	case kindUint:
		return time.Time{}, errWideTime
	}
	return time.Time{}, fmt.Errorf("a number is wanted, this is a %v", v.kind)
}

// text describes the clock; the first part of it goes into the definition of the flow.
func (c *Clock) text() string {
	if c.Layout != "" {
		return fmt.Sprintf("%s (layout %s)", c.Path, c.Layout)
	}
	return fmt.Sprintf("%s (%s)", c.Path, c.Format)
}

// String describes the clock for a plan.
func (c *Clock) String() string {
	s := "time in " + c.text()
	if c.Lateness > 0 {
		s += ", up to " + formatDuration(c.Lateness) + " late"
	}
	if c.Idle > 0 {
		s += ", goes on when idle for " + formatDuration(c.Idle)
	}
	return s + ", at most " + formatDuration(c.MaxAhead) + " ahead"
}
