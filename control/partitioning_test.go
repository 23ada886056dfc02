package control

import (
	"errors"
	"testing"
)

// Another partitioning of a source is taken by a drained flow only.
func TestRecord_samePartitioning(t *testing.T) {
	def := func(by ...int) Definition {
		return Definition{Partitions: 8, Hash: "h", Sources: map[string]SourceRecord{"IN": {PartitionBy: by}}}
	}
	for _, c := range []struct {
		state    State
		from, to Definition
		ok       bool
	}{
		{StateRunning, def(), def(), true},
		{StateRunning, def(2), def(2), true},
		{StateRunning, def(), def(2), false},
		{StateRunning, def(2), def(), false},
		{StateRunning, def(2, 3), def(3, 2), false},
		{StateDraining, def(2), def(3), false},
		{StateDrained, def(), def(2), true},
		{StateFinished, def(2), def(), true},
		// A source that is new has no tasks that are somewhere in it.
		{StateRunning, Definition{Partitions: 8, Hash: "h"}, def(2), true},
	} {
		rec := newRecord("f", c.from, ControlRef{}, 0, scriptTime(1))
		rec.State = c.state
		next, err := rec.redefine(c.to)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, ErrDefinition) {
			t.Errorf("%s, from %v to %v: %v", c.state, c.from.Sources, c.to.Sources, err)
		}
		if err == nil && len(next.Sources["IN"].PartitionBy) != len(c.to.Sources["IN"].PartitionBy) {
			t.Errorf("%s: the record has %v", c.state, next.Sources)
		}
	}
}
