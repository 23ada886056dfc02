package testenv

import (
	"errors"
	"time"

	"github.com/nats-io/nats.go"
)

// Answer is one answer to a request. Error is what a service says in its headers, with
// its code; empty if it is not an error.
type Answer struct {
	Data  []byte
	Code  string
	Error string
}

// Ask sends a request and returns its answers: n of them, or as many as come until
// there has been none for the time given.
func (a *Admin) Ask(subject string, data []byte, n int, quiet time.Duration) []Answer {
	a.s.tb.Helper()
	nc := a.js.Conn()
	inbox := nc.NewRespInbox()
	sub, err := nc.SubscribeSync(inbox)
	if err == nil {
		err = nc.PublishRequest(subject, inbox, data)
	}
	if err != nil {
		a.s.tb.Fatalf("testenv: asking %s: %v", subject, err)
	}
	defer func() { _ = sub.Unsubscribe() }() // fails when the connection is closed
	var all []Answer
	for len(all) < n {
		m, err := sub.NextMsg(quiet)
		if errors.Is(err, nats.ErrTimeout) || errors.Is(err, nats.ErrNoResponders) {
			return all
		}
		if err != nil {
			a.s.tb.Fatalf("testenv: waiting for an answer from %s: %v", subject, err)
		}
		all = append(all, Answer{Data: m.Data, Code: m.Header.Get("Nats-Service-Error-Code"), Error: m.Header.Get("Nats-Service-Error")})
	}
	return all
}
