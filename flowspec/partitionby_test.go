package flowspec

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"natsflow/flow"
)

func TestSpec_PartitionBy(t *testing.T) {
	for _, c := range []struct {
		name, source, key, plan string
		want                    []int
	}{
		{"one token", "stream: IN, partition_by: {subject: [2]}", "{subject: 2}", "through a mirror, partitioned by token 2 of the subject", []int{2}},
		{"fields in another order", "partition_by: {subject: [3]}, subjects: [in.>], stream: IN", "{subject: 3}", "in.>  json  through a mirror, partitioned by token 3", []int{3}},
		{"several tokens", "stream: IN, partition_by: {subject: [3, 2]}", "{expr: a + b}", "by the tokens 3, 2 of the subject", []int{3, 2}},
		{"without", "stream: IN", "{subject: 2}", "IN  all subjects  json\n", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := Parse("flow.yaml", []byte("flow: f\nsource: {"+c.source+"}\nsteps:\n  - key: "+c.key+"\n  - to: {stream: OUT, subject: out}\n"))
			if err != nil {
				t.Fatal(err)
			}
			f, err := s.Build()
			if err != nil {
				t.Fatal(err)
			}
			plan := s.Plan()
			if got := f.Sources()[0].PartitionBy; !slices.Equal(got, c.want) || !slices.Equal(plan.Sources[0].PartitionBy, c.want) {
				t.Errorf("PartitionBy is %v, in the plan %v, want %v", got, plan.Sources[0].PartitionBy, c.want)
			}
			if !strings.Contains(plan.String(), c.plan) {
				t.Errorf("the plan does not have %q:\n%s", c.plan, plan)
			}
		})
	}
}

// Without a key step any tokens will do: a record is published by the task of the
// partition that the server has found.
func TestSpec_PartitionBy_withoutKey(t *testing.T) {
	p := newPlayer(t, "flow: f\npartitions: 4\nsource: {stream: IN, partition_by: {subject: [2]}}\nsteps:\n  - to: {stream: OUT, subject: \"out.{_seq}\"}\n")
	for i := range 4 {
		if err := p.routers[0].RouteMirrored(strconv.Itoa(i)+".in.a", uint64(i+1), start.UnixNano(), []byte("{}")); err != nil {
			t.Fatal(err)
		}
	}
	p.routers[0].Take(func(b *flow.Batch) {
		if err := p.tasks[b.Partition].Play(b); err != nil {
			t.Error(err)
		}
		b.Release()
	})
	p.seal()
	if want := []string{"OUT out.1 {}", "OUT out.2 {}", "OUT out.3 {}", "OUT out.4 {}"}; !slices.Equal(p.out, want) {
		t.Errorf("got %q, want %q", p.out, want)
	}
}
