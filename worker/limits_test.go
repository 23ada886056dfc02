package worker

import (
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"natsflow/bus"
	"natsflow/flow"
)

func TestHeadroomOf(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for name, tc := range map[string]struct {
		info  bus.StreamInfo
		first unprocessed
		want  headroom
	}{
		"no limits":         {bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, MaxMsgs: -1, MaxBytes: -1}, unprocessed{seq: 1}, headroom{ratio: 1}},
		"all processed":     {bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, MaxMsgs: 100}, unprocessed{}, headroom{ratio: 1}},
		"came after a look": {bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, MaxMsgs: 100}, unprocessed{seq: 101}, headroom{ratio: 1}},
		"empty":             {bus.StreamInfo{FirstSeq: 101, LastSeq: 100, MaxMsgs: 100, MaxBytes: 5, MaxAge: 1}, unprocessed{seq: 50}, headroom{ratio: 1}},
		"messages": {
			bus.StreamInfo{FirstSeq: 901, LastSeq: 1000, Msgs: 100, MaxMsgs: 100},
			unprocessed{seq: 911},
			headroom{ratio: 0.1, limit: "MaxMsgs", messages: 10},
		},
		"messages, half full": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 50, Msgs: 50, MaxMsgs: 100},
			unprocessed{seq: 1},
			headroom{ratio: 0.5, limit: "MaxMsgs", messages: 50},
		},
		"messages, at the limit": {
			bus.StreamInfo{FirstSeq: 901, LastSeq: 1000, Msgs: 100, MaxMsgs: 100},
			unprocessed{seq: 901},
			headroom{ratio: 0, limit: "MaxMsgs"},
		},
		"messages, over a limit that was lowered": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 1000, Msgs: 1000, MaxMsgs: 100},
			unprocessed{seq: 1},
			headroom{ratio: 0, limit: "MaxMsgs"},
		},
		"messages, most of them deleted": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 1000, Msgs: 20, MaxMsgs: 100},
			unprocessed{seq: 1},
			headroom{ratio: 0.8, limit: "MaxMsgs", messages: 80},
		},
		"new messages are refused": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, Bytes: 100, MaxMsgs: 100, MaxBytes: 100, DiscardNew: true},
			unprocessed{seq: 1},
			headroom{ratio: 1},
		},
		"bytes": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, Bytes: 6000, MaxBytes: 8000},
			unprocessed{seq: 1},
			headroom{ratio: 0.25, limit: "MaxBytes", messages: 33},
		},
		"bytes before messages": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, Bytes: 6000, MaxBytes: 8000, MaxMsgs: 1000},
			unprocessed{seq: 51},
			headroom{ratio: 0.625, limit: "MaxBytes", messages: 83},
		},
		"messages before bytes": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, Bytes: 6000, MaxBytes: 8000, MaxMsgs: 100},
			unprocessed{seq: 1},
			headroom{ratio: 0, limit: "MaxMsgs"},
		},
		"age": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, MaxAge: time.Hour, FirstTime: ago(time.Hour), AsOf: now},
			unprocessed{seq: 40, at: ago(54 * time.Minute)},
			headroom{ratio: 0.1, limit: "MaxAge", left: 6 * time.Minute},
		},
		"age, too old": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, MaxAge: time.Hour, AsOf: now},
			unprocessed{seq: 1, at: ago(2 * time.Hour)},
			headroom{ratio: 0, limit: "MaxAge"},
		},
		"age, new messages are refused at other limits": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, MaxMsgs: 100, MaxAge: time.Hour, AsOf: now, DiscardNew: true},
			unprocessed{seq: 1, at: ago(30 * time.Minute)},
			headroom{ratio: 0.5, limit: "MaxAge", left: 30 * time.Minute},
		},
		"age, by a clock that is behind": {
			bus.StreamInfo{FirstSeq: 1, LastSeq: 100, Msgs: 100, MaxAge: time.Hour, AsOf: now},
			unprocessed{seq: 1, at: now.Add(time.Second)},
			headroom{ratio: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := headroomOf(tc.info, tc.first); math.Abs(got.ratio-tc.want.ratio) > 1e-9 || got.limit != tc.want.limit ||
				got.messages != tc.want.messages || got.left != tc.want.left {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
}

// gauge reads a gauge of a source or a bucket. ok is false if there is none.
func gauge(tb testing.TB, reg *prometheus.Registry, name, of string) (v float64, ok bool) {
	tb.Helper()
	families, err := reg.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if (l.GetName() == "source" || l.GetName() == "bucket") && l.GetValue() == of {
					return m.GetGauge().GetValue(), true
				}
			}
		}
	}
	return 0, false
}

