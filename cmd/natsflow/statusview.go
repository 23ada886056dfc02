package main

import (
	"fmt"
	"strconv"
	"time"

	"natsflow/control"
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
		head:  []string{"FLOW", "STATE", "EPOCH", "WORKER", "COMMITTED", "LAG", "RATE", "RESULTS", "TROUBLE"},
		right: []bool{false, false, true, false, false, true, true, true, false},
	}
	for _, f := range flows {
		worker := "none"
		if len(f.Workers) > 0 && f.Workers[0].Active {
			worker = f.Workers[0].Name
		}
		if n := len(f.Workers); n > 1 {
			worker += fmt.Sprintf(" +%d", n-1)
		}
		cut := map[string]uint64{}
		var lag uint64
		var rate float64
		trouble := f.Trouble
		for _, s := range f.Sources {
			cut[s.Stream] = s.Committed
			lag, rate = lag+s.Lag, rate+s.Rate
			if s.Error != "" {
				trouble = s.Error
			}
		}
		t.add(f.Flow, string(f.State), strconv.FormatUint(f.Epoch, 10), worker, control.FormatCut(cut), count(lag),
			fmt.Sprintf("%.0f/s", rate), count(f.Results), plain(trouble))
	}
	return t.lines()
}

// details describes one flow.
func (f flowStatus) details(c *Console, now time.Time) []string {
	colour := styleGreen
	if f.State != control.StateRunning {
		colour = styleYellow
	}
	lines := []string{fmt.Sprintf("%s  %s  epoch %d, %s, %s", c.style(styleBold, f.Flow),
		c.style(colour, string(f.State)), f.Epoch, plural(f.Results, "result"), plural(f.Dead, "dead letter"))}
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
	if len(f.Workers) == 0 {
		add("workers", []string{"none is running"})
	}
	add("workers", f.workerLines(now))
	if f.Drain != nil && !f.State.Stopped() {
		d := f.Drain
		cut := "not fixed yet"
		if d.Cut != nil {
			cut = control.FormatCut(d.Cut)
		}
		add("drain under way", []string{fmt.Sprintf("%s at %s since %s ago, cut %s%s", d.Command.Mode, d.Command.At, age(now, d.Since), cut, because(d.Command.Reason))})
	}
	if r := f.Report; r != nil {
		add("last drain", []string{fmt.Sprintf("epoch %d, %s at %s, %s ago, took %v, worker %s%s", r.Epoch, r.Mode, control.FormatCut(r.Cut),
			age(now, r.Time), r.Duration.Round(time.Millisecond), r.Worker, because(r.Reason))})
	}
	if f.LastError != "" {
		add("last error", []string{fmt.Sprintf("%s ago: %s", age(now, f.ErrorTime), plain(f.LastError))})
	}
	if f.Trouble != "" {
		add("trouble", []string{c.style(styleRed, plain(f.Trouble))})
	}
	return lines
}

func (f flowStatus) sourceLines() []string {
	t := table{
		head:  []string{"STREAM", "HEAD", "READ", "COMMITTED", "LAG", "RATE"},
		right: []bool{false, true, true, true, true, true},
	}
	for _, s := range f.Sources {
		if s.Error != "" {
			t.add(s.Stream, "?", count(s.Read), count(s.Committed), "?", plain(s.Error))
			continue
		}
		t.add(s.Stream, count(s.Head), count(s.Read), count(s.Committed), count(s.Lag), fmt.Sprintf("%.0f/s", s.Rate))
	}
	return t.lines()
}

func (f flowStatus) workerLines(now time.Time) []string {
	if len(f.Workers) == 0 {
		return nil
	}
	t := table{
		head:  []string{"NAME", "ROLE", "PHASE", "TASKS", "UP", "RENEWED", "HOST", "PID"},
		right: []bool{false, false, false, true, true, true, false, true},
	}
	for _, m := range f.Workers {
		role, phase, tasks := "stands by", "", "-"
		if m.Active {
			role = "active"
		}
		if m.Status != nil {
			phase, tasks = m.Status.Phase, strconv.Itoa(m.Status.Tasks)
		}
		t.add(m.Name, role, phase, tasks, age(now, m.Started), age(now, m.Renewed)+" ago", m.Host, strconv.Itoa(m.PID))
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
func age(now, then time.Time) string {
	d := max(now.Sub(then), 0)
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
