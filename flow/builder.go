package flow

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// DefaultPartitions is the number of partitions of a flow that does not say.
const DefaultPartitions = 16

// MaxPartitions bounds the number of partitions of a flow.
const MaxPartitions = 4096

// DefaultCommitInterval is the longest time that a busy task waits with its
// next commit unless the flow says another.
const DefaultCommitInterval = 100 * time.Millisecond

// OnError says what becomes of a record that cannot be decoded or whose step
// returns an error or panics.
type OnError int

// The ways to deal with a record that fails.
const (
	// DeadLetter publishes the record with its error to the dead-letter stream
	// and goes on.
	DeadLetter OnError = iota
	// Stop commits everything before the record and stops the worker there.
	Stop
)

// Delivery says what a crash may do to the results.
type Delivery int

// The delivery guarantees.
const (
	// ExactlyOnce stores results with the commit and publishes them after it.
	ExactlyOnce Delivery = iota
	// AtLeastOnce publishes results before the commit, for the lowest latency;
	// a crash may publish some of them again.
	AtLeastOnce
)

// Options of a flow.
type Options struct {
	// Partitions is the number of key groups, 1 to [MaxPartitions]. It is fixed
	// when the flow first runs. Defaults to [DefaultPartitions].
	Partitions int
	// OnError defaults to [DeadLetter].
	OnError OnError
	// Delivery defaults to [ExactlyOnce].
	Delivery Delivery
	// CommitInterval bounds how long a busy task waits with its next commit.
	// Defaults to [DefaultCommitInterval].
	CommitInterval time.Duration
	// Definition is a text that stands for the logic of the steps, such as the
	// YAML file of the flow or a version of the program; it goes into [Flow.Hash].
	Definition string
}

// Builder collects the steps of a flow. Its mistakes are reported by Build,
// all together.
type Builder struct {
	name    string
	opts    Options
	steps   []StepInfo
	ids     map[string]bool
	sources []sourceNode
	keys    []keyNode
	sinks   []SinkInfo
	// crossings are the steps that change the key, exchange is the index of the sink
	// that their records cross by, -1 without any.
	crossings []crossing
	exchange  int
	dead      int
	control   int
	// timed: watermarks mean something. lastTimed is the last stage with steps that wait
	// for times.
	timed     bool
	lastTimed int
	built     bool
	// streamTimed: there are steps that go by the time of the streams.
	streamTimed bool
	lookups     []LookupInfo
	errs        []error
}

// SourceInfo describes a source of a flow.
type SourceInfo struct {
	// Step is the id of the source step.
	Step string
	// Stream is the name of the JetStream stream.
	Stream string
	// Subjects filters the stream; empty takes all of it.
	Subjects []string
	// PartitionBy is that of [Source].
	PartitionBy []int
	// Bucket is the KV bucket that the stream holds, if the source is one; Subjects are
	// then those of its keys.
	Bucket string
	// Clock is nil where the time of a record is the stream's timestamp.
	Clock *ClockInfo
}

// SinkKind says what a sink is.
type SinkKind string

// The kinds of sinks.
const (
	SinkStream  SinkKind = "stream"
	SinkBucket  SinkKind = "kv"
	SinkDead    SinkKind = "dead-letter"
	SinkControl SinkKind = "control"
	// SinkExchange is the stream by which records come from one stage to the next.
	SinkExchange SinkKind = "exchange"
)

// SinkInfo describes a sink of a flow.
type SinkInfo struct {
	// Step is the id of the sink step; empty for the dead-letter, the control and
	// the exchange sink, which belong to the flow.
	Step string
	// Kind of the sink.
	Kind SinkKind
	// Name of the stream or the bucket. The runtime names the dead-letter and
	// the control stream.
	Name string
	// Subjects that the sink publishes to, with wildcards; for a bucket, empty.
	Subjects []string
}

// StepInfo describes a step of a flow.
type StepInfo struct {
	// ID is stable across versions of the flow; state is stored under it.
	ID string
	// Kind such as "map" or "aggregate".
	Kind string
	// Stateful steps keep state for each key.
	Stateful bool
	// Version of the stored state; 0 without state.
	Version int
	// Keyed steps come after a KeyBy and run in a task.
	Keyed bool
	// Stage that the step runs in; see [Rekey].
	Stage int
	// Windows describes those of the step; empty if it has none.
	Windows string
	// TTL of the step's state, 0 if it has none.
	TTL time.Duration
}

