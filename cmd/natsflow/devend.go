package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"natsflow/control"
	"natsflow/flow"
)

// finalRows is how many rows the final table has.
const finalRows = 20

// quickScan bounds the messages of a sink that are read to count its keys when
// the flow is stopped by hand.
const quickScan = 50_000

// conclude says where the flow stopped and what is saved.
func (d *devRun) conclude(ctx context.Context) error {
	recs, err := control.Flows(ctx, d.conn)
	if err != nil {
		return err
	}
	for _, rec := range recs {
		if rec.Flow == d.flow.Name() && rec.State.Stopped() {
			return d.printDrained(ctx, rec)
		}
	}
	return d.printStopped(ctx)
}

// printDrained prints the final table and the report.
func (d *devRun) printDrained(ctx context.Context, rec control.Record) error {
	for _, sink := range d.sinks() {
		list, err := readResults(ctx, d.conn, sink)
		if err != nil {
			return fmt.Errorf("read the results: %w", err)
		}
		printResults(d.c, sink, list, finalRows)
	}
	printReport(d.c, rec)
	d.c.notef("the data stays in %s; the same command resumes the flow\n", d.store.dir)
	return nil
}

// printStopped says where the flow was left. The worker has left without an error,
// so everything is saved; looking at it is only for the person.
func (d *devRun) printStopped(ctx context.Context) error {
	quick, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	p, err := storedProgress(quick, d.conn, d.flow.Name(), d.flow.Options().Partitions)
	if err != nil {
		// A large state takes its time to look at; it is stored all the same.
		d.c.notef("stopped; everything that was read is processed and saved in %s; the same command goes on from there\n", d.store.dir)
		return nil
	}
	if len(p.Offsets) == 0 {
		d.c.notef("stopped before anything was processed\n")
		return nil
	}
	t := table{}
	for _, stream := range sortedKeys(p.Offsets) {
		of := ""
		if info, err := d.conn.Stream(ctx, stream); err == nil {
			of = fmt.Sprintf(" of %s in stream %s", count(info.LastSeq), stream)
		}
		t.add("stopped", fmt.Sprintf("behind sequence %s%s; all before it is processed, nothing after it", count(p.Offsets[stream]), of))
	}
	saved := fmt.Sprintf("%s (%s)", plural(p.Tasks, "task"), size(p.Bytes))
	for _, sink := range d.sinks() {
		if keys, ok := d.keys(ctx, sink); ok {
			saved += fmt.Sprintf(", %s in %s", plural(keys, "key"), sinkName(sink))
		}
	}
	t.add("saved", saved+fmt.Sprintf(", %s published", plural(p.Results, "result")))
	if p.Dead > 0 {
		t.add("", plural(p.Dead, "dead letter")+" in stream NATSFLOW_DLQ")
	}
	t.add("data", d.store.dir)
	t.add("next", "the same command goes on from there")
	t.print(d.c.Err, "")
	return nil
}

// sinks are those that hold results.
func (d *devRun) sinks() []flow.SinkInfo {
	return slices.DeleteFunc(d.flow.Sinks(), func(s flow.SinkInfo) bool {
		return s.Kind != flow.SinkStream && s.Kind != flow.SinkBucket
	})
}

// keys counts the keys that have results, unless that would take long: a stop is
// to be quick.
func (d *devRun) keys(ctx context.Context, sink flow.SinkInfo) (n int, ok bool) {
	stream := sink.Name
	if sink.Kind == flow.SinkBucket {
		stream = "KV_" + stream
	}
	info, err := d.conn.Stream(ctx, stream)
	if err != nil || info.Msgs > quickScan {
		return 0, false
	}
	list, err := readResults(ctx, d.conn, sink)
	return len(list), err == nil
}
