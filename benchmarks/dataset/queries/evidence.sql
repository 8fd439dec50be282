-- Where the tokens went: evidence kept at scale 1, tokens and overlap inside the box, one-object questions.
SELECT task, method, budget, count(*) AS n, avg(evidence_recall) AS evidence_recall, avg(box_mass) AS box_mass,
       avg(box_mass / least(1, evidence_cells / visual_tokens)) AS of_the_most_possible,
       avg(iou) AS iou, avg(pointing_hit) AS pointing_game
FROM samples
WHERE evidence_boxes = 1
GROUP BY ALL
ORDER BY task, budget, evidence_recall DESC, method;
