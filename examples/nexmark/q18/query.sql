-- Of two bids at the same time the earlier one to come counts.
SELECT 'bid' AS event, auction, bidder, price, channel, url, dateTime, extra
FROM (SELECT *, row_number() OVER (PARTITION BY bidder, auction ORDER BY dateTime DESC, seq) AS rank_number FROM bid)
WHERE rank_number <= 1
