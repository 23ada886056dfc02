package bus

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestClassify(t *testing.T) {
	api := func(code, err int) error { return &APIError{Code: code, ErrorCode: jetstream.ErrorCode(err)} }
	for _, tc := range []struct {
		err       error
		class     error
		retryable bool
	}{
		{api(400, 10071), ErrFenced, false},
		{api(400, 10164), ErrConflict, true},
		{api(409, 10158), ErrConflict, true},
		{api(503, 10163), ErrConflict, true},
		{api(429, 10167), ErrConflict, true},
		{api(429, 10211), ErrConflict, true},
		{api(503, 10008), ErrConflict, true},
		{api(503, 99999), ErrConflict, true},
		{api(404, 10059), ErrNotFound, false},
		{api(404, 10037), ErrNotFound, false},
		{api(404, 10014), ErrNotFound, false},
		{api(404, 10043), ErrNotFound, false},
		{api(400, 10058), ErrExists, false},
		{api(400, 10013), ErrExists, false},
		{api(400, 10148), ErrExists, false},
		{api(503, 10077), ErrNoSpace, true},
		{api(400, 10002), ErrNoSpace, true},
		{api(503, 10023), ErrNoSpace, true},
		{api(500, 10028), ErrNoSpace, true},
		{api(500, 10047), ErrNoSpace, true},
		{api(400, 10122), ErrNoSpace, true},
		{api(400, 10027), ErrNoSpace, true},
		{api(400, 10054), ErrTooLarge, false},
		{api(400, 10097), ErrTooLarge, false},
		{api(503, 10076), ErrNoJetStream, false},
		{api(503, 10039), ErrNoJetStream, false},
		{nats.ErrTimeout, ErrUnknownOutcome, true},
		{nats.ErrNoResponders, ErrUnknownOutcome, true},
		{nats.ErrDisconnected, ErrUnknownOutcome, true},
		{nats.ErrReconnectBufExceeded, ErrUnknownOutcome, true},
		{context.DeadlineExceeded, ErrUnknownOutcome, true},
		{io.EOF, ErrUnknownOutcome, true},
		{nats.ErrConnectionClosed, ErrClosed, false},
		{nats.ErrMaxPayload, ErrTooLarge, false},
		{jetstream.ErrStreamNotFound, ErrNotFound, false},
		{errors.Join(ErrUnknownOutcome, ErrClosed), ErrUnknownOutcome, false},
		{errors.New("other"), nil, false},
	} {
		t.Run(tc.err.Error(), func(t *testing.T) {
			err := fmt.Errorf("outer: %w", classify("doing", fmt.Errorf("inner: %w", tc.err)))
			for _, class := range []error{ErrFenced, ErrConflict, ErrUnknownOutcome, ErrNotFound, ErrExists, ErrNoSpace, ErrTooLarge, ErrNoJetStream} {
				if got := errors.Is(err, class); got != errors.Is(class, tc.class) {
					t.Errorf("Is(%v) = %v, class should be %v", class, got, tc.class)
				}
			}
			if !errors.Is(err, tc.err) {
				t.Error("the cause is lost")
			}
			if Retryable(err) != tc.retryable {
				t.Errorf("Retryable = %v", Retryable(err))
			}
			var want, got *APIError
			if errors.As(tc.err, &want) && (!errors.As(err, &got) || got.ErrorCode != want.ErrorCode) {
				t.Error("the server's error is lost")
			}
			if again := classify("again", err); tc.class != nil && !errors.Is(again, tc.class) {
				t.Errorf("classified twice: %v", again)
			}
		})
	}
	if classify("doing", nil) != nil || Retryable(nil) {
		t.Error("nil is an error")
	}
}

