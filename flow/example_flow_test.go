package flow_test

import (
	"fmt"
	"strings"

	"natsflow/flow"
)

// A flow that counts words. Package worker runs it on a server; here it is
// played without one.
func Example() {
	b := flow.New("words", flow.Options{})
	lines := flow.From(b, flow.Source{Stream: "LINES", Subjects: []string{"lines.>"}}, flow.DecodeText())
	words := flow.FlatMap(lines, func(_ *flow.Meta, line string, emit func(string)) error {
		for _, word := range strings.Fields(line) {
			emit(word)
		}
		return nil
	})
	byWord := flow.KeyBy(words, func(_ *flow.Meta, word string) (string, error) { return word, nil })
	counts := flow.Stateful(byWord, "count", flow.JSONState[int](1, nil),
		func(_ *flow.Meta, n *int, _ string, emit func(int)) error {
			*n++
			emit(*n)
			return nil
		})
	flow.To(counts, flow.Sink[int]{
		Stream:   "COUNTS",
		Subjects: []string{"counts.*"},
		Subject:  flow.KeySubject[int]("counts."),
		Encode:   flow.EncodeJSON[int](),
	})
	f, err := b.Build()
	if err != nil {
		fmt.Println(err)
		return
	}
	printResults(f, "one fish two fish", "red fish blue fish")
	// Unordered output:
	// counts.one 1
	// counts.fish 1
	// counts.two 1
	// counts.fish 2
	// counts.red 1
	// counts.fish 3
	// counts.blue 1
	// counts.fish 4
}

// printResults plays payloads through a flow of one source, and prints what it
// would publish with a commit after each.
func printResults(f *flow.Flow, payloads ...string) {
	router := f.Router(0)
	tasks := map[int]*flow.Task{}
	play := func(b *flow.Batch) error {
		task := tasks[b.Partition]
		if task == nil {
			task = f.Task(b.Partition)
			tasks[b.Partition] = task
		}
		defer b.Release()
		if err := task.Play(b); err != nil {
			return err
		}
		sealed, err := task.Seal()
		if err != nil {
			return err
		}
		return flow.Outputs(sealed.Outbox, func(_ int, o flow.Output) error {
			fmt.Printf("%s %s\n", o.Subject, o.Data)
			return nil
		})
	}
	for i, payload := range payloads {
		err := router.Route("lines.x", uint64(i+1), int64(i)*1e9, []byte(payload))
		router.Take(func(b *flow.Batch) {
			if perr := play(b); err == nil {
				err = perr
			}
		})
		if err != nil {
			fmt.Println(err)
			return
		}
	}
}
