-- The definition has neither the start nor the end of the period among its columns.
WITH hops(back) AS (VALUES (0), (1), (2), (3), (4)),
counts AS (
  SELECT auction, count(*) AS num, at / 2000 * 2000 - back * 2000 + 10000 AS endtime
  FROM bid, hops
  GROUP BY auction, endtime
)
SELECT c.auction, c.num, rfc3339(c.endtime) AS endtime
FROM counts AS c
JOIN (SELECT endtime, max(num) AS maxn FROM counts GROUP BY endtime) AS m
ON c.endtime = m.endtime AND c.num >= m.maxn
