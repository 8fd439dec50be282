-- Speed-up by where tokens are dropped: a whole prefill against stock's, selection included.
SELECT shape, device, batch, native_tokens, budget_tokens, method, 1 / ratio_to_stock AS speed_up,
       ratio_to_stock, peak_bytes / 1e6 AS peak_mb, kv_bytes / 1e6 AS kv_mb
FROM speed
WHERE stage = '*'
ORDER BY shape, device, batch, native_tokens, budget_tokens, speed_up DESC, method;
