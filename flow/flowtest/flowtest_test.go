package flowtest_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// listFlow lists the values of each key; "bad" fails.
func listFlow(t *testing.T, opts flow.Options) *flow.Flow {
	t.Helper()
	b := flow.New("list", opts)
	var all []flow.Stream[string]
	for _, stream := range []string{"A", "B"} {
		src := flow.From(b, flow.Source{Stream: stream}, flow.DecodeText())
		all = append(all, flow.KeyBy(src, func(m *flow.Meta, _ string) (string, error) { return m.Subject, nil }))
	}
	lists := flow.Stateful(flow.Merge(all[0], all[1]), "list", flow.JSONState[[]string](1, nil),
		func(m *flow.Meta, s *[]string, v string, emit func(string)) error {
			if v == "bad" {
				return errors.New("is bad")
			}
			*s = append(*s, v)
			emit(fmt.Sprintf("%s %s %s %d", m.Key, strings.Join(*s, ""), m.Stream, m.Seq))
			return nil
		})
	flow.To(lists, flow.Sink[string]{Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."), Encode: flow.EncodeText()})
	flow.ToKV(lists, flow.KVSink[string]{Bucket: "LATEST", Encode: flow.EncodeText()})
	f, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestRunner(t *testing.T) {
	f := listFlow(t, flow.Options{Partitions: 4})
	keys := []string{"k1", "k2", "k3", "k4", "k5"}
	play := func(disturb func(r *flowtest.Runner, i int)) *flowtest.Runner {
		r := flowtest.New(t, f)
		for i := range 60 {
			data := fmt.Sprint(i % 10)
			if i == 33 {
				data = "bad"
			}
			r.Push(flowtest.Record{Stream: []string{"A", "B"}[i/10%2], Subject: keys[i*i%len(keys)], Data: data})
			disturb(r, i)
		}
		return r
	}
	calm := play(func(*flowtest.Runner, int) {})
	if len(calm.Data("OUT")) != 59 || len(calm.Results("LATEST")) != 59 || calm.Keys() == 0 {
		t.Fatalf("%d results, %d keys", len(calm.Data("OUT")), calm.Keys())
	}
	if got := calm.Results("LATEST")[0]; got.Kind != flow.SinkBucket || !strings.HasPrefix(got.Subject, "$KV.LATEST.k") {
		t.Errorf("a result in a bucket: %+v", got)
	}
	if diff := cmp.Diff([]string{"list: is bad"}, calm.Errors()); diff != "" {
		t.Errorf("dead letters (-want +got):\n%s", diff)
	}
	for name, disturb := range map[string]func(r *flowtest.Runner, i int){
		"a crash now and then": func(r *flowtest.Runner, i int) {
			// What is read between two commits is of one source: between sources there
			// is no order.
			if i%10 == 9 {
				r.Commit()
			}
			if i%7 == 0 {
				r.Crash()
			}
		},
		"a drain now and then": func(r *flowtest.Runner, i int) {
			if i%7 == 0 {
				r.Drain()
			}
		},
		"a task moves now and then": func(r *flowtest.Runner, i int) {
			if i%10 == 9 {
				r.Commit()
			}
			r.Crash(i % 4)
		},
		"time passes": func(r *flowtest.Runner, i int) { r.Pause(time.Duration(i) * time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			r := play(disturb)
			for _, sink := range []string{"OUT", "LATEST"} {
				want, got := calm.Data(sink), r.Data(sink)
				// The order is that of the commits; within a key it is that of the records.
				slices.SortStableFunc(want, byKey)
				slices.SortStableFunc(got, byKey)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", sink, diff)
				}
			}
			if diff := cmp.Diff(calm.Errors(), r.Errors()); diff != "" {
				t.Errorf("dead letters (-want +got):\n%s", diff)
			}
		})
	}
}

func byKey(a, b string) int { return strings.Compare(a[:2], b[:2]) }

// What was not committed is published once, by whoever reads it last.
func TestRunner_Crash(t *testing.T) {
	r := flowtest.New(t, listFlow(t, flow.Options{Partitions: 1}))
	r.Push(flowtest.Record{Stream: "A", Subject: "k", Data: "1"})
	r.Commit()
	r.Push(flowtest.Record{Stream: "A", Subject: "k", Data: "2"})
	r.Crash()
	r.Crash()
	if diff := cmp.Diff([]string{"k 1 A 1", "k 12 A 2"}, r.Data("OUT")); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
}

func TestRunner_Stop(t *testing.T) {
	r := flowtest.New(t, listFlow(t, flow.Options{Partitions: 1, OnError: flow.Stop}))
	err := r.Try(flowtest.Record{Stream: "A", Subject: "k", Data: "bad"})
	var se *flow.StepError
	if !errors.As(err, &se) || se.Seq != 1 || se.Key != "k" {
		t.Errorf("error %v", err)
	}
}

type failed struct{ text string }

func (f *failed) Helper() {}
func (f *failed) Fatalf(format string, args ...any) {
	f.text = fmt.Sprintf(format, args...)
	panic(f)
}

// Mistakes of a test end it.
func TestRunner_Mistakes(t *testing.T) {
	for want, mistake := range map[string]func(r *flowtest.Runner){
		`push: the flow does not read a stream ""`:                               func(r *flowtest.Runner) { r.Push(flowtest.Record{}) },
		`push: the flow does not read a stream "C"`:                              func(r *flowtest.Runner) { r.Push(flowtest.Record{Stream: "C"}) },
		`set: the flow has no bucket "LATEST" that it reads or looks keys up in`: func(r *flowtest.Runner) { r.Set("LATEST", "k", "v") },
		`results: the flow has no sink "NO"`:                                     func(r *flowtest.Runner) { r.Data("NO") },
		`push: step "list", stream A, sequence 1: is bad`:                        func(r *flowtest.Runner) { r.Push(flowtest.Record{Stream: "A", Data: "bad"}) },
	} {
		f := &failed{}
		func() {
			defer func() { _ = recover() }()
			mistake(flowtest.New(f, listFlow(t, flow.Options{OnError: flow.Stop})))
		}()
		if f.text != want {
			t.Errorf("%s, want %s", f.text, want)
		}
	}
}

func TestRunner_Time(t *testing.T) {
	r := flowtest.New(t, listFlow(t, flow.Options{}))
	r.Push(flowtest.Record{Stream: "A", Time: flowtest.Start.Add(time.Hour)})
	r.Push(flowtest.Record{Stream: "A", Time: flowtest.Start})
	r.Pause(time.Minute)
	if got := r.Now().Sub(flowtest.Start); got != 61*time.Minute {
		t.Errorf("%v have passed", got)
	}
}
