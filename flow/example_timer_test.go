package flow_test

import (
	"fmt"
	"os"
	"strings"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// A dead man's switch: an alarm when no record has come for five minutes after the last.
func ExampleStatefulWith() {
	b := flow.New("alarms", flow.Options{Partitions: 1})
	readings := flow.From(b, flow.Source{Stream: "READINGS"}, flow.DecodeText())
	devices := flow.KeyBy(readings, func(m *flow.Meta, _ string) (string, error) { return m.Subject, nil })
	alarms := flow.StatefulWith(devices, "silence", flow.StatefulConfig[string, time.Time, string]{
		State: flow.JSONState[time.Time](1, nil),
		On: func(m *flow.Meta, last *time.Time, _ string, _ func(string)) error {
			*last = m.Time()
			m.SetStreamTimer("silent", m.Time().Add(5*time.Minute)) // in place of the one before
			return nil
		},
		OnTimer: func(m *flow.Meta, last *time.Time, _ string, emit func(string)) error {
			emit(fmt.Sprintf("%s is silent since %s", m.Key, last.Format(time.TimeOnly)))
			m.DropState()
			return nil
		},
	})
	flow.To(alarms, textSink("ALARMS"))
	f, err := b.Build()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	r := flowtest.New(nil, f)
	r.Push(flowtest.Record{Subject: "pump"}, flowtest.Record{Subject: "fan"})
	r.Pause(4 * time.Minute)
	r.Push(flowtest.Record{Subject: "fan"})
	r.Drain() // a stop fires nothing, and loses nothing
	r.Pause(2 * time.Minute)
	r.Pause(time.Hour)
	fmt.Println(strings.Join(r.Data("ALARMS"), "\n"))
	// Output:
	// pump is silent since 00:00:00
	// fan is silent since 00:04:00
}
