-- Per question type: ours, stock and downscaling side by side at each budget.
SELECT ours.task, ours.budget, question_type, ours.n, stock.accuracy AS stock, ours.accuracy AS arr_coc,
       small.accuracy AS downscale, ours.accuracy - small.accuracy AS ahead
FROM summary ours
JOIN summary small USING (run_id, task, question_type, budget)
JOIN summary stock USING (run_id, task, question_type)
WHERE ours.method = 'arr_coc' AND small.method = 'downscale' AND stock.method = 'stock'
ORDER BY ours.task, ours.budget, ahead DESC, question_type;
