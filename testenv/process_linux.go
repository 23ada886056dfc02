package testenv

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// dieWithParent makes the kernel kill the child when the test's process ends
// in a way that runs no cleanup, as at the timeout of `go test` or a panic. The
// signal is tied to the thread that started the child; threads of a Go program
// live as long as it does, unless a goroutine ends while locked to one.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// stopped says whether every thread of a process has been stopped: a signal is
// on its way for a moment, and threads that run go on until it reaches them.
func stopped(pid int) bool {
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(stats) == 0 {
		return false
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			return false // a thread that ended: look again
		}
		// "pid (name) state …": the name may hold anything, also parentheses.
		_, state, ok := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
		if !ok || len(state) == 0 || state[0] != 'T' {
			return false
		}
	}
	return true
}
