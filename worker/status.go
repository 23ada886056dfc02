package worker

import (
	"context"
	"encoding/json"
	"maps"
	"sync"
	"time"

	"natsflow/control"
)

// Bounds of the status reports.
const (
	statusEvery      = time.Second
	statusEveryDrain = 100 * time.Millisecond
)

// Status is what a worker says of itself. It travels with its lease, as JSON.
type Status struct {
	// Phase is what the worker does: standing by, starting, running, draining,
	// leaving, drained or finished.
	Phase string `json:"phase"`
	// Tasks is the number of tasks that it owns, Done how many of them have come
	// to the cut of a drain.
	Tasks int `json:"tasks"`
	Done  int `json:"done"`
	// Sources by name.
	Sources map[string]SourceStatus `json:"sources,omitempty"`
	// Exchange is how far the exchange has been read for each later stage that the worker
	// has tasks of; its records are frames.
	Exchange []SourceStatus `json:"exchange,omitempty"`
	// Results and DeadLetters are those of its tasks since the flow's creation.
	Results     uint64 `json:"results"`
	DeadLetters uint64 `json:"dead_letters"`
	// Late counts the records that came after their window was closed.
	Late uint64 `json:"late,omitempty"`
	// StateKeys is the number of keys with state, StateBytes what they take in the
	// bucket, compressed; both as of the last commits.
	StateKeys  int    `json:"state_keys"`
	StateBytes uint64 `json:"state_bytes"`
	// LastCommit is when a task committed last.
	LastCommit time.Time `json:"last_commit,omitzero"`
	// Generations are those of its tasks, by name: how often each has been claimed.
	Generations map[string]uint64 `json:"generations,omitempty"`
	// Trouble is what the worker waits for; empty if it does not.
	Trouble string `json:"trouble,omitempty"`
	// Warnings are what needs somebody soon: sources that are about to drop
	// messages which are not processed.
	Warnings []string `json:"warnings,omitempty"`
	// Tables are the buckets that the flow looks keys up in.
	Tables map[string]TableStatus `json:"tables,omitempty"`
	// Since is when the session began.
	Since time.Time `json:"since,omitzero"`
}

// SourceStatus is how far a source has been read.
type SourceStatus struct {
	// Read is the last sequence that was read, Committed the one up to which
	// everything is committed and published.
	Read      uint64 `json:"read"`
	Committed uint64 `json:"committed"`
	// Records counts what was read since the session began, Rate per second in
	// the last interval.
	Records uint64  `json:"records"`
	Rate    float64 `json:"rate"`
}

// status returns what the session says of itself.
func (s *session) status() Status {
	st := Status{Tasks: int(s.owned.Load()), Done: int(s.done.Load()), Sources: map[string]SourceStatus{}, Since: s.began, Trouble: s.troubled(), Warnings: s.warned(), Tables: s.tables.status()}
	for i, r := range s.readers {
		read, count := r.position()
		committed, ok := s.committed(i)
		if !ok && s.exchange != nil {
			continue // it has no tasks that read that
		}
		if !ok {
			committed = read
		}
		is := SourceStatus{Read: read, Committed: committed, Records: count}
		if r.stage > 0 {
			st.Exchange = append(st.Exchange, is)
		} else {
			st.Sources[r.stream] = is
		}
		if st.Trouble == "" {
			st.Trouble = r.trouble()
		}
	}
	st.Results, st.DeadLetters = uint64(max(0, s.results.Load())), uint64(max(0, s.deadLetters.Load()))
	st.Late = uint64(max(0, s.late.Load()))
	st.StateKeys, st.StateBytes = int(s.keys.Load()), uint64(max(0, s.stateBytes.Load()))
	if at := s.lastCommit.Load(); at > 0 {
		st.LastCommit = time.Unix(0, at).UTC()
	}
	s.mu.Lock()
	st.Generations = maps.Clone(s.generations)
	s.mu.Unlock()
	return st
}

// reporter sends the worker's status with its lease.
type reporter struct {
	w    *worker
	poke chan struct{}

	mu     sync.Mutex
	now    string
	member *control.Member
	// joined: the worker has been a member; again is when it became one again.
	joined bool
	again  time.Time
	s      *session
	// stuck is what keeps a session from starting.
	stuck string

	last   map[string]SourceStatus
	lastAt time.Time
	// rate of each source in the last interval.
	rate map[string]float64
}

func newReporter(w *worker) *reporter {
	return &reporter{w: w, poke: make(chan struct{}, 1), now: "starting", last: map[string]SourceStatus{}}
}

func (r *reporter) set(fn func()) {
	r.mu.Lock()
	fn()
	r.mu.Unlock()
	select {
	case r.poke <- struct{}{}:
	default:
	}
}

func (r *reporter) phase(p string) { r.set(func() { r.now = p }) }

func (r *reporter) use(m *control.Member) {
	r.set(func() {
		r.member = m
		if m == nil {
			return
		}
		if r.joined {
			r.again = time.Now()
		}
		r.joined = true
	})
}

func (r *reporter) trouble(text string) { r.set(func() { r.stuck = text }) }
func (r *reporter) session(s *session) {
	r.set(func() {
		r.s = s
		if s != nil {
			r.stuck = ""
		}
	})
}

func (r *reporter) run(ctx context.Context) {
	t := time.NewTicker(statusEveryDrain)
	defer t.Stop()
	var sent time.Time
	for {
		urgent := false
		select {
		case <-ctx.Done():
			return
		case <-r.poke:
			urgent = true
		case <-t.C:
		}
		st, member := r.collect()
		stopping := st.Phase == "draining" || st.Phase == "leaving"
		if !urgent && !stopping && time.Since(sent) < statusEvery {
			continue
		}
		sent = time.Now()
		r.rates(&st)
		if r.w.cfg.OnStatus != nil {
			r.w.cfg.OnStatus(st)
		}
		if member == nil {
			continue
		}
		if raw, err := json.Marshal(st); err == nil {
			member.SetStatus(raw)
			if urgent || stopping {
				member.PushStatus()
			}
		}
	}
}

func (r *reporter) collect() (Status, *control.Member) {
	r.mu.Lock()
	defer r.mu.Unlock()
	st := Status{Trouble: r.stuck}
	if r.s != nil {
		st = r.s.status()
	}
	st.Phase = r.now
	return st, r.member
}

// shown is the status at this moment, with the rates of the last interval.
func (r *reporter) shown() Status {
	st, _ := r.collect()
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, src := range st.Sources {
		src.Rate = r.rate[name]
		st.Sources[name] = src
	}
	return st
}

// rejoinedFor is how long a worker has to be a member again before it may take what comes
// to it for new: what was held back while it was none comes to it at the same time as the
// answers by which it becomes one.
const rejoinedFor = time.Second

// trusted reports whether the worker is a member that may rely on its lease now, and has
// not become one again just now.
func (r *reporter) trusted() bool {
	r.mu.Lock()
	member, again := r.member, r.again
	r.mu.Unlock()
	return member != nil && member.Trusted() && time.Since(again) >= rejoinedFor
}

func (r *reporter) rates(st *Status) {
	now := time.Now()
	rate := map[string]float64{}
	for name, src := range st.Sources {
		if was, ok := r.last[name]; ok && src.Records >= was.Records && now.After(r.lastAt) {
			src.Rate = float64(src.Records-was.Records) / now.Sub(r.lastAt).Seconds()
			st.Sources[name] = src
			rate[name] = src.Rate
		}
	}
	r.last, r.lastAt = st.Sources, now
	r.mu.Lock()
	r.rate = rate
	r.mu.Unlock()
}
