//go:build !unix

package main

import (
	"errors"
	"os"
)

// lockFile creates a file that must not be there. After a crash it stays and has
// to be removed by hand, which the error's text says by naming the file.
func lockFile(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil, errStoreInUse
	}
	if err != nil {
		return nil, err
	}
	return func() {
		_ = f.Close() // nothing was written
		_ = os.Remove(path)
	}, nil
}
