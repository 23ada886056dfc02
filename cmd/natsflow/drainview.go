package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"natsflow/control"
)

// shownWorkers is how many workers a line names.
const shownWorkers = 4

// drainProgress is a drain in one line.
func drainProgress(rec control.Record, who crew, now time.Time) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: draining, epoch %d", rec.Flow, rec.Epoch)
	fixed := rec.Drain != nil && rec.Drain.Cut != nil
	if fixed {
		fmt.Fprintf(&b, ", cut %s", control.FormatCut(rec.Drain.Cut))
	}
	b.WriteString(": ")
	done, ownerless := who.count(rec)
	var parts []string
	if fixed {
		parts = append(parts, fmt.Sprintf("%d of %d tasks done", done, len(who.tasks)))
	}
	working := who.working()
	switch {
	case len(who.members) == 0:
		parts = append(parts, "no worker is running; the drain is done when one starts")
	case len(working) == 0 && len(ownerless) > 0:
		parts = append(parts, "waiting for a worker to take the tasks")
	case !fixed:
		parts = append(parts, waitForCut(rec, working, now))
	default:
		parts = append(parts, leftToCut(rec.Drain.Cut, working)...)
		if len(working) > 1 {
			parts = append(parts, "busy: "+busyWorkers(working))
		}
	}
	if len(ownerless) > 0 && len(working) > 0 {
		parts = append(parts, plural(len(ownerless), "task")+" without an owner")
	}
	b.WriteString(strings.Join(parts, ", "))
	for _, m := range who.members {
		if m.Status != nil && m.Status.Trouble != "" {
			b.WriteString("; " + plain(m.Name+": "+m.Status.Trouble))
		}
	}
	return b.String()
}

// waitForCut says what the cut is waiting for.
func waitForCut(rec control.Record, working []member, now time.Time) string {
	if rec.Drain != nil {
		if at := rec.Drain.Command.At; at.Kind == control.AtTime && now.Before(at.Time) {
			return "waiting until " + at.String()
		}
	}
	stopped := 0
	for _, m := range working {
		if m.Stopped != nil && m.Stopped.Epoch == rec.Epoch {
			stopped++
		}
	}
	return fmt.Sprintf("%d of %s stand still for the cut", stopped, plural(len(working), "worker"))
}

// leftToCut says of each source how far the slowest of the workers is from the cut.
func leftToCut(cut map[string]uint64, working []member) (parts []string) {
	for _, name := range sortedKeys(cut) {
		slowest, low := "", uint64(0)
		for _, m := range working {
			if !m.speaks() {
				continue
			}
			at, ok := m.Status.Sources[name]
			if ok && (slowest == "" || at.Committed < low) {
				slowest, low = m.Name, at.Committed
			}
		}
		of := ""
		if len(working) > 1 {
			of = " for " + slowest
		}
		switch {
		case slowest == "":
		case low < cut[name]:
			parts = append(parts, fmt.Sprintf("%s %s to go%s", name, count(cut[name]-low), of))
		default:
			parts = append(parts, fmt.Sprintf("%s at %s", name, count(low)))
		}
	}
	return parts
}

// busyWorkers names the workers that have tasks left, the busiest first.
func busyWorkers(working []member) string {
	working = slices.Clone(working)
	slices.SortStableFunc(working, func(a, b member) int { return cmp.Compare(len(b.Tasks), len(a.Tasks)) })
	var names []string
	for i, m := range working {
		if i == shownWorkers {
			names = append(names, fmt.Sprintf("and %d more", len(working)-i))
			break
		}
		names = append(names, fmt.Sprintf("%s (%d)", m.Name, len(m.Tasks)))
	}
	return strings.Join(names, " ")
}

// printReport prints the report of the last drain.
func printReport(c *Console, rec control.Record) {
	r := rec.Report
	if r == nil {
		return
	}
	c.printf("%s is %s, epoch %d\n", c.style(styleBold, rec.Flow), rec.State, r.Epoch)
	t := table{}
	t.add("cut", control.FormatCut(r.Cut))
	if r.Reason != "" {
		t.add("reason", plain(r.Reason))
	}
	for _, source := range sortedKeys(r.Records) {
		t.add("records", count(r.Records[source])+" of "+source+sinceDrain(r))
	}
	t.add("results", count(r.Results)+atEnd(r))
	t.add("dead letters", count(r.DeadLetters))
	if r.Late > 0 {
		t.add("late records", count(r.Late))
	}
	if r.OpenWindows > 0 {
		t.add("windows", plural(r.OpenWindows, "window")+" open, for the resume")
	}
	t.add("snapshot", fmt.Sprintf("%s, %s", plural(r.Tasks, "task"), size(r.SnapshotBytes)))
	t.add("took", fmt.Sprintf("%v, %s", r.Duration.Round(time.Millisecond), reportWorkers(r)))
	t.print(c.Out, "  ")
}

// atEnd says how many of the results the end of the drain has made.
func atEnd(r *control.Report) string {
	switch {
	case r.AtEnd == 0:
		return ""
	case r.Mode == control.ModeFinish:
		return fmt.Sprintf(", %s of them final ones at the end", count(r.AtEnd))
	}
	return fmt.Sprintf(", %s of them partial ones at the end", count(r.AtEnd))
}
