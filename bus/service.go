package bus

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
)

// NoVersion is what a service has as its version when it has none that is semantic.
const NoVersion = "0.0.0"

// semantic is the expression that semver.org gives for a version.
var semantic = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)` +
	`(?:-(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?` +
	`(?:\+[0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*)?$`)

// ServiceConfig is a service that the command nats micro finds (ADR-32 of nats-architecture-and-design).
type ServiceConfig struct {
	// Name is of letters, digits, _ and -.
	Name string
	// Version is a semantic version; anything else is told as NoVersion.
	Version     string
	Description string
	Metadata    map[string]string
	Endpoints   []Endpoint
}

// Endpoint is a subject that requests are taken on. Every instance of a service gets every request: there is no queue
// group.
type Endpoint struct {
	Name, Subject string
	// Handle is called for one request after the other, from a goroutine of the endpoint's own. It may keep the request
	// and answer it later, from another one.
	Handle func(*Request)
}

// Request is a request to an endpoint.
type Request struct {
	Subject string
	// Reply is the subject of the answer; empty if nobody waits for one.
	Reply string
	Data  []byte

	conn *Conn
}

// Respond answers. As with every message of core NATS, nobody knows whether it arrives.
func (r *Request) Respond(data []byte) error {
	return r.answer(&nats.Msg{Data: data})
}

// Refuse answers with an error, in the headers that services use. The codes are those of HTTP.
func (r *Request) Refuse(code int, text string) error {
	return r.answer(&nats.Msg{Header: nats.Header{
		micro.ErrorHeader:     []string{text},
		micro.ErrorCodeHeader: []string{strconv.Itoa(code)},
	}})
}

// answer does not use the framework's own way of answering: that writes to a place which the framework reads, without
// a lock, as soon as Handle has returned.
func (r *Request) answer(m *nats.Msg) error {
	if r.Reply == "" {
		return nil
	}
	m.Subject = r.Reply
	return classify("answering a request to "+r.Subject, r.conn.nc.PublishMsg(m))
}

// Service is a service that is being offered.
type Service struct{ svc micro.Service }

// AddService offers a service until Stop, or until the connection is closed. Its subscriptions survive reconnects. A
// server that does not allow them says so later, in the log.
func (c *Conn) AddService(cfg ServiceConfig) (*Service, error) {
	if !semantic.MatchString(cfg.Version) {
		cfg.Version = NoVersion
	}
	svc, err := micro.AddService(c.nc, micro.Config{
		Name: cfg.Name, Version: cfg.Version, Description: cfg.Description, Metadata: cfg.Metadata, QueueGroupDisabled: true,
	})
	if err != nil {
		return nil, classify("offering service "+cfg.Name, err)
	}
	s := &Service{svc: svc}
	for _, e := range cfg.Endpoints {
		handler := micro.HandlerFunc(func(m micro.Request) {
			e.Handle(&Request{Subject: m.Subject(), Reply: m.Reply(), Data: m.Data(), conn: c})
		})
		if err := svc.AddEndpoint(e.Name, handler, micro.WithEndpointSubject(e.Subject)); err != nil {
			return nil, errors.Join(classify(fmt.Sprintf("offering service %s: endpoint %s", cfg.Name, e.Name), err), s.Stop())
		}
	}
	return s, nil
}

// Stop ends the service. Requests that have arrived are still handled.
func (s *Service) Stop() error {
	return classify("ending a service", s.svc.Stop())
}
