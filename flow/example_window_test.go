package flow_test

import (
	"fmt"
	"os"
	"strings"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// Sessions of a user's clicks, by the time in each click, up to five minutes late.
func ExampleWindow() {
	type click struct {
		user, page string
		at         time.Time
	}
	b := flow.New("clicks", flow.Options{Partitions: 1})
	clicks := flow.From(b, flow.Source{
		Stream: "CLICKS",
		Time: flow.EventTime[click]{
			Of:       func(_ *flow.Meta, c click) (time.Time, error) { return c.at, nil },
			Lateness: 5 * time.Minute,
		},
	}, func(_ *flow.Meta, data []byte) (c click, err error) {
		fields := strings.Fields(string(data))
		c.user, c.page = fields[1], fields[2]
		c.at, err = time.Parse(time.RFC3339, fields[0])
		return c, err
	})
	users := flow.KeyBy(clicks, func(_ *flow.Meta, c click) (string, error) { return c.user, nil })
	type pages struct{ Pages []string }
	sessions, late := flow.Window(users, "sessions", flow.Sessions(30*time.Minute, 0), flow.WindowAggregator[click, pages, string]{
		State: flow.JSONState[pages](1, nil),
		Add:   func(_ *flow.Meta, p *pages, c click) error { p.Pages = append(p.Pages, c.page); return nil },
		Merge: func(into, from *pages) error { into.Pages = append(into.Pages, from.Pages...); return nil },
		Result: func(m *flow.Meta, w flow.Span, p *pages) (string, error) {
			return fmt.Sprintf("%s from %s to %s: %s", m.Key, w.Start.Format("15:04"), w.End.Format("15:04"), strings.Join(p.Pages, " ")), nil
		},
	})
	flow.To(sessions, textSink("SESSIONS"))
	flow.To(flow.Map(late, func(_ *flow.Meta, c click) (string, error) { return c.page, nil }), textSink("LATE"))
	f, err := b.Build()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	r := flowtest.New(nil, f)
	for _, c := range []string{"12:00:00Z ann home", "12:10:00Z bob home", "12:25:00Z ann cart", "12:22:00Z ann list", "14:00:00Z bob home", "12:30:00Z ann pay"} {
		r.Push(flowtest.Record{Data: "2026-01-01T" + c, Time: flowtest.Start.Add(14 * time.Hour)})
	}
	fmt.Println(strings.Join(r.Data("SESSIONS"), "\n"))
	fmt.Println("late:", r.Data("LATE"))
	// Output:
	// bob from 12:10 to 12:40: home
	// ann from 12:00 to 12:55: home cart list
	// late: [pay]
}
