package flow_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

// mistake adds something to a sound flow, and wants an error.
type mistake struct {
	add  func(b *flow.Builder, s flow.Stream[string])
	want string
}

func (m mistake) check(t *testing.T) {
	b := newFlow()
	s := keyed(b)
	textTo(s)
	m.add(b, s)
	f, err := b.Build()
	if f != nil || err == nil || !strings.Contains(err.Error(), m.want) {
		t.Errorf("error %v, want %q", err, m.want)
	}
}

func TestBuilder_Errors(t *testing.T) {
	keep := func(_ *flow.Meta, n *int64, v string, emit func(string)) error { return nil }
	yes := func(*flow.Meta, string) (bool, error) { return true, nil }
	by := func(_ *flow.Meta, v string) (string, error) { return v, nil }
	agg := counting(flow.EmitUpdate)
	for name, test := range map[string]mistake{
		"id twice": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Filter(s, yes, flow.ID("x"))
			flow.Filter(s, yes, flow.ID("x"))
		}, `step "x": the id is used twice`},
		"id of a stateful step twice": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Stateful(s, "x", decimalState, keep)
			flow.Dedupe(s, "x", time.Second, by)
		}, `step "x": the id is used twice`},
		"stateful without id":  {func(_ *flow.Builder, s flow.Stream[string]) { flow.Stateful(s, "", decimalState, keep) }, "stateful: a stateful step needs an id"},
		"id with a line break": {func(_ *flow.Builder, s flow.Stream[string]) { flow.Filter(s, yes, flow.ID("x\ny")) }, `step "x\ny": an id has`},
		"id too long": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Filter(s, yes, flow.ID(strings.Repeat("x", 129)))
		}, "an id has at most 128 bytes"},
		"id not UTF-8": {func(_ *flow.Builder, s flow.Stream[string]) { flow.Filter(s, yes, flow.ID("x\xff")) }, "valid UTF-8"},
		"key twice":    {func(_ *flow.Builder, s flow.Stream[string]) { flow.KeyBy(s, by, flow.ID("x")) }, `step "x": the stream has a key already`},
		"stateful without key": {func(b *flow.Builder, _ flow.Stream[string]) {
			s := flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText())
			flow.Stateful(s, "x", decimalState, keep)
		}, `step "x": stateful keeps state for each key: put a KeyBy before it`},
		"aggregate without key": {func(b *flow.Builder, _ flow.Stream[string]) {
			flow.Aggregate(flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText()), "x", agg)
		}, `step "x": aggregate keeps state for each key`},
		"dedupe without key": {func(b *flow.Builder, _ flow.Stream[string]) {
			flow.Dedupe(flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText()), "x", time.Second, by)
		}, `step "x": dedupe keeps state for each key`},
		"another word for a kind": {func(b *flow.Builder, _ flow.Stream[string]) {
			flow.Dedupe(flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText()), "x", time.Second, by, flow.Kind("uniq"))
		}, `step "x": uniq keeps state for each key`},
		"dedupe without a time": {func(_ *flow.Builder, s flow.Stream[string]) { flow.Dedupe(s, "x", 0, by) }, `step "x": dedupe within 0s`},
		"merge keyed and not": {func(b *flow.Builder, s flow.Stream[string]) {
			flow.Merge(s, flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText()))
		}, "some of the streams are keyed"},
		"merge of two flows": {func(_ *flow.Builder, s flow.Stream[string]) { flow.Merge(s, keyed(newFlow())) }, "different flows"},
		"source twice": {func(b *flow.Builder, _ flow.Stream[string]) {
			flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText())
		}, `source "IN" is read twice`},
		"source without stream": {func(b *flow.Builder, _ flow.Stream[string]) { flow.From(b, flow.Source{}, flow.DecodeText()) }, "neither a stream nor a bucket is named"},
	} {
		t.Run(name, test.check)
	}
}

