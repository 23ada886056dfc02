package main

import (
	"cmp"
	"io"
	"log/slog"
	"sync"
)

// LogFlags say what is logged, and how. Logs go to standard error.
type LogFlags struct {
	LogFormat string `enum:"auto,text,json" default:"auto" group:"log" help:"text, json, or auto: text on a terminal, JSON otherwise."`
	LogLevel  string `enum:",debug,info,warn,error" default:"" placeholder:"LEVEL" group:"log" help:"The least that is logged: debug, info, warn or error (default info, for dev warn)."`
}

// logger makes the logger that the flags ask for; least is the level without
// one.
func (f *LogFlags) logger(c *Console, to io.Writer, least slog.Level) *slog.Logger {
	switch f.LogLevel {
	case "debug":
		least = slog.LevelDebug
	case "info":
		least = slog.LevelInfo
	case "warn":
		least = slog.LevelWarn
	case "error":
		least = slog.LevelError
	}
	opts := &slog.HandlerOptions{Level: least}
	format := cmp.Or(f.LogFormat, "auto")
	if format == "text" || (format == "auto" && c.ErrTerminal) {
		return slog.New(slog.NewTextHandler(to, opts))
	}
	opts.ReplaceAttr = durationsAsText
	return slog.New(slog.NewJSONHandler(to, opts))
}

// durationsAsText writes durations as the text handler does, such as "1.5s": in
// JSON they would be numbers of nanoseconds, without a unit that a reader sees.
func durationsAsText(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return a
}

// warnings is the logger of commands that only ask: what goes wrong on the way is
// for the person who waits, in lines like those of errors.
func (c *Console) warnings() *slog.Logger { return notes(c.Err, slog.LevelWarn) }

func notes(to io.Writer, least slog.Level) *slog.Logger {
	return slog.New(&noteHandler{to: to, least: least, mu: &sync.Mutex{}})
}
