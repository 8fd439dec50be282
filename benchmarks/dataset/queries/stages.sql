-- Where the seconds go: each stage of a prefill as a share of stock's whole prefill.
SELECT shape, device, batch, native_tokens, budget_tokens, method, stage, seconds_median, ratio_to_stock
FROM speed
WHERE stage NOT IN ('*', 'model')
ORDER BY shape, device, batch, native_tokens, budget_tokens, method, seconds_median DESC, stage;
