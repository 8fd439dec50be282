-- The samples that downscaling gets wrong (VTC-Bench's group A): who answers them.
SELECT task, budget, method, n_downscale_wrong, accuracy_downscale_wrong, p_against_downscale
FROM runs
WHERE method NOT IN ('downscale', 'stock')
ORDER BY task, budget, accuracy_downscale_wrong DESC, method;
