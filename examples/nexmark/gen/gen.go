// Package gen makes the events of the Nexmark benchmark: an auction site on which
// people register, open auctions and bid.
//
// The model is that of "NEXMark, a benchmark for queries over data streams" (Tucker,
// Tufte, Papadimos and Maier), in the form that Apache Beam and the Nexmark suite for
// Flink have given it: of 50 events one is a person, three are auctions and 46 are
// bids; ids rise from 1000 on; a few auctions, bidders, sellers and channels are hot.
// The numbers and names are theirs, the code is not, and neither are the random
// numbers: the same seed gives other texts and prices there.
//
// An event is a function of the configuration and of its number, so that any part of
// the events can be made alone, and again.
package gen

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Of each epoch of 50 events the first is a person, the next three are auctions, the
// others are bids.
const (
	personShare  = 1
	auctionShare = 3
	epoch        = 50
)

const (
	firstID       = 1000 // of people and of auctions
	firstCategory = 10
	categories    = 5
	// hotGroup is how many people or auctions in a row share a hot one.
	hotGroup = 100
	// lead is how far ahead of the latest id one may be drawn, as if the events had
	// overtaken each other.
	lead = 10
	// channels besides the hot ones.
	channels = 10_000
)

// Config says which events are made. The zero value is the usual configuration.
type Config struct {
	// Seed of the random numbers.
	Seed uint64
	// Base is the time of the first event. Defaults to 2015-07-15T00:00:00Z.
	Base time.Time
	// Rate of the events, by their own times, in events a second. Defaults to 10,000.
	Rate int
	// OutOfOrder is the size of the groups of events that come shuffled. An event is
	// earlier than one before it by less than OutOfOrder / Rate seconds. Defaults to 1,
	// which is in order. At most 953, and no multiple of it, by which the groups are
	// shuffled.
	OutOfOrder int
	// HotAuctions is the ratio of bids for hot auctions: of n bids n-1 are. Defaults
	// to 2.
	HotAuctions int
	// HotBidders is that of bids by hot bidders. Defaults to 4.
	HotBidders int
	// HotSellers is that of auctions by hot sellers. Defaults to 4.
	HotSellers int
	// HotChannels is that of bids by way of hot channels. Defaults to 2.
	HotChannels int
	// InFlight is how many auctions are open at a time, on average. Defaults to 100.
	InFlight int
	// Active is how many people bid and sell at a time. Defaults to 1,000.
	Active int
	// PersonBytes, AuctionBytes and BidBytes are the sizes that the texts and numbers
	// of an event have on average, without the names of the members. Default to 200,
	// 500 and 100.
	PersonBytes, AuctionBytes, BidBytes int
}

// errOutOfOrder says that a group cannot be shuffled.
var errOutOfOrder = errors.New("from 1 to 952 events can be out of order")

func (c Config) withDefaults() Config {
	if c.Base.IsZero() {
		c.Base = time.Date(2015, 7, 15, 0, 0, 0, 0, time.UTC)
	}
	for _, d := range []struct {
		field    *int
		standard int
	}{
		{&c.Rate, 10_000},
		{&c.OutOfOrder, 1},
		{&c.HotAuctions, 2},
		{&c.HotBidders, 4},
		{&c.HotSellers, 4},
		{&c.HotChannels, 2},
		{&c.InFlight, 100},
		{&c.Active, 1000},
		{&c.PersonBytes, 200},
		{&c.AuctionBytes, 500},
		{&c.BidBytes, 100},
	} {
		*d.field = cmp.Or(*d.field, d.standard)
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if c.OutOfOrder < 1 || c.OutOfOrder >= shuffle {
		errs = append(errs, errOutOfOrder)
	}
	for _, f := range []struct {
		name  string
		value int
	}{
		{"rate", c.Rate},
		{"ratio of hot auctions", c.HotAuctions},
		{"ratio of hot bidders", c.HotBidders},
		{"ratio of hot sellers", c.HotSellers},
		{"ratio of hot channels", c.HotChannels},
		{"number of auctions in flight", c.InFlight},
		{"number of active people", c.Active},
		{"size of a person", c.PersonBytes},
		{"size of an auction", c.AuctionBytes},
		{"size of a bid", c.BidBytes},
	} {
		if f.value < 1 {
			errs = append(errs, fmt.Errorf("the %s is %d", f.name, f.value))
		}
	}
	return errors.Join(errs...)
}

// shuffle is a prime by which the events of a group are shuffled.
const shuffle = 953

// Generator makes events. It is safe for concurrent use.
type Generator struct{ cfg Config }

// New returns a generator, or what is wrong with its configuration.
func New(cfg Config) (*Generator, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("nexmark: %w", err)
	}
	return &Generator{cfg: cfg}, nil
}

