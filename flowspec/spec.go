package flowspec

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
	"github.com/tidwall/gjson"

	"natsflow/flow"
)

// FileName is the name of the flow file in a folder.
const FileName = "flow.yaml"

// Format says what the payloads of a source are.
type Format string

// The formats.
const (
	// JSON payloads have members that expressions can name.
	JSON Format = "json"
	// Text payloads are UTF-8; expressions name the whole of it _value.
	Text Format = "text"
	// Bytes are passed on; expressions do not see them.
	Bytes Format = "bytes"
)

// Spec is a flow as its file describes it, checked. It is immutable.
type Spec struct {
	// File that it was read from, as given to Load or Parse.
	File string
	// Name of the flow.
	Name string
	// Partitions, flow.DefaultPartitions if the file does not say.
	Partitions int
	// Sources of the records, in the order of the file; one at least.
	Sources []Source
	// OnError says what becomes of records that fail.
	OnError flow.OnError
	// Delivery of the results.
	Delivery flow.Delivery
	// CommitInterval is flow.DefaultCommitInterval if the file does not say.
	CommitInterval time.Duration
	// Dev is for `natsflow dev` only.
	Dev Dev

	// lists of steps, each behind those that it reads.
	lists []*stepList
}

// Source is a stream, or a KV bucket, that a flow reads.
type Source struct {
	// Name by which lists of steps read it; empty for the source of a flow that
	// has one without a name.
	Name string
	// Stream is the name of the stream; that of the bucket, KV_<bucket>, if it is one.
	Stream string
	// Subjects filters it; empty takes all of it. Those of a bucket are made of its
	// keys.
	Subjects []string
	// Bucket is the name of the bucket, empty for a stream, and Keys filters it.
	Bucket string
	Keys   []string
	// Format of the payloads; JSON if the file does not say.
	Format Format
	// PartitionBy are the tokens of the subject by which the server sorts the
	// records; empty where it does not.
	PartitionBy []int
	// Time says where the records have their time; nil for the timestamps of the
	// stream.
	Time *Clock
}

// Dev is what `natsflow dev` needs besides the flow.
type Dev struct {
	// Feed says, by the name of a source stream, what to fill it with.
	Feed map[string]Feed
}

// Feed is a file of lines that are published to a source stream.
type Feed struct {
	// File of newline-separated payloads, perhaps with gzip (.gz); its path is
	// that in the YAML, joined to the folder of the YAML file.
	File string
	// Subject as in the file, with placeholders for members of a line.
	Subject string

	template *template
}

// AppendSubject appends the subject of a line to dst. It returns an error when a
// placeholder has no value.
func (f Feed) AppendSubject(dst, line []byte) ([]byte, error) {
	if slices.ContainsFunc(f.template.parts, func(p templatePart) bool { return p.path != nil }) && !gjson.ValidBytes(line) {
		return dst, fmt.Errorf("subject %q: the line is not JSON: %s", f.Subject, excerpt(line))
	}
	return f.template.append(dst, nil, record{data: line})
}

// Wildcard returns the subject with "*" for each token that has a placeholder:
// what the stream has to listen to.
func (f Feed) Wildcard() string { return f.template.wildcard }

// Load reads a flow file, or the flow.yaml in a folder. Besides the errors of
// Parse it returns those of reading.
func Load(path string) (*Spec, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		inside := filepath.Join(path, FileName)
		if _, err := os.Stat(inside); errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read flow: there is no %s in %s: %w", FileName, path, fs.ErrNotExist)
		}
		path = inside
	}
	src, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read flow: %w", err)
	}
	return Parse(path, src)
}

// Parse reads a flow. file is its path, for errors and for files that it names.
// The error joins an [*Error] for each mistake.
func Parse(file string, src []byte) (*Spec, error) {
	d, root := parseDocument(file, src)
	if root == nil {
		return nil, d.err()
	}
	s := &Spec{File: file, Partitions: flow.DefaultPartitions, CommitInterval: flow.DefaultCommitInterval}
	p := &specParser{document: d, spec: s, places: map[string]*place{}}
	p.parse(root)
	if err := d.err(); err != nil {
		return nil, err
	}
	return s, nil
}

// specParser reads the fields of a flow file.
type specParser struct {
	*document
	spec *Spec
	// scope is what is known of the records where the parser is, in the steps of
	// the current list.
	scope   scope
	current *stepList
	// places are what a list can read, by name.
	places map[string]*place
}

func (p *specParser) parse(root ast.Node) {
	fields, ok := p.mapping(root, "a flow file")
	if !ok {
		return
	}
	var source, sources, steps, dev *field
	have := map[string]bool{}
	for _, f := range fields {
		have[f.name] = true
		switch f.name {
		case "flow":
			p.name(f)
		case "partitions":
			p.partitions(f)
		case "source":
			source = &f
		case "sources":
			sources = &f
		case "steps":
			steps = &f
		case "on_error":
			p.spec.OnError = flow.OnError(p.choice(f, "dead-letter", "stop"))
		case "delivery":
			p.spec.Delivery = flow.Delivery(p.choice(f, "exactly-once", "at-least-once"))
		case "commit":
			p.commit(f)
		case "dev":
			dev = &f
		default:
			p.unknown(f, "", "flow", "partitions", "source", "sources", "steps", "on_error", "delivery", "commit", "dev")
		}
	}
	have["source"] = have["source"] || have["sources"]
	for _, name := range []string{"flow", "source", "steps"} {
		if !have[name] {
			p.errorf(p.at(root), "", "the field %q is missing", name)
		}
	}
	// The steps need to know the sources, wherever they stand.
	p.parseSources(source, sources, steps)
	if steps != nil {
		p.parseSteps(*steps, sources)
	}
	if dev != nil {
		p.dev(*dev)
	}
}

