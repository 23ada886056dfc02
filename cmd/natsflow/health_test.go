package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"natsflow/worker"
)

func TestHealth(t *testing.T) {
	h := newHealth(prometheus.NewRegistry())
	if _, err := worker.NewMetrics(h.registry, "f"); err != nil {
		t.Fatal(err)
	}
	get := func(path string) (int, string) {
		w := httptest.NewRecorder()
		h.handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code, strings.TrimSpace(w.Body.String())
	}
	for _, tc := range []struct {
		status worker.Status
		code   int
		text   string
	}{
		{worker.Status{}, 503, "not consuming: starting"},
		{worker.Status{Phase: "starting"}, 503, "not consuming: starting"},
		{worker.Status{Phase: "standing by"}, 200, "standing by"},
		{worker.Status{Phase: "running"}, 200, "running"},
		{worker.Status{Phase: "running", Trouble: "the bucket is full"}, 503, "running: the bucket is full"},
		{worker.Status{Phase: "drained"}, 200, "drained"},
		{worker.Status{Phase: "leaving"}, 503, "not consuming: leaving"},
	} {
		h.set(tc.status)
		if code, text := get("/readyz"); code != tc.code || text != tc.text {
			t.Errorf("%+v: got %d %q", tc.status, code, text)
		}
	}
	if code, text := get("/healthz"); code != 200 || text != "ok" {
		t.Errorf("healthz: got %d %q", code, text)
	}
	if code, text := get("/metrics"); code != 200 || !strings.Contains(text, `natsflow_commits_total{flow="f"} 0`) {
		t.Errorf("metrics: got %d %q", code, text)
	}
}
