-- An array for each auction in place of a row for each bid: rank_number is the place.
SELECT CAST(auction AS TEXT) AS key, json_group_array(json_object(
    'auction', auction, 'bidder', bidder, 'price', price, 'channel', channel, 'url', url, 'dateTime', dateTime, 'extra', extra
  ) ORDER BY rank_number) AS top10
FROM (SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC, seq) AS rank_number FROM bid)
WHERE rank_number <= 10
GROUP BY auction
