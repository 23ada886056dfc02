package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"natsflow/control"
	"natsflow/worker"
)

// WorkerCmd runs a flow together with its other workers.
type WorkerCmd struct {
	File string `arg:"" help:"Flow file, or a folder with a flow.yaml."`
	ConnectionFlags
	PrefixFlag
	LogFlags

	Name          string        `placeholder:"NAME" help:"Name of this worker; a process takes the place of one of the same name (default: the host's name and a random part)."`
	Replicas      int           `default:"1" help:"Replicas of the streams and buckets that are created, 1 to 5."`
	Resume        bool          `help:"Let the flow go on if it is drained."`
	LeaseTTL      time.Duration `name:"lease-ttl" default:"5s" help:"How long a worker that died or froze keeps its tasks; whole seconds, at least 2s."`
	AcceptGap     bool          `help:"Go on when messages that were not processed are gone from a source."`
	AcceptChanges bool          `help:"Let a drained flow go on without the state of steps that are gone; see natsflow validate --against."`
	StopTimeout   time.Duration `default:"30s" help:"Patience for a clean stop; exit code 1 after it."`
	MetricsListen string        `placeholder:"[HOST:]PORT" help:"Serve /metrics, /healthz and /readyz there; the loopback address unless a host is given."`

	health   *health
	registry *prometheus.Registry
}

// Validate checks the flags without looking at the file or the server.
func (cmd *WorkerCmd) Validate() error {
	errs := []error{cmd.ConnectionFlags.Validate(), cmd.PrefixFlag.Validate()}
	if cmd.Name != "" {
		errs = append(errs, control.ValidName(cmd.Name))
	}
	if cmd.Replicas < 1 || cmd.Replicas > 5 {
		errs = append(errs, fmt.Errorf("--replicas=%d is not from 1 to 5", cmd.Replicas))
	}
	if cmd.LeaseTTL < 2*time.Second || cmd.LeaseTTL%time.Second != 0 {
		errs = append(errs, fmt.Errorf("--lease-ttl=%v: whole seconds, at least 2s", cmd.LeaseTTL))
	}
	if cmd.StopTimeout <= 0 {
		errs = append(errs, fmt.Errorf("--stop-timeout=%v is not positive", cmd.StopTimeout))
	}
	if cmd.MetricsListen != "" {
		_, err := hostPort("--metrics-listen", cmd.MetricsListen)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Serve listens for scrapes and probes if that was asked for.
func (cmd *WorkerCmd) Serve() (execute func() error, interrupt func(error), err error) {
	if cmd.MetricsListen == "" {
		return nil, nil, nil
	}
	cmd.registry = prometheus.NewRegistry()
	cmd.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	cmd.health = newHealth(cmd.registry)
	return cmd.health.listen(cmd.MetricsListen)
}

// Run runs the flow until it is drained or ctx ends.
func (cmd *WorkerCmd) Run(ctx context.Context, c *Console) error {
	_, f, err := loadFlow(cmd.File)
	if err != nil {
		return err
	}
	log := cmd.logger(c, c.Err, slog.LevelInfo)
	cfg := worker.Config{
		Bus: cmd.config(log), Name: cmd.Name, LeaseTTL: cmd.LeaseTTL, Replicas: cmd.Replicas, Resume: cmd.Resume,
		ControlPrefix: cmd.ControlPrefix, AcceptGap: cmd.AcceptGap, AcceptChanges: cmd.AcceptChanges, StopTimeout: cmd.StopTimeout, Logger: log,
	}
	if cmd.registry != nil {
		cfg.Registerer = cmd.registry
		cfg.OnStatus = cmd.health.set
		log.Info("serving metrics", "url", cmd.health.url)
	}
	cfg.Bus.Name = ""
	err = worker.Run(ctx, f, cfg)
	switch {
	case errors.Is(err, control.ErrReplaced):
		return fmt.Errorf("%w: of two workers of one name the younger stays", err)
	case errors.Is(err, worker.ErrStopTimeout):
		return fmt.Errorf("%w; nothing is lost, the next start goes on from the last commit", err)
	}
	return err
}
