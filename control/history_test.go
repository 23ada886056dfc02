package control

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"natsflow/bus"
)

type opKind int

const (
	opAcquire opKind = iota
	opRelease
	// opLose is the end of a process's trust: from then on, some time or never,
	// what it held is free.
	opLose
)

// lockInput is a call about the lock that a task is.
type lockInput struct {
	kind opKind
	task string // "" with opLose: all
	who  string // the instance
}

// lockOutput is what came of an acquire.
type lockOutput struct{ held, unknown bool }

// history records calls for porcupine. Its clock counts events: in virtual time
// much happens at the same time.
type history struct {
	mu    sync.Mutex
	clock int64
	ops   []porcupine.Operation
	all   []*process
	lost  map[*process]bool
}

type openOp struct {
	h     *history
	p     *process
	op    porcupine.Operation
	unset bool
}

func (h *history) joined(p *process) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, p)
}

func (h *history) tick() int64 {
	h.clock++
	return h.clock
}

func (h *history) began(p *process, kind opKind, task string) *openOp {
	if h == nil {
		return &openOp{unset: true}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return &openOp{h: h, p: p, op: porcupine.Operation{
		ClientId: slices.Index(h.all, p), Call: h.tick(), Input: lockInput{kind, task, p.m.Instance()},
	}}
}

// never is after everything: of calls of which it is not known whether and when
// they took effect.
const never = int64(1) << 60

func (o *openOp) ended(held bool, err error) {
	if o.unset {
		return
	}
	h := o.h
	h.mu.Lock()
	defer h.mu.Unlock()
	// Before this call is over, what others cannot trust any more may have been
	// taken from them.
	h.losses()
	o.op.Output, o.op.Return = lockOutput{held: held}, h.tick()
	if err != nil {
		o.op.Output, o.op.Return = lockOutput{unknown: true}, never
	}
	h.ops = append(h.ops, o.op)
}

func (h *history) losses() {
	for i, p := range h.all {
		if h.lost[p] || p.m.Trusted() {
			continue
		}
		h.lost[p] = true
		for _, task := range p.c.cfg.Tasks {
			h.ops = append(h.ops, porcupine.Operation{
				ClientId: i, Input: lockInput{opLose, task, p.m.Instance()}, Call: h.tick(), Output: lockOutput{}, Return: never,
			})
		}
	}
}

// lockModel is a lock per task that is lost with the trust of who has it.
func lockModel() porcupine.Model {
	model := porcupine.NondeterministicModel{
		Partition: func(all []porcupine.Operation) [][]porcupine.Operation {
			byTask := map[string][]porcupine.Operation{}
			for _, op := range all {
				task := op.Input.(lockInput).task
				byTask[task] = append(byTask[task], op)
			}
			var parts [][]porcupine.Operation
			for _, ops := range byTask {
				parts = append(parts, ops)
			}
			return parts
		},
		Init: func() []any { return []any{""} },
		Step: func(state, input, output any) []any {
			in, out, holder := input.(lockInput), output.(lockOutput), state.(string)
			mayHave := holder == "" || holder == in.who
			switch {
			case in.kind != opAcquire && holder == in.who:
				if out.unknown {
					return []any{"", holder}
				}
				return []any{""}
			case in.kind != opAcquire:
				return []any{holder}
			case out.unknown && mayHave:
				return []any{holder, in.who}
			case out.unknown:
				return []any{holder}
			case out.held && mayHave:
				return []any{in.who}
			case !out.held && !mayHave:
				return []any{holder}
			}
			return nil
		},
		DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
	}
	return model.ToModel()
}

func TestLockModel(t *testing.T) {
	op := func(kind opKind, who string, held bool, call, ret int64) porcupine.Operation {
		return porcupine.Operation{Input: lockInput{kind, "t", who}, Output: lockOutput{held: held}, Call: call, Return: ret}
	}
	tests := []struct {
		name string
		ops  []porcupine.Operation
		want bool
	}{
		{"one after the other", []porcupine.Operation{op(opAcquire, "a", true, 1, 2), op(opRelease, "a", false, 3, 4), op(opAcquire, "b", true, 5, 6)}, true},
		{"two at once", []porcupine.Operation{op(opAcquire, "a", true, 1, 2), op(opAcquire, "b", true, 3, 4)}, false},
		{"refused for nobody", []porcupine.Operation{op(opAcquire, "a", false, 1, 2)}, false},
		{"refused", []porcupine.Operation{op(opAcquire, "a", true, 1, 2), op(opAcquire, "b", false, 3, 4)}, true},
		{"lost", []porcupine.Operation{op(opAcquire, "a", true, 1, 2), op(opLose, "a", false, 4, never), op(opAcquire, "b", true, 3, 5)}, true},
		{"lost too late", []porcupine.Operation{op(opAcquire, "a", true, 1, 2), op(opLose, "a", false, 6, never), op(opAcquire, "b", true, 3, 5)}, false},
	}
	for _, tt := range tests {
		if got := porcupine.CheckOperations(lockModel(), tt.ops); got != tt.want {
			t.Errorf("%s: linearizable %v", tt.name, got)
		}
	}
}

// TestMember_histories lets processes come, leave, yield, die, be replaced by name,
// cut off and held up at random. No task may be run by two at any time, the calls
// about the tasks must be those of locks, and in the end the tasks are shared and
// nothing is written any more.
func TestMember_histories(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			bubble(t, func(s *site) {
				h := &history{lost: map[*process]bool{}}
				s.history(rand.New(rand.NewPCG(seed, 3)), h)
				h.mu.Lock()
				defer h.mu.Unlock()
				h.losses()
				// Outside of the bubble's clock it would be the wall clock; a history
				// of this size takes milliseconds.
				if result := porcupine.CheckOperations(lockModel(), h.ops); !result {
					t.Errorf("%d calls are not those of locks", len(h.ops))
				}
				t.Logf("%d calls of %d processes", len(h.ops), len(h.all))
			})
		})
	}
}

