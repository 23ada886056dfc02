package flow_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

func TestSource_Bucket(t *testing.T) {
	for _, c := range []struct {
		src  flow.Source
		want flow.SourceInfo
	}{
		{flow.Source{Bucket: "B"}, flow.SourceInfo{Step: "source-1", Stream: "KV_B", Subjects: []string{"$KV.B.>"}, Bucket: "B"}},
		{
			flow.Source{Bucket: "B", Keys: []string{"eu.>", "us.*.a-1", "x=2E/y"}},
			flow.SourceInfo{Step: "source-1", Stream: "KV_B", Subjects: []string{"$KV.B.eu.>", "$KV.B.us.*.a-1", "$KV.B.x=2E/y"}, Bucket: "B"},
		},
	} {
		b := newFlow()
		textTo(flow.KeyBy(flow.From(b, c.src, flow.DecodeText()), firstWord))
		if diff := cmp.Diff([]flow.SourceInfo{c.want}, build(t, b).Sources()); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", c.src, diff)
		}
	}
}

func TestSource_Bucket_errors(t *testing.T) {
	for _, c := range []struct {
		src  flow.Source
		want string
	}{
		{flow.Source{}, "source: neither a stream nor a bucket is named"},
		{flow.Source{Stream: "A", Bucket: "B"}, `source bucket "B": a source has a Stream with Subjects, or a Bucket with Keys, not both`},
		{flow.Source{Subjects: []string{"a"}, Bucket: "B"}, "not both"},
		{flow.Source{Stream: "A", Keys: []string{"a"}}, `source "A": Keys are those of a Bucket`},
		{flow.Source{Bucket: "a.b"}, `source bucket "a.b": a bucket has letters`},
		{flow.Source{Bucket: "B", PartitionBy: []int{3}}, "PartitionBy is for streams"},
		{flow.Source{Bucket: "B", Keys: []string{"a b"}}, `"a b" cannot match a key`},
		{flow.Source{Bucket: "B", Keys: []string{"a..b"}}, "cannot match a key"},
		{flow.Source{Bucket: "B", Keys: []string{"a*"}}, "cannot match a key"},
		{flow.Source{Bucket: "B", Keys: []string{">.a"}}, "cannot match a key"},
		{flow.Source{Bucket: "B", Keys: []string{"ä"}}, "cannot match a key"},
	} {
		b := newFlow()
		textTo(flow.KeyBy(flow.From(b, c.src, flow.DecodeText()), firstWord))
		if _, err := b.Build(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error %v, want %q", c.src, err, c.want)
		}
	}
	b := newFlow()
	first := flow.From(b, flow.Source{Stream: "KV_B"}, flow.DecodeText())
	textTo(flow.KeyBy(flow.Merge(first, flow.From(b, flow.Source{Bucket: "B"}, flow.DecodeText())), firstWord))
	if _, err := b.Build(); err == nil || !strings.Contains(err.Error(), `source "KV_B" is read twice`) {
		t.Errorf("a bucket and its stream: %v", err)
	}
	b = newFlow()
	flow.From(b, flow.Source{Bucket: "B"}, flow.DecodeKV[string](nil), flow.ID("s"))
	if _, err := b.Build(); err == nil || !strings.Contains(err.Error(), `step "s": there is no decoder`) {
		t.Errorf("without a decoder: %v", err)
	}
}

func TestSourceInfo_Takes(t *testing.T) {
	some := flow.SourceInfo{Subjects: []string{"$KV.B.eu.>", "$KV.B.us.*"}}
	for subject, want := range map[string]bool{"$KV.B.eu.a.b": true, "$KV.B.us.a": true, "$KV.B.us.a.b": false, "$KV.B.eu": false, "other": false} {
		if some.Takes(subject) != want {
			t.Errorf("%s: %v", subject, !want)
		}
	}
	if !(flow.SourceInfo{}).Takes("any") {
		t.Error("a source without filters does not take all")
	}
}

// names keeps the latest name of each key of the bucket NAMES, and lists what came.
func names(opts flow.Options, clock flow.Clock) *flow.Builder {
	b := flow.New("names", opts)
	changes := flow.From(b, flow.Source{Bucket: "NAMES", Keys: []string{"eu.>", "us.>"}, Time: clock},
		flow.DecodeKV(func(_ *flow.Meta, data []byte) (string, error) {
			if string(data) == "bad" {
				return "", errors.New("is bad")
			}
			return string(data), nil
		}), flow.ID("names"))
	byKey := flow.KeyBy(changes, func(m *flow.Meta, u flow.KVUpdate[string]) (string, error) {
		if u.Key != m.BucketKey() {
			return "", fmt.Errorf("key %q of the update, %q of the record", u.Key, m.BucketKey())
		}
		return u.Key, nil
	})
	seen := flow.Stateful(byKey, "seen", flow.JSONState[[]string](1, nil),
		func(m *flow.Meta, s *[]string, u flow.KVUpdate[string], emit func(string)) error {
			if u.Deleted {
				*s = append(*s, "-"+u.Value)
			} else {
				*s = append(*s, u.Value)
			}
			emit(fmt.Sprintf("%s %s @%d", m.Key, strings.Join(*s, " "), m.EventTime().Sub(flowtest.Start)/time.Second))
			return nil
		})
	flow.To(seen, flow.Sink[string]{Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."), Encode: flow.EncodeText()})
	return b
}

func TestDecodeKV(t *testing.T) {
	r := flowtest.New(t, build(t, names(flow.Options{Partitions: 1}, nil)))
	r.Set("NAMES", "eu.1", "ann")
	r.Set("NAMES", "us.x.2", "bob")
	r.Set("NAMES", "asia.3", "not read")
	r.Unset("NAMES", "eu.1")
	r.Set("NAMES", "eu.1", "bad")
	r.Set("NAMES", "eu.1", "eve")
	want := []string{"eu.1 ann @0", "us.x.2 bob @0", "eu.1 ann - @0", "eu.1 ann - eve @0"}
	if diff := cmp.Diff(want, r.Data("OUT")); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"names: decode: is bad"}, r.Errors()); diff != "" {
		t.Errorf("dead letters (-want +got):\n%s", diff)
	}
}

