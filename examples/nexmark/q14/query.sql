SELECT auction, bidder, 0.908 * price AS price,
  CASE
    WHEN hour >= 8 AND hour <= 18 THEN 'dayTime'
    WHEN hour <= 6 OR hour >= 20 THEN 'nightTime'
    ELSE 'otherTime'
  END AS bidTimeType,
  dateTime, extra, length(extra) - length(replace(extra, 'c', '')) AS c_counts
FROM (SELECT *, CAST(strftime('%H', dateTime) AS INTEGER) AS hour FROM bid)
WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000
