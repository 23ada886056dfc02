package embed

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
)

// logger is the server's logger. It passes warnings and errors on, and keeps
// the first fatal message, which the server would exit on if it were alone.
type logger struct {
	out *slog.Logger // nil discards

	mu  sync.Mutex
	err error
}

func newLogger(out *slog.Logger) *logger { return &logger{out: out} }

// fatal returns the first fatal condition, if there was any.
func (l *logger) fatal() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

func (l *logger) log(level slog.Level, format string, args []any) {
	if l.out == nil || !l.out.Enabled(context.Background(), level) {
		return
	}
	l.out.Log(context.Background(), level, "nats-server: "+fmt.Sprintf(format, args...))
}

// Noticef implements the server's logger.
func (l *logger) Noticef(format string, args ...any) { l.log(slog.LevelDebug, format, args) }

// Warnf implements the server's logger.
func (l *logger) Warnf(format string, args ...any) { l.log(slog.LevelWarn, format, args) }

// Errorf implements the server's logger.
func (l *logger) Errorf(format string, args ...any) { l.log(slog.LevelError, format, args) }

// Debugf implements the server's logger.
func (l *logger) Debugf(format string, args ...any) { l.log(slog.LevelDebug, format, args) }

// Tracef implements the server's logger.
func (l *logger) Tracef(format string, args ...any) { l.log(slog.LevelDebug, format, args) }

// Fatalf implements the server's logger.
func (l *logger) Fatalf(format string, args ...any) {
	l.mu.Lock()
	if l.err == nil {
		l.err = fmt.Errorf(format, args...)
	}
	l.mu.Unlock()
	l.log(slog.LevelError, format, args)
}
