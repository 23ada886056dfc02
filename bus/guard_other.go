//go:build !linux

package bus

import (
	"net"
	"syscall"
	"time"
)

// userTimeout needs TCP_USER_TIMEOUT, which only Linux has; elsewhere the kernel's own patience applies.
func userTimeout(time.Duration) func(network, address string, c syscall.RawConn) error { return nil }

// rawWriter is there on Linux only; elsewhere the guard is asked once for each Write.
func rawWriter(net.Conn, func() error) func([]byte) (int, error) { return nil }
