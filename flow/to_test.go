package flow_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

func TestTo_Unkeyed(t *testing.T) {
	// Without a key the records of one subject keep their order.
	b := newFlow()
	textTo(text(b))
	r := run(t, b)
	for _, rec := range []record{{subject: "in.b", data: "1"}, {subject: "in.a", data: "2"}, {subject: "in.b", data: "3"}} {
		if err := r.play(rec); err != nil {
			t.Fatal(err)
		}
	}
	diffOutputs(t, r.seal(), out("in=2Eb", "1"), out("in=2Ea", "2"), out("in=2Eb", "3"))
}

func TestTo_Several(t *testing.T) {
	b := newFlow()
	s := keyed(b)
	textTo(s)
	flow.To(s, flow.Sink[string]{
		Stream: "COPY", Subjects: []string{"copy.>"}, Encode: flow.EncodeJSON[string](),
		Subject: func(dst []byte, m *flow.Meta, _ string) ([]byte, error) {
			return append(dst, "copy."+m.Subject+".x"...), nil
		},
	})
	run(t, b).want([]string{"k a"}, out("k", "k a"), published{Sink: "stream COPY", Subject: "copy.in.x", Data: `"k a"`})
}

// A result that can never be published must not get into a commit: it would stop
// the flow for good.
func TestTo_BadSubjectIsADeadLetter(t *testing.T) {
	b := newFlow()
	flow.To(keyed(b), flow.Sink[string]{
		Stream: "OUT", Subjects: []string{"out.*", "more.>", "fix", "out.*.x"}, Encode: flow.EncodeText(),
		Subject: func(dst []byte, _ *flow.Meta, v string) ([]byte, error) {
			_, subject, _ := strings.Cut(v, " ")
			if subject == "error" {
				return dst, errors.New("no subject")
			}
			return append(dst, strings.ReplaceAll(subject, "_", " ")...), nil
		},
	}, flow.ID("out"))
	r := run(t, b)
	long := strings.Repeat("x", 2048)
	good := []string{"out.a", "out.*a", "more.a.b.c", "fix", "out.a.x", "out.ä", "out." + long[4:]}
	bad := map[string]string{
		"": "empty subject", "error": "no subject", "out": "Subjects do not have it", "out.a.b": "Subjects do not have it",
		"more": "Subjects do not have it", "fixx": "Subjects do not have it", "fi": "Subjects do not have it", "other.a": "Subjects do not have it",
		"out.": "not a subject", "out..x": "not a subject", ".out": "not a subject", "out.*": "not a subject", "out.>": "not a subject",
		"out.a_b": "not a subject", "out.a\tb": "not a subject", "out.a\r\nb": "not a subject", "out.\x7f": "not a subject",
		"out." + long: "not a subject",
	}
	for _, subject := range good {
		r.feed("k " + subject)
		if got := r.seal(); len(got) != 1 || got[0].Subject != subject || got[0].Headers != nil {
			t.Errorf("%.40q: %.200v", subject, got)
		}
	}
	for subject, want := range bad {
		r.feed("k " + subject)
		got := r.seal()
		if len(got) != 1 || got[0].Headers[flow.HeaderDeadStep] != "out" || !strings.Contains(got[0].Headers[flow.HeaderDeadError], want) {
			t.Errorf("%.40q: %.300v, want %q", subject, got, want)
		}
	}
}

func TestTo_EncodeFails(t *testing.T) {
	b := newFlow()
	flow.To(keyed(b), flow.Sink[string]{
		Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."),
		Encode: func(dst []byte, _ *flow.Meta, v string) ([]byte, error) {
			dst = append(dst, v...)
			switch v {
			case "k bad":
				return dst, errors.New("is bad")
			case "k panic":
				panic("half-way")
			}
			return dst, nil
		},
	}, flow.ID("out"))
	r := run(t, b)
	r.feed("k a", "k bad", "k panic", "k b")
	got := r.seal()
	if len(got) != 4 || got[2].Data != "k panic" || got[2].Headers[flow.HeaderDeadStep] != "out" {
		t.Fatalf("outputs %+v", got)
	}
	diffOutputs(t, append(got[:2:2], got[3]), out("k", "k a"), dead("out", "is bad", 2, "k bad"), out("k", "k b"))
}

func TestTo_Sinks(t *testing.T) {
	b := newFlow()
	s := keyed(b)
	textTo(s)
	flow.ToKV(s, flow.KVSink[string]{Bucket: "LAST", Encode: flow.EncodeText()}, flow.ID("last"))
	flow.StopWhen(s, func(*flow.Meta, string) (bool, error) { return false, nil })
	flow.StopWhen(s, func(*flow.Meta, string) (bool, error) { return false, nil })
	want := []flow.SinkInfo{
		{Kind: flow.SinkDead},
		{Step: "out", Kind: flow.SinkStream, Name: "OUT", Subjects: []string{"out.*"}},
		{Step: "last", Kind: flow.SinkBucket, Name: "LAST"},
		{Kind: flow.SinkControl},
	}
	if diff := cmp.Diff(want, build(t, b).Sinks()); diff != "" {
		t.Errorf("sinks (-want +got):\n%s", diff)
	}
}
