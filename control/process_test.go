package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/testenv"
)

const (
	ttl  = defaultLeaseTTL
	soon = 200 * time.Millisecond
)

// eight are the tasks of most tests.
func eight() []string { return taskNames(2, 4) }

func taskNames(stages, partitions int) (tasks []string) {
	for s := range stages {
		for p := range partitions {
			tasks = append(tasks, fmt.Sprintf("%d.%d", s, p))
		}
	}
	return tasks
}

func joining(name string) func(*Config) {
	return func(c *Config) {
		c.Name, c.Hash = name, "h1"
		if c.Tasks == nil {
			c.Tasks = eight()
		}
	}
}

// process is a member that runs, with what a worker does about its tasks: it takes
// those that it wants, and releases the others.
type process struct {
	s    *site
	c    *Control
	m    *Member
	link *testenv.Link
	done chan error // what Run returned, then closed
	gone chan struct{}
	stop context.CancelFunc
	halt context.CancelFunc // of work
	log  *history           // nil when nobody wants it

	mu      sync.Mutex
	held    map[string]bool
	due     map[string]bool // is to be released, and nothing more is done for it
	passive bool            // takes nothing more
}

// join starts a process under a name, on a link of its own.
func (s *site) join(name string, opts ...JoinOption) *process {
	s.t.Helper()
	return s.joinWith(joining(name), nil, opts...)
}

func (s *site) joinWith(change func(*Config), log *history, opts ...JoinOption) *process {
	s.t.Helper()
	link := testenv.NewLink(s.t)
	c := s.open(change, func(c *Config) {
		if c.Conn == nil {
			c.Conn = s.connect(link)
		}
	})
	m, err := c.Join(s.ctx, opts...)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(s.ctx)
	working, halt := context.WithCancel(ctx)
	p := &process{
		s: s, c: c, m: m, link: link, done: make(chan error, 1), gone: make(chan struct{}), stop: stop, halt: halt,
		log: log, held: make(map[string]bool), due: make(map[string]bool),
	}
	log.joined(p)
	go func() {
		p.done <- m.Run(ctx)
		close(p.done)
		halt()
	}()
	go func() {
		defer close(p.gone)
		p.work(working)
	}()
	s.t.Cleanup(func() {
		stop()
		<-p.gone
		for range p.done {
		}
	})
	return p
}

// work takes and releases tasks until Run has ended.
func (p *process) work(ctx context.Context) {
	for ctx.Err() == nil {
		wanted, changed := p.m.Wanted()
		for _, task := range p.holds() {
			if !slices.Contains(wanted, task) && p.release(ctx, task) != nil {
				break // ctx has ended
			}
		}
		var again <-chan time.Time
		if !p.acquire(ctx, wanted) {
			again = time.After(50 * time.Millisecond)
		}
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
		}
	}
}

// acquire tries to take the tasks and reports whether it has all of them.
func (p *process) acquire(ctx context.Context, tasks []string) bool {
	all := true
	for _, task := range tasks {
		if p.has(task) {
			continue
		}
		p.mu.Lock()
		passive := p.passive
		p.mu.Unlock()
		if passive {
			return true
		}
		op := p.log.began(p, opAcquire, task)
		_, held, err := p.m.Acquire(ctx, task)
		if held {
			p.mu.Lock()
			p.held[task] = true
			p.mu.Unlock()
		}
		op.ended(held, err)
		all = all && held
	}
	return all
}

// release gives a task up; one that it could not is tried again by shut.
func (p *process) release(ctx context.Context, task string) error {
	p.mu.Lock()
	delete(p.held, task)
	p.due[task] = true
	p.mu.Unlock()
	op := p.log.began(p, opRelease, task)
	err := p.m.Release(ctx, task, nil)
	op.ended(false, err)
	if err == nil {
		p.mu.Lock()
		delete(p.due, task)
		p.mu.Unlock()
	}
	return err
}

// holds are the tasks that p believes to have, whether or not it is trusted.
func (p *process) holds() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var tasks []string
	for task := range p.held {
		tasks = append(tasks, task)
	}
	slices.Sort(tasks)
	return tasks
}

func (p *process) has(task string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held[task]
}

// runs are the tasks that p may do something about at this moment.
func (p *process) runs() []string {
	tasks := p.holds()
	if !p.m.Trusted() {
		return nil
	}
	return tasks
}

// shut is a worker's leave: the tasks are released, then the lease.
func (p *process) shut(ctx context.Context) error {
	p.halt()
	<-p.gone
	tasks := p.holds()
	for task := range p.due {
		tasks = append(tasks, task)
	}
	var errs []error
	for _, task := range tasks {
		errs = append(errs, p.release(ctx, task))
	}
	return errors.Join(append(errs, p.m.Leave(ctx))...)
}

