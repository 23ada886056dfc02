package worker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// quietAnswer is how long to wait for one more answer, in virtual time.
const quietAnswer = time.Second

// logBuffer is a log that may be read while it is written.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

// logTo makes the workers that are started from now on write to a buffer.
func (l *lab) logTo() *logBuffer {
	b := &logBuffer{}
	l.log = slog.New(slog.NewTextHandler(b, nil))
	return b
}

// drainCommands counts the drains in the control stream.
func (l *lab) drainCommands() (n int) {
	l.tb.Helper()
	for _, m := range l.read(l.record().Control.Stream) {
		if strings.HasPrefix(m.subject, "control.drain") {
			n++
		}
	}
	return n
}

// pair starts two workers and waits until they share the tasks.
func (l *lab) pair(f *flow.Flow) (a, b *process) {
	l.tb.Helper()
	a, b = l.start(f, Config{Name: "a"}, nil), l.start(f, Config{Name: "b"}, nil)
	l.await("the share of both", func() bool { return a.at().Tasks > 0 && b.at().Tasks > 0 && a.at().Tasks+b.at().Tasks == 16 })
	return a, b
}

// askFor asks for one thing and decodes the answers.
func askFor[T any](l *lab, admin *testenv.Admin, subject, body string) []T {
	l.tb.Helper()
	var all []T
	for _, m := range admin.Ask(subject, []byte(body), 100, quietAnswer) {
		var v T
		if err := json.Unmarshal(m.Data, &v); err != nil || m.Error != "" {
			l.tb.Fatalf("%s: answer %+v: %v", subject, m, err)
		}
		all = append(all, v)
	}
	return all
}

// All workers answer, also one that stands by.
func TestService_pingAndStatus(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		f := countFlow{}.build(t)
		a, _ := l.pair(f)
		l.more(100)
		l.awaitResults(a, 100)
		l.pass(2 * time.Second) // until the status is known
		phases := map[string]string{}
		for _, p := range askFor[pong](l, admin, "natsflow.count.ping", "") {
			if phases[p.Worker] != "" || p.Flow != "count" {
				t.Errorf("answer %+v", p)
			}
			phases[p.Worker] = p.Phase
		}
		if len(phases) != 2 || phases["a"] != "running" || phases["b"] != "running" {
			t.Errorf("phases %q", phases)
		}
		tasks, results := 0, uint64(0)
		all := askFor[named](l, admin, "natsflow.count.status", "")
		for _, st := range all {
			tasks, results = tasks+st.Tasks, results+st.Results
			if st.Sources["IN"].Committed != 100 || st.Phase != "running" || st.Flow != "count" {
				t.Errorf("status %+v", st)
			}
		}
		if len(all) != 2 || all[0].Worker == all[1].Worker || tasks != 16 || results != 100 {
			t.Errorf("statuses %+v", all)
		}
		type info struct {
			Version  string            `json:"version"`
			Metadata map[string]string `json:"metadata"`
		}
		infos := askFor[info](l, admin, "$SRV.INFO.natsflow", "")
		for _, i := range infos {
			if i.Metadata["flow"] != "count" || i.Metadata["hash"] != f.Hash() || phases[i.Metadata["worker"]] == "" || i.Version == "" {
				t.Errorf("info %+v", i)
			}
		}
		if len(infos) != 2 {
			t.Errorf("%d services", len(infos))
		}
		// One that leaves is gone.
		if err := a.leave(); err != nil {
			t.Fatal(err)
		}
		if all := askFor[pong](l, admin, "natsflow.count.ping", ""); len(all) != 1 || all[0].Worker != "b" {
			t.Errorf("answers after a left: %+v", all)
		}
	})
}

func TestService_standsBy(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		f := countFlow{options: flow.Options{Partitions: 1}}.build(t)
		a, b := l.start(f, Config{Name: "a"}, nil), l.start(f, Config{Name: "b"}, nil)
		l.await("one that stands by", func() bool {
			return a.at().Phase == "running" && b.at().Phase == "standing by" || b.at().Phase == "running" && a.at().Phase == "standing by"
		})
		if all := askFor[pong](l, admin, "natsflow.count.ping", ""); len(all) != 2 || all[0].Phase == all[1].Phase {
			t.Errorf("answers %+v", all)
		}
	})
}

