package flow_test

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// timerModel is timerFlow with one partition, the naive way: record by record, with all
// timers in one list.
type timerModel struct {
	eventTime     bool
	lateness, ttl int64
	highest       int64
	// now and stream are the watermark and the time of the stream; without an EventTime
	// now is both.
	now, stream int64
	keys        map[string]*modelKey
	got         []string
}

type modelKey struct {
	n, touched int64
	timers     map[string]modelTimer
}

type modelTimer struct {
	at     int64
	stream bool
}

// modelCall is the Meta of the model.
type modelCall struct {
	key             *modelKey
	at, nanos       int64
	drop, unchanged bool
}

func (c *modelCall) SetTimer(name string, at time.Time) {
	c.key.timers[name] = modelTimer{at.UnixNano(), false}
}

func (c *modelCall) SetStreamTimer(name string, at time.Time) {
	c.key.timers[name] = modelTimer{at.UnixNano(), true}
}
func (c *modelCall) CancelTimer(name string) { delete(c.key.timers, name) }
func (c *modelCall) DropState()              { c.drop = true }
func (c *modelCall) Unchanged()              { c.unchanged = true }
func (c *modelCall) EventTime() time.Time    { return time.Unix(0, c.at) }
func (c *modelCall) Time() time.Time         { return time.Unix(0, c.nanos) }

// dueThing is a timer of a key, or the end of its TTL: kind 2.
type dueThing struct {
	at        int64
	kind      int
	key, name string
}

// due returns all that is due by one of the times, or both.
func (m *timerModel) due(event, stream bool) []dueThing {
	var all []dueThing
	streamNow := m.stream
	if !m.eventTime {
		streamNow = m.now
	}
	for key, k := range m.keys {
		for name, tm := range k.timers {
			kind, now, wanted := 0, m.now, event
			if tm.stream {
				kind, now, wanted = 1, streamNow, stream
			}
			if wanted && tm.at <= now {
				all = append(all, dueThing{tm.at, kind, key, name})
			}
		}
		if m.ttl > 0 && stream && k.touched+m.ttl <= streamNow {
			all = append(all, dueThing{k.touched + m.ttl, 2, key, ""})
		}
	}
	slices.SortFunc(all, func(a, b dueThing) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.kind, b.kind), cmp.Compare(a.key, b.key), cmp.Compare(a.name, b.name))
	})
	return all
}

// fire does all that is due by these times, one by one.
func (m *timerModel) fire(event, stream bool) (some bool) {
	for {
		all := m.due(event, stream)
		if len(all) == 0 {
			return some
		}
		some = true
		d := all[0]
		k := m.keys[d.key]
		if d.kind == 2 {
			delete(m.keys, d.key)
			continue
		}
		delete(k.timers, d.name)
		c := &modelCall{key: k, at: d.at, nanos: d.at}
		if m.eventTime && d.kind == 0 && m.stream != math.MinInt64 {
			c.nanos = m.stream
		}
		if m.eventTime && d.kind == 1 && m.now != math.MinInt64 {
			c.at = m.now
		}
		_ = timerFired(c, &k.n, d.name, func(s string) { m.got = append(m.got, d.key+" "+s) })
		if c.drop {
			delete(m.keys, d.key)
		}
	}
}

// overdue fires what was set for a time that has passed, by both times.
func (m *timerModel) overdue() {
	for m.fire(true, !m.eventTime) || m.fire(false, true) {
	}
}

// raise moves the watermark. What is fired on the way sees it where the timer was due.
func (m *timerModel) raise(to int64) {
	for end := to; m.now < end; {
		m.now = min(end, m.nextBefore(end, true, !m.eventTime))
		m.fire(true, !m.eventTime)
	}
	m.overdue()
}

func (m *timerModel) raiseStream(to int64) {
	if !m.eventTime {
		return
	}
	for m.stream < to {
		m.stream = min(to, m.nextBefore(to, false, true))
		m.fire(false, true)
	}
	m.overdue()
}

// nextBefore is the time of the first thing that is due up to a time, else that.
func (m *timerModel) nextBefore(to int64, event, stream bool) int64 {
	now, streamNow := m.now, m.stream
	m.now, m.stream = to, to
	all := m.due(event, stream)
	m.now, m.stream = now, streamNow
	if len(all) == 0 {
		return to
	}
	return max(all[0].at, now)
}

func (m *timerModel) watermark() int64 {
	if m.highest == math.MinInt64 {
		return m.highest
	}
	return m.highest - m.lateness
}

func (m *timerModel) record(nanos int64, data string) {
	at := nanos
	if m.eventTime {
		t, err := clockTime(data)
		if err != nil {
			panic(err)
		}
		at = t.UnixNano()
		_, data, _ = strings.Cut(data, " ")
		m.raise(m.watermark())
		m.highest = max(m.highest, at)
	} else {
		m.raise(nanos)
	}
	m.raiseStream(nanos)
	key, words, _ := strings.Cut(data, " ")
	k, there := m.keys[key]
	if !there {
		k = &modelKey{timers: map[string]modelTimer{}}
		m.keys[key] = k
	}
	k.touched = max(k.touched, nanos)
	c := &modelCall{key: k, at: at, nanos: nanos}
	_ = timerScript(c, &k.n, words, func(s string) { m.got = append(m.got, key+" "+s) })
	if c.drop || c.unchanged && !there && len(k.timers) == 0 {
		delete(m.keys, key)
	}
	m.overdue()
}

