package main

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow/flowtest"
)

// TestFlow lets time pass with and without readings, and stops and crashes in between.
func TestFlow(t *testing.T) {
	for name, disturb := range map[string]func(*flowtest.Runner){
		"calm": func(*flowtest.Runner) {}, "crash": func(r *flowtest.Runner) { r.Crash() }, "drain": func(r *flowtest.Runner) { r.Drain() },
	} {
		t.Run(name, func(t *testing.T) {
			f, err := Flow()
			if err != nil {
				t.Fatal(err)
			}
			r := flowtest.New(t, f)
			report := func(device string) {
				r.Push(flowtest.Record{Subject: "readings." + device, Data: "{}"})
				disturb(r)
			}
			pass := func(d time.Duration) {
				r.Pause(d)
				disturb(r)
			}
			report("pump")
			pass(4 * time.Minute)
			report("pump") // puts the alarm off
			report("fan")
			pass(4 * time.Minute)
			report("fan")
			pass(time.Minute) // the pump is silent, by the clock alone
			pass(time.Hour)   // and has no second alarm
			report("pump")
			if got := r.Keys(); got != 2 {
				t.Errorf("%d devices are known", got)
			}
			pass(8 * 24 * time.Hour)
			report("fan") // was forgotten: it is not back, it is new
			if got := r.Keys(); got != 1 {
				t.Errorf("%d devices are known after a week", got)
			}

			var got []string
			for _, res := range r.Results("ALARMS") {
				var a Alarm
				if err := json.Unmarshal([]byte(res.Data), &a); err != nil {
					t.Fatal(err)
				}
				got = append(got, fmt.Sprintf("%s %s %v after the start, last heard of at %v", a.Device, a.State, a.At.Sub(flowtest.Start), a.Last.Sub(flowtest.Start)))
				if res.Subject != "alarms."+a.Device {
					t.Errorf("an alarm of %s on %s", a.Device, res.Subject)
				}
			}
			want := map[string]bool{
				"pump silent 9m0s after the start, last heard of at 4m0s":      true,
				"pump back 1h9m0s after the start, last heard of at 4m0s":      true,
				"pump silent 1h14m0s after the start, last heard of at 1h9m0s": true,
				"fan silent 13m0s after the start, last heard of at 8m0s":      true,
			}
			all := map[string]bool{}
			for _, a := range got {
				all[a] = true
			}
			if diff := cmp.Diff(want, all); diff != "" || len(got) != len(want) {
				t.Errorf("%d alarms (-want +got):\n%s", len(got), diff)
			}
		})
	}
}
