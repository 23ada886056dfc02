package control

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestParseCommand(t *testing.T) {
	suspendNow := func(c Command) Command {
		c.Kind, c.Mode = KindDrain, ModeSuspend
		if c.At.Kind == "" {
			c.At.Kind = AtNow
		}
		return c
	}
	tests := []struct {
		name, subject, body string
		want                Command
	}{
		{"empty", "control.drain", "", suspendNow(Command{})},
		{"blank", "control.drain", " \n\t", suspendNow(Command{})},
		{"empty object", "control.drain", "{}", suspendNow(Command{})},
		{"flow", "control.drain.flights", "", suspendNow(Command{Flow: "flights"})},
		{"head", "control.drain", `{"at":"head"}`, suspendNow(Command{At: At{Kind: AtHead}})},
		{"seq", "control.drain", `{"at":{"seq":{"A":18446744073709551615,"B":0}}}`, suspendNow(Command{At: At{Kind: AtSeq, Seq: map[string]uint64{"A": 1<<64 - 1, "B": 0}}})},
		{"time", "control.drain", `{"at":{"time":"2026-01-02T05:04:05+02:00"}}`, suspendNow(Command{At: At{Kind: AtTime, Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}})},
		{"all", "control.drain.a-1", `{"mode":"finish","at":"now","reason":"deploy \"x\""}`, Command{Kind: KindDrain, Flow: "a-1", Mode: ModeFinish, At: At{Kind: AtNow}, Reason: `deploy "x"`}},
		{"resume", "control.resume", "", Command{Kind: KindResume}},
		{"resume reason", "control.resume.a", `{"reason":"go"}`, Command{Kind: KindResume, Flow: "a", Reason: "go"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseCommand("control", tt.subject, []byte(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestParseCommand_refused(t *testing.T) {
	tests := []struct{ name, subject, body, want string }{
		{"kind", "control.drian", "", `unknown command "drian" (did you mean "drain"?)`},
		{"kind far off", "control.status", "", `unknown command "status"`},
		{"savepoint", "control.savepoint.a", "", "savepoints are not supported"},
		{"flow", "control.drain.Flights", "", `flow name "Flights"`},
		{"tokens", "control.drain.a.b", "", "the form is control.drain.FLOW"},
		{"prefix", "other.drain", "", `does not begin with "control."`},
		{"member", "control.drain", `{"mdoe":"suspend"}`, `unknown member "mdoe" (did you mean "mode"?)`},
		{"case", "control.drain", `{"Mode":"suspend"}`, `(did you mean "mode"?)`},
		{"member far off", "control.drain", `{"x":1}`, `unknown member "x" (known: "mode", "at", "reason")`},
		{"twice", "control.drain", `{"mode":"suspend","mode":"finish"}`, `member "mode" given twice`},
		{"twice inside", "control.drain", `{"at":{"seq":{"A":1,"A":2}}}`, `member "A" given twice`},
		{"twice escaped", "control.drain", `{"mode":"suspend","mod\u0065":"finish"}`, `member "mode" given twice`},
		{"mode", "control.drain", `{"mode":"suspent"}`, `mode "suspent": must be one of "suspend", "finish" (did you mean "suspend"?)`},
		{"mode type", "control.drain", `{"mode":1}`, "mode must be a string, not a number"},
		{"at", "control.drain", `{"at":"haed"}`, `(did you mean "head"?)`},
		{"at type", "control.drain", `{"at":7}`, "not a number"},
		{"at empty", "control.drain", `{"at":{}}`, "one member, seq or time; it has 0"},
		{"at both", "control.drain", `{"at":{"seq":{"A":1},"time":"2026-01-02T03:04:05Z"}}`, "it has 2"},
		{"at member", "control.drain", `{"at":{"sequence":{"A":1}}}`, `unknown member "sequence"`},
		{"seq empty", "control.drain", `{"at":{"seq":{}}}`, "names no stream"},
		{"seq type", "control.drain", `{"at":{"seq":12}}`, "must be an object {STREAM:N}"},
		{"seq negative", "control.drain", `{"at":{"seq":{"A":-1}}}`, `at.seq of "A" must be a whole number, not -1`},
		{"seq fraction", "control.drain", `{"at":{"seq":{"A":1.5}}}`, "must be a whole number"},
		{"seq too large", "control.drain", `{"at":{"seq":{"A":18446744073709551616}}}`, "must be a whole number"},
		{"seq string", "control.drain", `{"at":{"seq":{"A":"1"}}}`, "must be a whole number"},
		{"seq no name", "control.drain", `{"at":{"seq":{"":1}}}`, "empty stream name"},
		{"time", "control.drain", `{"at":{"time":"yesterday"}}`, "must be RFC 3339"},
		{"time zero", "control.drain", `{"at":{"time":"0001-01-01T00:00:00Z"}}`, "between the years"},
		{"array", "control.drain", `[]`, "must be a JSON object, not an array"},
		{"null", "control.drain", `null`, "must be a JSON object, not null"},
		{"not JSON", "control.drain", `now`, "the body"},
		{"cut off", "control.drain", `{"mode":`, "not valid JSON"},
		{"more behind", "control.drain", `{}{}`, "not valid JSON"},
		{"resume mode", "control.resume", `{"mode":"suspend"}`, `unknown member "mode"`},
		{"reason", "control.drain", `{"reason":"` + strings.Repeat("x", 1001) + `"}`, "reason has 1001 bytes"},
		{"size", "control.drain", strings.Repeat(" ", maxBody+1), "more than 65536"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseCommand("control", tt.subject, []byte(tt.body))
			if !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error %v, want one with %q", err, tt.want)
			}
			if got.Mode != "" || got.Reason != "" || !got.At.IsZero() {
				t.Errorf("a refused command has contents: %+v", got)
			}
		})
	}
}

// genCommand draws commands that are valid.
func genCommand() *rapid.Generator[Command] {
	return rapid.Custom(func(t *rapid.T) Command {
		c := Command{
			Kind:   rapid.SampledFrom([]Kind{KindDrain, KindDrain, KindResume}).Draw(t, "kind"),
			Flow:   rapid.SampledFrom([]string{"", "f", "other"}).Draw(t, "flow"),
			Reason: rapid.StringN(0, 20, 60).Draw(t, "reason"),
		}
		if c.Kind != KindDrain {
			return c
		}
		c.Mode = rapid.SampledFrom([]Mode{ModeSuspend, ModeFinish}).Draw(t, "mode")
		c.At.Kind = rapid.SampledFrom([]string{AtNow, AtHead, AtSeq, AtTime}).Draw(t, "at")
		switch c.At.Kind {
		case AtSeq:
			c.At.Seq = rapid.MapOfN(rapid.SampledFrom([]string{"A", "B"}), rapid.Uint64(), 1, 2).Draw(t, "seq")
		case AtTime:
			c.At.Time = time.Unix(0, rapid.Int64Range(1, 1<<62).Draw(t, "time")).UTC()
		}
		return c
	})
}

func TestCommand_Body(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := genCommand().Draw(t, "command")
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		got, err := ParseCommand("a.b", c.Subject("a.b"), c.Body())
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(c, got); d != "" {
			t.Fatal(d)
		}
	})
}

func TestCommand_Validate(t *testing.T) {
	for _, c := range []Command{
		{},
		{Kind: "stop"},
		{Kind: KindDrain, Flow: "A"},
		{Kind: KindDrain, Mode: "fast"},
		{Kind: KindDrain, At: At{Kind: AtSeq}},
		{Kind: KindDrain, At: At{Kind: AtTime}},
		{Kind: KindDrain, At: At{Kind: "then"}},
		{Kind: KindDrain, At: At{Kind: AtNow, Seq: map[string]uint64{"A": 1}}},
		{Kind: KindResume, Reason: strings.Repeat("x", 2000)},
	} {
		if err := c.Validate(); !errors.Is(err, ErrMalformed) {
			t.Errorf("%+v: error %v", c, err)
		}
	}
	if err := (Command{Kind: KindDrain}).Validate(); err != nil {
		t.Errorf("a bare drain: %v", err)
	}
}

func FuzzParseCommand(f *testing.F) {
	for _, body := range []string{"", "{}", `{"mode":"finish","at":{"seq":{"A":1}},"reason":"x"}`, `{"at":{"time":"2026-01-02T03:04:05Z"}}`, `{"a":{"a":1,"a":2}}`} {
		f.Add("control.drain.f", []byte(body))
	}
	f.Fuzz(func(t *testing.T, subject string, body []byte) {
		c, err := ParseCommand("control", subject, body)
		if err != nil {
			return
		}
		// What is understood can be said again and means the same.
		again, err := ParseCommand("control", c.Subject("control"), c.Body())
		if err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		if d := cmp.Diff(c, again); d != "" {
			t.Fatal(d)
		}
	})
}

func TestValidPrefix(t *testing.T) {
	for _, p := range []string{"control", "a.b", "A_1-x"} {
		if err := ValidPrefix(p); err != nil {
			t.Error(err)
		}
	}
	for _, p := range []string{"", ".", "a.", "a..b", "a b", "a.*", ">", "$KV", "natsflow", "natsflow.x"} {
		if ValidPrefix(p) == nil {
			t.Errorf("prefix %q was accepted", p)
		}
	}
	if a, b := streamName("a.b"), streamName("a_b"); a == b || strings.Contains(a, ".") || streamName("control") != StreamName {
		t.Errorf("stream names %q, %q", a, b)
	}
}

func TestDidYouMean(t *testing.T) {
	words := []string{"suspend", "finish"}
	for in, want := range map[string]string{"suspned": "suspend", "SUSPEND": "suspend", "finnish": "finish", "stop": "", "": ""} {
		got := didYouMean(in, words)
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}
