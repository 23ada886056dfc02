package bus

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// Config says how to connect. The zero value connects to nats://127.0.0.1:4222 without credentials.
type Config struct {
	// URL of the servers, comma separated. Defaults to the context's, then nats://127.0.0.1:4222.
	URL string
	// Context is the name of a context of the `nats` command, read from
	// ${XDG_CONFIG_HOME:-~/.config}/nats/context/<name>.json. Fields set here win over it. Defaults to none.
	Context string
	// Creds is a file with user JWT and seed. Defaults to none.
	Creds string
	// NKey is a file with a user seed. Defaults to none.
	NKey string
	// TLSCA is a PEM file of authorities to trust. Defaults to the system's.
	TLSCA string
	// TLSCert is the PEM file of the client's certificate, with TLSKey. Defaults to none.
	TLSCert string
	// TLSKey is the PEM file of the client's key. Defaults to none.
	TLSKey string
	// User of a user and password login. Defaults to none.
	User string
	// Password of that login. Defaults to none.
	Password string
	// Name of the connection, shown by the server's monitoring. Defaults to "natsflow".
	Name string
	// ConnectTimeout is the patience for the first connection, which is tried again and again until then.
	// Defaults to 30 s.
	ConnectTimeout time.Duration
	// RequestTimeout bounds the wait for one answer of the server when the caller's ctx does not end earlier. A write
	// without an answer by then is ErrUnknownOutcome. Defaults to 5 s.
	RequestTimeout time.Duration
	// Logger for connects and disconnects. Defaults to one that drops everything.
	Logger *slog.Logger
	// InProcess dials an embedded server instead of URL. Defaults to none.
	InProcess func() (net.Conn, error)
	// Trusted makes the connection a guarded one: it is asked just before each write to the network, and when it says
	// no, the connection is closed and nothing is written; nor is anything kept to be sent after a reconnect.
	// It must be quick and safe for concurrent use. Defaults to none, an ordinary connection.
	Trusted func() bool
	// UserTimeout bounds how long the kernel keeps trying to deliver what a guarded connection has written
	// (TCP_USER_TIMEOUT, RFC 5482; Linux only). Defaults to 2 s.
	UserTimeout time.Duration

	// Filled from a context of the `nats` command.
	token, inboxPrefix, domain, apiPrefix string
	userJWT, userSeed                     string
	tlsFirst                              bool
}

const (
	defaultURL     = nats.DefaultURL
	dialTimeout    = 2 * time.Second
	flusherTimeout = 10 * time.Second
	closeTimeout   = 2 * time.Second
)

func (c Config) withDefaults() Config {
	if c.URL == "" {
		c.URL = defaultURL
	}
	if c.Name == "" {
		c.Name = "natsflow"
	}
	if c.ConnectTimeout <= 0 {
		c.ConnectTimeout = 30 * time.Second
	}
	if c.RequestTimeout <= 0 {
		c.RequestTimeout = 5 * time.Second
	}
	if c.UserTimeout <= 0 {
		c.UserTimeout = 2 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if (c.TLSCert == "") != (c.TLSKey == "") {
		errs = append(errs, errors.New("a TLS certificate needs its key, and a key its certificate"))
	}
	if c.Creds != "" && c.NKey != "" {
		errs = append(errs, errors.New("credentials file and nkey exclude each other"))
	}
	if c.Password != "" && c.User == "" {
		errs = append(errs, errors.New("password without a user"))
	}
	return errors.Join(errs...)
}

// apiSubject is the prefix of the JetStream API's subjects, with the dot.
func (c Config) apiSubject() string {
	switch {
	case c.apiPrefix != "":
		return strings.TrimSuffix(c.apiPrefix, ".") + "."
	case c.domain != "":
		return "$JS." + c.domain + ".API."
	}
	return "$JS.API."
}

// credentials are the options that authenticate and encrypt.
func (c Config) credentials() ([]nats.Option, error) {
	var opts []nats.Option
	switch {
	case c.Creds != "":
		opts = append(opts, nats.UserCredentials(c.Creds))
	case c.NKey != "":
		opt, err := nats.NkeyOptionFromSeed(c.NKey)
		if err != nil {
			return nil, fmt.Errorf("reading nkey %s: %w", c.NKey, err)
		}
		opts = append(opts, opt)
	case c.userJWT != "" && c.userSeed != "":
		opts = append(opts, nats.UserJWTAndSeed(c.userJWT, c.userSeed))
	case c.User != "":
		opts = append(opts, nats.UserInfo(c.User, c.Password))
	case c.token != "":
		opts = append(opts, nats.Token(c.token))
	}
	if c.TLSCA != "" {
		opts = append(opts, nats.RootCAs(c.TLSCA))
	}
	if c.TLSCert != "" {
		if _, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey); err != nil {
			return nil, fmt.Errorf("reading TLS certificate: %w", err)
		}
		opts = append(opts, nats.ClientCert(c.TLSCert, c.TLSKey))
	}
	if c.tlsFirst {
		opts = append(opts, nats.TLSHandshakeFirst())
	}
	if c.inboxPrefix != "" {
		opts = append(opts, nats.CustomInboxPrefix(c.inboxPrefix))
	}
	return opts, nil
}
