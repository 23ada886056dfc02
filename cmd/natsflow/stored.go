package main

import (
	"context"
	"errors"

	"natsflow/bus"
)

// stored is what the task logs say of a flow.
type stored struct {
	Tasks         int
	Offsets       map[string]uint64
	Results, Dead uint64
	Records       uint64
	Bytes         int64
}

// storedProgress reads the heads of the task logs. The position of a source is
// the lowest of all tasks that read it, those of the first stage; one without a log is
// at the beginning.
func storedProgress(ctx context.Context, conn *bus.Conn, flow string, partitions int) (stored, error) {
	p := stored{Offsets: map[string]uint64{}}
	store, err := openStore(ctx, conn, flow)
	if errors.Is(err, bus.ErrNotFound) {
		return p, nil
	}
	if err != nil {
		return p, err
	}
	tasks, err := store.Tasks(ctx)
	if err != nil {
		return p, err
	}
	first := 0
	for _, t := range tasks {
		p.Tasks++
		p.Results += t.Head.Results
		p.Dead += t.Head.DeadLetters
		p.Bytes += t.Bytes
		if t.Task.Stage > 0 {
			continue
		}
		p.Records += t.Head.Records
		for source, seq := range t.Head.Offsets {
			if low, ok := p.Offsets[source]; first == 0 || (ok && seq < low) {
				p.Offsets[source] = seq
			}
		}
		for source := range p.Offsets {
			if _, ok := t.Head.Offsets[source]; !ok {
				p.Offsets[source] = 0
			}
		}
		first++
	}
	if first < partitions {
		clear(p.Offsets)
	}
	return p, nil
}
