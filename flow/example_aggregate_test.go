package flow_test

import (
	"fmt"
	"strconv"
	"strings"

	"natsflow/flow"
)

// An aggregate has one result a record, or with [flow.EmitCommit] the latest of
// each key with a commit.
func ExampleAggregate() {
	b := flow.New("means", flow.Options{})
	values := flow.From(b, flow.Source{Stream: "VALUES"}, flow.DecodeText())
	byName := flow.KeyBy(values, func(_ *flow.Meta, v string) (string, error) {
		name, _, _ := strings.Cut(v, "=")
		return name, nil
	})
	type sum struct{ N, Sum int }
	means := flow.Aggregate(byName, "mean", flow.Aggregator[string, sum, float64]{
		State: flow.JSONState[sum](1, nil),
		Add: func(_ *flow.Meta, s *sum, v string) error {
			_, text, _ := strings.Cut(v, "=")
			n, err := strconv.Atoi(text)
			if err != nil {
				return err
			}
			s.N, s.Sum = s.N+1, s.Sum+n
			return nil
		},
		Result: func(_ *flow.Meta, s *sum) (float64, error) { return float64(s.Sum) / float64(s.N), nil },
	})
	flow.ToKV(means, flow.KVSink[float64]{Bucket: "MEANS", Encode: flow.EncodeJSON[float64]()})
	f, err := b.Build()
	if err != nil {
		fmt.Println(err)
		return
	}
	printResults(f, "a=1", "a=2", "b=7", "a=6")
	// Output:
	// $KV.MEANS.a 1
	// $KV.MEANS.a 1.5
	// $KV.MEANS.b 7
	// $KV.MEANS.a 3
}
