package worker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"natsflow/bus"
	"natsflow/control"
)

const (
	// serviceName is the name under which nats micro shows the workers of all flows.
	serviceName = "natsflow"
	// maxDrainWaits bounds the drain requests that a worker waits for.
	maxDrainWaits = 32
	// sendPatience bounds the sending of a command that a request asks for. After
	// it the caller may have done something else.
	sendPatience = 10 * time.Second
)

// serviceSubject is a subject of a flow's service and of its reports.
func serviceSubject(flow, what string) string { return "natsflow." + flow + "." + what }

// service answers the requests that come to a worker by its subjects.
type service struct {
	w *worker
	// ctx ends with the worker.
	ctx    context.Context
	cancel context.CancelFunc

	mu sync.Mutex
	// waits is the number of drain requests that are waited for.
	waits  int
	closed bool
	wg     sync.WaitGroup
}

// serve offers the worker as a service until stop is called. A worker works without,
// too: what goes wrong is only a warning.
func (w *worker) serve(ctx context.Context) (stop func()) {
	v := &service{w: w}
	v.ctx, v.cancel = context.WithCancel(ctx)
	name := w.flow.Name()
	offered, err := w.side.AddService(bus.ServiceConfig{
		Name: serviceName, Version: buildVersion(), Description: "workers of natsflow flows",
		Metadata: map[string]string{"flow": name, "worker": w.cfg.Name, "hash": w.flow.Hash()},
		Endpoints: []bus.Endpoint{
			{Name: "ping", Subject: serviceSubject(name, "ping"), Handle: v.ping},
			{Name: "status", Subject: serviceSubject(name, "status"), Handle: v.status},
			{Name: "drain", Subject: serviceSubject(name, "drain"), Handle: v.drain},
		},
	})
	if err != nil {
		w.log.Warn("nats micro does not show this worker", "err", err)
		v.cancel()
		return func() {}
	}
	return func() {
		if err := offered.Stop(); err != nil {
			w.log.Debug("the service goes with its connection", "err", err)
		}
		v.close()
	}
}

// buildVersion is the version of the program's module, without the v of Go's.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return bus.NoVersion
	}
	return strings.TrimPrefix(info.Main.Version, "v")
}

// close ends the waits. Those whose drain is done are still answered.
func (v *service) close() {
	v.mu.Lock()
	v.closed = true
	v.mu.Unlock()
	v.cancel()
	v.wg.Wait()
}

// pong is the answer to a ping.
type pong struct {
	Flow   string `json:"flow"`
	Worker string `json:"worker"`
	Phase  string `json:"phase"`
}

func (v *service) ping(r *bus.Request) {
	v.respond(r, pong{Flow: v.w.flow.Name(), Worker: v.w.cfg.Name, Phase: v.w.status.shown().Phase})
}

// named is the answer to a request for the status.
type named struct {
	Flow   string `json:"flow"`
	Worker string `json:"worker"`
	Status
}

func (v *service) status(r *bus.Request) {
	v.respond(r, named{Flow: v.w.flow.Name(), Worker: v.w.cfg.Name, Status: v.w.status.shown()})
}

// drain sends the command that the body is, and answers when the flow is drained.
// All workers get the request and send the command, with one id, so that one of
// them is enough; the control stream keeps one command.
func (v *service) drain(r *bus.Request) {
	if r.Reply == "" {
		// Without it two requests cannot be told apart.
		v.w.log.Warn("a drain request without a reply subject was ignored", "subject", r.Subject)
		return
	}
	cmd := control.Command{Kind: control.KindDrain, Flow: v.w.flow.Name()}
	cmd, err := control.ParseCommand(v.w.cfg.ControlPrefix, cmd.Subject(v.w.cfg.ControlPrefix), r.Data)
	if err != nil {
		v.refuse(r, 400, err.Error())
		return
	}
	if !v.w.status.trusted() {
		// This process may have been frozen, or away from the server: the request
		// may be so old that its command has been forgotten as a duplicate, and
		// what it asks for undone by a resume.
		v.w.log.Info("a drain request was left to the other workers: this one has no lease", "subject", r.Subject)
		return
	}
	sum := sha256.Sum256([]byte(r.Reply + "\n" + string(r.Data)))
	if !v.spawn(func() { v.await(r, cmd, "natsflow-request-"+hex.EncodeToString(sum[:16])) }) {
		v.refuse(r, 429, fmt.Sprintf("worker %s waits for %d drain requests already", v.w.cfg.Name, maxDrainWaits))
	}
}

