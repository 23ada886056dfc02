package flow_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"natsflow/flow"
)

const within = 10 * time.Second

// deduped drops repeats of the second word.
func deduped(b *flow.Builder) {
	textTo(flow.Dedupe(keyed(b), "seen", within, func(_ *flow.Meta, v string) (string, error) {
		words := strings.Fields(v)
		if words[1] == "bad" {
			return "", errors.New("is bad")
		}
		return words[1], nil
	}))
}

// at makes records of a key and a value at a number of seconds.
func at(seconds float64, data string) record {
	return record{nanos: int64(seconds * float64(time.Second)), data: data}
}

func (r *runner) wantAt(records []record, outputs ...published) {
	r.tb.Helper()
	if err := r.play(records...); err != nil {
		r.tb.Fatal(err)
	}
	got := r.seal()
	if fmt.Sprint(got) != fmt.Sprint(outputs) {
		r.tb.Fatalf("outputs %v\nwant %v", got, outputs)
	}
}

func TestDedupe(t *testing.T) {
	b := newFlow()
	deduped(b)
	r := run(t, b)
	r.wantAt([]record{at(100, "k a"), at(101, "k a"), at(101, "k b"), at(102, "j a"), at(103, "k bad"), at(104, "k b again")},
		out("k", "k a"), out("k", "k b"), out("j", "j a"), dead("seen", "is bad", 5, "k bad"))
	// The time counts from the record that was accepted, not from its repeats.
	r.wantAt([]record{at(109.999, "k a")})
	r.wantAt([]record{at(110, "k a again"), at(119.999, "k a")}, out("k", "k a again"))
}

// Key and value are told apart, whatever bytes they have.
func TestDedupe_KeyAndValueAreApart(t *testing.T) {
	b := newFlow()
	s := flow.KeyBy(text(b), func(_ *flow.Meta, v string) (string, error) { k, _, _ := strings.Cut(v, "|"); return k, nil })
	textTo(flow.Dedupe(s, "seen", within, func(_ *flow.Meta, v string) (string, error) { _, v, _ = strings.Cut(v, "|"); return v, nil }))
	run(t, b).want([]string{"ab|c", "a|bc", "|abc", "abc|"}, out("ab", "ab|c"), out("a", "a|bc"), out("=", "|abc"), out("abc", "abc|"))
}

func TestDedupe_Expiry(t *testing.T) {
	b := newFlow()
	deduped(b)
	r := run(t, b)
	for i := range 5000 {
		if err := r.play(at(float64(i), fmt.Sprintf("k v%d", i))); err != nil {
			t.Fatal(err)
		}
		if i > 20 && r.keys() > 11 {
			t.Fatalf("%d values after %d seconds of one a second, 10 s each", r.keys(), i)
		}
		if i%7 == 0 {
			r.seal()
		}
	}
	r.seal()
	// The deltas have the deletions too.
	r.crash()
	if r.keys() > 11 {
		t.Errorf("%d values after the restart", r.keys())
	}
	// A burst leaves as fast as records come.
	for i := range 1000 {
		if err := r.play(at(6000, fmt.Sprintf("k w%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	for range 600 {
		if err := r.play(at(7000, "k same")); err != nil {
			t.Fatal(err)
		}
	}
	if r.keys() != 1 {
		t.Errorf("%d values long after their time", r.keys())
	}
}

func TestDedupe_Restore(t *testing.T) {
	b := newFlow()
	deduped(b)
	r := run(t, b)
	r.wantAt([]record{at(100, "k a"), at(105, "k b")}, out("k", "k a"), out("k", "k b"))
	r.crash()
	r.wantAt([]record{at(109, "k a"), at(109, "k b"), at(110, "k a 2"), at(112, "k b"), at(115, "k b 2")},
		out("k", "k a 2"), out("k", "k b 2"))
	// What was restored expires too.
	r.crash()
	r.wantAt([]record{at(200, "k x"), at(200, "k y")}, out("k", "k x"), out("k", "k y"))
	if r.keys() != 2 {
		t.Errorf("%d values, want x and y", r.keys())
	}
}

// Two sources have two clocks: a value of the later one is known to the earlier.
func TestDedupe_TimeGoesBack(t *testing.T) {
	b := newFlow()
	deduped(b)
	r := run(t, b)
	r.wantAt([]record{at(100, "k a"), at(50, "k a"), at(50, "k b"), at(105, "k b"), at(115, "k b 2")},
		out("k", "k a"), out("k", "k b"), out("k", "k b"), out("k", "k b 2"))
}

// The naive model remembers every acceptance for ever; restarts at any moment.
func TestDedupe_Model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := flow.New("test", flow.Options{Partitions: 2})
		deduped(b)
		r := run(t, b)
		accepted := map[string]time.Duration{}
		now := time.Second
		for range rapid.IntRange(1, 60).Draw(t, "records") {
			now += time.Duration(rapid.IntRange(0, 4).Draw(t, "seconds")) * time.Second
			value := rapid.SampledFrom([]string{"a x", "a y", "b x", "c z"}).Draw(t, "value")
			last, there := accepted[value]
			want := !there || now-last >= within
			if want {
				accepted[value] = now
			}
			if err := r.play(record{nanos: int64(now), data: value}); err != nil {
				t.Fatal(err)
			}
			if got := r.seal(); (len(got) == 1) != want {
				t.Fatalf("%s at %v, accepted last at %v (%v): %d outputs", value, now, last, there, len(got))
			}
			if rapid.IntRange(0, 6).Draw(t, "crash") == 0 {
				r.crash()
			}
		}
	})
}
