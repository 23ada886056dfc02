//go:build !linux

package testenv

import "syscall"

// dieWithParent has no counterpart here: a child may outlive a test that panics.
func dieWithParent() *syscall.SysProcAttr { return nil }

// stopped cannot tell here: a server that is being stopped may run for a moment.
func stopped(int) bool { return true }