// All workers get a request for a drain and answer it; the control stream has one
// command, and one report is published.
func TestService_drain(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		var mu sync.Mutex
		var published []control.Report
		unsubscribe, err := l.conn.Subscribe("natsflow.count.report", func(_ string, data []byte) {
			mu.Lock()
			defer mu.Unlock()
			var r control.Report
			if err := json.Unmarshal(data, &r); err != nil {
				t.Errorf("report %s: %v", data, err)
			}
			published = append(published, r)
		})
		if err != nil {
			t.Fatal(err)
		}
		defer unsubscribe()
		f := countFlow{}.build(t)
		for epoch := uint64(1); epoch <= 2; epoch++ {
			a, b := l.pair(f)
			l.more(200)
			body := ""
			if epoch == 2 {
				body = `{"at":"head","reason":"deploy"}`
			}
			answers := askFor[control.Report](l, admin, "natsflow.count.drain", body)
			for _, p := range []*process{a, b} {
				if err := p.wait(); err != nil {
					t.Fatal(err)
				}
			}
			rec := l.record()
			if !drained(rec) || rec.Epoch != epoch || len(answers) != 2 {
				t.Fatalf("%d answers, record %+v", len(answers), rec)
			}
			for _, r := range answers {
				if r.Epoch != epoch || r.Cut["IN"] != rec.Report.Cut["IN"] || r.Worker != rec.Report.Worker || r.Tasks != 16 || (epoch == 2) != (r.Reason == "deploy") {
					t.Errorf("answer %+v, record %+v", r, rec.Report)
				}
			}
			if n := l.drainCommands(); n != int(epoch) {
				t.Errorf("%d drain commands in epoch %d", n, epoch)
			}
			mu.Lock()
			if len(published) != int(epoch) || published[epoch-1].Epoch != epoch || !published[epoch-1].Time.Equal(rec.Report.Time) {
				t.Errorf("published %+v, record %+v", published, rec.Report)
			}
			mu.Unlock()
			if _, err := l.control().Resume(l.ctx, "test"); err != nil {
				t.Fatal(err)
			}
		}
		l.drain(f, Config{})
		l.judge("OUT")
	})
}

// What is refused or cancelled is an error for who asked.
func TestService_drainRefused(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		a, _ := l.pair(countFlow{}.build(t))
		l.more(100)
		l.awaitResults(a, 100)
		refused := func(body, code, text string, commands int) {
			t.Helper()
			all := admin.Ask("natsflow.count.drain", []byte(body), 100, quietAnswer)
			for _, m := range all {
				if m.Code != code || !strings.Contains(m.Error, text) || len(m.Data) > 0 {
					t.Errorf("%s: answer %+v", body, m)
				}
			}
			if len(all) != 2 {
				t.Errorf("%s: %d answers", body, len(all))
			}
			if n := l.drainCommands(); n != commands {
				t.Errorf("%s: %d drain commands, want %d", body, n, commands)
			}
		}
		refused(`{"mode":"suspnd"}`, "400", "did you mean", 0)
		refused(`{"at":{"seq":{"NONE":5}}}`, "409", "refused: ", 1)
		refused(`{"at":{"seq":{"IN":5}}}`, "409", "lowest possible is IN:100", 2)
		// Without a reply nobody can be answered, and two of them would be one.
		if err := l.conn.Notify("natsflow.count.drain", nil); err != nil {
			t.Fatal(err)
		}
		timer := time.AfterFunc(quietAnswer/2, func() { l.send("control.resume.count", "") })
		defer timer.Stop()
		refused(`{"at":{"seq":{"IN":5000}}}`, "409", "cancelled by command", 3)
		if rec := l.record(); rec.State != control.StateRunning {
			t.Errorf("record %+v", rec)
		}
	})
}

// A worker that was away from the server for longer than its lease does not carry
// out a request that reaches it late.
func TestService_lateDrain(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		logged := l.logTo()
		admin := l.srv.Admin()
		p := l.start(countFlow{}.build(t), Config{LeaseTTL: 2 * time.Second}, nil)
		l.awaitPhase(p, "running")
		p.link.Hold(testenv.Both)
		if all := admin.Ask("natsflow.count.drain", nil, 1, 8*time.Second); len(all) != 0 {
			t.Fatalf("answers %+v", all)
		}
		p.link.Release(testenv.Both)
		l.await("the late request", func() bool { return logged.count("a drain request was left to the other workers") == 1 })
		l.awaitPhase(p, "running")
		l.pass(10 * time.Second)
		if n := l.drainCommands(); n != 0 {
			t.Errorf("%d drain commands", n)
		}
	})
}