func TestBuilder_MissingParts(t *testing.T) {
	keep := func(_ *flow.Meta, n *int64, v string, emit func(string)) error { return nil }
	agg := counting(flow.EmitUpdate)
	for name, test := range map[string]mistake{
		"no decoder": {func(b *flow.Builder, _ flow.Stream[string]) {
			flow.From[string](b, flow.Source{Stream: "IN2"}, nil, flow.ID("x"))
		}, `step "x": there is no decoder`},
		"no map":       {func(_ *flow.Builder, s flow.Stream[string]) { flow.Map[string, string](s, nil, flow.ID("x")) }, `step "x": there is no function`},
		"no filter":    {func(_ *flow.Builder, s flow.Stream[string]) { flow.Filter(s, nil) }, `there is no function`},
		"no flatmap":   {func(_ *flow.Builder, s flow.Stream[string]) { flow.FlatMap[string, string](s, nil) }, `there is no function`},
		"no branch":    {func(_ *flow.Builder, s flow.Stream[string]) { flow.Branch(s, nil) }, `there is no function`},
		"no inspect":   {func(_ *flow.Builder, s flow.Stream[string]) { flow.Inspect(s, nil) }, `there is no function`},
		"no stop-when": {func(_ *flow.Builder, s flow.Stream[string]) { flow.StopWhen(s, nil) }, `there is no function`},
		"no by":        {func(_ *flow.Builder, s flow.Stream[string]) { flow.Dedupe(s, "x", time.Second, nil) }, `there is no function`},
		"no key": {func(b *flow.Builder, _ flow.Stream[string]) {
			flow.KeyBy(flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText()), nil)
		}, `there is no function`},
		"no stateful": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Stateful[string, int64, string](s, "x", decimalState, nil)
		}, `there is no function`},
		"no state codec": {func(_ *flow.Builder, s flow.Stream[string]) { flow.Stateful(s, "x", flow.StateCodec[int64]{}, keep) }, `there is no state codec`},
		"negative version": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.Stateful(s, "x", flow.JSONState[int64](-1, nil), keep)
		}, `negative version -1`},
		"no add":    {func(_ *flow.Builder, s flow.Stream[string]) { a := agg; a.Add = nil; flow.Aggregate(s, "x", a) }, `there is no Add`},
		"no result": {func(_ *flow.Builder, s flow.Stream[string]) { a := agg; a.Result = nil; flow.Aggregate(s, "x", a) }, `there is no Result`},
		"no aggregate codec": {func(_ *flow.Builder, s flow.Stream[string]) {
			a := agg
			a.State.Decode = nil
			flow.Aggregate(s, "x", a)
		}, `there is no state codec`},
		"no such emit mode": {func(_ *flow.Builder, s flow.Stream[string]) { a := agg; a.Emit = 5; flow.Aggregate(s, "x", a) }, `there is no EmitMode 5`},
	} {
		t.Run(name, test.check)
	}
}

func TestBuilder_SinkErrors(t *testing.T) {
	sink := flow.Sink[string]{Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."), Encode: flow.EncodeText()}
	for name, test := range map[string]mistake{
		"to without stream":   {func(_ *flow.Builder, s flow.Stream[string]) { k := sink; k.Stream = ""; flow.To(s, k) }, `To needs`},
		"to without subjects": {func(_ *flow.Builder, s flow.Stream[string]) { k := sink; k.Subjects = nil; flow.To(s, k) }, `To needs`},
		"to without subject":  {func(_ *flow.Builder, s flow.Stream[string]) { k := sink; k.Subject = nil; flow.To(s, k) }, `To needs`},
		"to without encode":   {func(_ *flow.Builder, s flow.Stream[string]) { k := sink; k.Encode = nil; flow.To(s, k) }, `To needs`},
		"to a bad subject": {func(_ *flow.Builder, s flow.Stream[string]) {
			k := sink
			k.Subjects = []string{"out.>.x"}
			flow.To(s, k)
		}, `"out.>.x" is not a subject`},
		"to a bad stream": {func(_ *flow.Builder, s flow.Stream[string]) { k := sink; k.Stream = "a.b"; flow.To(s, k) }, `"a.b" is not the name of a stream`},
		"kv without bucket": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.ToKV(s, flow.KVSink[string]{Encode: flow.EncodeText()})
		}, `ToKV needs`},
		"kv without encode": {func(_ *flow.Builder, s flow.Stream[string]) { flow.ToKV(s, flow.KVSink[string]{Bucket: "B"}) }, `ToKV needs`},
		"kv of a bad bucket": {func(_ *flow.Builder, s flow.Stream[string]) {
			flow.ToKV(s, flow.KVSink[string]{Bucket: "a.b", Encode: flow.EncodeText()})
		}, `"a.b" is not the name of a bucket`},
	} {
		t.Run(name, test.check)
	}
}

