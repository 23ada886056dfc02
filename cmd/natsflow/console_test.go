package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// bufferConsole prints into buffers, as if to a pipe.
func bufferConsole() (c *Console, out, msg *bytes.Buffer) {
	out, msg = &bytes.Buffer{}, &bytes.Buffer{}
	return &Console{Out: out, Err: msg, Size: func() (int, int) { return 80, 24 }}, out, msg
}

func TestFormats(t *testing.T) {
	for got, want := range map[string]string{
		count(0):                               "0",
		count(999):                             "999",
		count(1000):                            "1,000",
		count(1234567):                         "1,234,567",
		count(-1234):                           "-1,234",
		plural(1, "key"):                       "1 key",
		plural(2000, "key"):                    "2,000 keys",
		size(1023):                             "1023 B",
		size(1536):                             "1.5 KiB",
		size(5 << 30):                          "5.0 GiB",
		bar(0, 10, 12):                         "[..........]",
		bar(5, 10, 12):                         "[#####.....]",
		bar(10, 10, 12):                        "[##########]",
		bar(11, 10, 12):                        "[##########]",
		bar(0, 0, 12):                          "[##########]",
		bar(1, 2, 2):                           "",
		plain("a\nb\x1b[31m\xff"):              "a b [31m?",
		clip("hello", 5):                       "hello",
		clip("hello", 3):                       "hel",
		clip("\x1b[1mhello\x1b[0m", 5):         "\x1b[1mhello\x1b[0m",
		clip("\x1b[1mhello\x1b[0m", 3):         "\x1b[1mhel\x1b[0m",
		clip("äöü", 2):                         "äö",
		age(time.Unix(90, 0), time.Unix(0, 0)): "1m30s",
		age(time.Unix(9, 0), time.Unix(10, 0)): "0s",
		age(time.Unix(3600*50, 0), time.Unix(0, 0)): "2d",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestTable_lines(t *testing.T) {
	tab := table{head: []string{"NAME", "N"}, right: []bool{false, true}}
	tab.add("a", "1,000")
	tab.add("longer", "7")
	want := []string{"NAME        N", "a       1,000", "longer      7"}
	if diff := cmp.Diff(want, tab.lines()); diff != "" {
		t.Error(diff)
	}
}

func TestRegion(t *testing.T) {
	c, out, _ := bufferConsole()
	c.Size = func() (int, int) { return 10, 4 }
	r := newRegion(c, c.Out)
	step := func(want string) {
		t.Helper()
		if diff := cmp.Diff(want, strings.ReplaceAll(out.String(), "\x1b", "^")); diff != "" {
			t.Error(diff)
		}
		out.Reset()
	}
	r.draw([]string{"one", "longer than the line"})
	step("^[?25lone^[K\nlonger th^[K\n^[J")
	r.draw([]string{"1", "2", "3", "beyond the screen"})
	step("\r^[2A1^[K\n2^[K\n3^[K\n^[J")
	if _, err := r.Write([]byte("a log line\n")); err != nil {
		t.Fatal(err)
	}
	step("\r^[3A^[Ja log line\n1\n2\n3\n")
	r.clear()
	step("\r^[3A^[J")
	r.done()
	step("^[?25h")
	c.restore() // the process is cut short: once is enough
	step("")
}

func TestHint(t *testing.T) {
	for _, tc := range []struct {
		name  string
		names []string
		want  string
	}{
		{"fligths", []string{"flights", "quakes"}, ` (did you mean "flights"?)`},
		{"orders", []string{"flights", "quakes"}, ": there are flights, quakes"},
		{"orders", nil, ": there is no flow on URL; natsflow worker FLOW.yaml starts one"},
	} {
		if got := hint(tc.name, tc.names, "URL"); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestValidateCmd_Run(t *testing.T) {
	c, out, _ := bufferConsole()
	if err := (&ValidateCmd{File: flightsDir(t)}).Run(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(out.String(), "flow flights: 16 partitions") {
		t.Errorf("got %s", out)
	}
}

func TestHostPort(t *testing.T) {
	for in, want := range map[string]string{
		"9090": "127.0.0.1:9090", ":9090": "127.0.0.1:9090", "0.0.0.0:1": "0.0.0.0:1", "[::1]:0": "[::1]:0", "localhost:07": "localhost:7",
	} {
		if got, err := hostPort("--x", in); err != nil || got != want {
			t.Errorf("%s: got %q, %v, want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"x", ":", "a:b:c", "1:70000", "host:"} {
		if got, err := hostPort("--x", in); err == nil {
			t.Errorf("%s: got %q, want an error", in, got)
		}
	}
}