func (p *process) leave() {
	p.s.t.Helper()
	if err := p.shut(p.s.ctx); err != nil {
		p.s.t.Error(err)
	}
	p.wantEnd(nil)
}

// kill is the end of a process without a word.
func (p *process) kill() { p.c.cfg.Conn.Abort() }

// freeze keeps everything of p off the network, both ways; thaw lets it all pass,
// late.
func (p *process) freeze() {
	p.link.Hold(testenv.ToServer)
	p.link.Hold(testenv.ToClient)
}

func (p *process) thaw() {
	p.link.Release(testenv.ToServer)
	p.link.Release(testenv.ToClient)
}

func (p *process) wantEnd(want error) {
	p.s.t.Helper()
	_ = p.endedWith(want)
}

// endedWith is wantEnd for who wants to see more of the error.
func (p *process) endedWith(want error) error {
	p.s.t.Helper()
	err := p.ended()
	if !errors.Is(err, want) {
		p.s.t.Errorf("%s ended with %v, want %v", p.m.Name(), err, want)
	}
	return err
}

// ended waits for the end of Run.
func (p *process) ended() error {
	p.s.t.Helper()
	select {
	case err := <-p.done:
		if p.m.Trusted() {
			p.s.t.Errorf("%s ended and is trusted", p.m.Name())
		}
		return err
	case <-time.After(time.Minute):
		p.s.t.Fatalf("%s did not end", p.m.Name())
		return nil
	}
}

// wantApart checks that no task is run by two.
func wantApart(t testing.TB, all []*process) {
	t.Helper()
	by, seen := map[string]string{}, map[*process]bool{}
	for _, p := range all {
		if seen[p] {
			continue
		}
		seen[p] = true
		for _, task := range p.runs() {
			if other, twice := by[task]; twice {
				t.Errorf("task %s is run by %s and %s/%s", task, other, p.m.Name(), p.m.Instance())
			}
			by[task] = p.m.Name() + "/" + p.m.Instance()
		}
	}
}

// shared reports whether the processes run all the tasks, balanced and each as it
// is assigned.
func shared(all []*process, tasks []string) bool {
	run := 0
	for _, p := range all {
		wanted, _ := p.m.Wanted()
		n := len(p.runs())
		if n < len(tasks)/len(all) || n > (len(tasks)+len(all)-1)/len(all) || wanted == nil || !slices.Equal(wanted, p.runs()) {
			return false
		}
		run += n
	}
	return run == len(tasks)
}

// wantShared waits until the processes share the tasks, at least and at most for a
// time. At no moment may a task be run by two, also of others that are watched.
func (s *site) wantShared(least, most time.Duration, all []*process, others ...*process) {
	s.t.Helper()
	s.wantSharedTasks(least, most, eight(), all, others...)
}

func (s *site) wantSharedTasks(least, most time.Duration, tasks []string, all []*process, others ...*process) {
	s.t.Helper()
	start := time.Now()
	for !shared(all, tasks) {
		wantApart(s.t, slices.Concat(all, others))
		if time.Since(start) > most {
			var got []string
			for _, p := range all {
				wanted, _ := p.m.Wanted()
				got = append(got, fmt.Sprintf("%s runs %v, wants %v", p.m.Name(), p.runs(), wanted))
			}
			s.t.Fatalf("not shared after %v: %s", most, strings.Join(got, "; "))
		}
		time.Sleep(10 * time.Millisecond)
	}
	wantApart(s.t, slices.Concat(all, others))
	if took := time.Since(start); took < least {
		s.t.Errorf("shared after %v, expected %v to %v", took, least, most)
	}
}

// wantStays checks that nobody moves for a time, and that nothing but leases is
// written.
func (s *site) wantStays(d time.Duration, tasks []string, all ...*process) {
	s.t.Helper()
	before := s.revisions(all[0].c)
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(d / 20) {
		if !shared(all, tasks) {
			s.t.Fatal("not shared any more")
		}
		wantApart(s.t, all)
	}
	if diff := cmp.Diff(before, s.revisions(all[0].c)); diff != "" {
		s.t.Errorf("written meanwhile: %s", diff)
	}
}

// revisions are those of the assignment and the tasks.
func (s *site) revisions(c *Control) map[string]uint64 {
	s.t.Helper()
	items, err := c.bucket.List(s.ctx, "f.>")
	if err != nil {
		s.t.Fatal(err)
	}
	revs := map[string]uint64{}
	for _, item := range items {
		if !strings.HasPrefix(item.Key, "f.member.") {
			revs[item.Key] = item.Seq
		}
	}
	return revs
}

func group(p ...*process) []*process { return p }
