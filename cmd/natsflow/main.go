package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
	_ "time/tzdata" // time zones of windows, on machines that have none

	"github.com/alecthomas/kong"
	"github.com/oklog/run"
)

// Exit codes.
const (
	exitDone   = 0
	exitFailed = 1
	exitUsage  = 2
)

// oneSignal is the time in which signals count as one: timeout(1) and some
// supervisors send theirs to the process and to its group.
const oneSignal = 200 * time.Millisecond

const description = `Stateful stream processing on NATS JetStream that can be stopped at any moment and goes on as if it had never stopped.

Start with: natsflow dev examples/flights`

// CLI is the command line.
type CLI struct {
	Dev       DevCmd       `cmd:"" help:"Run a flow with a server of its own, feed it and show its results."`
	Worker    WorkerCmd    `cmd:"" help:"Run a flow on a NATS server, sharing its tasks with its other workers."`
	Drain     DrainCmd     `cmd:"" help:"Stop a flow at a position, with a snapshot, and wait until it has."`
	Resume    ResumeCmd    `cmd:"" help:"Let a drained flow go on from where it stopped."`
	Status    StatusCmd    `cmd:"" help:"Show flows: state, positions, workers, errors."`
	Validate  ValidateCmd  `cmd:"" help:"Check a flow file and print its plan."`
	Snapshots SnapshotsCmd `cmd:"" help:"Look at the stored state of a flow."`
	Version   VersionCmd   `cmd:"" help:"Print versions."`
}

// command is what every subcommand is.
type command interface {
	Run(ctx context.Context, c *Console) error
}

// server is a command that listens for others besides its work, such as for a
// scrape of its metrics. A nil execute means that it does not, this time.
type server interface {
	Serve() (execute func() error, interrupt func(error), err error)
}

func main() { os.Exit(runMain(os.Args[1:], os.Stdout, os.Stderr)) }

// runMain is the process: it parses the arguments, runs the command and returns
// the exit code.
//
//	           first: cancel      ┌─────────┐
//	signals ──────────────────────> command │ worker, dev, drain, …
//	   │                          └────┬────┘
//	   │ second: exit at once          │ counts and readiness
//	   v                          ┌────v────┐
//	exit code 1                   │ server  │ /metrics /healthz /readyz
//	                              └─────────┘
func runMain(args []string, stdout, stderr *os.File) int {
	console := newConsole(stdout, stderr)
	cmd, code, done := parse(args, console)
	if done {
		return code
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	var g run.Group
	var failure error // of the command or its server; a signal is none
	{
		ended := make(chan struct{})
		g.Add(func() error { return watchSignals(cancel, ended, console) }, func(error) { close(ended) })
	}
	{
		g.Add(func() error {
			failure = cmd.Run(ctx, console)
			return failure
		}, func(error) { cancel() })
	}
	if s, ok := cmd.(server); ok {
		execute, interrupt, err := s.Serve()
		if err != nil {
			return fail(console, err)
		}
		if execute != nil {
			g.Add(execute, interrupt)
		}
	}
	if err := g.Run(); failure == nil {
		failure = err
	}
	console.restore()
	if failure != nil {
		return fail(console, failure)
	}
	return exitDone
}

// watchSignals makes the command leave at the first signal and ends the process
// at the second. It returns when the command has ended.
func watchSignals(leave func(), ended <-chan struct{}, c *Console) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	var first time.Time
	for {
		select {
		case <-ended:
			return nil
		case <-signals:
		}
		switch {
		case first.IsZero():
			first = time.Now()
			leave()
		case time.Since(first) > oneSignal:
			// Safe at any moment: the next start goes on from the last commit.
			c.restore()
			os.Exit(exitFailed)
		}
	}
}

// usageError is a mistake in the arguments.
type usageError struct {
	err error
	// help is the command that explains.
	help string
}

func newUsageError(err error) *usageError {
	e := &usageError{err: err, help: "natsflow --help"}
	var parsing *kong.ParseError
	if errors.As(err, &parsing) {
		if node := parsing.Context.Selected(); node != nil {
			e.help = node.FullPath() + " --help"
		}
	}
	return e
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// exited is thrown by kong's --help.
type exited int

// parse returns the command that the arguments ask for. done says that there is
// nothing to run, and code is the exit code then.
func parse(args []string, c *Console) (cmd command, code int, done bool) {
	bare := len(args) == 0
	defer func() {
		if p := recover(); p != nil {
			e, ok := p.(exited)
			if !ok {
				panic(p)
			}
			cmd, code, done = nil, int(e), true
			if bare {
				code = exitUsage
			}
		}
	}()
	parser, err := kong.New(&CLI{},
		kong.Name("natsflow"),
		kong.Description(description),
		kong.Writers(c.Out, c.Err),
		kong.Exit(func(code int) { panic(exited(code)) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}),
		kong.ExplicitGroups(groups()),
	)
	if err != nil {
		return nil, fail(c, fmt.Errorf("command line: %w", err)), true
	}
	if bare {
		parser.Stdout = c.Err
		args = []string{"--help"}
	}
	k, err := parser.Parse(args)
	if err != nil {
		return nil, fail(c, newUsageError(err)), true
	}
	cmd, ok := k.Selected().Target.Addr().Interface().(command)
	if !ok {
		return nil, fail(c, fmt.Errorf("command line: %s cannot be run", k.Command())), true
	}
	return cmd, exitDone, false
}

func groups() []kong.Group {
	return []kong.Group{
		{Key: "connection", Title: "Connection:"},
		{Key: "log", Title: "Log:"},
	}
}

// fail prints an error as one line and returns the exit code. Mistakes in a flow
// file come first, each on a line that an editor can jump to.
func fail(c *Console, err error) int {
	var file *flowFileError
	if errors.As(err, &file) {
		file.print(c.Err)
	}
	line := strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
	c.notef("natsflow: %s\n", line)
	var usage *usageError
	if errors.As(err, &usage) {
		c.notef("natsflow: see %s\n", usage.help)
		return exitUsage
	}
	return exitFailed
}
