package control

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/testenv"
)

func TestControl_drain(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		s.define(c)
		r := s.run(c)
		r.untilState(StateRunning)
		seq := s.pub(c, "control.drain", "")
		rec := r.untilState(StateDraining)
		if rec.Epoch != 1 || rec.Drain.Command.Seq != seq || rec.Drain.Command.Mode != ModeSuspend || rec.Drain.Command.At.Kind != AtNow {
			t.Errorf("record %+v", rec)
		}
		if _, err := c.Drained(s.ctx, 1, Report{}); err == nil {
			t.Error("ended before the cut")
		}
		s.must(c.FixCut(s.ctx, 1, map[string]uint64{"IN": 70}, map[string]uint64{"IN": 70}))
		// Another worker has another idea of the cut, too late.
		if rec := s.must(c.FixCut(s.ctx, 1, map[string]uint64{"IN": 99}, nil)); rec.Drain.Cut["IN"] != 70 {
			t.Errorf("cut %v", rec.Drain.Cut)
		}
		s.must(c.Drained(s.ctx, 1, Report{Tasks: 16, Records: map[string]uint64{"IN": 70}}))
		rec = r.untilState(StateDrained)
		if rec.Report == nil || rec.Report.Cut["IN"] != 70 || rec.Report.Worker != c.cfg.Name || rec.Report.Time.IsZero() {
			t.Errorf("report %+v", rec.Report)
		}

		// Another process, another day, another definition: it stays drained.
		r.stop()
		r.wantErr(context.Canceled)
		time.Sleep(24 * time.Hour)
		c = s.open()
		if rec = s.define(c); rec.State != StateDrained {
			t.Fatalf("state %s after a restart", rec.State)
		}
		if rec = s.must(c.CatchUp(s.ctx)); rec.State != StateDrained {
			t.Fatalf("state %s after a restart", rec.State)
		}
		r = s.run(c)
		r.untilState(StateDrained)
		s.pub(c, "control.resume.f", "")
		if rec = r.untilState(StateRunning); rec.Epoch != 1 || rec.Drain != nil {
			t.Errorf("record %+v", rec)
		}
	})
}

func TestControl_cutBehind(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		s.define(c)
		r := s.run(c)
		s.pub(c, "control.drain.f", `{"at":{"seq":{"IN":5}}}`)
		r.untilState(StateDraining)
		rec, err := c.FixCut(s.ctx, 1, map[string]uint64{"IN": 5}, map[string]uint64{"IN": 8})
		var behind *CutBehindError
		if !errors.As(err, &behind) || behind.Lowest != 8 {
			t.Fatalf("error %v", err)
		}
		if rec.State != StateRunning || !strings.Contains(rec.LastError, "the lowest possible is IN:8") {
			t.Errorf("record %+v", rec)
		}
		if got := r.untilState(StateRunning); got.Revision != rec.Revision {
			t.Errorf("revision %d, want %d", got.Revision, rec.Revision)
		}
	})
}

func TestControl_resume(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		s.define(c)
		// Without a Run anywhere: Resume applies what is there by itself.
		if rec := s.must(c.Resume(s.ctx, "nothing to do")); rec.State != StateRunning || rec.LastCommand != 0 {
			t.Errorf("record %+v", rec)
		}
		s.pub(c, "control.drain", "")
		if rec := s.must(c.CatchUp(s.ctx)); rec.State != StateDraining {
			t.Errorf("state %s", rec.State)
		}
		rec := s.must(c.Resume(s.ctx, "changed my mind"))
		if rec.State != StateRunning || rec.Epoch != 1 || rec.History[0].Outcome != "cancelled by command 2" {
			t.Errorf("record %+v", rec)
		}
		// A drain that nobody has seen yet is before this resume.
		s.pub(c, "control.drain", "")
		rec = s.must(c.Resume(s.ctx, "go"))
		if rec.State != StateRunning || rec.Epoch != 2 {
			t.Errorf("record %+v", rec)
		}
		if _, err := c.FixCut(s.ctx, 2, map[string]uint64{"IN": 1}, nil); !errors.Is(err, ErrNotDraining) {
			t.Errorf("error %v", err)
		}
	})
}

func TestControl_beforeCreation(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		s.pub(c, "control.drain", "")
		s.pub(c, "control.drain.f", "")
		if rec := s.define(c); rec.LastCommand != 2 {
			t.Errorf("last command %d", rec.LastCommand)
		}
		if rec := s.must(c.CatchUp(s.ctx)); rec.State != StateRunning {
			t.Errorf("state %s", rec.State)
		}
		// What is for others is passed over and does not touch the record.
		before := s.must(c.Record(s.ctx))
		for range 3 {
			s.pub(c, "control.drain.other", "")
		}
		if after := s.must(c.CatchUp(s.ctx)); after.Revision != before.Revision {
			t.Errorf("revision %d, was %d", after.Revision, before.Revision)
		}
		s.pub(c, "control.drain", "")
		s.pub(c, "control.resume.other", "")
		if rec := s.must(c.CatchUp(s.ctx)); rec.State != StateDraining || rec.LastCommand != 6 {
			t.Errorf("%s, last command %d", rec.State, rec.LastCommand)
		}
	})
}

