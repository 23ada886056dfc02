package clock

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestGuard(t *testing.T) {
	t.Parallel()
	must := func(t *testing.T, release func(), err error) func() {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return release
	}
	t.Run("real time is shared", func(t *testing.T) {
		t.Parallel()
		var g Guard
		a, errA := g.Shared(0)
		b, errB := g.Shared(0)
		a, b = must(t, a, errA), must(t, b, errB)
		a()
		a() // a second call must not release b's share
		if _, err := g.Virtual(0); !errors.Is(err, ErrBusy) {
			t.Fatalf("got %v, want ErrBusy while a share is held", err)
		}
		b()
		v, err := g.Virtual(0)
		must(t, v, err)()
	})
	t.Run("virtual time is exclusive", func(t *testing.T) {
		t.Parallel()
		var g Guard
		v, err := g.Virtual(0)
		v = must(t, v, err)
		if _, err := g.Shared(0); !errors.Is(err, ErrBusy) {
			t.Fatalf("got %v, want ErrBusy in a bubble", err)
		}
		if _, err := g.Virtual(0); !errors.Is(err, ErrBusy) {
			t.Fatalf("got %v, want ErrBusy for a second bubble", err)
		}
		v()
		s, err := g.Shared(0)
		must(t, s, err)()
	})
}

func TestGuard_Wait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Guard
		release, err := g.Shared(0)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		done := make(chan error, 1)
		go func() {
			v, err := g.Virtual(time.Minute)
			if err == nil {
				v()
			}
			done <- err
		}()
		time.Sleep(time.Second)
		release()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != time.Second {
			t.Fatalf("entered after %v, want 1s", d)
		}
	})
}
