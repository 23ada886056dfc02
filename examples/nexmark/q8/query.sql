SELECT p.id, p.name, rfc3339(p.starttime) AS starttime
FROM (
  SELECT id, name, at / 10000 * 10000 AS starttime
  FROM person
  GROUP BY id, name, starttime
) AS p
JOIN (
  SELECT seller, at / 10000 * 10000 AS starttime
  FROM auction
  GROUP BY seller, starttime
) AS a
ON p.id = a.seller AND p.starttime = a.starttime
