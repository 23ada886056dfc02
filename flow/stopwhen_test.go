package flow_test

import (
	"errors"
	"fmt"
	"testing"

	"natsflow/flow"
)

func stop(seq int) published {
	return published{Sink: "control ", Data: fmt.Sprintf(
		`{"at":"now","mode":"suspend","reason":"step enough: stop_when held at IN sequence %d"}`, seq)}
}

func enough(_ *flow.Meta, v string) (bool, error) {
	if v == "k bad" {
		return false, errors.New("is bad")
	}
	return v == "k stop", nil
}

func TestStopWhen(t *testing.T) {
	b := newFlow()
	s := keyed(b)
	textTo(s)
	flow.StopWhen(s, enough, flow.ID("enough"))
	r := run(t, b)
	r.want([]string{"k a", "k bad"}, out("k", "k a"), out("k", "k bad"), dead("enough", "is bad", 2, "k bad"))
	// One request a commit is enough.
	r.want([]string{"k stop", "k stop"}, out("k", "k stop"), stop(3), out("k", "k stop"))
	r.want([]string{"k stop"}, out("k", "k stop"), stop(5))
}

// A flow may have no other sink, and no key.
func TestStopWhen_Alone(t *testing.T) {
	b := newFlow()
	flow.StopWhen(text(b), enough, flow.ID("enough"))
	run(t, b).want([]string{"k a", "k stop", "k bad"}, stop(2), dead("enough", "is bad", 3, "k bad"))
}
