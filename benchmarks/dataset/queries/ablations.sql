-- The ablations: what each way of knowing, the tensions and training are worth, on the same questions at the same budget.
SELECT part.task, part.budget, part.method, count(*) AS n, avg(part.score) AS accuracy,
       avg(part.score) - avg(whole.score) AS without_it, avg(part.evidence_recall) AS evidence_recall,
       avg(part.box_mass) AS box_mass
FROM samples part
JOIN samples whole USING (run_id, task, sample_id, budget)
WHERE whole.method = 'arr_coc'
  AND (starts_with(part.method, 'no_') OR part.method = 'untrained' OR starts_with(part.method, 'arr_coc_'))
GROUP BY ALL
ORDER BY part.task, part.budget, without_it, part.method;
