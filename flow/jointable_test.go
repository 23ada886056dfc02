package flow_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// tableFlow joins the stream L with the table R. An entry "gone" deletes its key.
type tableFlow struct {
	cfg        flow.TableConfig[string, string, string]
	clock      *flow.EventTime[string]
	partitions int
	onError    flow.OnError
	late       bool
}

func (j tableFlow) builder() *flow.Builder {
	if j.partitions == 0 {
		j.partitions = 1
	}
	b := flow.New("test", flow.Options{Partitions: j.partitions, OnError: j.onError})
	if j.cfg.Join == nil {
		j.cfg.Join = joinValues
	}
	j.cfg.Stream, j.cfg.Table = flow.TextCodec(), flow.TextCodec()
	j.cfg.Deletes = func(_ *flow.Meta, v string) (bool, error) {
		if v == "worse" {
			return false, errors.New("is worse")
		}
		return v == "gone", nil
	}
	results, late := flow.JoinTable(timedKeyed(b, "L", j.clock), timedKeyed(b, "R", j.clock), "table", j.cfg)
	flow.To(results, textSink("OUT"))
	if j.late {
		flow.To(late, textSink("LATE"))
	}
	return b
}

func (j tableFlow) build(tb fataler) *flow.Flow {
	tb.Helper()
	return build(tb, j.builder())
}

func (j tableFlow) always(t *testing.T, lines []string, want ...string) {
	t.Helper()
	alwaysJoined(t, func(partitions int) *flow.Flow { j.partitions = partitions; return j.build(t) }, lines, want...)
}

var tableLines = []string{
	"L: 10:00 a 1",    // before there is an entry
	"R: 10:00 b x",    // at the same time as the next one
	"L: 10:00 b 2",    //
	"R: 10:05 a x",    //
	"L: 10:04:59 a 3", // just before the entry
	"L: 10:06 a 4",
	"R: 10:07 a y",
	"R: 10:10 a gone",
	"L: 10:08 a 5",
	"L: 10:10 a 6",
	"L: 10:20 a 7",
	"R: 10:20 a z",
	"L: 10:30 b 8",
	"pause 1h",
}

// byTime is tableLines as the streams would have them.
func byTime(lines []string) []string {
	records := slices.Clone(lines[:len(lines)-1])
	slices.SortStableFunc(records, func(a, b string) int {
		ta, _ := clockTime(a[3:])
		tb, _ := clockTime(b[3:])
		return ta.Compare(tb)
	})
	return append(records, lines[len(lines)-1])
}

func TestJoinTable_Inner(t *testing.T) {
	want := []string{"b 2+x", "a 4+x", "a 5+y", "a 7+z", "b 8+x"}
	tableFlow{}.always(t, byTime(tableLines), want...)
	tableFlow{clock: &flow.EventTime[string]{Lateness: time.Minute, Idle: time.Minute}}.always(t, tableLines, want...)
}

func TestJoinTable_Left(t *testing.T) {
	want := []string{"a 1+-", "b 2+x", "a 3+-", "a 4+x", "a 5+y", "a 6+-", "a 7+z", "b 8+x"}
	cfg := flow.TableConfig[string, string, string]{Kind: flow.LeftJoin}
	tableFlow{cfg: cfg}.always(t, byTime(tableLines), want...)
	tableFlow{cfg: cfg, clock: &flow.EventTime[string]{Lateness: time.Minute, Idle: time.Minute}}.always(t, tableLines, want...)
}

// With Latest a record meets what is there when it comes, whatever its time, and
// nothing waits.
func TestJoinTable_Latest(t *testing.T) {
	cfg := flow.TableConfig[string, string, string]{Kind: flow.LeftJoin, Latest: true}
	f := tableFlow{cfg: cfg}.build(t)
	if f.Timed() {
		t.Error("the flow waits for times")
	}
	lines := []string{"L: 10:00 a 1", "R: 10:05 a x", "L: 10:05 a 2", "drain", "L: 10:06 a 3", "R: 10:07 a y", "R: 10:08 b gone", "commit", "crash", "L: 10:09 a 4", "R: 10:10 a gone", "L: 10:11 a 5", "commit", "crash", "R: 10:12 a z", "L: 10:13 a 6"}
	r := timed(t, f, lines...)
	wantData(t, r, "OUT", "a 1+-", "a 2+x", "a 3+x", "a 4+y", "a 5+-", "a 6+z")
	if r.Keys() != 1 {
		t.Errorf("%d entries", r.Keys())
	}
	cfg.Kind = flow.InnerJoin
	wantData(t, timed(t, tableFlow{cfg: cfg, clock: &flow.EventTime[string]{}}.build(t), "R: 10:05 a x", "L: 09:00 a 1", "L: 09:00 b 2", "R: 08:00 a y", "L: 09:00 a 3"), "OUT", "a 1+x", "a 3+y")
}

