package kvsnap

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"natsflow/bus"
	"natsflow/testenv"
)

// logInput is a call about the log of a task.
type logInput struct {
	kind string // claim, append or base
	// generation of the log that is written to, value what an append changes the
	// state to.
	generation, value uint64
}

// logOutput is what came of it. With known false the write may have been made, be
// made later, or never.
type logOutput struct {
	known, fenced bool
	// generation of a claim, value the state that it found.
	generation, value uint64
}

// logState is a log as whoever claims it sees it.
type logState struct{ generation, value uint64 }

// logModel is a register that is written by whoever has claimed it last.
func logModel() porcupine.Model {
	model := porcupine.NondeterministicModel{
		Init: func() []any { return []any{logState{}} },
		Step: func(state, input, output any) []any {
			in, out, s := input.(logInput), output.(logOutput), state.(logState)
			if in.kind == "claim" {
				claimed := logState{s.generation + 1, s.value}
				switch {
				case !out.known:
					return []any{s, claimed}
				case out.generation == claimed.generation && out.value == s.value:
					return []any{claimed}
				}
				return nil
			}
			written, own := s, in.generation == s.generation
			if in.kind == "append" && own {
				written.value = in.value
			}
			switch {
			case !out.known:
				return []any{s, written}
			case out.fenced != own:
				return []any{written}
			}
			return nil
		},
		DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
	}
	return model.ToModel()
}

func TestLogModel(t *testing.T) {
	now := int64(0)
	op := func(kind string, generation, value uint64, out logOutput) porcupine.Operation {
		now += 2
		ret := now + 1
		if !out.known {
			ret = math.MaxInt64
		}
		return porcupine.Operation{Input: logInput{kind, generation, value}, Output: out, Call: now, Return: ret}
	}
	found := func(generation, value uint64) logOutput {
		return logOutput{known: true, generation: generation, value: value}
	}
	done, fenced, unknown := logOutput{known: true}, logOutput{known: true, fenced: true}, logOutput{}
	tests := []struct {
		name string
		ops  []porcupine.Operation
		want bool
	}{
		{"a claim finds what was appended", []porcupine.Operation{op("claim", 0, 0, found(1, 0)), op("append", 1, 5, done), op("claim", 0, 0, found(2, 5))}, true},
		{"a commit is lost", []porcupine.Operation{op("claim", 0, 0, found(1, 0)), op("append", 1, 5, done), op("claim", 0, 0, found(2, 0))}, false},
		{"a former owner appends", []porcupine.Operation{op("claim", 0, 0, found(1, 0)), op("claim", 0, 0, found(2, 0)), op("append", 1, 5, done)}, false},
		{"a former owner is fenced", []porcupine.Operation{op("claim", 0, 0, found(1, 0)), op("claim", 0, 0, found(2, 0)), op("append", 1, 5, fenced)}, true},
		{"the owner is fenced", []porcupine.Operation{op("claim", 0, 0, found(1, 0)), op("base", 1, 0, fenced)}, false},
		{"two claims of one generation", []porcupine.Operation{op("claim", 0, 0, found(1, 0)), op("claim", 0, 0, found(1, 0))}, false},
		{"it may have been appended", []porcupine.Operation{op("claim", 0, 0, found(1, 0)), op("append", 1, 5, unknown), op("claim", 0, 0, found(2, 5))}, true},
		{"or not", []porcupine.Operation{op("claim", 0, 0, found(1, 0)), op("append", 1, 5, unknown), op("claim", 0, 0, found(2, 0))}, true},
		{"but not after the claim", []porcupine.Operation{op("claim", 0, 0, found(1, 0)), op("append", 1, 5, unknown), op("claim", 0, 0, found(2, 0)), op("claim", 0, 0, found(3, 5))}, false},
	}
	for _, tt := range tests {
		if got := porcupine.CheckOperations(logModel(), tt.ops); got != tt.want {
			t.Errorf("%s: linearizable %v", tt.name, got)
		}
	}
}

// logHistory records calls for porcupine. Its clock counts events: in virtual time
// much happens at the same time.
type logHistory struct {
	mu                     sync.Mutex
	clock                  int64
	ops                    []porcupine.Operation
	value                  uint64
	fenced, unknown, found int
}

func (h *logHistory) tick() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	return h.clock
}

// next is a value that no other append has.
func (h *logHistory) next() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.value++
	return h.value
}

func (h *logHistory) note(client int, in logInput, call int64, out logOutput) {
	ret := h.tick()
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case !out.known:
		// What is on its way may arrive at any time.
		ret = math.MaxInt64
		h.unknown++
	case out.fenced:
		h.fenced++
	case in.kind == "claim" && out.value > 0:
		h.found++
	}
	h.ops = append(h.ops, porcupine.Operation{ClientId: client, Input: in, Output: out, Call: call, Return: ret})
}