func TestParsePubAck(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want pubAck
		code int
		bad  bool
	}{
		{in: `{"stream":"S","seq":12}`, want: pubAck{seq: 12}},
		{in: `{"stream":"S", "domain":"d", "seq": 12,"duplicate": true}`, want: pubAck{seq: 12, duplicate: true}},
		{in: `{"stream":"S","seq":12,"batch":"b","count":5}`, want: pubAck{seq: 12, count: 5}},
		{in: `{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 3"},"stream":"S","seq":0}`, code: 10071},
		{in: `{}`, bad: true},
		{in: ``, bad: true},
	} {
		got, err := parsePubAck([]byte(tc.in))
		var api *APIError
		switch {
		case tc.code != 0:
			if !errors.As(err, &api) || int(api.ErrorCode) != tc.code {
				t.Errorf("%s: %v", tc.in, err)
			}
		case (err != nil) != tc.bad, !tc.bad && got != tc.want:
			t.Errorf("%s: %+v, %v", tc.in, got, err)
		}
	}
}

func TestSubjects(t *testing.T) {
	for _, tc := range []struct {
		pattern, subject string
		want             bool
	}{
		{"a.>", "a.b", true},
		{"a.>", "a.b.c", true},
		{"a.>", "a", false},
		{"a.*", "a.b", true},
		{"a.*", "a.b.c", false},
		{"a.b", "a.b", true},
		{"a.b", "a.*", false},
		{"a.*", "a.*", true},
		{"a.*", "a.>", false},
		{">", "a", true},
		{">", "a.>", true},
		{"*.b", "a.b", true},
		{"a", "a.b", false},
		{"a.b", "a", false},
		{"a.>", "a.>", true},
	} {
		if got := subjectMatches(tc.pattern, tc.subject); got != tc.want {
			t.Errorf("%s ~ %s: %v", tc.pattern, tc.subject, got)
		}
	}
	for s, want := range map[string]bool{
		"a": true, "a.b": true, "a.b*c": true, "": false, ".a": false, "a.": false, "a..b": false, "a.*": false, "a.>": false, "*": false,
		"a b": false, "a\r\nb": false, "a\tb": false, "ä.ö": true, "a.>.b": false,
	} {
		if got := validSubject(s); got != want {
			t.Errorf("validSubject(%q) = %v", s, got)
		}
	}
}

func TestParseAckSubject(t *testing.T) {
	want := position{stream: 10, consumer: 7, time: 1700000000000000000, pending: 3}
	for _, s := range []string{
		"$JS.ACK.S.c.1.10.7.1700000000000000000.3",
		"$JS.ACK.dom.hash.S.c.1.10.7.1700000000000000000.3.tok",
		"$JS.ACK._.hash.S.c.1.10.7.1700000000000000000.3",
	} {
		if got, ok := parseAckSubject(s); !ok || got != want {
			t.Errorf("%s: %+v, %v", s, got, ok)
		}
	}
	for _, s := range []string{"", "$JS.ACK.", "$JS.ACK.S.c.1.x.7.1.3", "$JS.FC.S.c.1.2.3.4.5", "$JS.ACK.S.c.1..7.1.3", "$JS.ACK.S.c.1.10.7"} {
		if _, ok := parseAckSubject(s); ok {
			t.Errorf("%q was taken", s)
		}
	}
}

func TestParsePosition(t *testing.T) {
	s := FormatPosition("flow", "0.3", 17, 4)
	if s != "flow/0.3/17/4" {
		t.Errorf("FormatPosition: %s", s)
	}
	flow, task, n, i, ok := ParsePosition(s)
	if flow != "flow" || task != "0.3" || n != 17 || i != 4 || !ok {
		t.Error("ParsePosition is not the reverse")
	}
	for _, s := range []string{"", "a", "a/b/1", "a/b/x/1", "a/b/1/x", "a/b/1/-1", "a/b/01/1", "/b/1/1", "a//1/1", "a/b/+1/1"} {
		if _, _, _, _, ok := ParsePosition(s); ok {
			t.Errorf("%q was taken", s)
		}
	}
}

func FuzzParseAckSubject(f *testing.F) {
	f.Add("$JS.ACK.S.c.1.10.7.1700000000000000000.3")
	f.Fuzz(func(_ *testing.T, s string) { parseAckSubject(s) })
}

func FuzzParsePosition(f *testing.F) {
	f.Add("flow/0.3/17/4")
	f.Fuzz(func(t *testing.T, s string) {
		if flow, task, n, i, ok := ParsePosition(s); ok && FormatPosition(flow, task, n, i) != s {
			t.Errorf("%q is not what it is parsed to", s)
		}
	})
}
