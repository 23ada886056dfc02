package gen

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func generator(t *testing.T, cfg Config) *Generator {
	t.Helper()
	g, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// TestGenerator_shares counts what the definition says of 100,000 events.
func TestGenerator_shares(t *testing.T) {
	g := generator(t, Config{Seed: 1})
	var people, auctions, bids, hotBids, hotBidders, hotSellers, hotChannelled, withID, early int
	for n := range 100_000 {
		e := g.Event(n)
		switch {
		case e.Person != nil:
			if want := int64(1000 + people); e.Person.ID != want {
				t.Fatalf("person %d, want %d", e.Person.ID, want)
			}
			people++
		case e.Auction != nil:
			if want := int64(1000 + auctions); e.Auction.ID != want {
				t.Fatalf("auction %d, want %d", e.Auction.ID, want)
			}
			auctions++
			if e.Auction.Category < 10 || e.Auction.Category > 14 || e.Auction.Expires <= e.Auction.DateTime || e.Auction.Reserve <= e.Auction.InitialBid {
				t.Fatalf("%+v", e.Auction)
			}
			if e.Auction.Seller%100 == 0 {
				hotSellers++
			}
		default:
			bids++
			b := e.Bid
			if b.Auction%100 == 0 {
				hotBids++
			}
			if b.Bidder%100 == 1 {
				hotBidders++
			}
			if b.Price < 100 || b.Price > 100_000_000 {
				t.Fatalf("a price of %d", b.Price)
			}
			if !strings.HasPrefix(b.Channel, "channel-") {
				hotChannelled++
			} else if strings.Contains(b.URL, "&channel_id=") {
				withID++
			}
			if b.Auction >= int64(1000+auctions) {
				early++
			}
		}
	}
	if people != 2000 || auctions != 6000 || bids != 92_000 {
		t.Errorf("%d people, %d auctions and %d bids", people, auctions, bids)
	}
	for _, c := range []struct {
		what  string
		n, of int
		share float64
	}{
		{"bids for hot auctions", hotBids, bids, 0.5},
		{"bids by hot bidders", hotBidders, bids, 0.75},
		{"auctions of hot sellers", hotSellers, auctions, 0.75},
		{"bids by hot channels", hotChannelled, bids, 0.5},
		{"ids in the URLs of the other channels", withID, bids - hotChannelled, 0.9},
		{"bids for auctions that are not open yet", early, bids, 0.5 * 10 / 111},
	} {
		if got := float64(c.n) / float64(c.of); got < c.share-0.02 || got > c.share+0.02 {
			t.Errorf("%s: %.3f of all, want about %.3f", c.what, got, c.share)
		}
	}
}

// TestGenerator_sizes looks at the texts, which are to have the sizes of the
// definition on average.
func TestGenerator_sizes(t *testing.T) {
	g := generator(t, Config{Seed: 2})
	var size, bids, length, auctions int
	for n := range 20_000 {
		switch e := g.Event(n); {
		case e.Bid != nil:
			bids++
			size += 4*8 + len(e.Bid.Extra)
		case e.Auction != nil:
			auctions++
			length += int(e.Auction.Expires - e.Auction.DateTime)
		}
	}
	if mean := size / bids; mean < 95 || mean > 105 {
		t.Errorf("a bid has %d bytes on average, want 100", mean)
	}
	// 100 auctions come in 1,667 events, which are 167 ms.
	if mean := length / auctions; mean < 155 || mean > 175 {
		t.Errorf("an auction is open for %d ms on average, want 167", mean)
	}
}

// TestGenerator_order: groups are shuffled, and hold the same events as without that.
func TestGenerator_order(t *testing.T) {
	inOrder, shuffled := generator(t, Config{Seed: 3, Rate: 100}), generator(t, Config{Seed: 3, Rate: 100, OutOfOrder: 50})
	var highest, earlier Time
	back := 0
	want, got := map[string]int{}, map[string]int{}
	for n := range 1000 {
		want[string(inOrder.Event(n).JSON())]++
		e := shuffled.Event(n)
		got[string(e.JSON())]++
		if e.Time() < highest {
			back++
			earlier = max(earlier, highest-e.Time())
		}
		highest = max(highest, e.Time())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("other events:\n%.1000s", diff)
	}
	if back < 500 || earlier >= 500 {
		t.Errorf("%d events came later than one after them, up to %d ms", back, earlier)
	}
}

// TestGenerator_golden pins some events: what is stored somewhere can be made again.
func TestGenerator_golden(t *testing.T) {
	g := generator(t, Config{Seed: 4, Rate: 10, PersonBytes: 1, AuctionBytes: 1, BidBytes: 1})
	var got []string
	for _, n := range []int{0, 1, 4, 5} {
		got = append(got, g.Event(n).Subject()+" "+string(g.Event(n).JSON()))
	}
	want := []string{
		`nexmark.person {"event":"person","id":1000,"name":"Peter Walton","emailAddress":"xsebb@qhp.com","creditCard":"0328 1224 2262 1493","city":"Los Angeles","state":"CA","dateTime":"2015-07-15T00:00:00.000Z","extra":""}`,
		`nexmark.auction {"event":"auction","id":1000,"itemName":"onooel","description":"pnlbicvxhxqu","initialBid":236623,"reserve":351871,"dateTime":"2015-07-15T00:00:00.100Z","expires":"2015-07-15T00:03:28.995Z","seller":1001,"category":13,"extra":""}`,
		`nexmark.bid {"event":"bid","auction":1006,"bidder":1001,"price":47286,"channel":"channel-558","url":"https://www.nexmark.com/vtgzl/egka/qhq/item.htm?query=1&channel_id=975175680","dateTime":"2015-07-15T00:00:00.400Z","extra":""}`,
		`nexmark.bid {"event":"bid","auction":1007,"bidder":1003,"price":5109531,"channel":"channel-5716","url":"https://www.nexmark.com/uwc/abfzb/muu/item.htm?query=1&channel_id=355729408","dateTime":"2015-07-15T00:00:00.500Z","extra":""}`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTime(t *testing.T) {
	var at Time
	if err := at.UnmarshalText([]byte("2026-01-02T03:04:05.6+01:00")); err != nil {
		t.Fatal(err)
	}
	text, err := at.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != "2026-01-02T02:04:05.600Z" || !at.Std().Equal(time.Date(2026, 1, 2, 2, 4, 5, 6e8, time.UTC)) {
		t.Errorf("%s, %v", text, at.Std())
	}
	if err := at.UnmarshalText([]byte("yesterday")); err == nil {
		t.Error("yesterday is a time")
	}
}

func TestNew_invalid(t *testing.T) {
	for want, cfg := range map[string]Config{
		"nexmark: from 1 to 952 events can be out of order":                {OutOfOrder: 953},
		"nexmark: the rate is -1":                                          {Rate: -1},
		"nexmark: the ratio of hot bidders is -2\nthe size of a bid is -3": {HotBidders: -2, BidBytes: -3},
	} {
		if _, err := New(cfg); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
