//go:build race

package worker

// raceDetector says that everything takes ten times as long.
const raceDetector = true
