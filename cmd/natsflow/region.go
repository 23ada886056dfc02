package main

import (
	"fmt"
	"io"
	"strings"
	"sync"
)

// region is a block of lines at the bottom of a terminal that is redrawn in
// place. What is written to it as an io.Writer, such as a log, scrolls by above.
type region struct {
	c  *Console
	to io.Writer

	mu    sync.Mutex
	shown []string
	open  bool
	done  func()
}

// newRegion makes one on a terminal; to is Out or Err of the console.
func newRegion(c *Console, to io.Writer) *region {
	r := &region{c: c, to: to}
	r.done = c.onExit(r.close)
	return r
}

// draw shows lines instead of those before.
func (r *region) draw(lines []string) {
	columns, rows := r.c.Size()
	// The last column is left free: some terminals wrap when it is written to.
	lines = append([]string(nil), lines[:min(len(lines), max(rows-1, 1))]...)
	for i := range lines {
		lines[i] = clip(lines[i], columns-1)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	if !r.open {
		r.open = true
		b.WriteString("\x1b[?25l") // hide the cursor (DECTCEM)
	}
	b.WriteString(r.up())
	for _, line := range lines {
		b.WriteString(line + "\x1b[K\n") // erase the rest of the line
	}
	b.WriteString("\x1b[J") // and the lines of before
	_, _ = io.WriteString(r.to, b.String())
	r.shown = lines
}

// up moves the cursor to the first line of the block.
func (r *region) up() string {
	if len(r.shown) == 0 {
		return ""
	}
	return fmt.Sprintf("\r\x1b[%dA", len(r.shown))
}

// Write implements io.Writer: the text comes above the block.
func (r *region) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := string(p)
	if len(r.shown) > 0 {
		text = r.up() + "\x1b[J" + text + strings.Join(r.shown, "\n") + "\n"
	}
	_, err := io.WriteString(r.to, text)
	return len(p), err
}

// clear removes the block.
func (r *region) clear() { r.draw(nil) }

// close leaves the block as it is and gives the cursor back. It is called by done,
// or when the process is cut short.
func (r *region) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open {
		_, _ = io.WriteString(r.to, "\x1b[?25h")
	}
	r.open, r.shown = false, nil
}
