package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/flowspec"
	"natsflow/testenv"
)

const feedFlow = `flow: f
source: {stream: IN}
steps:
  - key: k
  - to: {stream: OUT, subject: "out.{key}"}
dev:
  feed: {IN: {file: in.ndjson, subject: "in.{k}"}}
`

func feedSpec(t *testing.T, lines string) *flowspec.Spec {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "in.ndjson"), []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	spec, err := flowspec.Parse(filepath.Join(dir, "flow.yaml"), []byte(feedFlow))
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func TestFeed(t *testing.T) {
	srv := testenv.StartServer(t, testenv.DontListen())
	conn, err := bus.Connect(t.Context(), bus.Config{InProcess: srv.InProcess})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	spec := feedSpec(t, "{\"k\":\"a\",\"n\":1}\n\n{\"k\":\"b\",\"n\":2}\r\n{\"k\":\"a\",\"n\":3}\n   \n{\"k\":\"b\",\"n\":4}")
	open := func() *feed {
		t.Helper()
		f, err := openFeed(t.Context(), conn, spec.Sources, "IN", spec.Dev.Feed["IN"], 0)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	f := open()
	f.most = 2
	if err := f.run(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	// Somebody publishes by hand between the two halves.
	if _, err := conn.Publish(t.Context(), "in.by.hand", nil, []byte("hand")); err != nil {
		t.Fatal(err)
	}
	f = open()
	if f.total != 4 || f.before != 2 {
		t.Errorf("%d of %d lines are in the stream, want 2 of 4", f.before, f.total)
	}
	if err := f.run(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	if f = open(); f.before != 4 {
		t.Errorf("%d lines are in the stream, want 4", f.before)
	}
	if err := f.run(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	var got []string
	err = readStream(t.Context(), conn, bus.CursorConfig{Stream: "IN"}, func(m *bus.Msg) {
		got = append(got, m.Subject+" "+string(m.Data)+" "+strings.Join(m.Header["Nats-Msg-Id"], ""))
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		`in.a {"k":"a","n":1} in.ndjson:1`, `in.b {"k":"b","n":2} in.ndjson:3`, "in.by.hand hand ",
		`in.a {"k":"a","n":3} in.ndjson:4`, `in.b {"k":"b","n":4} in.ndjson:6`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.run(ctx, conn); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want a cancelled feed", err)
	}
}

func TestFeed_mistakes(t *testing.T) {
	srv := testenv.StartServer(t, testenv.DontListen())
	conn, err := bus.Connect(t.Context(), bus.Config{InProcess: srv.InProcess})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	spec := feedSpec(t, "{\"k\":\"a\"}\nno JSON\n")
	f, err := openFeed(t.Context(), conn, spec.Sources, "IN", spec.Dev.Feed["IN"], 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.run(t.Context(), conn); err == nil || !strings.Contains(err.Error(), "in.ndjson, line 2: ") {
		t.Errorf("got %v, want an error that names line 2", err)
	}
	missing := spec.Dev.Feed["IN"]
	missing.File += ".gone"
	if _, err := openFeed(t.Context(), conn, spec.Sources, "IN", missing, 0); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want a file that does not exist", err)
	}
}

func TestStreamSubject(t *testing.T) {
	for in, want := range map[string]string{"flights.*": "flights.>", "a.b.*.c": "a.b.>", "a.b": "a.b", "*.x": "*.x"} {
		if got := streamSubject(in); got != want {
			t.Errorf("%s: got %s, want %s", in, got, want)
		}
	}
}

func TestOpenStoreDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	s, err := openStoreDir(dir, "f")
	if err != nil || !s.fresh || s.dir != dir {
		t.Fatalf("got %+v, %v", s, err)
	}
	if _, err := openStoreDir(dir, "f"); !errors.Is(err, errStoreInUse) {
		t.Errorf("got %v, want errStoreInUse", err)
	}
	s.unlock()
	if s, err = openStoreDir(dir, "f"); err != nil {
		t.Fatal(err)
	}
	s.unlock()
}

func TestFeedSubjects(t *testing.T) {
	for _, c := range []struct {
		wildcard string
		filters  []string
		want     string
	}{
		{"in.*", nil, "in.>"},
		{"in", nil, "in"},
		{"in.*.*", []string{"in.>"}, "in.>"},
		{"in.a", []string{"in.*", "other"}, "in.* other"},
		// The source reads a part of what is fed.
		{"in.*", []string{"in.a", "in.b"}, "in.>"},
		{"in.*", []string{"in.a", "other.a"}, "in.> other.a"},
		{"in.a.*", []string{"in.a"}, "in.a.> in.a"},
		{"in.*", []string{">"}, ">"},
		{"*", []string{"in"}, "*"},
	} {
		if got := strings.Join(feedSubjects(c.wildcard, c.filters), " "); got != c.want {
			t.Errorf("a feed of %s, filters %v: %s, want %s", c.wildcard, c.filters, got, c.want)
		}
	}
}
