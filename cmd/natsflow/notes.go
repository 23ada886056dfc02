package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
)

// noteHandler writes warnings and errors as lines for people, "natsflow: what
// (key value, …)", without times and levels.
type noteHandler struct {
	to    io.Writer
	attrs []slog.Attr
	mu    *sync.Mutex
}

// Enabled lets warnings and errors through.
func (h *noteHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelWarn
}

// Handle writes one line.
func (h *noteHandler) Handle(_ context.Context, r slog.Record) error {
	var parts []string
	add := func(a slog.Attr) bool {
		if a.Key != "flow" && a.Key != "worker" {
			parts = append(parts, fmt.Sprintf("%s %v", a.Key, a.Value.Resolve()))
		}
		return true
	}
	for _, a := range h.attrs {
		add(a)
	}
	r.Attrs(add)
	line := "natsflow: " + r.Message
	if len(parts) > 0 {
		line += " (" + strings.Join(parts, ", ") + ")"
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	_, err := io.WriteString(h.to, strings.ReplaceAll(line, "\n", " ")+"\n")
	return err
}

// WithAttrs keeps the attributes for each line.
func (h *noteHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &noteHandler{to: h.to, mu: h.mu, attrs: append(append([]slog.Attr(nil), h.attrs...), attrs...)}
}

// WithGroup ignores groups: nothing here uses them.
func (h *noteHandler) WithGroup(string) slog.Handler { return h }
