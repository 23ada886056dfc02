package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"natsflow/bus"
	"natsflow/control"
)

// Errors of [Run].
var (
	// ErrGap says that messages of a source which the flow has not processed are
	// no longer in the stream.
	ErrGap = errors.New("unprocessed messages are gone from the source")
	// ErrSource says that a source cannot be read, or not from the position that
	// the flow has.
	ErrSource = errors.New("the source does not fit the flow")
	// ErrStopTimeout says that a stop was not done in time. Nothing is lost: the
	// next start goes on from the last commit.
	ErrStopTimeout = errors.New("the stop took too long")
)

// Config of a worker. The zero value is usable.
type Config struct {
	// Bus says how to connect.
	Bus bus.Config
	// Name of the worker in the flow. A process started under the name of one
	// that died takes its place. Defaults to the host's name and a short random
	// text.
	Name string
	// LeaseTTL is how long a worker that died or froze keeps its place. At least
	// 2 s, whole seconds. Defaults to 5 s.
	LeaseTTL time.Duration
	// Replicas of the streams and buckets that the worker creates. Defaults to 1.
	Replicas int
	// Resume makes a drained flow go on.
	Resume bool
	// ControlPrefix is the first token of the control subjects. Defaults to
	// "control".
	ControlPrefix string
	// AcceptGap makes the flow go on when unprocessed messages are gone from a
	// source, with a warning, instead of refusing to start, or ending, with
	// [ErrGap].
	AcceptGap bool
	// AcceptChanges makes a drained flow go on under a definition that lacks steps
	// with stored state, instead of refusing to start with
	// [control.ErrDefinition]. That state is lost, and the ids of these steps must
	// not be used again.
	AcceptChanges bool
	// StopTimeout bounds a stop. Defaults to 30 s.
	StopTimeout time.Duration
	// Lanes is the number of goroutines that run tasks. Defaults to GOMAXPROCS,
	// at most the number of partitions.
	Lanes int
	// MaxPending bounds the results of a task, in bytes, that wait for a commit
	// before its lane stops taking records. Defaults to 4 MiB.
	MaxPending int
	// Logger defaults to slog.Default.
	Logger *slog.Logger
	// Registerer takes the metrics. Defaults to a registry of the worker's own.
	Registerer prometheus.Registerer
	// OnStatus is called now and then, and at each change of what the worker
	// does, from one goroutine.
	OnStatus func(Status)

	// probe is called at the named points of the protocol; an error stops the
	// worker dead there. Only tests set it.
	probe func(ctx context.Context, point, task string) error
	// idleCommit is how long a task waits until it records a position that moved
	// without a change of state.
	idleCommit time.Duration
	// trimEvery is how often the intakes are trimmed.
	trimEvery time.Duration
}

func (c Config) withDefaults(partitions int) Config {
	if c.Name == "" {
		c.Name = strings.ReplaceAll(control.DefaultName(), ".", "-")
	}
	if c.LeaseTTL == 0 {
		c.LeaseTTL = 5 * time.Second
	}
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	if c.ControlPrefix == "" {
		c.ControlPrefix = "control"
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = 30 * time.Second
	}
	if c.Lanes == 0 {
		c.Lanes = runtime.GOMAXPROCS(0)
	}
	c.Lanes = min(c.Lanes, partitions)
	if c.MaxPending == 0 {
		c.MaxPending = 4 << 20
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Registerer == nil {
		c.Registerer = prometheus.NewRegistry()
	}
	if c.trimEvery == 0 {
		c.trimEvery = 10 * time.Second
	}
	if c.idleCommit == 0 {
		c.idleCommit = 5 * time.Second
	}
	if c.Bus.Logger == nil {
		c.Bus.Logger = c.Logger
	}
	if c.Bus.Name == "" {
		c.Bus.Name = "natsflow " + c.Name
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if c.LeaseTTL < 2*time.Second || c.LeaseTTL%time.Second != 0 {
		errs = append(errs, fmt.Errorf("lease TTL %v: whole seconds, at least 2s", c.LeaseTTL))
	}
	if c.Replicas < 1 || c.Replicas > 5 {
		errs = append(errs, fmt.Errorf("%d replicas: 1 to 5 are possible", c.Replicas))
	}
	if c.StopTimeout < 0 {
		errs = append(errs, fmt.Errorf("negative stop timeout %v", c.StopTimeout))
	}
	if c.Lanes < 1 {
		errs = append(errs, fmt.Errorf("%d lanes: at least one is needed", c.Lanes))
	}
	if strings.ContainsAny(c.Name, ".*> \t\r\n") {
		errs = append(errs, fmt.Errorf("worker name %q: it is a token of a subject, without dots, wildcards and spaces", c.Name))
	}
	return errors.Join(errs...)
}

// reached is called at a named point of the protocol.
func (c *Config) reached(ctx context.Context, point, task string) error {
	if c.probe == nil {
		return nil
	}
	return c.probe(ctx, point, task)
}