func TestControl_malformed(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		s.define(c)
		r := s.run(c)
		for _, m := range [][2]string{
			{"control.drain.f", `{"mdoe":"finish"}`}, {"control.drian", ""}, {"control.drain.f.now", ""}, {"control.savepoint.f", ""}, {"control.drain", "now"},
		} {
			seq := s.pub(c, m[0], m[1])
			rec := r.untilCommand(seq)
			if rec.State != StateRunning || rec.Epoch != 0 || rec.LastErrorCommand != seq || !strings.Contains(rec.LastError, "malformed command on "+m[0]) {
				t.Errorf("%s: %+v", m, rec)
			}
		}
		r.stop()
		r.wantErr(context.Canceled)
		if n := s.log.count("command refused"); n != 5 {
			t.Errorf("%d refusals in the log", n)
		}
		rec := s.must(c.SetError(s.ctx, "something else"))
		if rec.LastError != "something else" || rec.LastErrorCommand != 0 || rec.LastErrorTime.IsZero() {
			t.Errorf("record %+v", rec)
		}
	})
}

func TestControl_define(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		s.define(c)
		_, err := c.Define(s.ctx, Definition{Partitions: 8})
		if !errors.Is(err, ErrDefinition) {
			t.Errorf("error %v", err)
		}
		def := Definition{Partitions: 16, Hash: "h2", Steps: []StepRecord{{ID: "count", Kind: "aggregate"}}, Sources: map[string]SourceRecord{"IN": {Created: scriptTime(9)}}}
		if _, err = c.Define(s.ctx, def); !errors.Is(err, ErrSourceRecreated) {
			t.Errorf("error %v", err)
		}
		def.AcceptRecreated = true
		if rec := s.must(c.Define(s.ctx, def)); rec.Hash != "h2" || !rec.Sources["IN"].Created.Equal(scriptTime(9)) {
			t.Errorf("record %+v", rec)
		}
		// The same again writes nothing.
		before := s.must(c.Record(s.ctx))
		if after := s.must(c.Define(s.ctx, def)); after.Revision != before.Revision {
			t.Error("written without a change")
		}
		if _, err := c.Define(s.ctx, Definition{}); err == nil {
			t.Error("no partitions were accepted")
		}
	})
}

// TestControl_once publishes commands while several processes apply them over
// connections that break all the time, mostly between a write and its answer.
func TestControl_once(t *testing.T) {
	for seed := range uint64(10) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			bubble(t, func(s *site) { s.applyOnce(rand.New(rand.NewPCG(seed, 1))) })
		})
	}
}

func (s *site) applyOnce(rng *rand.Rand) {
	const commands = 14
	c := s.open()
	s.define(c)
	var runs []*running
	var links []*testenv.Link
	for range 3 {
		link := testenv.NewLink(s.t)
		links = append(links, link)
		runs = append(runs, s.run(s.open(s.linked(link))))
	}
	var last uint64
	for i := range commands {
		for _, l := range links {
			l.Heal()
			dir := []testenv.Direction{testenv.ToServer, testenv.ToClient}[rng.IntN(2)]
			l.CutAfter(dir, rng.Int64N(1500))
		}
		last = s.pub(c, "control."+[]string{"drain", "resume"}[i%2], "")
		time.Sleep(time.Duration(rng.IntN(6000)) * time.Millisecond)
	}
	for _, l := range links {
		l.CutAfter(testenv.Both, -1)
		l.Heal()
	}
	for _, r := range runs {
		rec := r.untilCommand(last)
		if rec.State != StateRunning || rec.Epoch != commands/2 || len(rec.History) != commands {
			s.t.Errorf("%s, epoch %d, history %v", rec.State, rec.Epoch, rec.History)
		}
		for i, h := range rec.History {
			if h.Seq != uint64(i+1) {
				s.t.Errorf("history %v", rec.History)
			}
		}
		r.mu.Lock()
		for i := 1; i < len(r.records); i++ {
			if r.records[i].Revision <= r.records[i-1].Revision {
				s.t.Errorf("revision %d after %d", r.records[i].Revision, r.records[i-1].Revision)
			}
		}
		r.mu.Unlock()
	}
}

