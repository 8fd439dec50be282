-- The ablations: what each way of knowing, the tensions and training are worth, in accuracy at the same budget.
SELECT part.task, part.budget, part.method, part.accuracy, part.accuracy - whole.accuracy AS without_it,
       part.evidence_recall, part.box_mass
FROM summary part
JOIN summary whole USING (run_id, task, question_type, budget)
WHERE whole.method = 'arr_coc' AND question_type = '*'
  AND (starts_with(part.method, 'no_') OR part.method = 'untrained' OR starts_with(part.method, 'arr_coc_'))
ORDER BY part.task, part.budget, without_it, part.method;
