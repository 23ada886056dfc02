package main

import (
	"fmt"
	"strconv"

	"natsflow/flow"
)

// sellerPrice is a result of query 6.
type sellerPrice struct {
	Seller int64 `json:"seller"`
	// Price is the average of the last ten, at most, at which the seller has sold.
	Price float64 `json:"price"`
	// Auction is the last one of them.
	Auction int64 `json:"auction"`
}

// lastSales is how many sales of a seller count.
const lastSales = 10

// sale is what query 6 needs to know of one.
type sale struct {
	Auction int64 `json:"auction"`
	Price   int64 `json:"price"`
}

// seller is what is kept of one: the last sales, and those that wait for their turn, by
// the names of their timers.
type seller struct {
	ID      int64           `json:"id"`
	Last    []sale          `json:"last,omitempty"`
	Waiting map[string]sale `json:"waiting,omitempty"`
}

// q6 is query 6, average selling price by seller: that of the last ten auctions to close.
//
// Sales of one seller come from the tasks of many auctions, in the order in which these
// commit. So each waits for a timer at its own time, when all that closed before it
// have come: timers fire in the order of their times, and of one time in that of
// their names.
func q6() (*flow.Flow, error) {
	b := flow.New("nexmark-q6", flow.Options{})
	bySeller := flow.Rekey(winning(auctionsAndBids(b)), func(_ *flow.Meta, s sold) (string, error) {
		return strconv.FormatInt(s.Auction.Seller, 10), nil
	}, flow.JSONCodec[sold]())
	averages := flow.StatefulWith(bySeller, "last-ten", flow.StatefulConfig[sold, seller, sellerPrice]{
		State: flow.JSONState[seller](1, nil),
		On: func(m *flow.Meta, s *seller, v sold, _ func(sellerPrice)) error {
			s.ID = v.Auction.Seller
			if s.Waiting == nil {
				s.Waiting = map[string]sale{}
			}
			name := fmt.Sprintf("%020d", v.Auction.ID)
			s.Waiting[name] = sale{v.Auction.ID, v.Bid.Price}
			m.SetTimer(name, after(v.Auction.Expires+1)) // the sale is a moment after the expiry
			return nil
		},
		OnTimer: func(_ *flow.Meta, s *seller, name string, emit func(sellerPrice)) error {
			next := s.Waiting[name]
			delete(s.Waiting, name)
			if s.Last = append(s.Last, next); len(s.Last) > lastSales {
				s.Last = s.Last[1:]
			}
			var sum int64
			for _, l := range s.Last {
				sum += l.Price
			}
			emit(sellerPrice{s.ID, float64(sum) / float64(len(s.Last)), next.Auction})
			return nil
		},
	})
	flow.To(averages, flow.Sink[sellerPrice]{
		Stream: "NEXMARK_Q6", Subjects: []string{"q6.*"}, Subject: flow.KeySubject[sellerPrice]("q6."), Encode: flow.EncodeJSON[sellerPrice](),
	})
	return b.Build()
}
