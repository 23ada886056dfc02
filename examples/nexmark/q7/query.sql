SELECT b.auction, b.bidder, b.price, b.dateTime, b.extra
FROM bid AS b
JOIN (
  SELECT max(price) AS maxprice, at / 10000 AS period
  FROM bid
  GROUP BY period
) AS m
ON b.price = m.maxprice AND b.at / 10000 = m.period