// Event returns the n-th event, from 0 on.
func (g *Generator) Event(n int) Event {
	n = g.shuffled(n)
	r := newRandom(g.cfg.Seed, uint64(n))
	at := g.timeOf(n)
	switch offset := n % epoch; {
	case offset < personShare:
		return Event{Person: g.person(n, at, r)}
	case offset < personShare+auctionShare:
		return Event{Auction: g.auction(n, at, r)}
	}
	return Event{Bid: g.bid(n, at, r)}
}

// shuffled returns which event comes in the n-th place.
func (g *Generator) shuffled(n int) int {
	group := g.cfg.OutOfOrder
	return n/group*group + n*shuffle%group
}

// timeOf returns the time of an event, which is of whole milliseconds.
func (g *Generator) timeOf(n int) Time {
	return Time(g.cfg.Base.UnixMilli() + int64(n)*1000/int64(g.cfg.Rate))
}

// lastPerson returns the latest person at an event, from 0 on: that of the event if
// it is one.
func lastPerson(n int) int { return n / epoch * personShare }

// lastAuction is lastPerson for auctions. It is -1 where there is none yet.
func lastAuction(n int) int {
	before := n / epoch * auctionShare
	return before + min(n%epoch-personShare, auctionShare-1)
}

// somePerson draws one of those that are active, or of the next few.
func (g *Generator) somePerson(n int, r *random) int {
	people := lastPerson(n) + 1
	active := min(people, g.cfg.Active)
	return people - active + r.below(active+lead)
}

// someAuction draws one of those that are in flight, or of the next few.
func (g *Generator) someAuction(n int, r *random) int {
	last := lastAuction(n)
	first := max(last-g.cfg.InFlight, 0)
	return first + r.below(last-first+1+lead)
}

// hot is the number that stands for a group of hot ones.
func hot(last int) int { return last / hotGroup * hotGroup }

func (g *Generator) person(n int, at Time, r *random) *Person {
	p := &Person{
		Event:      PersonEvent,
		ID:         int64(firstID + lastPerson(n)),
		Name:       pick(r, firstNames) + " " + pick(r, lastNames),
		Email:      r.word(7) + "@" + r.word(5) + ".com",
		CreditCard: fmt.Sprintf("%04d %04d %04d %04d", r.below(10_000), r.below(10_000), r.below(10_000), r.below(10_000)),
		City:       pick(r, cities),
		State:      pick(r, states),
		DateTime:   at,
	}
	p.Extra = r.extra(g.cfg.PersonBytes - 8 - len(p.Name) - len(p.Email) - len(p.CreditCard) - len(p.City) - len(p.State))
	return p
}

func (g *Generator) auction(n int, at Time, r *random) *Auction {
	seller := hot(lastPerson(n))
	if r.below(g.cfg.HotSellers) == 0 {
		seller = g.somePerson(n, r)
	}
	a := &Auction{
		Event:       AuctionEvent,
		ID:          int64(firstID + lastAuction(n)),
		ItemName:    r.word(20),
		Description: r.word(100),
		InitialBid:  r.price(),
		DateTime:    at,
		Seller:      int64(firstID + seller),
		Category:    int64(firstCategory + r.below(categories)),
	}
	a.Reserve = a.InitialBid + r.price()
	// It is open for as long as it takes on average until so many auctions have come as
	// are in flight.
	horizon := g.timeOf(n+g.cfg.InFlight*epoch/auctionShare) - at
	a.Expires = at + 1 + Time(r.below(max(int(2*horizon), 1)))
	a.Extra = r.extra(g.cfg.AuctionBytes - 6*8 - len(a.ItemName) - len(a.Description))
	return a
}

func (g *Generator) bid(n int, at Time, r *random) *Bid {
	auction := hot(lastAuction(n))
	if r.below(g.cfg.HotAuctions) == 0 {
		auction = g.someAuction(n, r)
	}
	// The second of a group, so that hot bidders are no hot sellers.
	bidder := hot(lastPerson(n)) + 1
	if r.below(g.cfg.HotBidders) == 0 {
		bidder = g.somePerson(n, r)
	}
	b := &Bid{
		Event:    BidEvent,
		Auction:  int64(firstID + auction),
		Bidder:   int64(firstID + bidder),
		Price:    r.price(),
		DateTime: at,
	}
	if r.below(g.cfg.HotChannels) > 0 {
		i := r.below(len(hotChannels))
		b.Channel, b.URL = hotChannels[i], g.url(channels+i)
	} else {
		b.Channel, b.URL = g.channel(r.below(channels))
	}
	b.Extra = r.extra(g.cfg.BidBytes - 4*8)
	return b
}
