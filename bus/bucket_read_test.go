package bus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"natsflow/testenv"
)

// TestBucket_List_whileWritten: what is being replaced while it is listed must not
// hold the list up.
func TestBucket_List_whileWritten(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		b := must(c.EnsureBucket(t.Context(), BucketConfig{Name: "b", MarkerTTL: time.Minute}))
		for _, key := range []string{"a", "b", "c"} {
			must(b.Put(t.Context(), key, nil, 0))
		}
		for i := range 600 {
			var wg sync.WaitGroup
			wg.Go(func() {
				for _, key := range []string{"c", "a", "b"}[i%3:] {
					must(b.Put(t.Context(), key, []byte(fmt.Sprint(i)), 0))
				}
			})
			start := time.Now()
			items, err := b.List(t.Context(), "*")
			if err != nil || len(items) != 3 {
				t.Fatalf("items %v, %v", items, err)
			}
			// The server may go on counting a message that was replaced as one to come.
			if took := time.Since(start); took > 5*pullUnsettled {
				t.Errorf("list %d took %v", i, took)
			}
			wg.Wait()
		}
	})
}

// TestBucket_WatchAll: one watch over several keys brings what is there of them, its
// end, and changes of all of them, in their order, and nothing of other keys.
func TestBucket_WatchAll(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		b := must(c.EnsureBucket(t.Context(), BucketConfig{Name: "b", MarkerTTL: time.Minute}))
		for _, key := range []string{"x.a", "x.b", "x.c"} {
			must(b.Put(t.Context(), key, []byte("1"), 0))
		}
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan string, 100)
		done := make(chan error)
		go func() {
			done <- b.WatchAll(ctx, []string{"x.a", "x.c", "y.>"}, func(it Item) error {
				got <- fmt.Sprintf("%s=%s %v", it.Key, it.Value, it.Deleted)
				return nil
			})
		}()
		want := func(want ...string) {
			t.Helper()
			for _, w := range want {
				select {
				case g := <-got:
					if g != w {
						t.Errorf("got %s, want %s", g, w)
					}
				case <-time.After(time.Minute):
					t.Fatalf("no %s", w)
				}
			}
		}
		want("x.a=1 false", "x.c=1 false", "= false")
		must(b.Put(t.Context(), "x.b", []byte("2"), 0))
		must(b.Put(t.Context(), "y.q.r", []byte("3"), 2*time.Second))
		if err := b.Delete(t.Context(), "x.a", 0); err != nil {
			t.Fatal(err)
		}
		want("y.q.r=3 false", "x.a= true", "y.q.r= true")
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		if len(got) > 0 {
			t.Errorf("also %s", <-got)
		}
	})
}
