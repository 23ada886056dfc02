package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"natsflow/worker"
)

const (
	// shownKeys is how many keys the table of a terminal has.
	shownKeys = 15
	// lineKeys is how many results a line of progress is followed by.
	lineKeys = 3
	barWidth = 24
)

// devState is what a view shows.
type devState struct {
	feeds  []feedState
	status worker.Status
	// heads has the last sequence of each source.
	heads   map[string]uint64
	results []*results
	// caughtUp: all is fed and processed.
	caughtUp bool
	once     bool
}

type feedState struct {
	stream      string
	done, total uint64
}

// devView shows what a flow does.
type devView interface {
	// log is where logs go, so that they do not break what is shown.
	log() io.Writer
	// every is how often update is called.
	every() time.Duration
	update(st devState)
	// end leaves room for what is printed after the last update. keep says that
	// what is shown may stay above it.
	end(keep bool)
}

func newDevView(c *Console) devView {
	if c.OutTerminal {
		return &liveView{c: c, region: newRegion(c, c.Out)}
	}
	v := &lineView{c: c}
	if c.ErrTerminal {
		v.bar = newRegion(c, c.Err)
	}
	return v
}

// feedLine is the progress of a feed with a bar.
func feedLine(f feedState) string {
	return fmt.Sprintf("%s  %s %s of %s lines fed", f.stream, bar(f.done, f.total, barWidth), count(f.done), count(f.total))
}

// progressLine is what the flow does, in one line.
func progressLine(st devState) string {
	parts := []string{}
	for _, name := range sortedKeys(st.status.Sources) {
		src := st.status.Sources[name]
		p := fmt.Sprintf("%s processed to %s", name, count(src.Committed))
		if head := st.heads[name]; head > 0 {
			p += " of " + count(max(head, src.Committed))
		}
		if src.Rate >= 1 {
			p += fmt.Sprintf(", %s/s", count(int64(src.Rate)))
		}
		parts = append(parts, p)
	}
	parts = append(parts, plural(st.status.Results, "result"))
	if st.status.DeadLetters > 0 {
		parts = append(parts, plural(st.status.DeadLetters, "dead letter"))
	}
	line := st.status.Phase + ": " + strings.Join(parts, ", ")
	switch {
	case st.status.Phase == "":
		line = "starting"
	case len(st.status.Sources) == 0:
		line = st.status.Phase // between sessions there is nothing to tell
	}
	if st.status.Trouble != "" {
		line += "; trouble: " + plain(st.status.Trouble)
	}
	return line
}

// liveView is a table that is refreshed in place.
type liveView struct {
	c      *Console
	region *region
	tables []*liveTable
}

// liveTable shows the keys of a sink that changed last. A key keeps its row while
// it is among them, so that rows do not jump.
type liveTable struct {
	c *Console
	// slots are the names of the keys in the rows.
	slots []string
	last  uint64
}

func (v *liveView) log() io.Writer       { return v.region }
func (v *liveView) every() time.Duration { return 150 * time.Millisecond }

func (v *liveView) end(keep bool) {
	if !keep {
		v.region.clear()
	}
	v.region.done()
}

func (v *liveView) update(st devState) {
	var lines []string
	for _, f := range st.feeds {
		if f.done < f.total {
			lines = append(lines, feedLine(f))
		}
	}
	lines = append(lines, progressLine(st))
	if st.caughtUp && !st.once && st.status.Phase == "running" {
		lines = append(lines, v.c.style(styleDim, "all of it is processed; waiting for more. Ctrl-C stops, the same command goes on"))
	}
	_, rows := v.c.Size()
	lines = append(lines, "")
	n := max(len(st.results), 1)
	for i, r := range st.results {
		if i == len(v.tables) {
			v.tables = append(v.tables, &liveTable{c: v.c})
		}
		table := v.tables[i].lines(r, min(max((rows-len(lines)-2)/(n-i)-2, 1), max(shownKeys/n, 3)))
		if n > 1 && len(table) > 0 {
			lines = append(lines, v.c.style(styleDim, sinkName(r.sink)))
			table = append(table, "")
		}
		lines = append(lines, table...)
	}
	v.region.draw(lines)
}

// lines are the head of the table and at most so many rows.
func (v *liveTable) lines(r *results, rows int) []string {
	for len(v.slots) < rows {
		v.slots = append(v.slots, "")
	}
	v.slots = v.slots[:rows]
	list := r.latest(rows)
	waiting := map[string]result{}
	for _, e := range list {
		waiting[e.name] = e
	}
	placed := make([]result, 0, len(list))
	fresh := map[int]bool{}
	var free []int
	for i := range v.slots {
		if _, ok := waiting[v.slots[i]]; !ok {
			v.slots[i] = ""
			free = append(free, i)
		}
	}
	taken := map[string]bool{}
	for _, name := range v.slots {
		taken[name] = true
	}
	for _, e := range list {
		if !taken[e.name] && len(free) > 0 {
			v.slots[free[0]], free = e.name, free[1:]
		}
	}
	top := v.last
	for _, name := range v.slots {
		if e, ok := waiting[name]; ok && name != "" {
			fresh[len(placed)] = e.order > v.last
			top = max(top, e.order)
			placed = append(placed, e)
		}
	}
	v.last = top
	if len(placed) == 0 {
		return nil
	}
	t := resultTable(placed)
	lines := t.lines()
	lines[0] = v.c.style(styleDim, lines[0])
	for i := range placed {
		if fresh[i] {
			lines[i+1] = v.c.style(styleBold, lines[i+1])
		}
	}
	return lines
}

// lineView prints a line each second in which something happened, with the
// results that came last. Progress goes to standard error, results to standard
// output.
type lineView struct {
	c    *Console
	bar  *region // of the feed, if standard error is a terminal
	said string
	last []uint64 // of each sink
	up   bool     // said that it is caught up
}

func (v *lineView) log() io.Writer {
	if v.bar != nil {
		return v.bar
	}
	return v.c.Err
}

func (v *lineView) every() time.Duration { return time.Second }

func (v *lineView) end(bool) {
	if v.bar != nil {
		v.bar.clear()
		v.bar.done()
	}
}

func (v *lineView) update(st devState) {
	var lines []string
	fed := true
	for _, f := range st.feeds {
		if f.done < f.total {
			fed = false
			lines = append(lines, feedLine(f))
		}
	}
	if v.bar != nil {
		v.bar.draw(lines)
	} else if !fed {
		v.println(strings.Join(lines, "\n"))
	}
	line := progressLine(st)
	if line != v.said && (len(v.last) > 0 || st.status.Results > 0 || v.said == "") {
		v.said = line
		v.println(line)
		if !st.once { // the final table is what standard output is for then
			for i, r := range st.results {
				v.results(i, r)
			}
		}
	}
	if st.caughtUp && !v.up && !st.once {
		v.println("all of it is processed; waiting for more. Ctrl-C stops, the same command goes on")
	}
	v.up = st.caughtUp
}

func (v *lineView) println(line string) { _, _ = io.WriteString(v.log(), line+"\n") }

// results prints those that changed last, the oldest first.
func (v *lineView) results(sink int, r *results) {
	list := r.latest(lineKeys)
	for len(v.last) <= sink {
		v.last = append(v.last, 0)
	}
	top := v.last[sink]
	for i := len(list) - 1; i >= 0; i-- {
		if e := list[i]; e.order > v.last[sink] {
			v.c.printf("%s  %s\n", plain(e.name), plain(e.payload))
			top = max(top, e.order)
		}
	}
	v.last[sink] = top
}
