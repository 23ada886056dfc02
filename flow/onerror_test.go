package flow_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

var errBad = errors.New("is bad")

// failing has a step of every kind that fails at the record that names it, by an
// error or a panic: "k <step> error", "k <step> panic".
func failing(t *testing.T, change ...func(*flow.Options)) *runner {
	t.Helper()
	fail := func(step, v string) error {
		switch v {
		case "k " + step + " error":
			return errBad
		case "k " + step + " panic":
			panic(step + " falls over")
		}
		return nil
	}
	b := newFlow(change...)
	src := flow.From(b, flow.Source{Stream: "IN"}, func(_ *flow.Meta, data []byte) (string, error) {
		return string(data), fail("decode", string(data))
	}, flow.ID("decode"))
	pass := func(step string) func(*flow.Meta, string) (string, error) {
		return func(_ *flow.Meta, v string) (string, error) { return v, fail(step, v) }
	}
	is := func(step string) func(*flow.Meta, string) (bool, error) {
		return func(_ *flow.Meta, v string) (bool, error) { return true, fail(step, v) }
	}
	s := flow.Filter(flow.Map(src, pass("map"), flow.ID("map")), is("filter"), flow.ID("filter"))
	s = flow.FlatMap(s, func(_ *flow.Meta, v string, emit func(string)) error {
		if err := fail("flatmap", v); err != nil {
			return err
		}
		emit(v)
		return nil
	}, flow.ID("flatmap"))
	s = flow.KeyBy(s, func(_ *flow.Meta, v string) (string, error) { return "k", fail("key", v) }, flow.ID("key"))
	s, _ = flow.Branch(s, is("branch"), flow.ID("branch"))
	s = flow.Dedupe(s, "dedupe", 1, pass("dedupe"))
	s = flow.Stateful(s, "stateful", decimalState, func(_ *flow.Meta, _ *int64, v string, emit func(string)) error {
		emit(v)
		return fail("stateful", v)
	})
	flow.To(s, flow.Sink[string]{
		Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."),
		Encode: func(dst []byte, _ *flow.Meta, v string) ([]byte, error) { return append(dst, v...), fail("to", v) },
	}, flow.ID("to"))
	agg := flow.Aggregator[string, string, string]{
		State: flow.JSONState[string](1, nil),
		Add:   func(_ *flow.Meta, last *string, v string) error { *last = v; return fail("add", v) },
	}
	agg.Result = func(_ *flow.Meta, last *string) (string, error) { return *last, fail("result", *last) }
	flow.Aggregate(s, "update", agg)
	agg.Add = func(_ *flow.Meta, last *string, v string) error { *last = v; return nil }
	agg.Result = func(_ *flow.Meta, last *string) (string, error) { return *last, fail("commit", *last) }
	agg.Emit = flow.EmitCommit
	flow.Aggregate(s, "commit", agg)
	flow.StopWhen(s, func(_ *flow.Meta, v string) (bool, error) { return false, fail("stop", v) }, flow.ID("stop"))
	return run(t, b)
}

// failures are the steps of failing by the word that makes them fail.
var failures = map[string]string{
	"decode": "decode", "map": "map", "filter": "filter", "flatmap": "flatmap", "key": "key", "branch": "branch", "dedupe": "dedupe",
	"stateful": "stateful", "to": "to", "add": "update", "result": "update", "commit": "commit", "stop": "stop",
}

func TestDeadLetter_NamesTheStep(t *testing.T) {
	for word, step := range failures {
		for _, how := range []string{"error", "panic"} {
			r := failing(t)
			payload := fmt.Sprintf("k %s %s", word, how)
			if err := r.play(record{subject: "in.x", seq: 41, data: payload}, record{seq: 42, data: "k fine"}); err != nil {
				t.Fatal(err)
			}
			var letters []published
			for _, o := range r.seal() {
				if o.Headers != nil {
					letters = append(letters, o)
				}
			}
			if word == "commit" {
				// The last record of the key is the one that counts.
				r.feed(payload)
				letters = append(letters, r.seal()...)
				letters = letters[len(letters)-1:]
			}
			if len(letters) != 1 {
				t.Fatalf("%s: dead letters %+v", payload, letters)
			}
			h := letters[0].Headers
			text := h[flow.HeaderDeadError]
			switch {
			case how == "panic" && !strings.HasPrefix(text, "step panicked: "+word+" falls over"),
				how == "error" && strings.TrimPrefix(text, "decode: ") != "is bad":
				t.Errorf("%s: error %q", payload, text)
			}
			want := map[string]string{
				flow.HeaderDeadFlow: "test", flow.HeaderDeadStep: step, flow.HeaderDeadError: text,
				flow.HeaderDeadStream: "IN", flow.HeaderDeadSubject: "in.x", flow.HeaderDeadSeq: "41",
			}
			if word == "commit" {
				want[flow.HeaderDeadSubject], want[flow.HeaderDeadSeq] = "in", "43"
			}
			if diff := cmp.Diff(want, h); diff != "" {
				t.Errorf("%s: headers (-want +got):\n%s", payload, diff)
			}
			if letters[0].Data != payload || letters[0].Subject != "natsflow.dlq.test" {
				t.Errorf("%s: dead letter %+v", payload, letters[0])
			}
		}
	}
}

