-- Accuracy against latency: mean seconds of an answer, selection included, beside accuracy.
SELECT task, method, budget, accuracy, seconds_mean, device, p_against_stock
FROM runs
ORDER BY task, seconds_mean, method;
