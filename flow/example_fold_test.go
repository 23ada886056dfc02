package flow_test

import (
	"fmt"
	"strings"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// How often each word came in each hour: the state is the result.
func ExampleFold() {
	b := flow.New("words", flow.Options{Partitions: 1})
	lines := flow.From(b, flow.Source{Stream: "LINES"}, flow.DecodeText())
	byUser := flow.KeyBy(lines, func(_ *flow.Meta, v string) (string, error) {
		user, _, _ := strings.Cut(v, ":")
		return user, nil
	})
	count := func(_ *flow.Meta, n *map[string]int, v string) error {
		if *n == nil {
			*n = map[string]int{}
		}
		_, words, _ := strings.Cut(v, ":")
		for _, w := range strings.Fields(words) {
			(*n)[w]++
		}
		return nil
	}
	counts, _ := flow.Window(byUser, "counts", flow.Tumbling(time.Hour), flow.Fold(flow.JSONState[map[string]int](1, nil), count, nil))
	flow.To(counts, flow.Sink[map[string]int]{
		Stream: "COUNTS", Subjects: []string{"counts.*"},
		Subject: flow.KeySubject[map[string]int]("counts."), Encode: flow.EncodeJSON[map[string]int](),
	})
	f, err := b.Build()
	if err != nil {
		fmt.Println(err)
		return
	}
	r := flowtest.New(nil, f)
	r.Push(flowtest.Record{Data: "ann: one fish two fish"}, flowtest.Record{Data: "ann: red fish"})
	r.Drain() // the window stays open
	r.Push(flowtest.Record{Data: "ann: blue fish"})
	r.Pause(2 * time.Hour)
	fmt.Println(strings.Join(r.Data("COUNTS"), "\n"))
	// Output:
	// {"blue":1,"fish":4,"one":1,"red":1,"two":1}
}

// The longest line of each user, of all that came.
func ExampleReduce() {
	b := flow.New("longest", flow.Options{})
	lines := flow.From(b, flow.Source{Stream: "LINES"}, flow.DecodeText())
	byUser := flow.KeyBy(lines, func(_ *flow.Meta, v string) (string, error) {
		user, _, _ := strings.Cut(v, ":")
		return user, nil
	})
	longest := flow.Reduce(flow.JSONState[string](1, nil), func(a, b string) (string, error) {
		if len(b) > len(a) {
			return b, nil
		}
		return a, nil
	})
	flow.ToKV(flow.Aggregate(byUser, "longest", longest.Whole()), flow.KVSink[string]{Bucket: "LONGEST", Encode: flow.EncodeText()})
	f, err := b.Build()
	if err != nil {
		fmt.Println(err)
		return
	}
	printResults(f, "ann: hello", "bob: hi", "ann: yes", "ann: good morning")
	// Output:
	// $KV.LONGEST.ann ann: hello
	// $KV.LONGEST.bob bob: hi
	// $KV.LONGEST.ann ann: hello
	// $KV.LONGEST.ann ann: good morning
}
