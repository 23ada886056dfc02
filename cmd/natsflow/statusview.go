package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"natsflow/control"
	"natsflow/kvsnap"
)

const (
	// shownCommands is how much of the history is shown.
	shownCommands = 5
	// shownRuns is how many runs of tasks are shown of a worker.
	shownRuns = 12
)

// lines is the status for people: details of one flow, or a row for each.
func (cmd *StatusCmd) lines(c *Console, flows []flowStatus) []string {
	if len(flows) == 0 {
		return []string{"no flows; natsflow worker FLOW.yaml starts one"}
	}
	now := time.Now()
	if cmd.Flow != "" {
		return flows[0].details(c, now)
	}
	t := table{
		head:  []string{"FLOW", "STATE", "EPOCH", "WORKERS", "COMMITTED", "LAG", "RATE", "RESULTS", "TROUBLE"},
		right: []bool{false, false, true, false, false, true, true, true, false},
	}
	for _, f := range flows {
		cut := map[string]uint64{}
		var lag uint64
		var rate float64
		trouble := f.Trouble
		if n := f.TasksOwnerless; n > 0 && len(f.Workers) > 0 && !f.State.Stopped() {
			trouble = join(trouble, plural(n, "task")+" without an owner")
		}
		for _, s := range f.Sources {
			cut[s.Stream] = s.Committed
			lag, rate = lag+s.Lag, rate+s.Rate
			if s.Error != "" {
				trouble = s.Error
			}
		}
		t.add(f.Flow, string(f.State), strconv.FormatUint(f.Epoch, 10), f.workerCount(), control.FormatCut(cut), count(lag),
			perSecond(rate), count(f.Results), plain(trouble))
	}
	return t.lines()
}

// workerCount is "3" or "2 +1 standing by".
func (f flowStatus) workerCount() string {
	if len(f.Workers) == 0 {
		return "none"
	}
	n := f.crew.standingBy()
	text := strconv.Itoa(len(f.Workers) - n)
	if n > 0 {
		text += fmt.Sprintf(" +%d standing by", n)
	}
	return text
}

func perSecond(rate float64) string { return fmt.Sprintf("%.0f/s", rate) }

// afterFinish says what it means to go on behind an end of the input.
const afterFinish = "what was closed stays closed, new records open new windows"

// details describes one flow.
func (f flowStatus) details(c *Console, now time.Time) []string {
	colour := styleGreen
	if f.State != control.StateRunning {
		colour = styleYellow
	}
	state := size(f.StateBytes)
	if f.StateKeys > 0 {
		state = plural(f.StateKeys, "key") + ", " + state
	}
	dead := plural(f.Dead, "dead letter")
	if f.Late > 0 {
		dead += ", " + plural(f.Late, "late record")
	}
	lines := []string{fmt.Sprintf("%s  %s  epoch %d, %s, %s; state: %s", c.style(styleBold, f.Flow),
		c.style(colour, string(f.State)), f.Epoch, plural(f.Results, "result"), dead, state)}
	add := func(title string, body []string) {
		if len(body) == 0 {
			return
		}
		lines = append(lines, title)
		for _, l := range body {
			lines = append(lines, "  "+l)
		}
	}
	add("sources", f.sourceLines())
	if x := f.Exchange; x != nil {
		line := fmt.Sprintf("%s: %s on the way to the next stage, %s", x.Stream, plural(x.Frames, "frame"), size(x.Bytes))
		if x.Error != "" {
			line = x.Stream + ": " + plain(x.Error)
		}
		add("exchange", []string{line})
	}
	add("tables", f.tableLines())
	if len(f.Workers) == 0 {
		add("workers", []string{"none is running"})
	}
	add("workers", f.workerLines(now))
	add("positions", f.positionLines())
	add("tasks", f.taskLines())
	if f.Drain != nil && !f.State.Stopped() {
		d := f.Drain
		cut := "not fixed yet"
		if d.Cut != nil {
			cut = control.FormatCut(d.Cut)
		}
		add("drain under way", []string{fmt.Sprintf("%s at %s since %s ago, cut %s%s", d.Command.Mode, d.Command.At, age(now, d.Since), cut, because(d.Command.Reason))})
	}
	add("last drain", reportLines(f.Report, now))
	if r := f.Report; f.State == control.StateRunning && r != nil && r.Mode == control.ModeFinish && r.Epoch == f.Epoch {
		lines = append(lines, "  resumed after finish: "+afterFinish)
	}
	if f.LastError != "" {
		add("last error", []string{fmt.Sprintf("%s ago: %s", age(now, f.ErrorTime), plain(f.LastError))})
	}
	if f.Trouble != "" {
		add("trouble", []string{c.style(styleRed, plain(f.Trouble))})
	}
	if len(f.Warnings) > 0 {
		lines := make([]string, len(f.Warnings))
		for i, w := range f.Warnings {
			lines[i] = c.style(styleRed, plain(w))
		}
		add("warnings", lines)
	}
	add("last commands", historyLines(f.History, now))
	return lines
}

