//go:build unix

package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// terminalSize asks for the window's size, which only a terminal has: /dev/null
// is a character device too.
func terminalSize(f *os.File) (columns, rows int, ok bool) {
	ws, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, false
	}
	return int(ws.Col), int(ws.Row), true
}