// Versions are kept for as long as a record that is not late may need them, then only
// the last one; of a key that is deleted, nothing.
func TestJoinTable_Versions(t *testing.T) {
	j := tableFlow{clock: &flow.EventTime[string]{}}
	j.cfg.AllowedLateness = 10 * time.Minute
	keys := func(want int, lines ...string) {
		t.Helper()
		f := j.build(t)
		r := timed(t, f, lines...)
		if got := r.Keys(); got != want {
			t.Errorf("%q: %d are kept, want %d", lines, got, want)
		}
		r.Drain()
		if got := r.Keys(); got != want {
			t.Errorf("%q: %d are kept after a drain, want %d", lines, got, want)
		}
	}
	versions := []string{"R: 10:00 a x", "R: 10:01 a y", "R: 10:02 a z", "R: 10:03 b x", "R: 10:04 b gone", "R: 12:00 z z"}
	keys(6, versions...)
	at := func(l string) []string { return append(slices.Clip(versions), "L: "+l+" q q") }
	keys(7, at("10:11")...)    // y is the version of 10:01
	keys(6, at("10:11:01")...) // x is needed no more
	keys(5, at("10:12:01")...) // nor is y
	keys(5, at("10:14")...)
	keys(3, at("10:14:01")...) // nor both of b
}

// A record of the table that comes late counts, unless what is newer has taken its
// place for good.
func TestJoinTable_LateEntry(t *testing.T) {
	j := tableFlow{clock: &flow.EventTime[string]{}}
	r := timed(t, j.build(t), "R: 10:10 a x", "R: 11:00 z z", "L: 11:00 z 1", "R: 10:05 a old", "R: 10:20 a new", "R: 09:00 b y",
		"L: 11:10 a 2", "L: 11:10 b 3", "R: 11:20 z z", "L: 11:20 z 4")
	wantData(t, r, "OUT", "z 1+z", "a 2+new", "b 3+y")
	if r.Late() != 1 {
		t.Errorf("%d late", r.Late())
	}
	wantErrors(t, r)
}

func TestJoinTable_Late(t *testing.T) {
	j := tableFlow{clock: &flow.EventTime[string]{}, late: true}
	j.cfg.AllowedLateness = 10 * time.Minute
	lines := []string{
		"R: 10:10 a x", "R: 10:30 a y", "L: 10:00 a 0", "R: 10:40 z z", "L: 10:40 z 1",
		"L: 10:30 a 2", "L: 10:29:59 a 3", "L: 10:35 a 4", "drain", "L: 10:40 a 5", "R: 10:50 z z", "L: 10:50 z 6",
	}
	r := timed(t, j.build(t), lines...)
	wantData(t, r, "OUT", "a 2+y", "a 4+y", "a 5+y", "z 1+z")
	wantData(t, r, "LATE", "3")
	if r.Late() != 1 {
		t.Errorf("%d late", r.Late())
	}
	j.late = false
	wantErrors(t, timed(t, j.build(t), lines...),
		"table: late: its time is 2026-01-01T10:29:59Z, it would have been kept until the watermark 2026-01-01T10:39:59.000000001Z, the watermark is 2026-01-01T10:40:00Z")
}

