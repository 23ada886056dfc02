package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

func TestResultTable(t *testing.T) {
	for name, tc := range map[string]struct {
		payloads []string
		want     []string
	}{
		"aggregate": {
			[]string{`{"key":"ATL","n":812,"avg":8.123,"worst":null}`, `{"key":"O","n":7,"avg":0.5,"worst":3}`},
			[]string{"key    n   avg  worst", "ATL  812  8.12      -", "O      7  0.50      3"},
		},
		"records": {
			[]string{`{"id":7,"name":"x\ny"}`, `{"id":8,"name":"z"}`},
			[]string{"subject  id  name", "s.0       7  x y", "s.1       8  z"},
		},
		"other members": {
			[]string{`{"id":7}`, `{"name":"z"}`},
			[]string{"subject  result", `s.0      {"id":7}`, `s.1      {"name":"z"}`},
		},
		"nested": {
			[]string{`{"id":[1]}`},
			[]string{"subject  result", `s.0      {"id":[1]}`},
		},
		"no JSON": {
			[]string{"\x1b[31mred"},
			[]string{"subject  result", "s.0       [31mred"},
		},
	} {
		var list []result
		for i, p := range tc.payloads {
			list = append(list, result{name: fmt.Sprintf("s.%d", i), kind: kindSubject, payload: p})
		}
		tab := resultTable(list)
		if diff := cmp.Diff(tc.want, tab.lines()); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestPrintResults(t *testing.T) {
	var list []result
	for i := range 25 {
		list = append(list, result{name: fmt.Sprintf("k.%02d", i), payload: fmt.Sprintf(`{"key":"%02d","n":%d}`, i, i)})
	}
	c, out, _ := bufferConsole()
	printResults(c, flow.SinkInfo{Kind: flow.SinkStream, Name: "S"}, list, 20)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 22 || lines[1] != "24   24" || lines[20] != "05    5" {
		t.Errorf("got\n%s", out)
	}
	if want := "… and 5 more (by n, the latest result of each of 25 keys in stream S)"; lines[len(lines)-1] != want {
		t.Errorf("got %q", lines[len(lines)-1])
	}
}

func TestResults(t *testing.T) {
	r := newResults(flow.SinkInfo{})
	for i := range 10 * keptResults {
		r.put(kindKey, fmt.Sprint(i), []byte("x"))
	}
	r.put(kindKey, "1", []byte("again"))
	if got := len(r.byKey); got > 2*keptResults+1 {
		t.Errorf("%d results are kept", got)
	}
	latest := r.latest(2)
	if latest[0].name != "1" || latest[0].payload != "again" || latest[1].name != fmt.Sprint(10*keptResults-1) {
		t.Errorf("got %v", latest)
	}
}

// A key keeps its row while it is among those that changed last.
func TestLiveTable_lines(t *testing.T) {
	c, _, _ := bufferConsole()
	v := &liveTable{c: c}
	r := newResults(flow.SinkInfo{})
	names := func() string {
		lines := v.lines(r, 3)
		var names []string
		for _, l := range lines[1:] {
			names = append(names, strings.Fields(l)[0])
		}
		return strings.Join(names, " ")
	}
	for _, step := range []struct{ put, want string }{
		{"a", "a"}, {"b", "a b"}, {"c", "a b c"}, {"a", "a b c"}, {"d", "a d c"}, {"b", "a d b"},
	} {
		r.put(kindKey, step.put, []byte(`{"key":"`+step.put+`","n":1}`))
		if got := names(); got != step.want {
			t.Errorf("after %s: got %q, want %q", step.put, got, step.want)
		}
	}
}
