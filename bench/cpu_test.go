package bench

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cpu returns the processor time that this process and the server have used.
func (r *rig) cpu() (client, server time.Duration) {
	r.tb.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		r.tb.Fatal(err)
	}
	client = time.Duration(u.Utime.Nano() + u.Stime.Nano())
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.srv.PID()))
	if err != nil {
		r.tb.Fatal(err)
	}
	// Behind the name in brackets: fields 14 and 15 are user and system time, in
	// hundredths of a second.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			r.tb.Fatal(err)
		}
		server += time.Duration(n) * 10 * time.Millisecond
	}
	return client, server
}