// spawn runs fn, unless there are too many already or the worker ends.
func (v *service) spawn(fn func()) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed || v.waits == maxDrainWaits {
		return false
	}
	v.waits++
	v.wg.Go(func() {
		fn()
		v.mu.Lock()
		v.waits--
		v.mu.Unlock()
	})
	return true
}

// await sends the command and waits for what comes of it. A worker that ends
// before that does not answer: the others do.
func (v *service) await(r *bus.Request, cmd control.Command, id string) {
	bounded, cancel := context.WithTimeout(v.ctx, sendPatience)
	defer cancel()
	seq, err := v.w.ctl.SendOnce(bounded, id, cmd)
	if err != nil {
		if v.ctx.Err() == nil {
			v.refuse(r, 503, err.Error())
		}
		return
	}
	d := drainRequest{seq: seq}
	for ended := false; ; {
		rec, changed := v.w.records.get()
		report, err := d.outcome(rec)
		switch {
		case err != nil:
			v.refuse(r, 409, err.Error())
			return
		case report != nil:
			v.respond(r, report)
			return
		case ended:
			return
		}
		select {
		case <-changed:
		case <-v.ctx.Done():
			ended = true // and what the record says now is the last word
		}
	}
}

// drainRequest is a drain that a request has asked for.
type drainRequest struct {
	// seq of its command.
	seq uint64
	// applied: the command was looked at, and has this epoch.
	applied bool
	epoch   uint64
}

// outcome says what a record means for the drain: its report, an error, or neither,
// which is to wait.
func (d *drainRequest) outcome(rec control.Record) (*control.Report, error) {
	if rec.LastCommand < d.seq {
		return nil, nil //nolint:nilnil // the third outcome
	}
	was := ""
	i := slices.IndexFunc(rec.History, func(h control.HistoryEntry) bool { return h.Seq == d.seq })
	switch {
	case i >= 0:
		was = rec.History[i].Outcome
		d.applied, d.epoch = true, rec.History[i].Epoch
	case !d.applied:
		return nil, fmt.Errorf("command %d is not in the history of the flow any more, which is %s in epoch %d", d.seq, rec.State, rec.Epoch)
	}
	switch {
	case strings.HasPrefix(was, "refused: "), strings.HasPrefix(was, "cancelled "):
		return nil, errors.New(was)
	case rec.Report != nil && rec.Report.Epoch >= d.epoch:
		return rec.Report, nil
	case rec.State == control.StateRunning, rec.Epoch != d.epoch:
		return nil, fmt.Errorf("the drain of epoch %d was cancelled; the flow is %s in epoch %d", d.epoch, rec.State, rec.Epoch)
	}
	return nil, nil //nolint:nilnil // the third outcome
}

func (v *service) respond(r *bus.Request, answer any) {
	b, err := json.Marshal(answer)
	if err == nil {
		err = r.Respond(b)
	}
	if err != nil {
		v.w.log.Debug("a request was not answered", "subject", r.Subject, "err", err)
	}
}

func (v *service) refuse(r *bus.Request, code int, text string) {
	if err := r.Refuse(code, text); err != nil {
		v.w.log.Debug("a request was not answered", "subject", r.Subject, "err", err)
	}
}

// publishReport tells whoever listens that a drain is done. The record has it, too.
func (w *worker) publishReport(report *control.Report) {
	b, err := json.Marshal(report)
	if err == nil {
		err = w.side.Notify(serviceSubject(w.flow.Name(), "report"), b)
	}
	if err != nil {
		w.log.Debug("the report was not published", "err", err)
	}
}
