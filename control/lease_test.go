package control

import (
	"testing"
	"time"
)

func TestValidLeaseTTL(t *testing.T) {
	for ttl, ok := range map[time.Duration]bool{
		0: false, time.Second: false, 2 * time.Second: true, 2500 * time.Millisecond: false, 5 * time.Second: true, -5 * time.Second: false,
	} {
		if err := validLeaseTTL(ttl); (err == nil) != ok {
			t.Errorf("%v: %v", ttl, err)
		}
	}
}

func TestLease(t *testing.T) {
	const ttl = 4 * time.Second
	start := time.Now()
	at := func(d time.Duration) time.Time { return start.Add(d) }
	l := newLease(start, ttl)
	for d, want := range map[time.Duration]bool{0: true, 2999 * time.Millisecond: true, 3 * time.Second: false, time.Hour: false} {
		if got := l.trusted(at(d)); got != want {
			t.Errorf("at %v: trusted %v", d, got)
		}
	}
	// Counted from the start of the renewal, not from its acknowledgement.
	if !l.renewed(at(time.Second), at(2900*time.Millisecond), ttl) || !l.trusted(at(3999*time.Millisecond)) || l.trusted(at(4*time.Second)) {
		t.Error("a renewal that took long")
	}
	// One that comes when the trust has run out does not bring it back.
	if l.renewed(at(3500*time.Millisecond), at(4*time.Second), ttl) || l.trusted(at(3*time.Second)) {
		t.Error("a renewal that came too late")
	}
	if l.renewed(at(time.Second), at(time.Second), ttl) || !l.until().IsZero() {
		t.Error("renewed after its end")
	}
}

func TestTrusts_eitherClock(t *testing.T) {
	now := time.Now()
	deadline := now.Add(time.Second)
	if !trusts(deadline, now) {
		t.Error("not trusted before the deadline")
	}
	// The machine slept: its wall clock went on, the monotonic one did not.
	if wall := deadline.Round(0).Add(time.Millisecond); trusts(deadline, wall) {
		t.Error("trusted after a sleep of the machine")
	}
}

func TestHeldFor(t *testing.T) {
	renewed := scriptTime(0)
	for taken, want := range map[time.Duration]time.Duration{
		0: 5 * time.Second, 2 * time.Second: 3 * time.Second, 5 * time.Second: 0, time.Hour: 0, -time.Second: 5 * time.Second,
	} {
		if got := heldFor(5*time.Second, renewed, renewed.Add(taken)); got != want {
			t.Errorf("taken after %v: %v, want %v", taken, got, want)
		}
	}
}