func (f flowStatus) sourceLines() []string {
	t := table{
		head:  []string{"STREAM", "HEAD", "READ", "COMMITTED", "LAG", "RATE"},
		right: []bool{false, true, true, true, true, true, true, true},
	}
	cut := slices.ContainsFunc(f.Sources, func(s sourceStatus) bool { return s.Cut != nil })
	if cut {
		t.head = append(t.head, "CUT", "TO GO")
	}
	own := slices.ContainsFunc(f.Sources, func(s sourceStatus) bool { return s.Origin != "" })
	if own {
		t.head = append(t.head, "TAKEN FROM")
	}
	for _, s := range f.Sources {
		row := []string{s.Stream, count(s.Head), count(s.Read), count(s.Committed), count(s.Lag), perSecond(s.Rate)}
		if s.Error != "" {
			row = []string{s.Stream, "?", count(s.Read), count(s.Committed), "?", plain(s.Error)}
		}
		if cut && s.Cut != nil {
			row = append(row, count(*s.Cut), count(above(*s.Cut, s.Committed)))
		}
		if own {
			for len(row) < len(t.head)-1 {
				row = append(row, "")
			}
			row = append(row, takenFrom(s))
		}
		t.add(row...)
	}
	return t.lines()
}

// takenFrom says where a stream of the flow's own has its messages from.
func takenFrom(s sourceStatus) string {
	if s.Origin == "" || s.Waiting == 0 {
		return s.Origin
	}
	return s.Origin + ", " + count(s.Waiting) + " to come"
}

func (f flowStatus) workerLines(now time.Time) []string {
	if len(f.Workers) == 0 {
		return nil
	}
	t := table{
		head:  []string{"NAME", "PHASE", "TASKS", "RESULTS", "KEYS", "STATE", "COMMITTED", "UP", "LEASE", "HOST", "PID"},
		right: []bool{false, false, true, true, true, true, true, true, false, false, true},
	}
	for _, m := range f.Workers {
		phase, results, keys, state, committed := "starting", "", "", "", ""
		if st := m.Status; st != nil {
			phase, results, keys, state = st.Phase, count(st.Results), count(st.StateKeys), size(st.StateBytes)
			if !st.LastCommit.IsZero() {
				committed = age(now, st.LastCommit) + " ago"
			}
		}
		if m.StandsBy {
			phase = "stands by"
		}
		t.add(m.Name, phase, strconv.Itoa(len(m.Tasks)), results, keys, state, committed, age(now, m.Started),
			fmt.Sprintf("%.0fs of %v", m.LeaseAge.Seconds(), m.LeaseTTL), m.Host, strconv.Itoa(m.PID))
	}
	return t.lines()
}

// positionLines tell how far each worker is, when there are several.
func (f flowStatus) positionLines() []string {
	working := f.crew.working()
	if len(working) < 2 {
		return nil
	}
	t := table{
		head:  []string{"WORKER", "STREAM", "READ", "COMMITTED", "LAG", "RATE"},
		right: []bool{false, false, true, true, true, true},
	}
	for _, m := range working {
		if !m.speaks() {
			continue
		}
		for _, s := range f.Sources {
			if at, ok := m.Status.Sources[s.Stream]; ok {
				t.add(m.Name, s.Stream, count(at.Read), count(at.Committed), count(above(s.Head, at.Committed)), perSecond(at.Rate))
			}
		}
	}
	if len(t.rows) == 0 {
		return nil
	}
	return t.lines()
}