// TestControl_race lets processes fix different cuts at the same time.
func TestControl_race(t *testing.T) {
	bubble(t, func(s *site) {
		first := s.open()
		s.define(first)
		s.pub(first, "control.drain", "")
		s.must(first.CatchUp(s.ctx))
		const n = 6
		cuts := make([]map[string]uint64, n)
		var wg sync.WaitGroup
		for i := range n {
			c := s.open()
			wg.Go(func() {
				rec, err := c.FixCut(s.ctx, 1, map[string]uint64{"IN": uint64(100 + i)}, nil)
				if err != nil {
					t.Error(err)
					return
				}
				cuts[i] = rec.Drain.Cut
			})
		}
		wg.Wait()
		for _, cut := range cuts[1:] {
			if !maps.Equal(cut, cuts[0]) {
				t.Errorf("cuts %v", cuts)
			}
		}
	})
}

// TestControl_restart has the server away for a moment. In real time: a server
// that is stopped in a bubble in the middle of a request may wait with a lock
// held, and time would not pass for it.
func TestControl_restart(t *testing.T) {
	s := newSite(t, testenv.StartServer(t))
	c := s.open()
	s.define(c)
	r := s.run(c)
	r.untilState(StateRunning)
	s.srv.Restart()
	seq, err := c.Send(s.ctx, Command{Kind: KindDrain, Flow: "f"})
	if err != nil {
		t.Fatal(err)
	}
	if rec := r.untilState(StateDraining); rec.Drain.Command.Seq != seq {
		t.Errorf("record %+v", rec)
	}
}

// TestControl_streamRecreated: the sequences of a new control stream are lower
// than the last command, which must not make its commands look old.
func TestControl_streamRecreated(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		s.define(c)
		r := s.run(c)
		for range 3 {
			s.pub(c, "control.resume", "")
		}
		r.untilCommand(3)
		if err := c.cfg.Conn.DeleteStream(s.ctx, StreamName); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * identityCheck)
		if seq := s.pub(c, "control.drain", ""); seq != 1 {
			t.Fatalf("sequence %d", seq)
		}
		r.untilState(StateDraining)
	})
}

// TestControl_streamShorter: a control stream that has lost its end gives the sequences
// of commands that were looked at to others.
func TestControl_streamShorter(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		s.define(c)
		r := s.run(c)
		r.untilCommand(s.pub(c, "control.resume", ""))
		// As if there had been seven more.
		_, err := c.change(s.ctx, "look ahead", func(rec Record) (Record, error) {
			rec = rec.clone()
			rec.LastCommand += 7
			return rec, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * identityCheck)
		s.pub(c, "control.drain", "")
		rec := r.untilState(StateDraining)
		if !strings.Contains(rec.LastError, "ends at sequence 1, and command 8 was looked at") {
			t.Errorf("last error %q", rec.LastError)
		}
		if n := s.log.count("has lost its end"); n == 0 {
			t.Error("nothing was logged")
		}
	})
}

func TestControl_recordDeleted(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		if err := c.Run(s.ctx, nil); !errors.Is(err, ErrNoFlow) {
			t.Fatalf("error %v", err)
		}
		s.define(c)
		r := s.run(c)
		r.untilState(StateRunning)
		if err := c.bucket.Delete(s.ctx, "f.flow", 0); err != nil {
			t.Fatal(err)
		}
		r.wantErr(ErrNoFlow)
	})
}

func TestControl_unreadable(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		s.define(c)
		if _, err := c.bucket.Put(s.ctx, "f.flow", []byte(`{"version":9}`), 0); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Define(s.ctx, Definition{Partitions: 16}); !errors.Is(err, ErrRecord) || !strings.Contains(err.Error(), "f.flow") {
			t.Errorf("error %v", err)
		}
		if item, err := c.bucket.Get(s.ctx, "f.flow"); err != nil || string(item.Value) != `{"version":9}` {
			t.Errorf("overwritten: %s, %v", item.Value, err)
		}
	})
}

func TestControl_prefix(t *testing.T) {
	bubble(t, func(s *site) {
		other := func(c *Config) { c.Prefix = "ops.flows" }
		c := s.open(other)
		s.define(c)
		r := s.run(c)
		s.pub(c, "ops.flows.drain", "")
		r.untilState(StateDraining)

		plain := s.open()
		if _, err := plain.Send(s.ctx, Command{Kind: KindResume, Flow: "f"}); !errors.Is(err, ErrPrefix) {
			t.Errorf("error %v", err)
		}
		if err := plain.Run(s.ctx, nil); !errors.Is(err, ErrPrefix) {
			t.Errorf("error %v", err)
		}
		// The flow moves: what is in the other stream already is not for it.
		s.pub(plain, "control.resume", "")
		if rec := s.define(plain); rec.Control.Prefix != "control" || rec.LastCommand != 1 || rec.State != StateDraining {
			t.Errorf("record %+v", rec)
		}
		s.pub(c, "ops.flows.resume", "")
		r.wantErr(ErrPrefix)
	})
}

