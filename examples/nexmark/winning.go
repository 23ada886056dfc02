package main

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"natsflow/examples/nexmark/gen"
	"natsflow/flow"
)

// sold is an auction that has closed, with the bid that has won it. Queries 4, 6 and 9
// begin with these.
type sold struct {
	Auction gen.Auction `json:"auction"`
	Bid     gen.Bid     `json:"bid"`
}

// standing is what is kept of an auction until it closes.
type standing struct {
	Auction *gen.Auction `json:"auction,omitempty"`
	Best    *gen.Bid     `json:"best,omitempty"`
	// Early are bids that have come before the auction, as those do that have overtaken
	// it; and those for an auction that is over, or never comes.
	Early []gen.Bid `json:"early,omitempty"`
}

// offer takes a bid if it is the best one so far, of those made while the auction is
// open. Of two with one price it is the earlier one.
func (s *standing) offer(b gen.Bid) {
	if b.DateTime < s.Auction.DateTime || b.DateTime > s.Auction.Expires {
		return
	}
	if s.Best == nil || b.Price > s.Best.Price || b.Price == s.Best.Price && b.DateTime < s.Best.DateTime {
		s.Best = &b
	}
}

// The timers of an auction.
const (
	timerClose = "close" // it is over
	timerEarly = "early" // the auction would have come before the latest of the early bids
)

// lateness is how much later than others an event may come.
const lateness = time.Second

// auctionsAndBids reads both from the one stream.
func auctionsAndBids(b *flow.Builder) flow.Stream[gen.Event] {
	return flow.From(b, flow.Source{
		Stream:   stream,
		Subjects: []string{"nexmark." + gen.AuctionEvent, "nexmark." + gen.BidEvent},
		Time: flow.EventTime[gen.Event]{
			Of:       func(_ *flow.Meta, e gen.Event) (time.Time, error) { return e.Time().Std(), nil },
			Lateness: lateness,
		},
	}, decode)
}

// decode tells events apart by their subjects.
func decode(m *flow.Meta, data []byte) (e gen.Event, err error) {
	switch m.Subject {
	case "nexmark." + gen.AuctionEvent:
		err = json.Unmarshal(data, &e.Auction)
	case "nexmark." + gen.BidEvent:
		err = json.Unmarshal(data, &e.Bid)
	default:
		err = fmt.Errorf("subject %s is that of no auction and of no bid", m.Subject)
	}
	if err == nil && e.Auction == nil && e.Bid == nil {
		err = fmt.Errorf("null on subject %s", m.Subject)
	}
	return e, err
}

// winning gives each auction that has been sold, once, when it has closed.
func winning(events flow.Stream[gen.Event]) flow.Stream[sold] {
	byAuction := flow.KeyBy(events, func(_ *flow.Meta, e gen.Event) (string, error) {
		if e.Auction != nil {
			return strconv.FormatInt(e.Auction.ID, 10), nil
		}
		return strconv.FormatInt(e.Bid.Auction, 10), nil
	})
	return flow.StatefulWith(byAuction, "winning", flow.StatefulConfig[gen.Event, standing, sold]{
		State: flow.JSONState[standing](1, nil),
		On: func(m *flow.Meta, s *standing, e gen.Event, _ func(sold)) error {
			switch {
			case e.Auction != nil:
				s.open(m, e.Auction)
			case s.Auction != nil:
				s.offer(*e.Bid)
			default:
				s.early(m, *e.Bid)
			}
			return nil
		},
		OnTimer: func(m *flow.Meta, s *standing, _ string, emit func(sold)) error {
			if s.Best != nil {
				emit(sold{*s.Auction, *s.Best})
			}
			m.DropState()
			return nil
		},
	})
}

// open begins an auction.
func (s *standing) open(m *flow.Meta, a *gen.Auction) {
	s.Auction = a
	for _, b := range s.Early {
		s.offer(b)
	}
	s.Early = nil
	m.CancelTimer(timerEarly)
	m.SetTimer(timerClose, after(a.Expires))
}

// early keeps a bid until an auction that was open when it was made would have come.
func (s *standing) early(m *flow.Meta, b gen.Bid) {
	s.Early = append(s.Early, b)
	latest := b.DateTime
	for _, e := range s.Early {
		latest = max(latest, e.DateTime)
	}
	m.SetTimer(timerEarly, after(latest))
}

// after returns when everything of a moment has come: a watermark says that all before
// it has.
func after(at gen.Time) time.Time { return (at + 1).Std() }
