-- Accuracy against tokens: every method at every budget, all questions of a task.
SELECT task, method, budget, n, accuracy, accuracy_low, accuracy_high, visual_tokens_mean
FROM summary
WHERE question_type = '*'
ORDER BY task, budget, accuracy DESC, method;
