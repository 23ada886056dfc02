// Command alarms is a flow written in Go: it raises an alarm when a device has not
// reported for five minutes. It needs a stream READINGS, and NATS_URL if NATS is not at
// home.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"natsflow/bus"
	"natsflow/worker"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	f, err := Flow()
	if err == nil {
		err = worker.Run(ctx, f, worker.Config{Bus: bus.Config{URL: os.Getenv("NATS_URL")}})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "alarms:", err)
		stop()
		os.Exit(1)
	}
}