// taskLines tell who has which tasks.
func (f flowStatus) taskLines() []string {
	t := table{right: []bool{false, true}}
	for _, m := range f.crew.working() {
		t.add(m.Name, strconv.Itoa(len(m.Tasks)), compactTasks(m.Tasks, shownRuns)+f.crew.generations(m.Name))
	}
	if f.TasksDone > 0 {
		t.add("done", strconv.Itoa(f.TasksDone), "at the cut of epoch "+strconv.FormatUint(f.Epoch, 10))
	}
	if len(f.ownerless) > 0 {
		t.add("without an owner", strconv.Itoa(len(f.ownerless)), compactTasks(f.ownerless, shownRuns))
	}
	return t.lines()
}

// generations says which generations the tasks of an owner have: how often they
// have changed hands.
func (w crew) generations(owner string) string {
	var low, high uint64
	for _, t := range w.tasks {
		if t.Owner == owner && t.Generation > 0 {
			high = max(high, t.Generation)
			if low == 0 || t.Generation < low {
				low = t.Generation
			}
		}
	}
	switch {
	case high == 0:
		return ""
	case low == high:
		return fmt.Sprintf(", generation %d", low)
	}
	return fmt.Sprintf(", generations %d to %d", low, high)
}

// compactTasks writes tasks, which are in order, with runs of partitions as one:
// "0.0-3 0.7 1.2-5", at most so many of them.
func compactTasks(names []string, most int) string {
	var runs []string
	var first, last kvsnap.TaskID
	left := 0 // tasks that are not in runs
	end := func() {
		switch left {
		case 0:
		case 1:
			runs = append(runs, first.String())
		default:
			runs = append(runs, fmt.Sprintf("%s-%d", first, last.Partition))
		}
		left = 0
	}
	for i, name := range names {
		id, err := kvsnap.ParseTaskID(name)
		if err != nil {
			end()
			runs = append(runs, plain(name))
			continue
		}
		if left == 0 || id.Stage != last.Stage || id.Partition != last.Partition+1 {
			end()
			if len(runs) == most {
				runs = append(runs, fmt.Sprintf("and %d more (--json has all)", len(names)-i))
				break
			}
			first = id
		}
		last = id
		left++
	}
	end()
	return strings.Join(runs, " ")
}

// reportLines is the report of the last drain.
func reportLines(r *control.Report, now time.Time) []string {
	if r == nil {
		return nil
	}
	done := []string{plural(r.Tasks, "task"), plural(r.Results, "result") + atEnd(r), plural(r.DeadLetters, "dead letter"), size(r.SnapshotBytes) + " of snapshots"}
	for _, source := range sortedKeys(r.Records) {
		done = append(done, plural(r.Records[source], "record")+" of "+source+sinceDrain(r))
	}
	if r.OpenWindows > 0 {
		done = append(done, plural(r.OpenWindows, "window")+" open")
	}
	return []string{
		fmt.Sprintf("epoch %d, %s at %s, %s ago, took %v, %s%s", r.Epoch, r.Mode, control.FormatCut(r.Cut),
			age(now, r.Time), r.Duration.Round(time.Millisecond), reportWorkers(r), because(r.Reason)),
		strings.Join(done, ", "),
	}
}

// sinceDrain says from where on the records of a report count.
func sinceDrain(r *control.Report) string {
	if r.Epoch == 1 {
		return ""
	}
	return " since the drain before"
}

// reportWorkers says who drained.
func reportWorkers(r *control.Report) string {
	last := r.Last
	if last == "" {
		last = r.Worker
	}
	if r.Workers > 1 {
		return fmt.Sprintf("%d workers, the last was %s", r.Workers, last)
	}
	return "worker " + last
}

// historyLines are the last commands, the latest first.
func historyLines(history []historyEntry, now time.Time) []string {
	t := table{right: []bool{true, true}}
	for i := len(history) - 1; i >= max(0, len(history)-shownCommands); i-- {
		h := history[i]
		what := plain(string(h.Kind))
		if h.Kind == control.KindDrain && !h.At.IsZero() {
			what = fmt.Sprintf("%s %s at %s", h.Kind, h.Mode, h.At)
		}
		t.add(strconv.FormatUint(h.Seq, 10), age(now, h.Time)+" ago", what, plain(h.Outcome)+because(h.Reason))
	}
	return t.lines()
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + plain(reason)
}

// age is how long ago something was, with the precision that people want.
func age(now, then time.Time) string { return span(now.Sub(then)) }

// span is a duration for people; one below zero is none.
func span(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%.0fs", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}
