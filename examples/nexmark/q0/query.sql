SELECT 'bid' AS event, auction, bidder, price, channel, url, dateTime, extra
FROM bid