func TestStop_NamesTheStep(t *testing.T) {
	for word, step := range failures {
		for _, how := range []string{"error", "panic"} {
			r := failing(t, stopOnError)
			payload := fmt.Sprintf("k %s %s", word, how)
			r.feed("k fine")
			if got := r.seal(); len(got) != 1 {
				t.Fatalf("outputs %v", got)
			}
			err := r.play(record{subject: "in.x", seq: 41, data: payload})
			if word == "commit" {
				if err != nil {
					t.Fatal(err)
				}
				_, err = r.tasks[0].Seal()
			}
			wantStepError(t, err, step, 41)
			if se := new(flow.StepError); errors.As(err, &se) && (se.Stream != "IN" || se.Subject != "in.x") {
				t.Errorf("%s: %+v", payload, se)
			}
			if want := map[string]error{"error": errBad, "panic": flow.ErrPanic}[how]; !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", payload, err, want)
			}
			if text := err.Error(); !strings.HasPrefix(text, fmt.Sprintf("step %q, stream IN, sequence 41: ", step)) {
				t.Errorf("%s: %q", payload, text)
			}
		}
	}
}

func TestStop_HasNoDeadLetterSink(t *testing.T) {
	for _, s := range failing(t, stopOnError).f.Sinks() {
		if s.Kind == flow.SinkDead {
			t.Errorf("sink %+v", s)
		}
	}
}

// The first failure is the one to report, and the router and the task stay
// stopped: what they hold may be a part of a record.
func TestStop_TheFirstFailureCounts(t *testing.T) {
	r := failing(t, stopOnError)
	wantStepError(t, r.play(record{data: "k map error"}), "map", 1)
	wantStepError(t, r.play(record{data: "k fine"}), "map", 1)

	r = failing(t, stopOnError)
	wantStepError(t, r.play(record{data: "k fine"}, record{data: "k to error"}, record{data: "k stateful panic"}), "to", 2)
	wantStepError(t, r.play(record{data: "k fine"}), "to", 2)
}

// A step that recovers what comes from behind it must not hide the failure.
func TestStop_IsNotHiddenByARecover(t *testing.T) {
	hide := func(_ *flow.Meta, v string, emit func(string)) error {
		defer func() { _ = recover() }()
		emit(v)
		return nil
	}
	bad := func(_ *flow.Meta, v string) (string, error) {
		if v == "k bad" {
			return "", errBad
		}
		return v, nil
	}
	t.Run("before the key", func(t *testing.T) {
		b := newFlow(stopOnError)
		textTo(flow.KeyBy(flow.Map(flow.FlatMap(text(b), hide), bad, flow.ID("bad")), firstWord))
		wantStepError(t, run(t, b).play(record{data: "k a"}, record{data: "k bad"}), "bad", 2)
	})
	t.Run("after the key", func(t *testing.T) {
		b := newFlow(stopOnError)
		textTo(flow.Map(flow.FlatMap(keyed(b), hide), bad, flow.ID("bad")))
		wantStepError(t, run(t, b).play(record{data: "k a"}, record{data: "k bad"}, record{data: "k b"}), "bad", 2)
	})
}

func TestDeadLetter_ErrorIsOneShortLine(t *testing.T) {
	for name, test := range map[string]struct{ err, want string }{
		"lines":       {"one\r\ntwo\tthree\x00\x7f\u0085four", "one  two three   four"},
		"not UTF-8":   {"a\xffb", "ab"},
		"blanks":      {"\n a \n", "a"},
		"long":        {strings.Repeat("x", 5000), strings.Repeat("x", 1024)},
		"cut a rune":  {strings.Repeat("ä", 513) + "x", strings.Repeat("ä", 512)},
		"cut a rune2": {"x" + strings.Repeat("ä", 600), "x" + strings.Repeat("ä", 511)},
		"empty":       {"", ""},
	} {
		b := newFlow()
		textTo(flow.Map(keyed(b), func(*flow.Meta, string) (string, error) { return "", errors.New(test.err) }))
		r := run(t, b)
		r.feed("k x")
		got := r.seal()[0].Headers[flow.HeaderDeadError]
		if got != test.want || !utf8.ValidString(got) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// The other steps that follow the same stream get the record after an error;
// what was emitted before the error stays.
func TestDeadLetter_OtherBranchesGoOn(t *testing.T) {
	b := newFlow()
	s := keyed(b)
	textTo(flow.Map(s, func(*flow.Meta, string) (string, error) { return "", errBad }, flow.ID("bad")))
	flow.ToKV(s, flow.KVSink[string]{Bucket: "LAST", Encode: flow.EncodeText()})
	run(t, b).want([]string{"k a"}, dead("bad", "is bad", 1, "k a"), published{Sink: "kv LAST", Subject: "$KV.LAST.k", Data: "k a"})
}