func (s *site) history(rng *rand.Rand, h *history) {
	var alive, all []*process
	for range 80 {
		for range rng.IntN(40) {
			time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
			wantApart(s.t, all)
		}
		if len(alive) < 2 || len(alive) < 5 && rng.IntN(3) == 0 {
			p := s.joinWith(joining([]string{"a", "b", "c", "d"}[rng.IntN(4)]), h)
			alive, all = append(alive, p), append(all, p)
			continue
		}
		i := rng.IntN(len(alive))
		if p := alive[i]; s.disturb(p, rng.IntN(7)) || !p.m.Trusted() {
			p.stop()
			alive = slices.Delete(alive, i, i+1)
		}
	}
	for _, p := range alive {
		p.thaw()
		p.link.Heal()
	}
	// Those that are left may have been told to go, or found it out just now.
	time.Sleep(2 * ttl)
	alive = slices.DeleteFunc(alive, func(p *process) bool {
		p.m.mu.Lock()
		defer p.m.mu.Unlock()
		return p.m.info.Leaving || !p.m.Trusted()
	})
	last := s.joinWith(joining("e"), h)
	alive = append(alive, last)
	s.wantShared(0, 3*time.Second, alive, all...)
	s.wantStays(5*time.Minute, eight(), alive...)
}

// disturb does something to p and reports whether it is the end of it.
func (s *site) disturb(p *process, what int) bool {
	ctx, cancel := context.WithTimeout(s.ctx, time.Second)
	defer cancel()
	known := func(err error) {
		// It may be cut off or dead; then its lease runs out.
		if err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, bus.ErrClosed) && !errors.Is(err, ErrLeaseLost) {
			s.t.Error(err)
		}
	}
	switch what {
	case 0:
		known(p.shut(ctx))
		return true
	case 1:
		p.kill()
	case 2:
		p.freeze()
	case 3:
		p.thaw()
	case 4:
		p.link.Cut()
	case 5:
		p.link.Heal()
	case 6:
		known(p.m.Yield(ctx))
	}
	return false
}
