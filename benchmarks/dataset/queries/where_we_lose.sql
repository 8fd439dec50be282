-- Where we lose: every method, task, budget and question type in which ARR-COC is behind, the oracle aside.
SELECT other.task, other.budget, question_type, other.method, other.n, ours.accuracy AS arr_coc,
       other.accuracy AS theirs, other.accuracy - ours.accuracy AS behind,
       ours.accuracy_low > other.accuracy_high OR other.accuracy_low > ours.accuracy_high AS intervals_apart
FROM summary other
JOIN summary ours USING (run_id, task, question_type, budget)
WHERE ours.method = 'arr_coc' AND other.accuracy > ours.accuracy
  AND NOT starts_with(other.method, 'oracle') AND NOT starts_with(other.method, 'arr_coc')
  AND NOT starts_with(other.method, 'no_')
ORDER BY behind DESC, other.task, other.budget, other.method;
