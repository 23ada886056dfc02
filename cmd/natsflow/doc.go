// Command natsflow runs flows on NATS JetStream and controls them.
//
// Each subcommand is a struct with kong tags, Validate and Run in a file of its
// own. Results go to standard output, everything else (progress, logs, errors)
// to standard error, so that output can be piped. Exit codes: 0 done, 1 failed,
// 2 usage.
package main
