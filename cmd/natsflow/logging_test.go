package main

import (
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Durations are text in both formats, wherever they are in the line.
func TestLogFlags_durations(t *testing.T) {
	c, _, to := bufferConsole()
	log := (&LogFlags{}).logger(c, to, slog.LevelInfo)
	log.With("lease", 5*time.Second).Info("left", "took", 1500*time.Millisecond, "records", 7, slog.Group("wait", "next", 20*time.Millisecond))
	var line map[string]any
	if err := json.Unmarshal(to.Bytes(), &line); err != nil {
		t.Fatalf("%v: %s", err, to)
	}
	delete(line, slog.TimeKey)
	want := map[string]any{
		"level": "INFO", "msg": "left", "lease": "5s", "took": "1.5s", "records": 7.0, "wait": map[string]any{"next": "20ms"},
	}
	if diff := cmp.Diff(want, line); diff != "" {
		t.Error(diff)
	}

	to.Reset()
	(&LogFlags{LogFormat: "text"}).logger(c, to, slog.LevelInfo).Info("left", "took", 1500*time.Millisecond)
	if !strings.HasSuffix(to.String(), "level=INFO msg=left took=1.5s\n") {
		t.Errorf("text: %s", to)
	}
}