var nameRE = regexp.MustCompile(`^[a-z0-9](?:[a-z0-9-]*[a-z0-9])?$`)

// ValidName reports whether a name may be a flow's: lower-case letters, digits
// and inner hyphens, at most 63 of them. The names dlq and fence are taken: what is
// below natsflow.<flow> would be that of the dead letters and fences. The exchange has
// natsflow.x.<flow>.<stage>.<partition>, of which the services of a flow x have none.
func ValidName(name string) bool {
	return len(name) <= 63 && nameRE.MatchString(name) && name != "dlq" && name != "fence"
}

// New starts a flow. Its name is the identity of its state; see [ValidName].
func New(name string, opts Options) *Builder {
	b := &Builder{name: name, opts: opts, ids: map[string]bool{}, exchange: -1, dead: -1, control: -1}
	if !ValidName(name) {
		b.errorf("flow %q: a name has lower-case letters, digits and inner hyphens, at most 63, and is not dlq or fence", name)
	}
	if b.opts.Partitions == 0 {
		b.opts.Partitions = DefaultPartitions
	}
	if b.opts.Partitions < 1 || b.opts.Partitions > MaxPartitions {
		b.errorf("flow %q: %d partitions, 1 to %d are possible", name, b.opts.Partitions, MaxPartitions)
		b.opts.Partitions = DefaultPartitions
	}
	if b.opts.CommitInterval == 0 {
		b.opts.CommitInterval = DefaultCommitInterval
	}
	if b.opts.CommitInterval < 0 {
		b.errorf("flow %q: negative commit interval %v", name, b.opts.CommitInterval)
	}
	if b.opts.OnError != DeadLetter && b.opts.OnError != Stop {
		b.errorf("flow %q: there is no OnError %d", name, b.opts.OnError)
	}
	if b.opts.Delivery != ExactlyOnce && b.opts.Delivery != AtLeastOnce {
		b.errorf("flow %q: there is no Delivery %d", name, b.opts.Delivery)
	}
	if b.opts.OnError == DeadLetter {
		b.dead = b.sink(SinkInfo{Kind: SinkDead})
	}
	return b
}

func (b *Builder) errorf(format string, args ...any) {
	b.errs = append(b.errs, fmt.Errorf(format, args...))
}

// step registers a step; an empty id is made from the kind and a number.
func (b *Builder) step(info StepInfo) int {
	if info.ID == "" {
		if info.Stateful {
			b.errorf("%s: a stateful step needs an id: its state is stored under it", info.Kind)
		}
		for n := len(b.steps) + 1; info.ID == "" || b.ids[info.ID]; n++ {
			info.ID = fmt.Sprintf("%s-%d", info.Kind, n)
		}
	}
	if b.ids[info.ID] {
		b.errorf("step %q: the id is used twice", info.ID)
	}
	if !validID(info.ID) {
		b.errorf("step %q: an id has at most %d bytes of valid UTF-8 and no control characters", info.ID, maxID)
	}
	if info.Version < 0 {
		b.errorf("step %q: negative version %d of the state", info.ID, info.Version)
	}
	if info.Version >= withHead {
		b.errorf("step %q: version %d of the state, at most %d is possible", info.ID, info.Version, withHead-1)
	}
	b.ids[info.ID] = true
	b.steps = append(b.steps, info)
	return len(b.steps) - 1
}

// maxID bounds the id of a step, which goes into each section of stored state
// and into a header of a dead letter.
const maxID = 128

func validID(id string) bool {
	return len(id) <= maxID && utf8.ValidString(id) && !strings.ContainsFunc(id, unicode.IsControl)
}

// need reports that a step lacks something without which it cannot run.
func (b *Builder) need(step int, what string, there bool) {
	if !there {
		b.errorf("step %q: there is no %s", b.steps[step].ID, what)
	}
}

func (b *Builder) sink(info SinkInfo) int {
	b.sinks = append(b.sinks, info)
	return len(b.sinks) - 1
}

