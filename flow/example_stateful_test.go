package flow_test

import (
	"fmt"
	"strconv"
	"strings"

	"natsflow/flow"
)

// A stateful step may emit any number of results, and may drop its state: here
// the readings of a sensor are compared with the one before, until it is off.
func ExampleStateful() {
	b := flow.New("sensors", flow.Options{})
	readings := flow.From(b, flow.Source{Stream: "READINGS"}, flow.DecodeText())
	bySensor := flow.KeyBy(readings, func(_ *flow.Meta, v string) (string, error) {
		sensor, _, _ := strings.Cut(v, "=")
		return sensor, nil
	})
	type last struct{ Value, Readings int }
	jumps := flow.Stateful(bySensor, "last", flow.JSONState[last](1, nil),
		func(m *flow.Meta, s *last, v string, emit func(string)) error {
			_, text, _ := strings.Cut(v, "=")
			if text == "off" {
				m.DropState()
				return nil
			}
			value, err := strconv.Atoi(text)
			if err != nil {
				return err // the reading goes to the dead letters
			}
			if s.Readings > 0 && value-s.Value > 10 {
				emit(fmt.Sprintf("from %d to %d", s.Value, value))
			}
			*s = last{Value: value, Readings: s.Readings + 1}
			return nil
		})
	flow.To(jumps, flow.Sink[string]{
		Stream: "JUMPS", Subjects: []string{"jumps.*"},
		Subject: flow.KeySubject[string]("jumps."), Encode: flow.EncodeText(),
	})
	f, err := b.Build()
	if err != nil {
		fmt.Println(err)
		return
	}
	printResults(f, "a=1", "a=20", "b=50", "a=off", "a=90", "a=broken")
	// Output:
	// jumps.a from 1 to 20
	// natsflow.dlq.sensors a=broken
}
