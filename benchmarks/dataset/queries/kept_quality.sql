-- Quality kept: each method's accuracy as a share of stock's on the same questions.
SELECT s.task, s.method, s.budget, s.accuracy, s.accuracy / stock.accuracy AS kept
FROM summary s
JOIN summary stock USING (run_id, task, question_type)
WHERE stock.method = 'stock' AND question_type = '*' AND s.method <> 'stock'
ORDER BY s.task, s.budget, kept DESC, s.method;
