package testenv

import (
	"testing"
	"testing/synctest"
	"time"

	"natsflow/testenv/embed"
	"natsflow/testenv/internal/clock"
)

// bubblePatience bounds how long a bubble waits for servers of other tests.
const bubblePatience = 5 * time.Minute

// Bubble runs fn in a testing/synctest bubble, together with a nats-server that
// lives in the same virtual time: time stands still while any goroutine works,
// and jumps to the next timer when all of them wait. Clients connect with
// [Server.InProcess]; there is no network in a bubble.
//
// Everything that fn starts must have ended when fn and its cleanups are done;
// the server stops after them. A goroutine that waits for a mutex, a system
// call or the network keeps time from passing, so a connection that is to be
// slow inside a bubble should be on hold ([Link.Hold]) and not frozen.
//
// Bubble must be called outside of a bubble and waits until no server runs in
// real time in this process; see the package's documentation.
func Bubble(t *testing.T, fn func(t *testing.T, s *Server), opts ...Option) {
	t.Helper()
	release, err := clock.Virtual(bubblePatience)
	if err != nil {
		t.Fatalf("testenv: opening a bubble: %v", err)
	}
	defer release()
	defer watch(t.Name(), limitOf(t), func(report string) { panic(report) })()
	synctest.Test(t, func(t *testing.T) {
		opts = append(opts[:len(opts):len(opts)], DontListen())
		fn(t, startServer(t, embed.Config{Virtual: true}, opts))
	})
}