// Build checks the flow and returns it. The error joins everything that is
// wrong with it. It ends the building: later steps are not a part of the flow,
// and a second Build is an error.
func (b *Builder) Build() (*Flow, error) {
	if b.built {
		return nil, fmt.Errorf("flow %q: it was built already", b.name)
	}
	b.built = true
	if len(b.sources) == 0 {
		b.errorf("flow %q: no source", b.name)
	}
	if !slices.ContainsFunc(b.sinks, func(s SinkInfo) bool { return s.Kind != SinkDead }) {
		b.errorf("flow %q: no sink: end it with To, ToKV or StopWhen", b.name)
	}
	if n := 1 + len(b.stages()); n > MaxStages {
		b.errorf("flow %q: %d stages, at most %d are possible", b.name, n, MaxStages)
	}
	if err := errors.Join(b.errs...); err != nil {
		return nil, err
	}
	return &Flow{
		name: b.name, opts: b.opts, steps: slices.Clone(b.steps), sources: slices.Clone(b.sources),
		keys: slices.Clone(b.keys), sinks: slices.Clone(b.sinks), dead: b.dead, control: b.control,
		timed: b.timed, lastTimed: b.lastTimed, twoTimes: b.streamTimed && b.eventTimed(),
		crossings: slices.Clone(b.crossings), exchange: b.exchange, stages: 1 + len(b.stages()),
		lookups: slices.Clone(b.lookups),
	}, nil
}

// Flow is a built dataflow. It is immutable and safe for concurrent use; the
// routers and tasks made from it are not.
type Flow struct {
	name    string
	opts    Options
	steps   []StepInfo
	sources []sourceNode
	keys    []keyNode
	sinks   []SinkInfo
	dead    int
	control int
	timed   bool
	// twoTimes: the time of the streams is not the watermark, and there are steps that
	// go by it.
	twoTimes bool

	lastTimed int
	crossings []crossing
	exchange  int
	stages    int
	lookups   []LookupInfo
}

// Name returns the flow's name.
func (f *Flow) Name() string { return f.name }

// Options returns the options with their defaults filled in.
func (f *Flow) Options() Options { return f.opts }

// Steps returns the steps in the order of their making.
func (f *Flow) Steps() []StepInfo { return slices.Clone(f.steps) }

// Sinks returns the sinks; an output names its sink by the index in it.
func (f *Flow) Sinks() []SinkInfo { return slices.Clone(f.sinks) }

// Sources returns the sources.
func (f *Flow) Sources() []SourceInfo {
	infos := make([]SourceInfo, len(f.sources))
	for i, s := range f.sources {
		infos[i] = s.info()
	}
	return infos
}

// Hash identifies the definition of the flow, as far as it is data: its name,
// number of partitions and [Options.Definition]; the sources with their streams
// and subjects; the steps in the order of their making, each with its id, its
// kind, the version of its state and whether it comes behind a key; and the sinks
// with their streams or buckets and subjects; the clocks of sources, the windows and the
// TTL of steps and the buckets that they look keys up in. It is the same in every process and
// every build. 16 hexadecimal digits.
//
// What a flow does besides is not in it: functions of Go (a key, a predicate, a
// codec) have no identity, so a flow in Go whose functions change keeps its hash
// unless its Definition changes, too; and OnError, Delivery and CommitInterval,
// with the sink of dead letters, are settings of a run.
func (f *Flow) Hash() string {
	b := fmt.Appendf(nil, "%s\n%d\n%q\n", f.name, f.opts.Partitions, f.opts.Definition)
	for _, s := range f.Sources() {
		b = fmt.Appendf(b, "source %q %q %q\n", s.Step, s.Stream, s.Subjects)
		if s.Bucket != "" {
			b = fmt.Appendf(b, "bucket %q\n", s.Bucket)
		}
		if len(s.PartitionBy) > 0 {
			b = fmt.Appendf(b, "partition by %v\n", s.PartitionBy)
		}
		if c := s.Clock; c != nil {
			b = fmt.Appendf(b, "time lateness %v idle %v ahead %v\n", c.Lateness, c.Idle, c.MaxAhead)
		}
	}
	for _, s := range f.steps {
		b = fmt.Appendf(b, "step %q %q %v %d %v\n", s.ID, s.Kind, s.Stateful, s.Version, s.Keyed)
		if s.Windows != "" {
			b = fmt.Appendf(b, "windows %s\n", s.Windows)
		}
		if s.TTL != 0 {
			b = fmt.Appendf(b, "ttl %v\n", s.TTL)
		}
		if s.Stage > 0 {
			b = fmt.Appendf(b, "stage %d\n", s.Stage)
		}
	}
	for _, l := range f.lookups {
		b = fmt.Appendf(b, "lookup %q %q\n", l.Step, l.Bucket)
	}
	for _, s := range f.sinks {
		if s.Step != "" {
			b = fmt.Appendf(b, "sink %q %q %q %q\n", s.Step, s.Kind, s.Name, s.Subjects)
		}
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])[:16]
}