func (p *specParser) unknown(f field, where string, possible ...string) {
	if where != "" {
		where += ": "
	}
	p.errorf(f.at, didYouMean(f.name, possible), "%sunknown field %q", where, f.name)
}

func (p *specParser) name(f field) {
	s, ok := p.text(f.value, "flow")
	if ok && !flow.ValidName(s.text) {
		p.errorf(s.start, "", "flow %q: a name has lower-case letters, digits and inner hyphens, at most 63, and is not dlq or fence", s.text)
	}
	p.spec.Name = s.text
}

func (p *specParser) partitions(f field) {
	n, ok := p.integer(f.value, "partitions")
	if !ok {
		return
	}
	if n < 1 || n > flow.MaxPartitions {
		p.errorf(p.at(f.value), "", "partitions: %d is not from 1 to %d", n, flow.MaxPartitions)
		return
	}
	p.spec.Partitions = n
}

// choice reads one of a few words and returns its index.
func (p *specParser) choice(f field, words ...string) int {
	s, ok := p.text(f.value, f.name)
	if !ok {
		return 0
	}
	i := slices.Index(words, s.text)
	if i < 0 {
		p.errorf(s.start, didYouMean(s.text, words), "%s: unknown value %q", f.name, s.text)
		return 0
	}
	return i
}

// duration reads a positive duration.
func (p *specParser) duration(n ast.Node, what string) (time.Duration, bool) {
	if _, number := n.(*ast.IntegerNode); number {
		p.errorf(p.at(n), "write it with its unit, such as 100ms, 24h or 30d", "%s: a number without a unit is not a duration", what)
		return 0, false
	}
	s, ok := p.text(n, what)
	if !ok {
		return 0, false
	}
	v, err := parseDuration(s.text)
	if err == nil && v <= 0 {
		err = fmt.Errorf("%q: a positive duration is needed", s.text)
	}
	if err != nil {
		p.errorf(s.start, "durations are such as 100ms, 1h30m or 30d", "%s: %v", what, err)
		return 0, false
	}
	return v, true
}

func (p *specParser) commit(f field) {
	fields, _ := p.mapping(f.value, "commit")
	for _, f := range fields {
		if f.name != "interval" {
			p.unknown(f, "commit", "interval")
			continue
		}
		if v, ok := p.duration(f.value, "commit.interval"); ok {
			p.spec.CommitInterval = v
		}
	}
}

func (p *specParser) dev(f field) {
	fields, _ := p.mapping(f.value, "dev")
	for _, f := range fields {
		if f.name != "feed" {
			p.unknown(f, "dev", "feed")
			continue
		}
		streams, _ := p.mapping(f.value, "dev.feed")
		for _, stream := range streams {
			p.feed(stream)
		}
	}
}

func (p *specParser) feed(stream field) {
	what := "dev.feed." + stream.name
	src := p.feedSource(stream, what)
	if src.Bucket != "" {
		p.errorf(stream.at, fmt.Sprintf("put values into it, such as by nats kv put %s KEY VALUE", src.Bucket), "%s: that is the bucket %s, which has no feed", what, src.Bucket)
		return
	}
	fields, ok := p.mapping(stream.value, what)
	if !ok {
		return
	}
	var feed Feed
	for _, f := range fields {
		switch f.name {
		case "file":
			if s, ok := p.text(f.value, what+".file"); ok && s.text != "" {
				feed.File = s.text
				if !filepath.IsAbs(s.text) {
					feed.File = filepath.Join(filepath.Dir(p.file), s.text)
				}
			}
		case "subject":
			if s, ok := p.text(f.value, what+".subject"); ok {
				feed.Subject = s.text
				feed.template = p.template(s, what+".subject", feedTemplate, &scope{format: JSON})
				p.checkFeedSubject(s, feed.template, src)
			}
		default:
			p.unknown(f, what, "file", "subject")
		}
	}
	if feed.File == "" || feed.Subject == "" {
		p.errorf(stream.at, "", "%s needs file and subject", what)
	}
	if p.spec.Dev.Feed == nil {
		p.spec.Dev.Feed = map[string]Feed{}
	}
	p.spec.Dev.Feed[stream.name] = feed
}

// feedSource finds the source that a feed is for, and reports that there is none.
func (p *specParser) feedSource(stream field, what string) Source {
	sources := p.spec.Sources
	if i := slices.IndexFunc(sources, func(s Source) bool { return s.Stream == stream.name }); i >= 0 {
		return sources[i]
	}
	var names []string
	for _, s := range sources {
		names = append(names, strconv.Quote(s.Stream))
	}
	if slices.Contains(names, `""`) || len(names) == 0 {
		return Source{} // which is reported
	}
	hint := "the source is " + strings.Join(names, "")
	if len(names) > 1 {
		hint = "the sources are " + strings.Join(names, ", ")
	}
	p.errorf(stream.at, hint, "%s: the flow does not read stream %q", what, stream.name)
	if len(sources) == 1 {
		return sources[0]
	}
	return Source{}
}

// checkFeedSubject refuses a feed that the source would not read.
func (p *specParser) checkFeedSubject(s scalar, t *template, src Source) {
	if t == nil || len(src.Subjects) == 0 {
		return
	}
	if !slices.ContainsFunc(src.Subjects, func(subject string) bool { return overlap(subject, t.wildcard) }) {
		p.errorf(s.start, "", "dev.feed: the source does not read %q: its subjects are %s", s.text, strings.Join(src.Subjects, ", "))
	}
}
