package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
)

// Console is where a command prints.
type Console struct {
	// Out takes results, Err everything else.
	Out, Err io.Writer
	// OutTerminal and ErrTerminal say that they are terminals: only then is
	// anything refreshed in place or coloured.
	OutTerminal, ErrTerminal bool
	// Colour says that colours are wanted: a terminal, and no NO_COLOR
	// (https://no-color.org).
	Colour bool
	// Size returns the size of the terminal; 80 by 24 without one.
	Size func() (columns, rows int)

	mu       sync.Mutex
	restores []func()
}

func newConsole(stdout, stderr *os.File) *Console {
	c := &Console{Out: stdout, Err: stderr}
	_, _, c.OutTerminal = terminalSize(stdout)
	_, _, c.ErrTerminal = terminalSize(stderr)
	c.Colour = c.OutTerminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	c.Size = func() (columns, rows int) {
		for _, f := range []*os.File{stdout, stderr} {
			// A terminal whose size nobody has set says 0.
			if w, h, ok := terminalSize(f); ok && w > 0 && h > 0 {
				return w, h
			}
		}
		return 80, 24
	}
	return c
}

// onExit registers what has to be done to the terminal before the process ends,
// also when it is cut short. The returned function does it, once.
func (c *Console) onExit(fn func()) (done func()) {
	done = sync.OnceFunc(fn)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.restores = append(c.restores, done)
	return done
}

func (c *Console) restore() {
	c.mu.Lock()
	restores := c.restores
	c.mu.Unlock()
	for _, fn := range restores {
		fn()
	}
}

// printf prints to Out. A reader that has gone, as of a pipe into head, is no
// reason to stop a flow.
func (c *Console) printf(format string, args ...any) { _, _ = fmt.Fprintf(c.Out, format, args...) }

// notef prints to Err.
func (c *Console) notef(format string, args ...any) { _, _ = fmt.Fprintf(c.Err, format, args...) }

// Styles of text (ECMA-48 SGR).
const (
	styleBold   = "1"
	styleDim    = "2"
	styleRed    = "31"
	styleGreen  = "32"
	styleYellow = "33"
)

// style wraps s for the terminal; unchanged without colours.
func (c *Console) style(code, s string) string {
	if !c.Colour || s == "" {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

// bar draws how much of a whole is done, in width columns, without anything that
// needs Unicode.
func bar(done, total uint64, width int) string {
	if width < 3 {
		return ""
	}
	inner := width - 2
	full := inner
	if done < total {
		full = int(float64(inner) * float64(done) / float64(total))
	}
	return "[" + strings.Repeat("#", full) + strings.Repeat(".", inner-full) + "]"
}

// count formats a number with commas between the thousands.
func count[N ~int | ~int64 | ~uint64](n N) string {
	s := fmt.Sprintf("%d", n)
	sign := ""
	if s[0] == '-' {
		sign, s = "-", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

// plural is "1 key", "2 keys".
func plural[N ~int | ~int64 | ~uint64](n N, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return count(n) + " " + one + "s"
}

// size formats a number of bytes.
func size[N ~int | ~int64 | ~uint64](n N) string {
	f := float64(n)
	for _, unit := range []string{"B", "KiB", "MiB", "GiB"} {
		if f < 1024 {
			if unit == "B" {
				return fmt.Sprintf("%.0f B", f)
			}
			return fmt.Sprintf("%.1f %s", f, unit)
		}
		f /= 1024
	}
	return fmt.Sprintf("%.1f TiB", f)
}
