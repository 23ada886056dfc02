package flowspec

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
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
	// Source of the records.
	Source Source
	// OnError says what becomes of records that fail.
	OnError flow.OnError
	// Delivery of the results.
	Delivery flow.Delivery
	// CommitInterval is flow.DefaultCommitInterval if the file does not say.
	CommitInterval time.Duration
	// Dev is for `natsflow dev` only.
	Dev Dev

	steps []step
}

// Source is the stream that a flow reads.
type Source struct {
	// Stream is its name.
	Stream string
	// Subjects filters it; empty takes all of it.
	Subjects []string
	// Format of the payloads; JSON if the file does not say.
	Format Format
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
	s := &Spec{
		File: file, Partitions: flow.DefaultPartitions, CommitInterval: flow.DefaultCommitInterval,
		Source: Source{Format: JSON},
	}
	p := &specParser{document: d, spec: s}
	p.parse(root)
	if err := d.err(); err != nil {
		return nil, err
	}
	return s, nil
}

// specParser reads the fields of a flow file.
type specParser struct {
	*document
	spec   *Spec
	scope  scope
	source position
}

func (p *specParser) parse(root ast.Node) {
	fields, ok := p.mapping(root, "a flow file")
	if !ok {
		return
	}
	var steps, dev *field
	have := map[string]bool{}
	for _, f := range fields {
		have[f.name] = true
		switch f.name {
		case "flow":
			p.name(f)
		case "partitions":
			p.partitions(f)
		case "source":
			p.parseSource(f)
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
			p.unknown(f, "", "flow", "partitions", "source", "steps", "on_error", "delivery", "commit", "dev")
		}
	}
	for _, name := range []string{"flow", "source", "steps"} {
		if !have[name] {
			p.errorf(p.at(root), "", "the field %q is missing", name)
		}
	}
	// The steps need to know the format of the source, wherever it stands.
	p.scope = scope{format: p.spec.Source.Format}
	if p.scope.format != JSON {
		p.scope.known, p.scope.from = true, "format "+string(p.scope.format)
	}
	if steps != nil {
		p.parseSteps(*steps)
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
		p.errorf(s.start, "", "flow %q: a name has lower-case letters, digits and inner hyphens, at most 63", s.text)
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

func (p *specParser) parseSource(f field) {
	p.source = f.at
	fields, ok := p.mapping(f.value, "source")
	if !ok {
		return
	}
	src := &p.spec.Source
	stream := false
	for _, f := range fields {
		switch f.name {
		case "stream":
			stream = true
			src.Stream = p.streamName(f.value, "source.stream")
		case "subjects":
			src.Subjects = p.subjects(f.value)
		case "format":
			src.Format = []Format{JSON, Text, Bytes}[p.choice(f, "json", "text", "bytes")]
		default:
			p.unknown(f, "source", "stream", "subjects", "format")
		}
	}
	if !stream {
		p.errorf(f.at, "", "source: the field \"stream\" is missing")
	}
}

// streamName reads the name of a stream.
func (p *specParser) streamName(n ast.Node, what string) string {
	s, ok := p.text(n, what)
	if ok && (s.text == "" || len(s.text) > 255 || strings.ContainsAny(s.text, " \t\r\n.*>/\\")) {
		p.errorf(s.start, "", "%s: %q cannot be the name of a stream: no white space, . * > / \\", what, s.text)
	}
	return s.text
}

func (p *specParser) subjects(n ast.Node) []string {
	if s, isText := n.(*ast.StringNode); isText {
		p.errorf(p.at(n), fmt.Sprintf("write [%q]", s.Value), "source.subjects is a list, this is text")
		return nil
	}
	nodes, ok := p.list(n, "source.subjects")
	if !ok {
		return nil
	}
	var subjects []string
	for _, n := range nodes {
		s, ok := p.text(n, "a subject")
		if !ok {
			continue
		}
		if mistake := validSubject(s.text); mistake != "" {
			p.errorf(s.start, "", "source.subjects: %q has %s", s.text, mistake)
			continue
		}
		for _, other := range subjects {
			if overlap(other, s.text) {
				p.errorf(s.start, "", "source.subjects: %q and %q overlap, which the server refuses", other, s.text)
			}
		}
		subjects = append(subjects, s.text)
	}
	return subjects
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
	src := p.spec.Source
	if stream.name != src.Stream && src.Stream != "" {
		p.errorf(stream.at, fmt.Sprintf("the source is %q", src.Stream), "%s: the flow does not read stream %q", what, stream.name)
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
				p.checkFeedSubject(s, feed.template)
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

// checkFeedSubject refuses a feed that the source would not read.
func (p *specParser) checkFeedSubject(s scalar, t *template) {
	subjects := p.spec.Source.Subjects
	if t == nil || len(subjects) == 0 {
		return
	}
	if !slices.ContainsFunc(subjects, func(subject string) bool { return overlap(subject, t.wildcard) }) {
		p.errorf(s.start, "", "dev.feed: the source does not read %q: its subjects are %s", s.text, strings.Join(subjects, ", "))
	}
}
