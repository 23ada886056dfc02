package testenv

import (
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func waitsForMutex(mu *sync.Mutex) {
	mu.Lock()
	mu.Unlock() //nolint:staticcheck // it only waits
}

func waitsForChannel(c chan struct{}) { <-c }

func TestWatch(t *testing.T) {
	reports := make(chan string, 1)
	stop := watch("Test", time.Nanosecond, func(report string) { reports <- report })
	defer stop()
	if got := <-reports; !strings.Contains(got, "the bubble of Test has not ended within 1ns") {
		t.Errorf("the report is %q", got)
	}
	watch("Test", time.Hour, func(string) { t.Error("reported after it was stopped") })()
}

func TestTelling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		mu.Lock()
		c := make(chan struct{})
		go waitsForMutex(&mu)
		go waitsForChannel(c)
		for {
			got := telling(stacks())
			mutex, channel := strings.Index(got, "testenv.waitsForMutex("), strings.Index(got, "testenv.waitsForChannel(")
			if mutex < 0 || channel < 0 || mutex > channel {
				// They have not come to wait yet.
				runtime.Gosched()
				continue
			}
			break
		}
		mu.Unlock()
		close(c)
	})
	if got := telling(stacks()); got != "" {
		t.Errorf("goroutines outside of a bubble are told:\n%s", got)
	}
}
