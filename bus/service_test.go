package bus

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/micro"

	"natsflow/testenv"
)

// serve offers a service with an endpoint that answers with the name of the
// instance, later and from another goroutine; with an error if that is asked for.
func serve(t *testing.T, c *Conn, instance, version string) *Service {
	t.Helper()
	s, err := c.AddService(ServiceConfig{
		Name: "svc", Version: version, Metadata: map[string]string{"instance": instance},
		Endpoints: []Endpoint{{Name: "who", Subject: "svc.who", Handle: func(r *Request) {
			go func() {
				var err error
				if string(r.Data) == "fail" {
					err = r.Refuse(409, "not\nnow")
				} else {
					err = r.Respond(fmt.Appendf(nil, "%s %s %s", instance, r.Subject, r.Data))
				}
				if err != nil {
					t.Errorf("answering: %v", err)
				}
			}()
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	// The server has the subscriptions when it answers what comes behind them.
	if err := c.RequireJetStream(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestConn_AddService(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		admin := s.Admin()
		a, b := connect(t, s), connect(t, s)
		first := serve(t, a, "a", "1.2.3-rc.1+dirty")
		serve(t, b, "b", "(devel)")
		ask := func(subject, data string) []testenv.Answer { return admin.Ask(subject, []byte(data), 10, time.Second) }
		texts := func(answers []testenv.Answer) (all []string) {
			for _, m := range answers {
				all = append(all, m.Code+m.Error+string(m.Data))
			}
			slices.Sort(all)
			return all
		}
		// There is no queue group: all answer.
		if got := texts(ask("svc.who", "me")); !slices.Equal(got, []string{"a svc.who me", "b svc.who me"}) {
			t.Errorf("answers %q", got)
		}
		// A header has no line ends.
		if got := texts(ask("svc.who", "fail")); !slices.Equal(got, []string{"409not now", "409not now"}) {
			t.Errorf("answers %q", got)
		}
		versions := map[string]string{}
		for _, m := range ask("$SRV.PING.svc", "") {
			var ping micro.Ping
			if err := json.Unmarshal(m.Data, &ping); err != nil {
				t.Fatal(err)
			}
			versions[ping.Metadata["instance"]] = ping.Version
		}
		if len(versions) != 2 || versions["a"] != "1.2.3-rc.1+dirty" || versions["b"] != NoVersion {
			t.Errorf("versions %q", versions)
		}
		if err := errors.Join(first.Stop(), a.RequireJetStream(t.Context())); err != nil {
			t.Fatal(err)
		}
		if got := texts(ask("svc.who", "me")); !slices.Equal(got, []string{"b svc.who me"}) {
			t.Errorf("answers after a stop %q", got)
		}
		// The connection ends the other one.
		b.Close()
		if got := texts(ask("$SRV.PING.svc", "")); len(got) != 0 {
			t.Errorf("answers after a close %q", got)
		}
	})
}

// Nobody waits for the answer to a message without a reply subject.
func TestRequest_noReply(t *testing.T) {
	r := &Request{Subject: "svc.who"}
	if err := r.Respond(nil); err != nil {
		t.Error(err)
	}
	if err := r.Refuse(400, "no"); err != nil {
		t.Error(err)
	}
}

func TestConn_AddService_refused(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		if _, err := c.AddService(ServiceConfig{Name: "a b", Version: "1.0.0"}); err == nil {
			t.Error("a name with a space was taken")
		}
		// What was offered before the bad endpoint is taken back.
		_, err := c.AddService(ServiceConfig{Name: "svc", Version: "1.0.0", Endpoints: []Endpoint{{Name: "a b", Subject: "x"}}})
		if err == nil {
			t.Error("an endpoint name with a space was taken")
		}
		if got := s.Admin().Ask("$SRV.PING.svc", nil, 10, time.Second); len(got) != 0 {
			t.Errorf("%d services are left", len(got))
		}
	})
}