// outcome says what an error tells of a write.
func outcome(err error) logOutput {
	switch {
	case err == nil:
		return logOutput{known: true}
	case errors.Is(err, bus.ErrFenced) && !errors.Is(err, bus.ErrUnknownOutcome):
		return logOutput{known: true, fenced: true}
	}
	return logOutput{}
}

// Processes claim one task from each other, append and write bases, over links that
// are cut, held up and frozen at random. Whatever answers are lost: what they see are
// the states of one register that is written by whoever has claimed it last.
func TestLog_histories(t *testing.T) {
	fenced, unknown, found := 0, 0, 0
	for seed := range uint64(20) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
				h := &logHistory{}
				runHistory(t, srv, h, seed)
				if !porcupine.CheckOperations(logModel(), h.ops) {
					for _, op := range h.ops {
						t.Logf("%d %d-%d %+v -> %+v", op.ClientId, op.Call, op.Return, op.Input, op.Output)
					}
					t.Error("these are not the calls of a register that is fenced by claims")
				}
				fenced, unknown, found = fenced+h.fenced, unknown+h.unknown, found+h.found
			})
		})
	}
	t.Logf("%d calls were fenced, %d have an unknown end, %d claims found something", fenced, unknown, found)
	// Without these nothing was tried.
	if fenced < 20 || unknown < 20 || found < 100 {
		t.Error("too little has happened")
	}
}

func runHistory(t *testing.T, srv *testenv.Server, h *logHistory, seed uint64) {
	t.Helper()
	conn, err := bus.Connect(t.Context(), bus.Config{InProcess: srv.InProcess})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	openBucket(t, conn, 0)
	var wg sync.WaitGroup
	for client := range 3 {
		rng := rand.New(rand.NewPCG(seed, uint64(client)))
		link := testenv.NewLink(t)
		c, err := bus.Connect(t.Context(), bus.Config{InProcess: link.Dialer(srv.InProcess), Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		p := &logProcess{h: h, client: client, rng: rng, link: link}
		p.store = New(Config{
			Bucket: openBucket(t, c, 0), Flow: "orders", Owner: fmt.Sprint("w", client), MinBaseBytes: 100, MaxEntries: 5,
			Logger: slog.New(slog.DiscardHandler),
		})
		wg.Go(func() { p.run(t.Context()) })
	}
	wg.Wait()
	// Whoever comes last finds what the last owner has left.
	p := &logProcess{h: h, client: 3, store: New(Config{Bucket: openBucket(t, conn, 0), Flow: "orders", Owner: "last"})}
	p.claim(t.Context())
	if p.log == nil {
		t.Error("the last claim failed")
	}
}

// logProcess is one of those that want the task.
type logProcess struct {
	h      *logHistory
	client int
	rng    *rand.Rand
	link   *testenv.Link
	store  *Store
	log    *Log
	value  uint64
}

func (p *logProcess) run(ctx context.Context) {
	for range 14 {
		time.Sleep(time.Duration(p.rng.IntN(1500)) * time.Millisecond)
		switch p.rng.IntN(12) {
		case 0:
			p.link.Cut()
		case 1:
			p.link.Hold(testenv.Direction(1 + p.rng.IntN(2)))
		case 2:
			p.link.Drop()
		default:
			p.link.Heal()
			p.link.Release(testenv.Both)
		}
		try, cancel := context.WithTimeout(ctx, time.Second)
		switch {
		case p.log == nil:
			p.claim(try)
		case p.rng.IntN(5) == 0:
			p.base(try)
		default:
			p.append(try)
		}
		cancel()
	}
	p.link.Heal()
	p.link.Release(testenv.Both)
}

func (p *logProcess) claim(ctx context.Context) {
	call := p.h.tick()
	st := state{}
	log, r, err := p.store.Claim(ctx, testTask, st.load)
	out := logOutput{}
	if err == nil {
		// Found in the state, and in the head beside it.
		value, _ := strconv.ParseUint(st["value"], 10, 64)
		out = logOutput{known: true, generation: r.Generation, value: value}
		if r.Head.Records != value {
			out.value = math.MaxUint64 // never written
		}
		p.log, p.value = log, value
	}
	p.h.note(p.client, logInput{kind: "claim"}, call, out)
}

func (p *logProcess) append(ctx context.Context) {
	in := logInput{kind: "append", generation: p.log.Generation(), value: p.h.next()}
	call := p.h.tick()
	_, err := p.log.Append(ctx, Commit{Head: Head{Records: in.value}, Delta: pair(nil, "value", strconv.FormatUint(in.value, 10))})
	p.h.note(p.client, in, call, outcome(err))
	p.value = in.value
	if err != nil {
		p.log = nil
	}
}

func (p *logProcess) base(ctx context.Context) {
	in := logInput{kind: "base", generation: p.log.Generation()}
	call := p.h.tick()
	b := p.log.BeginBase()
	b.Add(pair(nil, "value", strconv.FormatUint(p.value, 10)))
	err := b.Finish(ctx, Head{Records: p.value})
	p.h.note(p.client, in, call, outcome(err))
	if err != nil {
		p.log = nil
	}
}