// A step that is stuck makes a worker warn before messages are dropped, once, and
// say when that is over.
func TestRun_limitsWarning(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg     bus.StreamConfig
		records int
		// wait is what goes by before the limit is near.
		wait time.Duration
		want string
	}{
		"messages": {bus.StreamConfig{MaxMsgs: 6}, 5, 0, "stream LIM drops messages that are not processed after 1 more (MaxMsgs)"},
		"bytes":    {bus.StreamConfig{MaxBytes: 240}, 5, 0, "(MaxBytes)"},
		"age":      {bus.StreamConfig{MaxAge: 5 * time.Minute, Duplicates: time.Minute}, 3, 4 * time.Minute, "stream LIM drops messages that are not processed in "},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				logged := l.logTo()
				tc.cfg.Name, tc.cfg.Subjects = "LIM", []string{"lim.>"}
				if _, err := l.conn.CreateStream(l.ctx, tc.cfg); err != nil {
					t.Fatal(err)
				}
				// The step is stuck while a gate is there that is not open. Few enough
				// records that the reader is not stuck, too.
				var stuck atomic.Pointer[gate]
				stuck.Store(newGate(""))
				free := func() {
					if g := stuck.Swap(nil); g != nil {
						close(g.open)
					}
				}
				defer free()
				reg := prometheus.NewRegistry()
				f := countFlow{sources: []string{"IN", "LIM"}, step: func(m *flow.Meta, _ string) error {
					if g := stuck.Load(); g != nil && m.Stream == "LIM" {
						<-g.open
					}
					return nil
				}}.build(t)
				p := l.start(f, Config{Registerer: reg}, nil)
				l.awaitPhase(p, "running")
				room := func(source string) float64 {
					v, ok := gauge(t, reg, "natsflow_source_limit_headroom_ratio", source)
					if !ok {
						return -1
					}
					return v
				}
				l.await("a look at the limits", func() bool { return room("LIM") == 1 })
				l.feedTo("lim.", l.rng, tc.records, 8)
				if tc.wait > 0 {
					l.pass(tc.wait - time.Minute)
					if n := logged.count("is about to drop"); n != 0 || len(p.at().Warnings) != 0 {
						t.Errorf("warned too early: %d times, %q", n, p.at().Warnings)
					}
				}
				l.await("the warning", func() bool { return len(p.at().Warnings) > 0 })
				l.pass(25 * time.Second) // some looks more
				if n := logged.count("a source is about to drop messages that are not processed"); n != 1 {
					t.Errorf("warned %d times", n)
				}
				if w := p.at().Warnings; len(w) != 1 || !strings.Contains(w[0], tc.want) {
					t.Errorf("warnings %q", w)
				}
				if low := room("LIM"); low < 0 || low >= lowHeadroom || room("IN") != 1 {
					t.Errorf("headroom %v, of a source without limits %v", low, room("IN"))
				}
				free()
				l.await("the end of the warning", func() bool { return len(p.at().Warnings) == 0 })
				if n := logged.count("the source has room again"); n != 1 || room("LIM") < enoughHeadroom {
					t.Errorf("the end was logged %d times, headroom %v", n, room("LIM"))
				}
				// A second episode is told, too.
				if name == "messages" {
					stuck.Store(newGate(""))
					l.feedTo("lim.", l.rng, tc.records, 8)
					l.await("the second warning", func() bool { return logged.count("a source is about to drop") == 2 })
					free()
				}
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				if _, ok := gauge(t, reg, "natsflow_source_limit_headroom_ratio", "LIM"); ok {
					t.Error("the headroom is still there after the end")
				}
				l.judge("OUT")
			})
		})
	}
}

// In a source that is read in part, what the flow does not read is nothing to lose.
func TestSession_limitsOfOtherSubjects(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "MIX", Subjects: []string{"mix.>"}, MaxMsgs: 100}); err != nil {
			t.Fatal(err)
		}
		put := func(subject string, n int) {
			t.Helper()
			for i := range n {
				if _, err := l.conn.Publish(l.ctx, subject, nil, fmt.Appendf(nil, "%d", i)); err != nil {
					t.Fatal(err)
				}
			}
		}
		s := &session{conn: l.conn}
		look := func(committed uint64) headroom {
			t.Helper()
			h, err := s.lookAtLimits(l.ctx, "MIX", []string{"mix.ours"}, committed)
			if err != nil {
				t.Fatal(err)
			}
			return h
		}
		put("mix.ours", 1)
		put("mix.theirs", 90)
		if h := look(1); h.ratio != 1 {
			t.Errorf("nothing of ours waits: %+v", h)
		}
		put("mix.ours", 1)
		if h := look(1); h.ratio != 0.99 || h.messages != 99 {
			t.Errorf("one of ours waits: %+v", h)
		}
		put("mix.theirs", 85)
		if h := look(1); h.limit != "MaxMsgs" || h.messages != 14 {
			t.Errorf("one of ours is far back: %+v", h)
		}
	})
}
