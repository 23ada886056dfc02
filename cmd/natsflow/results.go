package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/tidwall/gjson"

	"natsflow/bus"
	"natsflow/flow"
)

const (
	// keptResults bounds the keys of which the latest result is kept for the
	// display.
	keptResults = 2000
	// finalScan bounds how many messages of a sink are read for the final table.
	finalScan = 1 << 20
)

// What the name of a result is, as the head of a table has it.
const (
	kindSubject = "subject"
	kindKey     = "key"
)

// result is the latest result of a key.
type result struct {
	// name is the subject of a stream's result, or the key in a bucket, and kind
	// says which.
	name, kind string
	payload    string
	// order rises with each result.
	order uint64
}

// results keeps the latest results of one sink as they are published.
type results struct {
	sink flow.SinkInfo

	mu    sync.Mutex
	byKey map[string]*result
	total uint64
}

func newResults(sink flow.SinkInfo) *results {
	return &results{sink: sink, byKey: map[string]*result{}}
}

// put takes a result.
func (r *results) put(kind, name string, payload []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total++
	if e := r.byKey[name]; e != nil {
		e.payload, e.order = string(payload), r.total
		return
	}
	if len(r.byKey) >= 2*keptResults {
		for name, e := range r.byKey {
			if e.order+keptResults < r.total {
				delete(r.byKey, name)
			}
		}
	}
	r.byKey[name] = &result{name: name, kind: kind, payload: string(payload), order: r.total}
}

// latest returns the n results that changed last, the latest first.
func (r *results) latest(n int) []result {
	r.mu.Lock()
	list := make([]result, 0, len(r.byKey))
	for _, e := range r.byKey {
		list = append(list, *e)
	}
	r.mu.Unlock()
	slices.SortFunc(list, func(a, b result) int { return cmp.Compare(b.order, a.order) })
	return list[:min(n, len(list))]
}

// subscribe makes r follow its sink.
func (r *results) subscribe(conn *bus.Conn) (unsubscribe func(), err error) {
	var undo []func()
	unsubscribe = func() {
		for _, u := range undo {
			u()
		}
	}
	subjects, put := r.sink.Subjects, func(subject string, data []byte) { r.put(kindSubject, subject, data) }
	if r.sink.Kind == flow.SinkBucket {
		prefix := "$KV." + r.sink.Name + "."
		subjects = []string{prefix + ">"}
		put = func(subject string, data []byte) { r.put(kindKey, strings.TrimPrefix(subject, prefix), data) }
	}
	for _, subject := range subjects {
		u, err := conn.Subscribe(subject, put)
		if err != nil {
			unsubscribe()
			return nil, err
		}
		undo = append(undo, u)
	}
	return unsubscribe, nil
}

// readResults reads the latest result of each key from a sink.
func readResults(ctx context.Context, conn *bus.Conn, sink flow.SinkInfo) ([]result, error) {
	byKey := map[string]result{}
	kind := kindSubject
	if sink.Kind == flow.SinkBucket {
		kind = kindKey
	}
	var order uint64
	put := func(name string, payload []byte) {
		order++
		byKey[name] = result{name: name, kind: kind, payload: string(payload), order: order}
	}
	if sink.Kind == flow.SinkBucket {
		bucket, err := conn.OpenBucket(ctx, sink.Name)
		if err != nil {
			return nil, err
		}
		items, err := bucket.List(ctx, ">")
		if err != nil {
			return nil, err
		}
		for _, item := range items {
			if !item.Deleted {
				put(item.Key, item.Value)
			}
		}
	} else {
		info, err := conn.Stream(ctx, sink.Name)
		if err != nil {
			return nil, err
		}
		from := uint64(1)
		if info.LastSeq > finalScan {
			from = info.LastSeq - finalScan
		}
		err = readStream(ctx, conn, bus.CursorConfig{Stream: sink.Name, Subjects: sink.Subjects, From: from}, func(m *bus.Msg) { put(m.Subject, m.Data) })
		if err != nil {
			return nil, err
		}
	}
	list := make([]result, 0, len(byKey))
	for _, e := range byKey {
		list = append(list, e)
	}
	slices.SortFunc(list, func(a, b result) int { return strings.Compare(a.name, b.name) })
	return list, nil
}

// member of a JSON object.
type field struct {
	name  string
	value gjson.Result
}