func TestJoinTable_Failures(t *testing.T) {
	lines := []string{"R: 10:00 a bad", "R: 10:00 b worse", "R: 10:00 c x", "L: 10:01 a 1", "L: 10:02 b 2", "L: 10:03 c boom", "L: 10:04 c 3", "L: 10:05 c no", "pause 1h"}
	cfg := flow.TableConfig[string, string, string]{Kind: flow.LeftJoin}
	r := timed(t, tableFlow{cfg: cfg}.build(t), lines...)
	wantData(t, r, "OUT", "b 2+-", "c 3+x", "c no+-")
	want := []string{"table: is worse", "table: is bad: 1+bad", "table: step panicked: as told"}
	for i, e := range r.Errors() {
		if i > len(want) || !strings.HasPrefix(e, want[i]) {
			t.Errorf("dead letter %s", e)
		}
	}
	letters := r.DeadLetters()
	if h := letters[1].Headers; len(letters) != 3 || h[flow.HeaderDeadStream] != "L" || h[flow.HeaderDeadSeq] != "1" || letters[1].Data != "1" {
		t.Errorf("dead letters %v", letters)
	}
	j := tableFlow{cfg: cfg, onError: flow.Stop}
	r = timed(t, j.build(t), lines[0], lines[3])
	wantStepError(t, r.Try(flowtest.Record{Stream: "R", Time: flowtest.Start.Add(12 * time.Hour), Data: "z z"}, flowtest.Record{Stream: "L", Data: "z z"}), "table", 0)
}

// A finish ends the waiting, once; the table stays.
func TestJoinTable_Finish(t *testing.T) {
	cfg := flow.TableConfig[string, string, string]{Kind: flow.LeftJoin}
	cfg.Join = func(m *flow.Meta, l, r *string) (string, bool, error) {
		v, ok, err := joinValues(m, l, r)
		return fmt.Sprintf("%s %v at %s", v, m.Pane(), clockText(m.EventTime())), ok, err
	}
	f := tableFlow{cfg: cfg, clock: &flow.EventTime[string]{}}.build(t)
	r := timed(t, f, "R: 10:00 a x", "R: 10:10 a y", "L: 10:00 b 1", "L: 10:05 a 2", "L: 10:20 a 3")
	r.Finish()
	r.Crash()
	r.Finish()
	if r.Keys() != 2 {
		t.Errorf("%d records and versions are kept, want the two versions of a", r.Keys())
	}
	playTimed(t, r, f, "L: 10:30 a 4")
	playTimed(t, r, f, "R: 10:40 z z")
	playTimed(t, r, f, "L: 10:40 z 5")
	wantData(t, r, "OUT", "b 1+- none at 10:00", "a 2+x none at 10:05", "a 3+y final at 10:20", "a 4+y none at 10:30")
}

// Results have the time and the position of the record of the stream.
func TestJoinTable_Meta(t *testing.T) {
	cfg := flow.TableConfig[string, string, string]{}
	cfg.Join = func(m *flow.Meta, l, r *string) (string, bool, error) {
		v, ok, err := joinValues(m, l, r)
		return fmt.Sprintf("%s %s %s#%d %s at %s stream %s", v, m.Raw(), m.Stream, m.Seq, m.Subject, clockText(m.EventTime()), clockText(m.Time())), ok, err
	}
	for _, latest := range []bool{false, true} {
		cfg.Latest = latest
		r := flowtest.New(t, tableFlow{cfg: cfg}.build(t))
		at := flowtest.Start.Add(10 * time.Hour)
		r.Push(flowtest.Record{Stream: "R", Subject: "r", Time: at, Data: "a x"})
		r.Push(flowtest.Record{Stream: "L", Subject: "l", Time: at.Add(time.Minute), Data: "a 1"})
		r.Pause(time.Hour)
		raw := map[bool]string{true: "a 1", false: "1"}[latest]
		wantData(t, r, "OUT", fmt.Sprintf("a 1+x %s L#1 l at 10:01 stream 10:01", raw))
	}
}

// A window behind the join takes what has waited.
func TestJoinTable_WindowBehind(t *testing.T) {
	b := newFlow()
	results, late := flow.JoinTable(timedKeyed(b, "L", nil), timedKeyed(b, "R", nil), "table", flow.TableConfig[string, string, string]{
		Stream: flow.TextCodec(), Table: flow.TextCodec(), Join: joinValues, Kind: flow.LeftJoin,
	})
	counts, _ := flow.Window(results, "count", flow.Tumbling(time.Hour), listing)
	flow.To(counts, textSink("OUT"))
	flow.To(late, textSink("LATE"))
	r := timed(t, build(t, b), "L: 10:00 a 1", "L: 10:59:59 a 2", "R: 11:00 a x", "L: 11:00 a 3", "pause 2h")
	wantData(t, r, "OUT", "a 10:00-11:00 a 1+-a 2+-", "a 11:00-12:00 a 3+x")
	wantErrors(t, r)
}

