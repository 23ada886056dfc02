-- SQLite has no REGEXP_EXTRACT: channel_id is the last parameter of a URL.
SELECT auction, bidder, price, channel,
  CASE lower(channel)
    WHEN 'apple' THEN '0'
    WHEN 'google' THEN '1'
    WHEN 'facebook' THEN '2'
    WHEN 'baidu' THEN '3'
    ELSE substr(url, instr(url, '&channel_id=') + length('&channel_id='))
  END AS channel_id
FROM bid
WHERE instr(url, '&channel_id=') > 0 OR lower(channel) IN ('apple', 'google', 'facebook', 'baidu')
