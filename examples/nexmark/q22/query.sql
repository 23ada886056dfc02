WITH cut AS (
  SELECT *, substr(url, length('https://www.nexmark.com/') + 1) AS path1 FROM bid
), once AS (
  SELECT *, substr(path1, instr(path1, '/') + 1) AS path2 FROM cut
), twice AS (
  SELECT *, substr(path2, instr(path2, '/') + 1) AS path3 FROM once
)
SELECT auction, bidder, price, channel,
  substr(path1, 1, instr(path1, '/') - 1) AS dir1,
  substr(path2, 1, instr(path2, '/') - 1) AS dir2,
  substr(path3, 1, instr(path3, '/') - 1) AS dir3
FROM twice
