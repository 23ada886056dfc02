// Package bench measures natsflow against a nats-server process of its own, with
// file storage, beside a loop written by hand that does the same work without
// keeping its state. All ratios come from one run:
//
//	go test ./bench -run '^$' -bench . -benchtime 1x -timeout 60m
//
// The flags -messages and -rounds make it shorter. The figures of a run are in
// docs/BENCHMARKS.md.
package bench