// naiveTable says what comes of the records, whatever their order: at each time the
// last of the table's that came.
func naiveTable(kind flow.JoinKind, all []joinRecord) []string {
	out := []string{}
	for _, l := range all {
		if !l.left {
			continue
		}
		var found *joinRecord
		for i, r := range all {
			if !r.left && r.key == l.key && r.at <= l.at && (found == nil || found.at <= r.at) {
				found = &all[i]
			}
		}
		switch {
		case found != nil && found.id%5 != 0:
			out = append(out, fmt.Sprintf("%s %d+%d", l.key, l.id, found.id))
		case kind == flow.LeftJoin:
			out = append(out, fmt.Sprintf("%s %d+-", l.key, l.id))
		}
	}
	slices.Sort(out)
	return out
}

// The results are those of the records, whatever their order, and whatever dies.
func TestJoinTable_Model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := flow.TableConfig[string, string, string]{Kind: flow.JoinKind(rapid.IntRange(0, 1).Draw(t, "kind"))}
		cfg.Stream, cfg.Table, cfg.Join = flow.TextCodec(), flow.TextCodec(), joinValues
		cfg.Deletes = func(m *flow.Meta, v string) (bool, error) {
			return strings.HasSuffix(v, "0") || strings.HasSuffix(v, "5"), nil
		}
		cfg.AllowedLateness = time.Duration(rapid.IntRange(0, 30).Draw(t, "allowed")) * time.Second
		clock := &flow.EventTime[string]{Lateness: 20 * time.Second}
		b := flow.New("test", flow.Options{Partitions: rapid.IntRange(1, 3).Draw(t, "partitions")})
		left, right := timedKeyed(b, "L", clock), timedKeyed(b, "R", clock)
		all := drawRecords(t, "a", "b", "c")
		if rapid.Bool().Draw(t, "rekeyed") {
			left, right = crossed(left), crossed(right)
			// Which of two of one time comes last is not known behind a change of key.
			slices.SortStableFunc(all, func(a, b joinRecord) int {
				return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(fmt.Sprint(a.left), fmt.Sprint(b.left)))
			})
			all = slices.CompactFunc(all, func(a, b joinRecord) bool { return a.at == b.at && !a.left && !b.left })
		}
		results, _ := flow.JoinTable(left, right, "table", cfg)
		flow.To(results, textSink("OUT"))
		if diff := gocmp.Diff(naiveTable(cfg.Kind, all), playDrawn(t, build(t, b), all)); diff != "" {
			t.Fatalf("results (-want +got):\n%s", diff)
		}
	})
}

// At the end of the input records do not wait for the table any more. The table stays as
// it is, for what comes after a resume.
func TestJoinTable_EndOfInput(t *testing.T) {
	j := tableFlow{cfg: flow.TableConfig[string, string, string]{Kind: flow.LeftJoin, Join: func(m *flow.Meta, l, r *string) (string, bool, error) {
		v, ok, err := joinValues(m, l, r)
		return paneText(m) + v, ok, err
	}}}
	j.always(t, []string{
		"R: 10:00 a x", "L: 10:30 a 1", "L: 10:40 b 2", "R: 11:00 a y", "L: 11:30 a 3", "finish",
		"L: 11:40 a 4", "R: 11:50 b z", "finish", "L: 12:00 b 5", "R: 12:10 b gone", "pause 1h",
	}, "a 1+x", "b 2+-", "final a 3+y", "final a 4+y", "b 5+z")
	// The watermark is where the stream is: what the table had there is needed still.
	j.clock = &flow.EventTime[string]{Lateness: time.Hour}
	r := timed(t, j.build(t), "R: 10:00 a x", "R: 11:00 a y", "L: 10:20 a 1", "finish", "L: 10:30 a 2", "finish")
	wantData(t, r, "OUT", "final a 1+x", "final a 2+x")
}
