package bus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv"
)

// copying runs a copy of the bucket b until the test ends.
type copying struct {
	*Copy
	tb   testing.TB
	done chan struct{}
	err  error
}

func startCopy(tb testing.TB, c *Conn) *copying {
	tb.Helper()
	k := &copying{Copy: must(c.OpenCopy(tb.Context(), "b")), tb: tb, done: make(chan struct{})}
	ctx, cancel := context.WithCancel(tb.Context())
	go func() {
		defer close(k.done)
		k.err = k.Run(ctx)
	}()
	tb.Cleanup(func() {
		cancel()
		<-k.done
	})
	return k
}

// text is what the copy holds.
func (k *copying) text() string {
	k.mu.RLock()
	defer k.mu.RUnlock()
	var all []string
	bytes := 0
	for _, key := range slices.Sorted(maps.Keys(k.items)) {
		all = append(all, fmt.Sprintf("%s=%s", key, k.items[key].value))
		bytes += len(key) + len(k.items[key].value)
	}
	if bytes != k.bytes {
		k.tb.Errorf("%d bytes, counted %d", bytes, k.bytes)
	}
	return strings.Join(all, " ")
}

// await waits until the copy holds that.
func (k *copying) await(want string) {
	k.tb.Helper()
	for range 2000 {
		if k.State().Behind.IsZero() && k.text() == want {
			return
		}
		time.Sleep(20 * time.Millisecond) // of virtual time
	}
	k.tb.Fatalf("the copy has %q (%+v), want %q", k.text(), k.State(), want)
}

func (k *copying) want(want string) {
	k.tb.Helper()
	if diff := cmp.Diff(want, k.text()); diff != "" {
		k.tb.Errorf("the copy (-want +got):\n%s", diff)
	}
}

// store puts "key=value" into the bucket, and deletes "key".
func store(tb testing.TB, b *Bucket, pairs ...string) {
	tb.Helper()
	for _, pair := range pairs {
		key, value, ok := strings.Cut(pair, "=")
		var err error
		if ok {
			_, err = b.Put(tb.Context(), key, []byte(value), 0)
		} else {
			err = b.Delete(tb.Context(), key, 0)
		}
		if err != nil {
			tb.Fatal(err)
		}
	}
}

func TestCopy(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		b := bucket(t, c, BucketConfig{MarkerTTL: time.Hour})
		store(t, b, "a=1", "x.y=2", "gone=3", "a=4", "gone", "empty=")
		k := startCopy(t, c)
		if _, ok := k.Get("a"); ok || k.State().Behind.IsZero() {
			t.Error("a copy that is not loaded has a key, or follows the bucket")
		}
		<-k.Loaded()
		k.want("a=4 empty= x.y=2")
		if got := k.State(); got.Keys != 3 || got.Bytes != 11 || !got.Behind.IsZero() || got.Err != nil {
			t.Errorf("state %+v", got)
		}
		if v, ok := k.Get("a"); string(v) != "4" || !ok {
			t.Errorf("a is %s, %v", v, ok)
		}
		if _, ok := k.Get("gone"); ok {
			t.Error("a deleted key is there")
		}
		store(t, b, "a=5", "x.y", "new=6")
		must(b.Put(t.Context(), "short", []byte("7"), 2*time.Second))
		k.await("a=5 empty= new=6 short=7")
		time.Sleep(2 * time.Second)
		k.await("a=5 empty= new=6")
		if got := consumers(t, c, "KV_b"); got != 1 {
			t.Errorf("%d consumers", got)
		}
	})
}

// An empty bucket is loaded at once.
func TestCopy_empty(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		b := bucket(t, c, BucketConfig{})
		k := startCopy(t, c)
		<-k.Loaded()
		k.want("")
		store(t, b, "a=1")
		k.await("a=1")
	})
}

// What is deleted while the copy is cut off is gone afterwards, also without a mark that
// would still say so; until then the copy has what it had, and says since when.
func TestCopy_cutOff(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		link := testenv.NewLink(t)
		far := connect(t, s, func(cfg *Config) { cfg.InProcess = link.Dialer(s.InProcess) })
		near := connect(t, s)
		b := bucket(t, near, BucketConfig{})
		store(t, b, "a=1", "b=1", "c=1", "d=1")
		k := startCopy(t, far)
		<-k.Loaded()
		for round := range 3 {
			link.Cut()
			cut := time.Now()
			store(t, b, "a", fmt.Sprintf("b=%d", round+2), "e=1")
			if err := b.Purge(t.Context(), "c", 0); err != nil {
				t.Fatal(err)
			}
			before := k.text()
			time.Sleep(time.Minute)
			k.want(before)
			if st := k.State(); st.Behind.Before(cut) || st.Behind.Sub(cut) > 10*time.Second || st.Err == nil {
				t.Errorf("state %+v, cut off at %v", st, cut)
			}
			link.Heal()
			k.await(fmt.Sprintf("b=%d d=1 e=1", round+2))
			if st := k.State(); !st.Behind.IsZero() || st.Err != nil {
				t.Errorf("state %+v", st)
			}
			store(t, b, "a=9", "c=9", "e")
			k.await(fmt.Sprintf("a=9 b=%d c=9 d=1", round+2))
		}
	})
}

