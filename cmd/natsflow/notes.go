package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
)

// noteHandler writes logs as lines for people, "natsflow: what
// (key value, …)", without times and levels.
type noteHandler struct {
	to    io.Writer
	least slog.Level
	attrs []slog.Attr
	mu    *sync.Mutex
}

// Enabled implements slog.Handler.
func (h *noteHandler) Enabled(_ context.Context, level slog.Level) bool { return level >= h.least }

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
	return &noteHandler{to: h.to, mu: h.mu, least: h.least, attrs: append(append([]slog.Attr(nil), h.attrs...), attrs...)}
}

// WithGroup ignores groups: nothing here uses them.
func (h *noteHandler) WithGroup(string) slog.Handler { return h }

// redirect is a writer whose destination can change.
type redirect struct {
	mu sync.Mutex
	to io.Writer
}

// Write implements io.Writer.
func (r *redirect) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.to.Write(p)
}

func (r *redirect) set(to io.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.to = to
}
