WITH gaps AS (
  SELECT bidder, at, coalesce(at - lag(at) OVER (PARTITION BY bidder ORDER BY at) >= 10000, 1) AS first
  FROM bid
), sessions AS (
  SELECT bidder, at, sum(first) OVER (PARTITION BY bidder ORDER BY at ROWS UNBOUNDED PRECEDING) AS session
  FROM gaps
)
SELECT bidder, count(*) AS bid_count, rfc3339(min(at)) AS starttime, rfc3339(max(at) + 10000) AS endtime
FROM sessions
GROUP BY bidder, session
