-- taken is the timestamp that the stream gave the bid.
SELECT bidder, count(*) AS bid_count, rfc3339(taken / 10000 * 10000) AS starttime, rfc3339(taken / 10000 * 10000 + 10000) AS endtime
FROM bid
GROUP BY bidder, taken / 10000
