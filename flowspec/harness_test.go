package flowspec

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// input is a record of a source.
type input struct {
	subject string
	nanos   int64
	data    []byte
}

// player runs a flow as a worker would: a router for each source, a task for each
// partition.
type player struct {
	tb      testing.TB
	flow    *flow.Flow
	routers []*flow.Router
	tasks   []*flow.Task
	// later are the tasks of later stages, with their routers; crossed counts frames.
	later   [][]*flow.Task
	crosses []*flow.Router
	crossed uint64
	// epoch counts drains.
	epoch uint64
	// seqs are the last sequences of the sources.
	seqs []uint64
	// tables are the buckets of lookups, by "bucket key".
	tables tableMap
	out    []string
}

func newPlayer(tb testing.TB, yaml string) *player {
	tb.Helper()
	s, err := Parse("flow.yaml", []byte(yaml))
	if err != nil {
		tb.Fatal(err)
	}
	return playerOf(tb, s)
}

func playerOf(tb testing.TB, s *Spec) *player {
	tb.Helper()
	f, err := s.Build()
	if err != nil {
		tb.Fatal(err)
	}
	p := &player{tb: tb, flow: f, seqs: make([]uint64, len(f.Sources())), tables: tableMap{}}
	for i := range f.Sources() {
		p.routers = append(p.routers, f.Router(i))
	}
	for i := range f.Options().Partitions {
		p.tasks = append(p.tasks, f.Task(i))
		p.tasks[i].UseTables(p.tables)
	}
	for stage := 1; stage < f.Stages(); stage++ {
		p.crosses = append(p.crosses, f.ExchangeRouter(stage))
		var tasks []*flow.Task
		for i := range f.Options().Partitions {
			tasks = append(tasks, f.StageTask(stage, i))
			tasks[i].UseTables(p.tables)
		}
		p.later = append(p.later, tasks)
	}
	return p
}

// tableMap has the values of buckets by "bucket key".
type tableMap map[string]string

func (m tableMap) Get(bucket, key string) ([]byte, bool) {
	value, ok := m[bucket+" "+key]
	return []byte(value), ok
}

func (m tableMap) change(tb testing.TB, line string) {
	tb.Helper()
	words := strings.SplitN(line, " ", 4)
	switch {
	case len(words) == 4 && words[0] == "put":
		m[words[1]+" "+words[2]] = words[3]
	case len(words) == 3 && words[0] == "del":
		delete(m, words[1]+" "+words[2])
	default:
		tb.Fatalf("kv %s: put B K V or del B K is wanted", line)
	}
}

// play plays a record of the first source.
func (p *player) play(in input) {
	p.tb.Helper()
	p.playFrom(0, in)
}

func (p *player) playFrom(source int, in input) {
	p.tb.Helper()
	p.seqs[source]++
	router := p.routers[source]
	if err := router.Route(in.subject, p.seqs[source], in.nanos, in.data); err != nil {
		p.out = append(p.out, "stopped: "+err.Error())
		return
	}
	router.Take(func(b *flow.Batch) {
		if err := p.tasks[b.Partition].Play(b); err != nil {
			p.out = append(p.out, "stopped: "+err.Error())
		}
		b.Release()
	})
	ticks, stream := router.TakeTicks()
	p.advanceStream(source, stream, ticks)
	p.advance(source, router.Watermark())
}

// advanceStream moves the time of a source in all tasks.
func (p *player) advanceStream(source int, at int64, ticks flow.Ticks) {
	for _, task := range p.tasks {
		if err := task.AdvanceStream(source, at, ticks); err != nil {
			p.out = append(p.out, "stopped: "+err.Error())
		}
	}
}

// advance moves the watermark of a source in all tasks.
func (p *player) advance(source int, watermark int64) {
	for _, task := range p.tasks {
		if err := task.Advance(source, watermark); err != nil {
			p.out = append(p.out, "stopped: "+err.Error())
		}
	}
}

// source returns the index of the source with that stream.
func (p *player) source(stream string) int {
	p.tb.Helper()
	i := slices.IndexFunc(p.flow.Sources(), func(s flow.SourceInfo) bool { return s.Stream == stream })
	if i < 0 {
		p.tb.Fatalf("the flow does not read %s", stream)
	}
	return i
}

// seal commits all tasks, one stage behind the other, and returns what each of the
// first one stored.
func (p *player) seal() [][]byte {
	p.tb.Helper()
	deltas := p.sealStage(0, p.tasks)
	for i, tasks := range p.later {
		p.crosses[i].Take(func(b *flow.Batch) {
			if err := tasks[b.Partition].Play(b); err != nil {
				p.out = append(p.out, "stopped: "+err.Error())
			}
			b.Release()
		})
		p.sealStage(i+1, tasks)
	}
	return deltas
}

// drain brings all tasks to the end of a drain, one stage behind the other.
func (p *player) drain(mode flow.DrainMode) {
	p.tb.Helper()
	p.seal()
	p.epoch++
	d := flow.Drain{Mode: mode, Epoch: p.epoch}
	for _, tasks := range append([][]*flow.Task{p.tasks}, p.later...) {
		for _, task := range tasks {
			if more, err := task.Drain(d, 1<<20); more || err != nil {
				p.out = append(p.out, fmt.Sprint("stopped: ", more, err))
			}
		}
		p.seal()
	}
}

