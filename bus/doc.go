// Package bus is everything of natsflow that talks to NATS. It is the only package (with testenv) that imports nats.go.
//
// # What is here
//
//   - [Conn]: one connection, made with patience and kept for ever. With [Config].Trusted it is guarded: no byte leaves
//     it once the owner has stopped trusting its lease.
//   - streams: [Conn.Stream], [Conn.CreateStream], [Conn.EnsureSink], [Conn.SeqAt].
//   - [Cursor]: a disposable pull consumer. Positions are the caller's, never the server's.
//   - [Bucket]: a KV bucket of our own, with compare-and-set appends over a wildcard and reads from the leader only.
//   - [Sink]: groups of results, published with a fence (fast ingest) or with message ids.
//   - [Feeder]: bulk publishing.
//
// # Errors
//
// Every error of a server or a connection is classified once, here, into one of the Err values, and still wraps what
// the server said ([APIError]). A write whose answer was lost is [ErrUnknownOutcome]: it may or may not have been
// made. Nothing is retried behind the caller's back when repeating it could change the outcome.
//
// # Authority
//
// What must be true after a failure is read from the stream's leader: buckets are created without direct gets, so a
// stale replica never answers. A consumer's idea of a position is never used: a cursor is made anew at the position
// of its owner whenever there is any doubt.
//
// Sources: ADR-8 (KV), ADR-13 (pull consumers), ADR-43 (per-message TTL), ADR-50 (batch publishing) of
// nats-io/nats-architecture-and-design, and the source of nats-server v2.15.3.
package bus
