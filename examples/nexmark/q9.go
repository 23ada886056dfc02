package main

import (
	"natsflow/examples/nexmark/gen"
	"natsflow/flow"
)

// wonBid is a result of query 9: an auction and the bid that has won it.
type wonBid struct {
	ID          int64    `json:"id"`
	ItemName    string   `json:"itemName"`
	Description string   `json:"description"`
	InitialBid  int64    `json:"initialBid"`
	Reserve     int64    `json:"reserve"`
	DateTime    gen.Time `json:"dateTime"`
	Expires     gen.Time `json:"expires"`
	Seller      int64    `json:"seller"`
	Category    int64    `json:"category"`
	Extra       string   `json:"extra"`
	Auction     int64    `json:"auction"`
	Bidder      int64    `json:"bidder"`
	Price       int64    `json:"price"`
	BidDateTime gen.Time `json:"bid_dateTime"`
	BidExtra    string   `json:"bid_extra"`
}

// q9 is query 9, winning bids: each auction that has been sold, once, when it has closed.
func q9() (*flow.Flow, error) {
	b := flow.New("nexmark-q9", flow.Options{})
	won := flow.Map(winning(auctionsAndBids(b)), func(_ *flow.Meta, s sold) (wonBid, error) {
		a, bid := s.Auction, s.Bid
		return wonBid{
			a.ID, a.ItemName, a.Description, a.InitialBid, a.Reserve, a.DateTime, a.Expires, a.Seller, a.Category, a.Extra,
			bid.Auction, bid.Bidder, bid.Price, bid.DateTime, bid.Extra,
		}, nil
	})
	flow.To(won, flow.Sink[wonBid]{
		Stream: "NEXMARK_Q9", Subjects: []string{"q9.*"}, Subject: flow.KeySubject[wonBid]("q9."), Encode: flow.EncodeJSON[wonBid](),
	})
	return b.Build()
}
