// Package testenv gives tests a real nats-server and ways to break it.
//
// # Which server
//
//   - [StartServer] runs one inside the test's process: it is ready within
//     milliseconds, and stops and restarts on the same store. The usual choice.
//   - [Bubble] runs one in the virtual time of testing/synctest: an hour of
//     leases and redeliveries passes in milliseconds, and always in the same way.
//   - [StartProcess] runs one as a child process, for what only a process can
//     suffer: SIGKILL, SIGSTOP, and being restarted afterwards.
//   - [StartCluster] runs several of those as a cluster, whose streams may have
//     replicas and so have leaders that can be lost.
//
// `natsflow dev` uses package embed, which is StartServer without testing.
//
// # Real and virtual time do not mix
//
// The server's coarse clock and the client's pool of timers are shared by a
// whole process. A bubble therefore has the process to itself: [Bubble] waits
// for servers of parallel tests to stop, and StartServer, StartProcess and StartCluster wait
// for bubbles. A test that starts a server in real time must not open a bubble
// while that server runs.
//
// # Faults
//
// A [Link] stands between a client and a server, in process or on TCP. It cuts
// connections, freezes or holds what is on its way, and delays it.
//
// # Commands
//
// [NatsCLI] and [StartProcess] build the programs they need from source with
// the go command, once for all test binaries, into the user's cache folder.
package testenv
