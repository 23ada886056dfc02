package main

import (
	"strings"
	"time"

	"natsflow/flow"
)

const (
	// silence is how long a device may say nothing.
	silence = 5 * time.Minute
	// forget is when a device that has gone for good is no device any more.
	forget = 7 * 24 * time.Hour
)

// Device is what the flow keeps of a device.
type Device struct {
	Last   time.Time `json:"last"`
	Silent bool      `json:"silent"`
}

// Alarm is what the flow says when a device falls silent, and when it is back.
type Alarm struct {
	Device string    `json:"device"`
	State  string    `json:"state"` // silent or back
	Last   time.Time `json:"last"`  // the reading before
	At     time.Time `json:"at"`
}

// Flow watches the devices that report under readings.<device>.
func Flow() (*flow.Flow, error) {
	b := flow.New("alarms", flow.Options{})
	readings := flow.From(b, flow.Source{Stream: "READINGS", Subjects: []string{"readings.*"}}, flow.DecodeBytes())
	devices := flow.KeyBy(readings, func(m *flow.Meta, _ []byte) (string, error) {
		return strings.TrimPrefix(m.Subject, "readings."), nil
	})
	alarms := flow.StatefulWith(devices, "silence", flow.StatefulConfig[[]byte, Device, Alarm]{
		State:   flow.JSONState[Device](1, nil),
		On:      reading,
		OnTimer: silent,
		TTL:     forget,
	})
	flow.To(alarms, flow.Sink[Alarm]{
		Stream: "ALARMS", Subjects: []string{"alarms.*"}, Subject: flow.KeySubject[Alarm]("alarms."), Encode: flow.EncodeJSON[Alarm](),
	})
	return b.Build()
}

// reading puts the alarm off, and takes it back.
func reading(m *flow.Meta, d *Device, _ []byte, emit func(Alarm)) error {
	if d.Silent {
		emit(Alarm{m.Key, "back", d.Last, m.Time()})
	}
	*d = Device{Last: m.Time()}
	m.SetStreamTimer("silent", m.Time().Add(silence))
	return nil
}

// silent raises it: no reading has put the timer off. Only a reading sets it again, so
// that a device has one alarm however long it is silent.
func silent(m *flow.Meta, d *Device, _ string, emit func(Alarm)) error {
	d.Silent = true
	emit(Alarm{m.Key, "silent", d.Last, m.Time()})
	return nil
}
