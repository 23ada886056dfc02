package flow_test

import (
	"strings"
	"testing"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// aheadRecords are records of ten o'clock, the third with a time a year in the future.
func aheadRecords() []flowtest.Record {
	at := flowtest.Start.Add(10 * time.Hour)
	var records []flowtest.Record
	for _, data := range []string{"2026-01-01T10:05 a 1", "2026-01-01T10:06 a 2", "2027-01-01T10:07 a 3", "2026-01-01T10:04 a 4", "2026-01-01T11:00 a 5"} {
		records = append(records, flowtest.Record{Time: at, Data: data})
	}
	return records
}

// dated is a keyed stream of values such as "1", of records "TIME KEY VALUE" in any of
// the streams.
func dated(b *flow.Builder, stream string) flow.Stream[string] {
	s := flow.From(b, flow.Source{Stream: stream, Time: flow.EventTime[string]{
		MaxAhead: time.Hour, Lateness: 5 * time.Minute,
		Of: func(_ *flow.Meta, v string) (time.Time, error) {
			at, _, _ := strings.Cut(v, " ")
			return time.Parse("2006-01-02T15:04", at)
		},
	}}, flow.DecodeText())
	return flow.Map(flow.KeyBy(s, func(_ *flow.Meta, v string) (string, error) { return strings.Fields(v)[1], nil }),
		func(_ *flow.Meta, v string) (string, error) { return strings.Fields(v)[2], nil })
}

const aheadError = "ahead: its time is 2027-01-01T10:07:00Z, 8760h7m0s ahead of the timestamp that the stream gave the record, more than its source allows (max_ahead)"

// A record whose time is too far ahead does not move the watermark. Steps that go by times
// treat it like a late one, also behind a change of key; others take it.
func TestEventTime_Ahead(t *testing.T) {
	late := func(s flow.Stream[string], late flow.Stream[string]) flow.Stream[string] {
		flow.To(late, textSink("LATE"))
		return s
	}
	window := func(w flow.Windows) func(s flow.Stream[string]) flow.Stream[string] {
		return func(s flow.Stream[string]) flow.Stream[string] { return late(flow.Window(s, "window", w, listing)) }
	}
	for name, tc := range map[string]struct {
		steps func(s flow.Stream[string]) flow.Stream[string]
		out   []string
		late  int
	}{
		"tumbling": {window(flow.Tumbling(time.Hour)), []string{"a 10:00-11:00 124"}, 1},
		"session":  {window(flow.Sessions(10*time.Minute, 0)), []string{"a 10:04-10:16 124"}, 1},
		"count":    {window(flow.CountWindows(3)), []string{"a 10:05-10:06 123"}, 0},
		"behind a change of key": {func(s flow.Stream[string]) flow.Stream[string] {
			return window(flow.Tumbling(time.Hour))(flow.Rekey(s, func(m *flow.Meta, _ string) (string, error) { return m.Key + m.Key, nil }, flow.TextCodec()))
		}, []string{"aa 10:00-11:00 124"}, 1},
		"no times": {func(s flow.Stream[string]) flow.Stream[string] { return s }, []string{"1", "2", "3", "4", "5"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			b := flow.New("test", flow.Options{Partitions: 1})
			flow.To(tc.steps(dated(b, "IN")), textSink("OUT"))
			r := flowtest.New(t, build(t, b))
			r.Push(aheadRecords()[:3]...)
			r.Crash()
			r.Push(aheadRecords()[3:]...)
			r.Commit()
			r.Drain()
			r.Push(flowtest.Record{Data: "2026-01-01T11:05 b x", Time: flowtest.Start.Add(11 * time.Hour)}, flowtest.Record{Data: "2026-01-01T11:30 c x"})
			var got []string
			for _, data := range r.Data("OUT") {
				if !strings.Contains(data, "x") && !strings.Contains(data, "11:00-") {
					got = append(got, data)
				}
			}
			if strings.Join(got, ";") != strings.Join(tc.out, ";") {
				t.Errorf("results %q, want %q", got, tc.out)
			}
			if r.Late() != tc.late {
				t.Errorf("%d were late, want %d", r.Late(), tc.late)
			}
			if tc.late > 0 {
				wantData(t, r, "LATE", "3")
			}
			wantErrors(t, r)
		})
	}
}

// Where late records go nowhere, one that is too far ahead fails.
func TestEventTime_AheadFails(t *testing.T) {
	join := func(a, b flow.Stream[string]) flow.Stream[string] {
		results, _, _ := flow.Join(a, b, "join", flow.JoinConfig[string, string, string]{
			Left: flow.TextCodec(), Right: flow.TextCodec(),
			Join: func(_ *flow.Meta, l, r *string) (string, bool, error) { return *l + *r, true, nil },
		})
		return results
	}
	dedupe := func(a, b flow.Stream[string]) flow.Stream[string] {
		return flow.Dedupe(flow.Merge(a, b), "dedupe", time.Hour, func(_ *flow.Meta, v string) (string, error) { return v, nil })
	}
	window := func(a, b flow.Stream[string]) flow.Stream[string] {
		results, _ := flow.Window(flow.Merge(a, b), "window", flow.Tumbling(time.Hour), listing)
		return results
	}
	for id, steps := range map[string]func(a, b flow.Stream[string]) flow.Stream[string]{"join": join, "dedupe": dedupe, "window": window} {
		t.Run(id, func(t *testing.T) {
			b := flow.New("test", flow.Options{Partitions: 1})
			flow.To(steps(dated(b, "A"), dated(b, "B")), textSink("OUT"))
			r := flowtest.New(t, build(t, b))
			records := aheadRecords()
			for i := range records {
				records[i].Stream = "B"
			}
			r.Push(records...)
			wantErrors(t, r, id+": "+aheadError)
		})
	}
}