func TestBuilder_OptionErrors(t *testing.T) {
	for want, opts := range map[string]flow.Options{
		"4097 partitions":          {Partitions: 4097},
		"-1 partitions":            {Partitions: -1},
		"negative commit interval": {CommitInterval: -time.Second},
		"there is no OnError 7":    {OnError: 7},
		"there is no Delivery 3":   {Delivery: 3},
	} {
		b := flow.New("test", opts)
		textTo(keyed(b))
		if _, err := b.Build(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	_, err := flow.New("Not a name", flow.Options{Partitions: 5000}).Build()
	for _, want := range []string{`flow "Not a name": a name has`, "5000 partitions", "no source", "no sink"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}

func TestValidName(t *testing.T) {
	for name, want := range map[string]bool{
		"a": true, "flights": true, "a-b-3": true, "3": true, strings.Repeat("a", 63): true,
		"": false, "-a": false, "a-": false, "A": false, "a_b": false, "a.b": false, "ä": false, "a\n": false, strings.Repeat("a", 64): false,
	} {
		if got := flow.ValidName(name); got != want {
			t.Errorf("ValidName(%q) = %v", name, got)
		}
	}
}

func TestFlow_Describes(t *testing.T) {
	b := flow.New("test", flow.Options{})
	subjects := []string{"in.>"}
	src := flow.From(b, flow.Source{Stream: "IN", Subjects: subjects}, flow.DecodeText())
	s := flow.KeyBy(flow.Map(src, func(_ *flow.Meta, v string) (string, error) { return v, nil }), firstWord)
	textTo(flow.Stateful(s, "script", decimalState, script, flow.Kind("count")))
	f := build(t, b)
	subjects[0] = "changed"
	f.Sources()[0].Stream, f.Steps()[0].ID, f.Sinks()[0].Name = "x", "x", "x"
	if f.Name() != "test" {
		t.Errorf("name %q", f.Name())
	}
	if diff := cmp.Diff(flow.Options{Partitions: 16, CommitInterval: 100 * time.Millisecond}, f.Options()); diff != "" {
		t.Errorf("options (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]flow.SourceInfo{{Step: "source-1", Stream: "IN", Subjects: []string{"in.>"}}}, f.Sources()); diff != "" {
		t.Errorf("sources (-want +got):\n%s", diff)
	}
	steps := []flow.StepInfo{
		{ID: "source-1", Kind: "source"},
		{ID: "map-2", Kind: "map"},
		{ID: "key-3", Kind: "key"},
		{ID: "script", Kind: "count", Stateful: true, Version: 1, Keyed: true},
		{ID: "out", Kind: "to", Keyed: true},
	}
	if diff := cmp.Diff(steps, f.Steps()); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
}

// A flow is what it was when it was built.
func TestFlow_IsImmutable(t *testing.T) {
	b := newFlow()
	s := keyed(b)
	textTo(s)
	f := build(t, b)
	textTo(flow.Map(s, func(*flow.Meta, string) (string, error) { return "late", nil }))
	if _, err := b.Build(); err == nil || !strings.Contains(err.Error(), "built already") {
		t.Errorf("a second Build: %v", err)
	}
	start(t, f).want([]string{"k a"}, out("k", "k a"))
	if n := len(f.Steps()); n != 3 {
		t.Errorf("%d steps, want 3", n)
	}
	// Routers and tasks may be made at the same time; the race detector looks.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { start(t, f).want([]string{"k a"}, out("k", "k a")) })
	}
	wg.Wait()
}

// hashed is a flow with everything that the hash covers.
func hashed(change string) *flow.Builder {
	is := func(what, changed, text string) string {
		if change == what {
			return changed
		}
		return text
	}
	opts := flow.Options{Partitions: 4, Definition: is("definition", "other", "text")}
	version := 1
	switch change {
	case "partitions":
		opts.Partitions = 5
	case "version":
		version = 2
	case "commit interval":
		opts.CommitInterval = time.Second
	case "on error":
		opts.OnError = flow.Stop
	case "delivery":
		opts.Delivery = flow.AtLeastOnce
	}
	b := flow.New(is("name", "other", "test"), opts)
	src := flow.From(b, flow.Source{
		Stream: is("source", "IN2", "IN"), Subjects: []string{is("subject", "in.*", "in.>")},
	}, flow.DecodeText())
	byKey := flow.KeyBy(src, firstWord, flow.ID(is("key", "by-word", "by")))
	counts := flow.Stateful(byKey, is("id", "other", "count"), flow.JSONState[int64](version, nil), script, flow.Kind(is("kind", "other", "stateful")))
	noted := src
	if change == "place of a step" {
		noted = byKey
	}
	flow.Inspect(noted, func(*flow.Meta, string) {})
	subject := is("sink subject", "out.*.x", "out.*")
	flow.To(counts, flow.Sink[string]{
		Stream: is("sink", "OUT2", "OUT"), Subjects: []string{subject}, Subject: flow.KeySubject[string]("out."), Encode: flow.EncodeText(),
	}, flow.ID(is("sink id", "out2", "out")))
	if change == "no bucket" {
		return b
	}
	flow.ToKV(counts, flow.KVSink[string]{Bucket: is("bucket", "latest2", "latest"), Encode: flow.EncodeText()})
	return b
}

// The hash is stored: it must be the same in every build of every version.
func TestFlow_HashIsStable(t *testing.T) {
	const want = "aebf955d9c82e714"
	if got := build(t, hashed("")).Hash(); got != want {
		t.Errorf("hash %s, want %s", got, want)
	}
	seen := map[string]string{want: "nothing"}
	for _, change := range []string{
		"partitions", "definition", "name", "source", "subject", "key", "id", "kind", "version", "place of a step",
		"sink", "sink subject", "sink id", "bucket", "no bucket",
	} {
		got := build(t, hashed(change)).Hash()
		if other, ok := seen[got]; ok {
			t.Errorf("a change of %s hashes like one of %s", change, other)
		}
		seen[got] = change
	}
	for _, change := range []string{"commit interval", "on error", "delivery"} {
		if got := build(t, hashed(change)).Hash(); got != want {
			t.Errorf("hash %s after a change of %s, which is not of the definition", got, change)
		}
	}
}