// fields returns the members of a flat JSON object, in its order; nil if the
// payload is something else.
func (r result) fields() []field {
	if !gjson.Valid(r.payload) {
		return nil
	}
	root := gjson.Parse(r.payload)
	if !root.IsObject() {
		return nil
	}
	var list []field
	flat := true
	root.ForEach(func(k, v gjson.Result) bool {
		flat = !v.IsObject() && !v.IsArray()
		list = append(list, field{k.String(), v})
		return flat
	})
	if !flat {
		return nil
	}
	return list
}

// resultTable makes a table of results: a column for each member if all of them
// are objects with the same members, or else the payloads as they are.
func resultTable(list []result) table {
	if len(list) == 0 {
		return table{}
	}
	if t, ok := memberTable(list); ok {
		return t
	}
	t := table{head: []string{list[0].kind, "result"}}
	for _, r := range list {
		t.add(plain(r.name), plain(r.payload))
	}
	return t
}

func memberTable(list []result) (t table, ok bool) {
	for i, r := range list {
		fields := r.fields()
		if len(fields) == 0 {
			return t, false
		}
		// Results of an aggregate have the key as a member; of others the
		// subject tells what they are about.
		keyed := fields[0].name == "key"
		var row []string
		if !keyed {
			row = append(row, plain(r.name))
		}
		if i == 0 {
			if !keyed {
				t.head, t.right = []string{r.kind}, []bool{false}
			}
			for _, f := range fields {
				t.head = append(t.head, plain(f.name))
				t.right = append(t.right, f.value.Type == gjson.Number || f.value.Type == gjson.Null)
			}
		}
		if len(t.head) != len(row)+len(fields) {
			return t, false
		}
		for _, f := range fields {
			if t.head[len(row)] != plain(f.name) {
				return t, false
			}
			row = append(row, cell(f.value))
		}
		t.add(row...)
	}
	return t, len(list) > 0
}

// cell formats a value for a table: numbers with two decimals at the most.
func cell(v gjson.Result) string {
	if v.Type == gjson.Number && strings.ContainsAny(v.Raw, ".eE") {
		return strconv.FormatFloat(v.Num, 'f', 2, 64)
	}
	if v.Type == gjson.Null {
		return "-"
	}
	return plain(v.String())
}

// rank sorts results by their first number, the largest first, if they are those
// of an aggregate, and says what it did.
func rank(list []result) (by string) {
	first := func(r result) (field, bool) {
		fields := r.fields()
		if len(fields) == 0 || fields[0].name != "key" {
			return field{}, false
		}
		i := slices.IndexFunc(fields, func(f field) bool { return f.name != "key" && f.value.Type == gjson.Number })
		if i < 0 {
			return field{}, false
		}
		return fields[i], true
	}
	if len(list) == 0 {
		return ""
	}
	f, ok := first(list[0])
	if !ok {
		return "by name"
	}
	values := make(map[string]float64, len(list))
	for _, r := range list {
		if g, ok := first(r); ok && g.name == f.name {
			values[r.name] = g.value.Num
		}
	}
	slices.SortStableFunc(list, func(a, b result) int { return cmp.Compare(values[b.name], values[a.name]) })
	return "by " + f.name
}

// printResults prints the latest result of each key, most of them at the most.
func printResults(c *Console, sink flow.SinkInfo, list []result, most int) {
	if len(list) == 0 {
		c.printf("%s: no results\n", sink.Name)
		return
	}
	by := rank(list)
	shown := list[:min(most, len(list))]
	t := resultTable(shown)
	lines := t.lines()
	if c.OutTerminal {
		columns, _ := c.Size()
		for i := range lines {
			lines[i] = clip(lines[i], columns)
		}
	}
	lines[0] = c.style(styleBold, lines[0])
	c.printf("%s\n", strings.Join(lines, "\n"))
	if n := len(list) - len(shown); n > 0 {
		c.printf("… and %s more (%s, the latest result of each of %s in %s)\n", count(n), by, plural(len(list), "key"), sinkName(sink))
	} else {
		c.printf("(%s, the latest result of each of %s in %s)\n", by, plural(len(list), "key"), sinkName(sink))
	}
}

func sinkName(sink flow.SinkInfo) string {
	if sink.Kind == flow.SinkBucket {
		return fmt.Sprintf("bucket %s", sink.Name)
	}
	return fmt.Sprintf("stream %s", sink.Name)
}