// The server restarts, and the consumer is deleted: the copy does not stop without a
// word.
func TestCopy_lost(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		b := bucket(t, c, BucketConfig{})
		store(t, b, "a=1", "b=1")
		k := startCopy(t, c)
		<-k.Loaded()
		s.Restart()
		for {
			if _, err := b.Put(t.Context(), "a", []byte("2"), 0); err == nil {
				break
			} else if !Retryable(err) {
				t.Fatal(err)
			}
		}
		k.await("a=2 b=1")
		admin := s.Admin()
		for _, con := range admin.Consumers("KV_b") {
			admin.DeleteConsumer("KV_b", con.Name)
		}
		store(t, b, "a=3", "b")
		k.await("a=3")
	})
}

// Messages that are gone without a mark are gone from the copy, too: they were purged, or
// grew too old.
func TestCopy_unmarked(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		b := bucket(t, c, BucketConfig{})
		store(t, b, "a=1", "b=1", "c=1", "d=1")
		k := startCopy(t, c)
		<-k.Loaded()
		if err := b.Purge(t.Context(), "b", 0); err != nil {
			t.Fatal(err)
		}
		k.await("a=1 c=1 d=1")
		if err := b.Purge(t.Context(), ">", 4); err != nil {
			t.Fatal(err)
		}
		k.await("d=1")
		s.Admin().Edit("KV_b", map[string]any{"max_age": time.Minute})
		time.Sleep(30 * time.Second)
		store(t, b, "e=1")
		time.Sleep(40 * time.Second)
		k.await("e=1")
		time.Sleep(time.Minute)
		k.await("")
		store(t, b, "f=1")
		k.await("f=1")
	})
}

func TestCopy_otherBucket(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		store(t, bucket(t, c, BucketConfig{}), "a=1", "b=1")
		k := startCopy(t, c)
		<-k.Loaded()
		// The same name and sequences.
		if err := c.DeleteStream(t.Context(), "KV_b"); err != nil {
			t.Fatal(err)
		}
		store(t, bucket(t, c, BucketConfig{}), "x=1", "b=2")
		k.await("b=2 x=1")
		if err := c.DeleteStream(t.Context(), "KV_b"); err != nil {
			t.Fatal(err)
		}
		<-k.done
		if !errors.Is(k.err, ErrNotFound) {
			t.Errorf("got %v", k.err)
		}
	})
}

func TestConn_OpenCopy_errors(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		if _, err := c.OpenCopy(t.Context(), "none"); !errors.Is(err, ErrNotFound) {
			t.Errorf("a bucket that is not there: %v", err)
		}
		bucket(t, c, BucketConfig{})
		must(c.createStream(t.Context(), jetstream.StreamConfig{Name: "KV_mirror", Mirror: &jetstream.StreamSource{Name: "KV_b"}, Storage: jetstream.FileStorage}))
		if _, err := c.OpenCopy(t.Context(), "mirror"); err == nil || !strings.Contains(err.Error(), "it is a mirror of another one") {
			t.Errorf("a mirror: %v", err)
		}
	})
}

// A bucket that is written to all the time, and read by many.
func TestCopy_concurrent(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		b := bucket(t, c, BucketConfig{})
		store(t, b, "k0=0", "k1=0", "k2=0")
		var wg sync.WaitGroup
		stop := make(chan struct{})
		wg.Go(func() {
			for i := 1; i <= 2000; i++ {
				must(b.Put(t.Context(), fmt.Sprintf("k%d", i%3), fmt.Append(nil, i), 0))
			}
			close(stop)
		})
		k := startCopy(t, c)
		<-k.Loaded()
		for range 4 {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					if _, ok := k.Get("k1"); !ok {
						t.Error("a key that was there all the time is not")
						return
					}
					time.Sleep(time.Millisecond)
				}
			})
		}
		wg.Wait()
		k.await("k0=1998 k1=1999 k2=2000")
	})
}
