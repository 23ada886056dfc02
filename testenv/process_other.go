//go:build !linux

package testenv

import "syscall"

// dieWithParent has no counterpart here: a child may outlive a test that panics.
func dieWithParent() *syscall.SysProcAttr { return nil }
