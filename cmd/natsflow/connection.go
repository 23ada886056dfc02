package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"natsflow/bus"
	"natsflow/control"
)

// askPatience is how long a command that only asks waits for a server, unless
// told otherwise. A worker is more patient: it is started together with its
// server as often as not.
const askPatience = 5 * time.Second

// ConnectionFlags say which server to connect to, and how. They have the names
// and the variables of the nats command.
type ConnectionFlags struct {
	Server         string        `short:"s" env:"NATS_URL" placeholder:"URL" group:"connection" help:"Servers, comma separated (default nats://127.0.0.1:4222)."`
	Context        string        `env:"NATS_CONTEXT" placeholder:"NAME" group:"connection" help:"A context of the nats command."`
	Creds          string        `env:"NATS_CREDS" type:"path" placeholder:"FILE" group:"connection" help:"File with user JWT and seed."`
	NKey           string        `name:"nkey" env:"NATS_NKEY" type:"path" placeholder:"FILE" group:"connection" help:"File with a user seed."`
	TLSCA          string        `name:"tlsca" env:"NATS_CA" type:"path" placeholder:"FILE" group:"connection" help:"Authorities to trust."`
	TLSCert        string        `name:"tlscert" env:"NATS_CERT" type:"path" placeholder:"FILE" group:"connection" help:"Client certificate, with --tlskey."`
	TLSKey         string        `name:"tlskey" env:"NATS_KEY" type:"path" placeholder:"FILE" group:"connection" help:"Key of the client certificate."`
	User           string        `env:"NATS_USER" group:"connection" help:"User name."`
	Password       string        `env:"NATS_PASSWORD" group:"connection" help:"Password."`
	ConnectTimeout time.Duration `placeholder:"DURATION" group:"connection" help:"Patience for the first connection (default 30s for a worker, 5s otherwise)."`
}

// Validate refuses flags that exclude each other.
func (f *ConnectionFlags) Validate() error {
	var errs []error
	if (f.TLSCert == "") != (f.TLSKey == "") {
		errs = append(errs, errors.New("--tlscert and --tlskey go together"))
	}
	if f.Creds != "" && f.NKey != "" {
		errs = append(errs, errors.New("--creds and --nkey exclude each other"))
	}
	if f.Password != "" && f.User == "" {
		errs = append(errs, errors.New("--password without --user"))
	}
	if f.ConnectTimeout < 0 {
		errs = append(errs, fmt.Errorf("--connect-timeout=%v is negative", f.ConnectTimeout))
	}
	return errors.Join(errs...)
}

// config is the configuration of a connection.
func (f *ConnectionFlags) config(log *slog.Logger) bus.Config {
	return bus.Config{
		URL: f.Server, Context: f.Context, Creds: f.Creds, NKey: f.NKey, TLSCA: f.TLSCA, TLSCert: f.TLSCert, TLSKey: f.TLSKey,
		User: f.User, Password: f.Password, ConnectTimeout: f.ConnectTimeout, Name: "natsflow", Logger: log,
	}
}

// connect connects for a command that asks.
func (f *ConnectionFlags) connect(ctx context.Context, c *Console) (*bus.Conn, error) {
	cfg := f.config(c.warnings())
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = askPatience
	}
	conn, err := bus.Connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := conn.RequireJetStream(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// PrefixFlag is the prefix of the control subjects.
type PrefixFlag struct {
	ControlPrefix string `placeholder:"PREFIX" help:"First tokens of the control subjects (default control)."`
}

// Validate refuses what cannot begin a subject.
func (f *PrefixFlag) Validate() error {
	if f.ControlPrefix == "" {
		return nil
	}
	return control.ValidPrefix(f.ControlPrefix)
}

// FlowArg names a flow.
type FlowArg struct {
	Flow string `arg:"" help:"Name of the flow."`
}

// Validate refuses what cannot be the name of a flow. That there is none is
// reported when the arguments are counted.
func (a *FlowArg) Validate() error {
	if a.Flow == "" {
		return nil
	}
	return control.ValidFlow(a.Flow)
}

// open finds the flow and opens its control; prefix may be empty, for the one
// that the flow has. A flow that is not there is an error before anything of
// natsflow is created on the server.
func (a *FlowArg) open(ctx context.Context, conn *bus.Conn, c *Console, prefix string) (*control.Control, control.Record, error) {
	rec, err := a.find(ctx, conn)
	if err != nil {
		return nil, rec, err
	}
	if prefix == "" {
		prefix = rec.Control.Prefix
	}
	ctl, err := control.Open(ctx, control.Config{Conn: conn, Flow: a.Flow, Prefix: prefix, Logger: c.warnings()})
	return ctl, rec, err
}

// find returns the record of the flow, or an error that says what there is
// instead.
func (a *FlowArg) find(ctx context.Context, conn *bus.Conn) (control.Record, error) {
	recs, err := control.Flows(ctx, conn)
	if err != nil {
		return control.Record{}, err
	}
	var names []string
	for _, rec := range recs {
		if rec.Flow == a.Flow {
			return rec, nil
		}
		names = append(names, rec.Flow)
	}
	return control.Record{}, fmt.Errorf("%w: %q%s", control.ErrNoFlow, a.Flow, hint(a.Flow, names, conn.URL()))
}
