package flow_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

func TestSourceInfo_Transforms(t *testing.T) {
	eu := flow.Partition("eu", 8)
	for _, c := range []struct {
		subjects []string
		by       []int
		want     []flow.Transform
	}{
		{[]string{"a.*"}, nil, nil},
		{[]string{"a.*"}, []int{2}, []flow.Transform{{"a.*", "{{partition(8,1)}}.a.{{wildcard(1)}}"}}},
		{[]string{"*.b.*"}, []int{3}, []flow.Transform{{"*.b.*", "{{partition(8,2)}}.{{wildcard(1)}}.b.{{wildcard(2)}}"}}},
		{[]string{"*.b.*"}, []int{3, 1}, []flow.Transform{{"*.b.*", "{{partition(8,2,1)}}.{{wildcard(1)}}.b.{{wildcard(2)}}"}}},
		{[]string{"a.*.>"}, []int{2}, []flow.Transform{{"a.*.>", "{{partition(8,1)}}.a.{{wildcard(1)}}.>"}}},
		{[]string{"a.>"}, []int{2}, []flow.Transform{
			{"a.*", "{{partition(8,1)}}.a.{{wildcard(1)}}"},
			{"a.*.>", "{{partition(8,1)}}.a.{{wildcard(1)}}.>"},
		}},
		{nil, []int{2}, []flow.Transform{
			{"*", "0.{{wildcard(1)}}"},
			{"*.*", "{{partition(8,2)}}.{{wildcard(1)}}.{{wildcard(2)}}"},
			{"*.*.>", "{{partition(8,2)}}.{{wildcard(1)}}.{{wildcard(2)}}.>"},
		}},
		{[]string{"a.*.>"}, []int{2, 4}, []flow.Transform{
			{"a.*.*", "0.a.{{wildcard(1)}}.{{wildcard(2)}}"},
			{"a.*.*.*", "{{partition(8,1,3)}}.a.{{wildcard(1)}}.{{wildcard(2)}}.{{wildcard(3)}}"},
			{"a.*.*.*.>", "{{partition(8,1,3)}}.a.{{wildcard(1)}}.{{wildcard(2)}}.{{wildcard(3)}}.>"},
		}},
		{[]string{"a.eu.*", "a.us", "$b.*"}, []int{2}, []flow.Transform{
			{"a.eu.*", fmt.Sprintf("%d.a.eu.{{wildcard(1)}}", eu)},
			{"a.us", fmt.Sprintf("%d.a.us", flow.Partition("us", 8))},
			{"$b.*", "{{partition(8,1)}}.$b.{{wildcard(1)}}"},
		}},
		{[]string{"a.eu.>"}, []int{2}, []flow.Transform{{"a.eu.>", fmt.Sprintf("%d.a.eu.>", eu)}}},
	} {
		t.Run(fmt.Sprint(c.subjects, c.by), func(t *testing.T) {
			got, err := flow.SourceInfo{Subjects: c.subjects, PartitionBy: c.by}.Transforms(8)
			if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
				t.Errorf("error %v, transforms (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestSourceInfo_Transforms_refuses(t *testing.T) {
	for _, c := range []struct {
		subject string
		by      []int
		want    string
	}{
		{"a.*", []int{0}, "count from 1"},
		{"a.>", []int{33}, "at most 32"},
		{"a.*", []int{2, 2}, "named twice"},
		{"a.*", []int{3}, "only 2 tokens"},
		{"a.*", []int{1, 2}, "the server can hash wildcards only"},
		{"a.$1.*", []int{3}, "a function in a transform"},
		{"a.{{x}}.*", []int{3}, "a function in a transform"},
	} {
		t.Run(fmt.Sprint(c.subject, c.by), func(t *testing.T) {
			src := flow.Source{Stream: "S", Subjects: []string{c.subject}, PartitionBy: c.by}
			if _, err := (flow.SourceInfo{Subjects: src.Subjects, PartitionBy: c.by}).Transforms(8); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
			b := newFlow()
			textTo(keyBySubject(flow.From(b, src, func(_ *flow.Meta, data []byte) (string, error) { return string(data), nil })))
			if _, err := b.Build(); err == nil || !strings.Contains(err.Error(), `source "S": `) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Build: error %v", err)
			}
		})
	}
}

func keyBySubject(s flow.Stream[string]) flow.Stream[string] {
	return flow.KeyBy(s, func(m *flow.Meta, _ string) (string, error) { return m.Subject, nil })
}

// All that comes of a record goes to the partition that it is in: also its dead
// letters, and what has no key. A key of another partition is an error.
func TestRouter_RouteMirrored(t *testing.T) {
	key := func(_ *flow.Meta, v string) (string, error) {
		if v == "" {
			return "", fmt.Errorf("no key")
		}
		return v, nil
	}
	source := func(b *flow.Builder) flow.Stream[string] {
		src := flow.Source{Stream: "S", Subjects: []string{"a.*"}, PartitionBy: []int{2}}
		return flow.From(b, src, func(_ *flow.Meta, data []byte) (string, error) { return string(data), nil })
	}
	b := newFlow(func(o *flow.Options) { o.Partitions = 8 })
	textTo(flow.KeyBy(source(b), key))
	keyedFlow := build(t, b)
	b = newFlow(func(o *flow.Options) { o.Partitions = 8 })
	textTo(source(b))
	keyless := build(t, b)
	p := flow.Partition("k", keyedFlow.Options().Partitions)
	other := (p + 1) % keyedFlow.Options().Partitions
	for _, c := range []struct {
		name       string
		flow       *flow.Flow
		subject    string
		data       string
		seen       uint64
		want       int
		dead, fail string
	}{
		{name: "its key", flow: keyedFlow, subject: fmt.Sprintf("%d.a.k", p), data: "k", want: p},
		{name: "applied", flow: keyedFlow, subject: fmt.Sprintf("%d.a.k", p), data: "k", seen: 7, want: -1},
		{name: "no key", flow: keyedFlow, subject: fmt.Sprintf("%d.a.k", p), want: p, dead: "no key"},
		{name: "another key", flow: keyedFlow, subject: fmt.Sprintf("%d.a.k", other), data: "k", want: other, dead: `the key "k" belongs to partition`},
		{name: "without keys", flow: keyless, subject: fmt.Sprintf("%d.a.k", other), data: "k", want: other},
		{name: "foreign", flow: keyedFlow, subject: "x.a.k", data: "k", fail: "does not begin with a partition"},
		{name: "beyond", flow: keyedFlow, subject: "4096.a.k", data: "k", fail: "does not begin with a partition"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := c.flow.Router(0)
			for i := range c.flow.Options().Partitions {
				r.Seen(i, c.seen)
			}
			err := r.RouteMirrored(c.subject, 7, 0, []byte(c.data))
			if c.fail != "" {
				if err == nil || !strings.Contains(err.Error(), c.fail) {
					t.Errorf("error %v, want one with %q", err, c.fail)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := -1
			r.Take(func(b *flow.Batch) {
				got = b.Partition
				task := c.flow.Task(b.Partition)
				if err := task.Play(b); err != nil {
					t.Fatal(err)
				}
				sealed, err := task.Seal()
				if err != nil {
					t.Fatal(err)
				}
				err = flow.Outputs(sealed.Outbox, func(_ int, o flow.Output) error {
					isDead := c.flow.Sinks()[o.Sink].Kind == flow.SinkDead
					headers := fmt.Sprint(o.Headers)
					if isDead != (c.dead != "") || isDead && (!strings.Contains(headers, c.dead) || !strings.Contains(headers, "a.k") || strings.Contains(headers, c.subject)) {
						t.Errorf("result %+v, headers %s", o, headers)
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				b.Release()
			})
			if got != c.want {
				t.Errorf("partition %d, want %d", got, c.want)
			}
		})
	}
}

// What has a mirror is another definition; what has none has the hash of before.
func TestFlow_Hash_partitionBy(t *testing.T) {
	hash := func(by []int) string {
		b := newFlow(func(o *flow.Options) { o.Partitions = 8 })
		textTo(keyBySubject(flow.From(b, flow.Source{Stream: "S", PartitionBy: by}, func(_ *flow.Meta, data []byte) (string, error) { return string(data), nil })))
		return build(t, b).Hash()
	}
	if hash(nil) != hash([]int{}) || hash(nil) == hash([]int{1}) || hash([]int{1}) == hash([]int{2}) {
		t.Errorf("%s %s %s", hash(nil), hash([]int{1}), hash([]int{2}))
	}
}
