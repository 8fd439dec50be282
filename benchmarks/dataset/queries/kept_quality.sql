-- Quality kept: each method's accuracy as a share of stock's on the same questions.
SELECT s.task, s.method, s.budget, count(*) AS n, avg(s.score) AS accuracy, avg(s.score) / avg(stock.score) AS kept
FROM samples s
JOIN samples stock USING (run_id, task, sample_id)
WHERE stock.method = 'stock' AND s.method <> 'stock'
GROUP BY ALL
ORDER BY s.task, s.budget, kept DESC, s.method;
