package main

import (
	"strconv"

	"natsflow/flow"
)

// category is a result of query 4.
type category struct {
	ID int64 `json:"id"`
	// Final is the average of the prices at which its auctions were sold.
	Final float64 `json:"final"`
}

// prices are those of a category.
type prices struct {
	ID  int64 `json:"id"`
	Sum int64 `json:"sum"`
	N   int64 `json:"n"`
}

// q4 is query 4, average price for a category: that of the winning bids of all its
// auctions so far, renewed when one has closed.
func q4() (*flow.Flow, error) {
	b := flow.New("nexmark-q4", flow.Options{})
	byCategory := flow.Rekey(winning(auctionsAndBids(b)), func(_ *flow.Meta, s sold) (string, error) {
		return strconv.FormatInt(s.Auction.Category, 10), nil
	}, flow.JSONCodec[sold]())
	averages := flow.Aggregate(byCategory, "average", flow.Aggregator[sold, prices, category]{
		State: flow.JSONState[prices](1, nil),
		Add: func(_ *flow.Meta, p *prices, s sold) error {
			p.ID = s.Auction.Category
			p.Sum += s.Bid.Price
			p.N++
			return nil
		},
		Result: func(_ *flow.Meta, p *prices) (category, error) {
			return category{p.ID, float64(p.Sum) / float64(p.N)}, nil
		},
		Emit: flow.EmitCommit,
	})
	flow.To(averages, flow.Sink[category]{
		Stream: "NEXMARK_Q4", Subjects: []string{"q4.*"}, Subject: flow.KeySubject[category]("q4."), Encode: flow.EncodeJSON[category](),
	})
	return b.Build()
}
