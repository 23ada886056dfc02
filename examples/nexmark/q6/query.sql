-- In the definition the sales are in the order of the winning bids, and eleven count.
WITH sold AS (
  SELECT a.id, a.seller, a.ends, max(b.price) AS price
  FROM auction AS a
  JOIN bid AS b ON a.id = b.auction AND b.at BETWEEN a.at AND a.ends
  GROUP BY a.id
)
SELECT seller, id AS auction,
  avg(price) OVER (PARTITION BY seller ORDER BY ends, id ROWS BETWEEN 9 PRECEDING AND CURRENT ROW) AS price
FROM sold
