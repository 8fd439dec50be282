-- Where we lose: each method, task, budget and question type in which ARR-COC is behind on the same questions.
SELECT other.task, other.budget, coalesce(other.question_type, '*') AS question_type, other.method, count(*) AS n,
       avg(ours.score) AS arr_coc, avg(other.score) AS theirs, avg(other.score) - avg(ours.score) AS behind
FROM samples other
JOIN samples ours USING (run_id, task, sample_id, budget)
WHERE ours.method = 'arr_coc'
  AND NOT starts_with(other.method, 'oracle') AND NOT starts_with(other.method, 'arr_coc')
  AND NOT starts_with(other.method, 'no_')
GROUP BY GROUPING SETS ((other.task, other.budget, other.method, other.question_type),
                        (other.task, other.budget, other.method))
HAVING behind > 0
ORDER BY behind DESC, other.task, other.budget, other.method, question_type;
