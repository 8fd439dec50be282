-- Where the seconds go: each stage of a prefill as a share of stock's whole prefill.
SELECT native_tokens, budget_tokens, batch, method, stage, seconds_median, ratio_to_stock
FROM speed
WHERE stage NOT IN ('*', 'model')
ORDER BY native_tokens, budget_tokens, batch, method, seconds_median DESC, stage;