// pause lets the clock of the server go on.
func (m *timerModel) pause(now int64) {
	if m.eventTime {
		m.raise(m.watermark())
		m.raiseStream(now)
		return
	}
	m.raise(now)
}

// timerWord draws a word of a script, with times about those of the record.
func timerWord(t *rapid.T, event, stream time.Time) string {
	near := func(at time.Time) string {
		at = at.Add(time.Duration(rapid.IntRange(-30, 90).Draw(t, "minutes")) * time.Minute)
		if at.Before(flowtest.Start) {
			at = flowtest.Start
		}
		return fmt.Sprintf("%dT%s", 1+int(at.Sub(flowtest.Start).Hours()/24), at.UTC().Format("15:04:05"))
	}
	name := rapid.SampledFrom([]string{"x", "y", "r", "s", "c", "d"}).Draw(t, "name")
	switch rapid.SampledFrom([]string{"=", "~", "=", "~", "-", "add", "emit", "drop", "unchanged"}).Draw(t, "word") {
	case "=":
		return name + "=" + near(event)
	case "~":
		return name + "~" + near(stream)
	case "-":
		return "-" + name
	case "emit":
		return "emit"
	case "drop":
		return "drop"
	case "unchanged":
		return "unchanged"
	}
	return "add"
}

// Whatever the batches, the partitions, crashes and stops are, a flow with timers and a
// TTL does what the naive model does.
func TestTimer_Model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &timerModel{
			eventTime: rapid.Bool().Draw(t, "event time"), highest: math.MinInt64, now: math.MinInt64, stream: math.MinInt64,
			keys: map[string]*modelKey{}, ttl: int64(rapid.SampledFrom([]time.Duration{0, 20 * time.Minute, time.Hour}).Draw(t, "ttl")),
		}
		f := timerFlow{partitions: rapid.IntRange(1, 3).Draw(t, "partitions"), ttl: time.Duration(m.ttl)}
		if m.eventTime {
			f.clock = &flow.EventTime[string]{Lateness: 10 * time.Minute}
			m.lateness = int64(f.clock.Lateness)
		}
		r := flowtest.New(t, f.build(t))
		at := flowtest.Start.Add(time.Hour)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"push", "push", "push", "push", "pause", "commit", "crash", "crash some", "drain"}).Draw(t, "step") {
			case "push":
				var batch []flowtest.Record
				for range rapid.IntRange(1, 6).Draw(t, "records") {
					at = at.Add(time.Duration(rapid.IntRange(0, 40).Draw(t, "later")) * time.Minute)
					rec := drawRecord(t, at, m.eventTime)
					batch = append(batch, rec)
					m.record(at.UnixNano(), rec.Data)
				}
				r.Push(batch...)
				m.pause(at.UnixNano())
			case "pause":
				d := time.Duration(rapid.IntRange(0, 90).Draw(t, "pause")) * time.Minute
				if r.Now().Before(at) {
					r.Pause(at.Sub(r.Now()))
				}
				at = at.Add(d)
				r.Pause(d)
				m.pause(at.UnixNano())
			case "commit":
				r.Commit()
			case "crash":
				r.Crash()
			case "crash some":
				r.Crash(rapid.IntRange(0, f.partitions-1).Draw(t, "partition"))
			case "drain":
				r.Drain()
			}
		}
		got, want := r.Data("OUT"), slices.Clone(m.got)
		slices.SortStableFunc(got, byKey)
		slices.SortStableFunc(want, byKey)
		if !slices.Equal(got, want) {
			t.Fatalf("results\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		if errs := r.Errors(); len(errs) > 0 {
			t.Fatalf("dead letters %v", errs)
		}
		if r.Keys() != len(m.keys) {
			t.Fatalf("%d keys have state, want %d", r.Keys(), len(m.keys))
		}
	})
}

func drawRecord(t *rapid.T, at time.Time, eventTime bool) flowtest.Record {
	event := at
	data := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "key")
	if eventTime {
		event = at.Add(-time.Duration(rapid.IntRange(0, 120).Draw(t, "behind")) * time.Minute)
		if event.Before(flowtest.Start) {
			event = flowtest.Start
		}
		data = fmt.Sprintf("%dT%s ", 1+int(event.Sub(flowtest.Start).Hours()/24), event.UTC().Format("15:04:05")) + data
	}
	for range rapid.IntRange(1, 4).Draw(t, "words") {
		data += " " + timerWord(t, event, at)
	}
	if strings.Contains(data, "add") {
		data = strings.ReplaceAll(data, "unchanged", "emit")
	}
	return flowtest.Record{Time: at, Data: data}
}
