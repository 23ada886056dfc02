package bus

import (
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// userTimeout sets TCP_USER_TIMEOUT: what has been written and is not acknowledged by the peer for this long is given
// up by the kernel, together with the connection.
func userTimeout(d time.Duration) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var serr error
		err := c.Control(func(fd uintptr) {
			serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
		})
		return errors.Join(err, serr)
	}
}

// rawWriter returns a Write for conn that calls check just before every system call, or nil if conn has no descriptor.
func rawWriter(conn net.Conn, check func() error) func([]byte) (int, error) {
	sc, ok := conn.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	return func(b []byte) (int, error) {
		done := 0
		var werr error
		err := raw.Write(func(fd uintptr) bool {
			for done < len(b) {
				if werr = check(); werr != nil {
					return true
				}
				n, err := unix.Write(int(fd), b[done:])
				switch {
				case errors.Is(err, unix.EINTR):
					continue
				case errors.Is(err, unix.EAGAIN):
					return false // wait until the socket takes more, then check again
				case err != nil:
					werr = err
					return true
				case n == 0:
					werr = io.ErrUnexpectedEOF
					return true
				}
				done += n
			}
			return true
		})
		return done, errors.Join(err, werr)
	}
}
