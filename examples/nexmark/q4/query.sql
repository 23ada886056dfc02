SELECT category AS id, avg(final) AS final
FROM (
  SELECT max(b.price) AS final, a.category
  FROM auction AS a
  JOIN bid AS b ON a.id = b.auction AND b.at BETWEEN a.at AND a.ends
  GROUP BY a.id, a.category
)
GROUP BY category