// A worker that leaves in the middle of a drain leaves the answer to the others.
func TestService_leaveWhileDraining(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		f := countFlow{}.build(t)
		a, b := l.pair(f)
		l.more(50)
		left := time.AfterFunc(quietAnswer/4, a.cancel)
		defer left.Stop()
		rest := time.AfterFunc(quietAnswer/2, func() {
			if _, err := l.conn.Publish(l.ctx, "in.x", nil, []byte("k1 last")); err != nil {
				t.Error(err)
			}
		})
		defer rest.Stop()
		all := askFor[control.Report](l, admin, "natsflow.count.drain", `{"at":{"seq":{"IN":51}}}`)
		if err := errors.Join(a.wait(), b.wait()); err != nil {
			t.Fatal(err)
		}
		if len(all) != 1 || all[0].Cut["IN"] != 51 {
			t.Errorf("answers %+v", all)
		}
	})
}

func TestService_spawnIsBounded(t *testing.T) {
	ctx := t.Context()
	v := &service{ctx: ctx, cancel: func() {}}
	end := make(chan struct{})
	for i := range maxDrainWaits {
		if !v.spawn(func() { <-end }) {
			t.Fatalf("wait %d was refused", i)
		}
	}
	if v.spawn(func() {}) {
		t.Error("one too many was taken")
	}
	close(end)
	v.wg.Wait()
	done := make(chan struct{})
	if !v.spawn(func() { close(done) }) {
		t.Error("refused though the others have ended")
	}
	<-done
	v.close()
	if v.spawn(func() {}) {
		t.Error("taken after the end")
	}
}

func TestDrainRequest_outcome(t *testing.T) {
	running, draining, stopped := control.StateRunning, control.StateDraining, control.StateDrained
	history := func(seq, epoch uint64, outcome string) []control.HistoryEntry {
		return []control.HistoryEntry{{Seq: 3, Epoch: 1, Outcome: "of another"}, {Seq: seq, Epoch: epoch, Outcome: outcome}}
	}
	for name, tc := range map[string]struct {
		rec  control.Record
		d    drainRequest
		want string // "" is to wait
	}{
		"not looked at":   {rec: control.Record{State: stopped, LastCommand: 6, Epoch: 1, Report: &control.Report{Epoch: 1}}},
		"under way":       {rec: control.Record{State: draining, LastCommand: 7, Epoch: 2, History: history(7, 2, "draining, epoch 2")}},
		"under way again": {rec: control.Record{State: draining, LastCommand: 7, Epoch: 2, History: history(7, 2, "draining, epoch 2"), Report: &control.Report{Epoch: 1}}},
		"drained":         {rec: control.Record{State: stopped, LastCommand: 7, Epoch: 2, History: history(7, 2, "drained, epoch 2"), Report: &control.Report{Epoch: 2}}, want: "report 2"},
		"nothing to do":   {rec: control.Record{State: stopped, LastCommand: 7, Epoch: 1, History: history(7, 1, "nothing to do: already drained"), Report: &control.Report{Epoch: 1}}, want: "report 1"},
		"resumed since":   {rec: control.Record{State: running, LastCommand: 9, Epoch: 2, History: history(7, 2, "drained, epoch 2"), Report: &control.Report{Epoch: 2}}, want: "report 2"},
		"refused":         {rec: control.Record{State: running, LastCommand: 7, History: history(7, 0, "refused: no")}, want: "refused: no"},
		"refused twice":   {rec: control.Record{State: draining, LastCommand: 7, Epoch: 2, History: history(7, 2, "refused: already draining")}, want: "refused: already draining"},
		"cancelled":       {rec: control.Record{State: running, LastCommand: 8, Epoch: 2, History: history(7, 2, "cancelled by command 8")}, want: "cancelled by command 8"},
		"joined a cancelled one": {
			rec:  control.Record{State: running, LastCommand: 8, Epoch: 2, History: history(7, 2, "joined the drain of epoch 2"), Report: &control.Report{Epoch: 1}},
			want: "the drain of epoch 2 was cancelled; the flow is running in epoch 2",
		},
		"cancelled and begun again": {
			rec:  control.Record{State: draining, LastCommand: 9, Epoch: 3, History: history(7, 2, "joined the drain of epoch 2")},
			want: "the drain of epoch 2 was cancelled; the flow is draining in epoch 3",
		},
		"forgotten":        {rec: control.Record{State: running, LastCommand: 40, Epoch: 9}, want: "command 7 is not in the history of the flow any more, which is running in epoch 9"},
		"forgotten, known": {rec: control.Record{State: draining, LastCommand: 40, Epoch: 2}, d: drainRequest{applied: true, epoch: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			tc.d.seq = 7
			report, err := tc.d.outcome(tc.rec)
			got := ""
			switch {
			case err != nil:
				got = err.Error()
			case report != nil:
				got = fmt.Sprintf("report %d", report.Epoch)
			}
			if got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}
