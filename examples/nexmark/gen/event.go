package gen

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"
)

// The kinds of events, as the member event names them.
const (
	PersonEvent  = "person"
	AuctionEvent = "auction"
	BidEvent     = "bid"
)

// Time is in milliseconds since 1970. Its text always has three digits of a second, so
// that texts sort like times.
type Time int64

const layout = "2006-01-02T15:04:05.000Z07:00"

// Std returns it as the standard library has it.
func (t Time) Std() time.Time { return time.UnixMilli(int64(t)).UTC() }

// MarshalText writes the time as RFC 3339 has it.
func (t Time) MarshalText() ([]byte, error) { return t.Std().AppendFormat(nil, layout), nil }

// UnmarshalText reads what RFC 3339 allows.
func (t *Time) UnmarshalText(text []byte) error {
	at, err := time.Parse(time.RFC3339, string(text))
	if err != nil {
		return err
	}
	*t = Time(at.UnixMilli())
	return nil
}

// Person has come to the site.
type Person struct {
	Event      string `json:"event"`
	ID         int64  `json:"id"`
	Name       string `json:"name"`
	Email      string `json:"emailAddress"`
	CreditCard string `json:"creditCard"`
	City       string `json:"city"`
	State      string `json:"state"`
	DateTime   Time   `json:"dateTime"`
	Extra      string `json:"extra"`
}

// Auction has been opened. Prices are in cents.
type Auction struct {
	Event       string `json:"event"`
	ID          int64  `json:"id"`
	ItemName    string `json:"itemName"`
	Description string `json:"description"`
	InitialBid  int64  `json:"initialBid"`
	Reserve     int64  `json:"reserve"`
	DateTime    Time   `json:"dateTime"`
	Expires     Time   `json:"expires"`
	Seller      int64  `json:"seller"`
	Category    int64  `json:"category"`
	Extra       string `json:"extra"`
}

// Bid has been made for an auction. The price is in cents.
type Bid struct {
	Event    string `json:"event"`
	Auction  int64  `json:"auction"`
	Bidder   int64  `json:"bidder"`
	Price    int64  `json:"price"`
	Channel  string `json:"channel"`
	URL      string `json:"url"`
	DateTime Time   `json:"dateTime"`
	Extra    string `json:"extra"`
}

// Event is one of the three.
type Event struct {
	Person  *Person
	Auction *Auction
	Bid     *Bid
}

// Kind returns PersonEvent, AuctionEvent or BidEvent.
func (e Event) Kind() string {
	switch {
	case e.Person != nil:
		return PersonEvent
	case e.Auction != nil:
		return AuctionEvent
	}
	return BidEvent
}

// Time returns when it took place.
func (e Event) Time() Time {
	switch {
	case e.Person != nil:
		return e.Person.DateTime
	case e.Auction != nil:
		return e.Auction.DateTime
	}
	return e.Bid.DateTime
}

// Subject is the one that the event is published on.
func (e Event) Subject() string { return "nexmark." + e.Kind() }

// JSON returns the event as JSON.
func (e Event) JSON() []byte {
	var v any = e.Bid
	switch {
	case e.Person != nil:
		v = e.Person
	case e.Auction != nil:
		v = e.Auction
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // the & of URLs
	if err := enc.Encode(v); err != nil {
		// Numbers and texts can always be written.
		panic(fmt.Sprintf("nexmark: event as JSON: %v", err))
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
