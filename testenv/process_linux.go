package testenv

import "syscall"

// dieWithParent makes the kernel kill the child when the test's process ends
// in a way that runs no cleanup, as at the timeout of `go test` or a panic. The
// signal is tied to the thread that started the child; threads of a Go program
// live as long as it does, unless a goroutine ends while locked to one.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
