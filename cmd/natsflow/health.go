package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"natsflow/worker"
)

// health answers scrapes and probes.
type health struct {
	registry *prometheus.Registry
	// url of the metrics, once there is a listener.
	url string

	mu     sync.Mutex
	status worker.Status
}

func newHealth(registry *prometheus.Registry) *health { return &health{registry: registry} }

// set takes the worker's status.
func (h *health) set(st worker.Status) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.status = st
}

// hostPort completes "[HOST:]PORT": without a host it is the loopback address, so
// that nothing is shown to a whole network by accident.
func hostPort(flag, s string) (string, error) {
	full := s
	if !strings.Contains(s, ":") {
		full = ":" + s
	}
	host, port, err := net.SplitHostPort(full)
	if err != nil {
		return "", fmt.Errorf("%s=%s: must be [HOST:]PORT", flag, s)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("%s=%s: %q is not a port", flag, s, port)
	} else if port = strconv.FormatUint(n, 10); host == "" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port), nil
}

// listen opens the listener at once, so that a port that is taken is found before
// the flow starts, and returns the actor that serves.
func (h *health) listen(addr string) (execute func() error, interrupt func(error), err error) {
	addr, err = hostPort("--metrics-listen", addr)
	if err != nil {
		return nil, nil, err
	}
	l, err := net.Listen("tcp", addr) //nolint:noctx // before anything can be cancelled
	if err != nil {
		return nil, nil, fmt.Errorf("serve metrics: %w", err)
	}
	h.url = "http://" + l.Addr().String() + "/metrics"
	srv := &http.Server{Handler: h.handler(), ReadHeaderTimeout: 5 * time.Second}
	execute = func() error {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve metrics: %w", err)
		}
		return nil
	}
	interrupt = func(error) {
		//nolint:forbidigo // the group has ended: there is no context left
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if srv.Shutdown(ctx) != nil {
			_ = srv.Close() // a scrape that does not end is cut off
		}
	}
	return execute, interrupt, nil
}

func (h *health) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(h.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		text, ready := h.ready()
		if !ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = fmt.Fprintln(w, text) // who has gone does not want to know
	})
	return mux
}

// ready reports whether the worker does what it is there for. One that stands by
// or waits for a resume is ready: a deployment that waited for it to get tasks
// would wait for ever.
func (h *health) ready() (text string, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch st := h.status; {
	case st.Trouble != "":
		return st.Phase + ": " + st.Trouble, false
	case st.Phase == "" || st.Phase == "starting" || st.Phase == "leaving":
		return "not consuming: " + cmp.Or(st.Phase, "starting"), false
	default:
		return st.Phase, true
	}
}