// What the bucket has replaced is not there for a replay, which goes on with the rest.
func TestSource_Bucket_replay(t *testing.T) {
	r := flowtest.New(t, build(t, names(flow.Options{Partitions: 4}, nil)))
	r.Set("NAMES", "eu.1", "ann")
	r.Commit()
	r.Set("NAMES", "eu.1", "bob")
	r.Set("NAMES", "us.1", "joe")
	r.Set("NAMES", "eu.1", "eve")
	r.Crash()
	got := map[string][]string{}
	for _, res := range r.Results("OUT") {
		got[res.Subject] = append(got[res.Subject], res.Data)
	}
	want := map[string][]string{"out.eu=2E1": {"eu.1 ann @0", "eu.1 ann eve @0"}, "out.us=2E1": {"us.1 joe @0"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
}

// A deletion brings no time along: it has the highest one before it, and does not move
// the watermark to the time of the stream, by which all that follows would be late.
func TestSource_Bucket_eventTime(t *testing.T) {
	at := func(_ *flow.Meta, u flow.KVUpdate[string]) (time.Time, error) {
		d, err := time.ParseDuration(u.Value)
		return flowtest.Start.Add(d), err
	}
	f := build(t, names(flow.Options{Partitions: 1}, flow.EventTime[flow.KVUpdate[string]]{Of: at}))
	r := flowtest.New(t, f)
	r.Pause(time.Hour)
	r.Unset("NAMES", "eu.1") // the first record of all has the time of the stream
	r.Set("NAMES", "eu.1", "10s")
	r.Set("NAMES", "us.1", "90s")
	r.Set("NAMES", "us.2", "30s")
	r.Unset("NAMES", "us.1")
	want := []string{"eu.1 - @3600", "eu.1 - 10s @10", "us.1 90s @90", "us.2 30s @30", "us.1 90s - @90"}
	if diff := cmp.Diff(want, r.Data("OUT")); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	task, router := f.Task(0), f.Router(0)
	if err := router.Route("$KV.NAMES.eu.1", 1, flowtest.Start.Add(time.Hour).UnixNano(), []byte("70s")); err != nil {
		t.Fatal(err)
	}
	before := router.Watermark()
	if err := router.Route("$KV.NAMES.eu.1", 2, flowtest.Start.Add(2*time.Hour).UnixNano(), nil); err != nil {
		t.Fatal(err)
	}
	if got := router.Watermark(); got != before || got != flowtest.Start.Add(70*time.Second).UnixNano() {
		t.Errorf("watermark %d, before the deletion %d", got, before)
	}
	router.Take(func(b *flow.Batch) {
		if err := task.Play(b); err != nil {
			t.Fatal(err)
		}
	})
}

func TestMeta_BucketKey(t *testing.T) {
	for subject, want := range map[string]string{"$KV.B.a.b": "a.b", "$KV.B.a": "a", "$KV.B": "", "in.a": "", "KV.B.a": ""} {
		if got := (&flow.Meta{Subject: subject}).BucketKey(); got != want {
			t.Errorf("%s: %q, want %q", subject, got, want)
		}
	}
}

// A source that names its bucket, and the buckets of lookups, are a part of the
// definition.
func TestFlow_Hash_buckets(t *testing.T) {
	hash := func(src flow.Source, bucket string) string {
		b := newFlow()
		s := flow.KeyBy(flow.From(b, src, flow.DecodeText()), firstWord)
		if bucket != "" {
			s = flow.Lookup(s, "look", bucket, firstWord, func(_ *flow.Meta, v string, _ []byte, _ bool) (string, error) { return v, nil })
		}
		textTo(s)
		return build(t, b).Hash()
	}
	all := map[string]bool{}
	for _, h := range []string{
		hash(flow.Source{Stream: "KV_B", Subjects: []string{"$KV.B.>"}}, ""), hash(flow.Source{Bucket: "B"}, ""), hash(flow.Source{Bucket: "B", Keys: []string{"a"}}, ""),
		hash(flow.Source{Bucket: "B"}, "X"), hash(flow.Source{Bucket: "B"}, "Y"),
	} {
		all[h] = true
	}
	if len(all) != 5 {
		t.Errorf("%d hashes of 5 flows", len(all))
	}
}
