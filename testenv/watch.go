package testenv

import (
	"fmt"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"
)

// bubbleLimit is how long a bubble may last in real time. The longest ones take
// some minutes with the race detector on a slow machine.
const bubbleLimit = 20 * time.Minute

// limitOf is the limit for a bubble of a test: before the runner's own, if that is to come.
func limitOf(t *testing.T) time.Duration {
	if deadline, ok := t.Deadline(); ok {
		if left := time.Until(deadline) - 10*time.Second; left > 0 {
			return min(left, bubbleLimit)
		}
	}
	return bubbleLimit
}

// watch calls fail when a bubble has lasted for limit of real time, with
// what its goroutines wait for. A bubble in which a goroutine waits for a mutex
// stands still for ever without being a deadlock for the runtime, and of the thousands
// of lines that the test runner prints when its own time is over the last ones name
// neither the test nor the goroutine. It must be called outside of the bubble.
func watch(name string, limit time.Duration, fail func(report string)) (stop func()) {
	timer := time.AfterFunc(limit, func() {
		fail(fmt.Sprintf("testenv: the bubble of %s has not ended within %v. Its goroutines that work or keep its time from passing, and those of the tests:\n\n%s",
			name, limit, telling(stacks())))
	})
	return func() { timer.Stop() }
}

// stacks returns the stacks of all goroutines.
func stacks() string {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			return string(buf[:n])
		}
		buf = make([]byte, 2*len(buf))
	}
}

// header is the first line of a goroutine in a bubble.
var header = regexp.MustCompile(`^goroutine \d+ (?:gp=\S+ m=\S+ (?:mp=\S+ )?)?\[([^\]]*synctest bubble \d+[^\]]*)\]`)

// telling returns those of the stacks that may tell why a bubble does not end: the
// goroutines in a bubble that do not wait durably, then those that run code of this
// module.
func telling(all string) string {
	var holding, ours []string
	for _, g := range strings.Split(all, "\n\n") {
		m := header.FindStringSubmatch(g)
		switch {
		case m == nil:
		case !strings.Contains(m[1], "(durable)"):
			holding = append(holding, g)
		case strings.Contains(g, "\nnatsflow/"):
			ours = append(ours, g)
		}
	}
	return strings.Join(append(holding, ours...), "\n\n")
}