func (p *player) sealStage(stage int, tasks []*flow.Task) [][]byte {
	p.tb.Helper()
	deltas := make([][]byte, len(tasks))
	for i, t := range tasks {
		sealed, err := t.Seal()
		if err != nil {
			p.tb.Fatal(err)
		}
		deltas[i] = sealed.Delta
		p.out = append(p.out, outputs(p.tb, p.flow, sealed.Outbox)...)
		err = flow.Outputs(sealed.Outbox, func(_ int, o flow.Output) error {
			if p.flow.Sinks()[o.Sink].Kind != flow.SinkExchange {
				return nil
			}
			to, err := flow.ExchangePartition(string(o.Subject))
			if err != nil {
				return err
			}
			p.crossed++
			return p.crosses[stage].RouteFrame(to, p.crossed, o.Data)
		})
		if err != nil {
			p.out = append(p.out, "stopped: "+err.Error())
		}
	}
	return deltas
}

// outputs prints an outbox, a line for each output.
func outputs(tb testing.TB, f *flow.Flow, outbox []byte) []string {
	tb.Helper()
	var lines []string
	err := flow.Outputs(outbox, func(_ int, o flow.Output) error {
		sink := f.Sinks()[o.Sink]
		if sink.Kind == flow.SinkExchange {
			return nil
		}
		name := sink.Name
		if sink.Kind == flow.SinkDead {
			name = fmt.Sprintf("DEAD %s: %s:", header(o, flow.HeaderDeadStep), header(o, flow.HeaderDeadError))
		}
		if sink.Kind == flow.SinkControl {
			name = "CONTROL"
		}
		lines = append(lines, strings.Join(strings.Fields(fmt.Sprintf("%s %s", name, o.Subject)), " ")+" "+string(o.Data))
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return lines
}

func header(o flow.Output, name string) string {
	for i := 0; i < len(o.Headers); i += 2 {
		if o.Headers[i] == name {
			return o.Headers[i+1]
		}
	}
	return ""
}

// archive is a text file that holds others, in the format of txtar.
type archive struct {
	comment string
	files   []archiveFile
}

type archiveFile struct{ name, data string }

func readArchive(tb testing.TB, file string) *archive {
	tb.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		tb.Fatal(err)
	}
	a := &archive{}
	for line := range strings.Lines(string(data)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "-- "); ok && strings.HasSuffix(name, " --") {
			a.files = append(a.files, archiveFile{name: strings.TrimSuffix(name, " --")})
			continue
		}
		if n := len(a.files); n > 0 {
			a.files[n-1].data += line
			continue
		}
		a.comment += line
	}
	return a
}

func (a *archive) String() string {
	var b strings.Builder
	b.WriteString(a.comment)
	for _, f := range a.files {
		fmt.Fprintf(&b, "-- %s --\n%s", f.name, f.data)
	}
	return b.String()
}

// TestOperators plays the files in testdata/operators: a flow, records and what
// comes out. A line of the records is "subject payload", or "STREAM: subject
// payload" where the flow reads several; "+ 1h" lets time pass, "commit" seals,
// "suspend" and "finish" drain, "kv put B K V" and "kv del B K" change a bucket that
// the flow looks keys up in.
func TestOperators(t *testing.T) {
	files, err := filepath.Glob("testdata/operators/*.txtar")
	if err != nil || len(files) < len(operators) {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			goldenArchive(t, file, readArchive(t, file))
		})
	}
}

// goldenArchive plays each triple of files flow.yaml, in and out.
func goldenArchive(t *testing.T, file string, archive *archive) {
	t.Helper()
	if len(archive.files)%3 != 0 || len(archive.files) == 0 {
		t.Fatalf("%d files: a flow, its input and its output are wanted", len(archive.files))
	}
	for i := 0; i < len(archive.files); i += 3 {
		yaml, in, out := archive.files[i], archive.files[i+1], &archive.files[i+2]
		got := playText(t, yaml.data, in.data)
		if *update {
			out.data = got
			continue
		}
		if diff := cmp.Diff(out.data, got); diff != "" {
			t.Errorf("%s, %s (-want +got):\n%s", file, out.name, diff)
		}
	}
	if *update {
		if err := os.WriteFile(file, []byte(archive.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func playText(t *testing.T, yaml, in string) string {
	t.Helper()
	p := newPlayer(t, yaml)
	now := start
	// last has the timestamps of the last records; a stream is as old as the test.
	last := slices.Repeat([]int64{start.UnixNano()}, len(p.routers))
	for line := range strings.Lines(in) {
		line = strings.TrimSuffix(line, "\n")
		word, rest, _ := strings.Cut(line, " ")
		source := 0
		if stream, ok := strings.CutSuffix(word, ":"); ok {
			source = p.source(stream)
			word, rest, _ = strings.Cut(rest, " ")
		}
		switch word {
		case "", "#":
		case "commit":
			p.seal()
		case "kv":
			p.tables.change(t, rest)
		case "suspend", "finish":
			p.drain(flow.DrainMode(word))
		case "+":
			d, err := parseDuration(rest)
			if err != nil {
				t.Fatal(err)
			}
			now = now.Add(d)
			for i, r := range p.routers {
				p.advance(i, r.QuietWatermark(now.UnixNano(), last[i]))
				p.advanceStream(i, now.UnixNano(), nil)
			}
		default:
			p.playFrom(source, input{word, now.UnixNano(), []byte(rest)})
			last[source] = now.UnixNano()
			now = now.Add(time.Second)
			if strings.Contains(yaml, "emit: commit") {
				continue
			}
			p.seal()
		}
	}
	p.seal()
	if len(p.out) == 0 {
		return ""
	}
	return strings.Join(p.out, "\n") + "\n"
}