func TestControl_send(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open()
		if recs, err := Flows(s.ctx, c.cfg.Conn); err != nil || len(recs) != 0 {
			t.Errorf("flows %v, %v", recs, err)
		}
		for _, flow := range []string{"flights", "delays"} {
			s.define(s.open(func(c *Config) { c.Flow = flow }))
		}
		_, err := c.Send(s.ctx, Command{Kind: KindDrain, Flow: "fligths"})
		if !errors.Is(err, ErrNoFlow) || !strings.Contains(err.Error(), `did you mean "flights"?`) {
			t.Errorf("error %v", err)
		}
		if _, err := c.Send(s.ctx, Command{Kind: KindDrain, Mode: "slow"}); !errors.Is(err, ErrMalformed) {
			t.Errorf("error %v", err)
		}
		all := s.open(func(c *Config) { c.Flow = "" })
		if seq, err := all.Send(s.ctx, Command{Kind: KindDrain, Reason: "all"}); err != nil || seq != 1 {
			t.Errorf("sequence %d, %v", seq, err)
		}
		if _, err := all.Record(s.ctx); !errors.Is(err, ErrNoFlow) {
			t.Errorf("error %v", err)
		}
		recs, err := Flows(s.ctx, c.cfg.Conn)
		if err != nil || len(recs) != 2 || recs[0].Flow != "delays" || recs[1].Flow != "flights" {
			t.Errorf("flows %v, %v", recs, err)
		}
	})
}

func TestFlows_none(t *testing.T) {
	bubble(t, func(s *site) {
		if recs, err := Flows(s.ctx, s.connect(nil)); err != nil || recs != nil {
			t.Errorf("flows %v, %v", recs, err)
		}
	})
}

func TestOpen_refused(t *testing.T) {
	bubble(t, func(s *site) {
		conn := s.connect(nil)
		for _, cfg := range []Config{
			{Flow: "f"},
			{Conn: conn, Flow: "F"},
			{Conn: conn, Prefix: "a.*"},
			{Conn: conn, LeaseTTL: time.Second},
			{Conn: conn, LeaseTTL: 2500 * time.Millisecond},
			{Conn: conn, Name: "a b"},
			{Conn: conn, Replicas: 9},
		} {
			if _, err := Open(s.ctx, cfg); err == nil {
				t.Errorf("accepted %+v", cfg)
			}
		}
		// Somebody's stream has the subjects.
		if _, err := conn.CreateStream(s.ctx, bus.StreamConfig{Name: "MINE", Subjects: []string{"control.>"}}); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(s.ctx, Config{Conn: conn}); err == nil || !strings.Contains(err.Error(), "another control prefix") {
			t.Errorf("error %v", err)
		}
		if _, err := Open(s.ctx, Config{Conn: conn, Prefix: "natsflow-control"}); err != nil {
			t.Error(err)
		}
		// One that deletes commands has natsflow's name.
		if _, err := conn.CreateStream(s.ctx, bus.StreamConfig{Name: streamName("brief"), Subjects: []string{"brief.>"}, Retention: "interest"}); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(s.ctx, Config{Conn: conn, Prefix: "brief"}); err == nil || !strings.Contains(err.Error(), "has interest retention and would lose commands") {
			t.Errorf("error %v", err)
		}
	})
}

func TestDefaultName(t *testing.T) {
	a, b := DefaultName(), DefaultName()
	if a == b || ValidName(a) != nil {
		t.Errorf("names %q, %q", a, b)
	}
}

// TestControl_natsCommand sends commands as an operator does.
func TestControl_natsCommand(t *testing.T) {
	s := newSite(t, testenv.StartServer(t))
	c := s.open()
	s.define(c)
	r := s.run(c)
	r.untilState(StateRunning)
	cli := func(args ...string) string {
		t.Helper()
		out, err := exec.CommandContext(s.ctx, testenv.NatsCLI(t), append([]string{"-s", s.srv.URL()}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("nats %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	cli("pub", "control.drain", "")
	r.untilState(StateDraining)
	if out := cli("req", "control.resume.f", `{"reason":"go on"}`); !strings.Contains(out, fmt.Sprintf("%q", StreamName)) {
		t.Errorf("no acknowledgement: %s", out)
	}
	if rec := r.until("running again", func(r Record) bool { return r.LastCommand == 2 }); rec.State != StateRunning || rec.History[1].Reason != "go on" {
		t.Errorf("record %+v", rec)
	}
	if out := cli("kv", "get", BucketName, "f.flow", "--raw"); !strings.Contains(out, `"state":"running"`) {
		t.Errorf("not a bucket for nats kv: %s", out)
	}
}
