// Command nexmark makes the events of the Nexmark benchmark, and runs those of its
// queries that are written in Go. README.md says more.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"natsflow/bus"
	"natsflow/examples/nexmark/gen"
	"natsflow/flow"
	"natsflow/worker"
)

const (
	// stream is the one that all events are in.
	stream = "NEXMARK"
	// side is the bucket that query 13 looks auctions up in, by their numbers modulo
	// sideKeys.
	side     = "NEXMARK_SIDE"
	sideKeys = 10_000
)

// flows are the queries in Go.
var flows = map[string]func() (*flow.Flow, error){"q4": q4, "q6": q6, "q9": q9}

// standard are the events of events.ndjson.gz: 200 seconds, out of order by less than
// one of them.
var standard = gen.Config{Seed: 1, Rate: 50, OutOfOrder: 50}

// standardEvents is how many there are in events.ndjson.gz.
const standardEvents = 10_000

const usage = `usage:
  nexmark events [flags]   write events to the standard output, one a line
  nexmark feed [flags]     publish them to the stream NEXMARK of the server NATS_URL, and
                           fill the bucket NEXMARK_SIDE
  nexmark run QUERY        run a query: `

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "nexmark:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errUsage()
	}
	switch cmd, args := args[0], args[1:]; cmd {
	case "events", "feed":
		g, n, err := generator(cmd, args)
		switch {
		case errors.Is(err, flag.ErrHelp):
			return nil
		case err != nil:
			return err
		case cmd == "feed":
			return feed(ctx, g, n)
		}
		return write(out, g, n)
	case "run":
		if len(args) != 1 || flows[args[0]] == nil {
			return errUsage()
		}
		f, err := flows[args[0]]()
		if err != nil {
			return err
		}
		return worker.Run(ctx, f, worker.Config{Bus: server()})
	}
	return errUsage()
}

func errUsage() error {
	return errors.New(usage + strings.Join(slices.Sorted(maps.Keys(flows)), ", "))
}

func server() bus.Config { return bus.Config{URL: os.Getenv("NATS_URL")} }

// generator reads the flags.
func generator(cmd string, args []string) (*gen.Generator, int, error) {
	cfg, n := standard, standardEvents
	flags := flag.NewFlagSet("nexmark "+cmd, flag.ContinueOnError)
	flags.IntVar(&n, "n", n, "number of events")
	flags.Uint64Var(&cfg.Seed, "seed", cfg.Seed, "seed of the random numbers")
	flags.IntVar(&cfg.Rate, "rate", cfg.Rate, "events a second, by their own times")
	flags.IntVar(&cfg.OutOfOrder, "out-of-order", cfg.OutOfOrder, "events of a group that is shuffled")
	if err := flags.Parse(args); err != nil {
		return nil, 0, err
	}
	if flags.NArg() > 0 {
		return nil, 0, errUsage()
	}
	g, err := gen.New(cfg)
	return g, n, err
}

func write(out io.Writer, g *gen.Generator, n int) error {
	w := bufio.NewWriter(out)
	for i := range n {
		// An error stays until Flush.
		_, _ = w.Write(g.Event(i).JSON())
		_ = w.WriteByte('\n')
	}
	return w.Flush()
}

// feed publishes the events. Their message ids let it be done again after a failure,
// within the duplicate window of the stream.
func feed(ctx context.Context, g *gen.Generator, n int) error {
	conn, err := bus.Connect(ctx, server())
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err = conn.Stream(ctx, stream); errors.Is(err, bus.ErrNotFound) {
		_, err = conn.CreateStream(ctx, bus.StreamConfig{Name: stream, Subjects: []string{"nexmark.>"}})
	}
	if err != nil {
		return err
	}
	out := conn.NewFeeder(0)
	for i := range n {
		if err := ctx.Err(); err != nil {
			return err
		}
		e := g.Event(i)
		if err := out.Publish(e.Subject(), fmt.Sprintf("nexmark:%d", i), e.JSON()); err != nil {
			return err
		}
	}
	if err := out.Flush(ctx); err != nil {
		return err
	}
	return fillSide(ctx, conn)
}

// fillSide puts the text of each number under it.
func fillSide(ctx context.Context, conn *bus.Conn) error {
	if _, err := conn.EnsureBucket(ctx, bus.BucketConfig{Name: side, Description: "side input of Nexmark"}); err != nil {
		return err
	}
	out := conn.NewFeeder(0)
	for key := range sideKeys {
		text := strconv.Itoa(key)
		if err := out.Publish("$KV."+side+"."+text, "", []byte(text)); err != nil {
			return err
		}
	}
	return out.Flush(ctx)
}
