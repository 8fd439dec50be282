"""FastV: past the second language layer, only visual tokens that the last token attends to (Chen et al. 2024, arXiv
2403.06764).

All tokens pass the tower and the first layers; then the K with most attention from the prompt's last token go on. The
attention is our own q·kᵀ in the second layer, mean over heads, so no backend is changed. Where DeepStack adds features
after a later layer than that, tokens drop after the last of them (layer 3 in Qwen3-VL-2B).

Layers past the drop hold a shorter cache than those before, which `generate` cannot know: prefill and the greedy steps
are written out.
"""

import torch
from torch import Tensor
from transformers import DynamicCache

from arr_coc.modeling_arr_coc import _query_key

from .interface import Method, Outcome, at_scale_1

RANKED_BY = 1  # the second layer's attention


def attention_of_last(query: Tensor, key: Tensor, real: Tensor) -> Tensor:
    """Mean over heads of what it pays: scaled queries `[B, H, D]`, keys `[B, H, L, D]`, `[B, L]` bool -> `[B, L]`."""
    scores = torch.einsum("bhd,bhld->bhl", query.float(), key.float())
    return scores.masked_fill(~real[:, None], -torch.inf).softmax(-1).mean(1)


def keep_best(attention: Tensor, is_image: Tensor, real: Tensor, budgets: list[int]) -> Tensor:
    """`[B, L]` bool: all text, and of each row's visual tokens the best by attention, as many as its budget."""
    keep = real & ~is_image
    for row, budget in enumerate(budgets):
        at = is_image[row].nonzero()[:, 0]
        best = torch.argsort(attention[row, at], descending=True, stable=True)[:budget]
        keep[row, at[best]] = True
    return keep


def prefill(model, inputs: dict, seen, budgets: list[int]):
    """Runs the prompts of one left-padded batch, `seen` by the tower. Stock's own parts in stock's order, but the drop.

    Returns:
        The last logits `[B, V]`, the cache, what is real in early and late layers (`[B, L]` and `[B, l]` bool), each
        row's next position `[B]`, `keep [B, L]`, and the layer after which tokens drop.
    """
    core, lm = model.model, model.model.language_model
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    is_image = (ids == model.config.image_token_id) & real
    positions, _ = core.get_rope_index(
        ids, inputs["mm_token_type_ids"], inputs["image_grid_thw"], attention_mask=inputs["attention_mask"]
    )
    states = lm.embed_tokens(ids)
    states = states.masked_scatter(is_image[..., None], torch.cat(seen.pooler_output).to(states.dtype))
    drop_after = max(RANKED_BY, len(seen.deepstack_features) - 1)
    following = positions.amax(0).masked_fill(~real, -1).amax(1) + 1
    cache, rotary, mask, late, keep = DynamicCache(), lm.rotary_emb(states, positions), causal(real, states), None, None
    for i, layer in enumerate(lm.layers):
        if i == RANKED_BY:
            query, key = _query_key(layer, states, rotary)
            keep = keep_best(attention_of_last(query[:, :, -1], key, real), is_image, real, budgets)
        states = layer(states, attention_mask=mask, position_embeddings=rotary, past_key_values=cache)
        if i < len(seen.deepstack_features):
            added = torch.cat(seen.deepstack_features[i]).to(states.dtype)
            states = states.masked_scatter(is_image[..., None], states[is_image] + added)
        if i == drop_after:
            width = int(keep.sum(1).max())
            columns = torch.argsort(keep.long(), dim=1, stable=True)[:, -width:]  # kept ones last, in their order
            late = keep.gather(1, columns)
            states = states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1]))
            rotary = tuple(r.gather(1, columns[..., None].expand(-1, -1, r.shape[-1])) for r in rotary)
            mask = causal(late, states)
    logits = model.lm_head(lm.norm(states[:, -1]))
    return logits, cache, (real, late), following, keep, drop_after


def causal(real: Tensor, states: Tensor) -> Tensor:
    """Additive attention mask `[B, 1, L, L]` of left-padded rows."""
    length = real.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=real.device).tril() & real[:, None]
    allowed = allowed | torch.eye(length, dtype=torch.bool, device=real.device)  # padding sees itself: no row is empty
    return additive(allowed[:, None], states)


def additive(allowed: Tensor, states: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, dtype=states.dtype, device=states.device).masked_fill(
        ~allowed, torch.finfo(states.dtype).min
    )


def answer(model, batch, budgets, run) -> Outcome:
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=model.device)
    lm = model.model.language_model
    seen, _ = batch.seen(model, run.clock)
    with run.clock.stage("prefill"):
        logits, cache, masks, following, keep, drop_after = prefill(model, batch.inputs, seen, budgets)
    tokens, done = [], torch.zeros(len(batch.samples), dtype=torch.bool, device=model.device)
    with run.clock.stage("decode"):
        for step in range(run.max_new_tokens):
            token = logits.argmax(-1).masked_fill(done, int(ends[0]))
            tokens.append(token)
            done = done | torch.isin(token, ends)
            if bool(done.all()) or step == run.max_new_tokens - 1:
                break
            masks = tuple(torch.cat([m, m.new_ones(len(m), 1)], 1) for m in masks)
            states = lm.embed_tokens(token[:, None])
            rotary = lm.rotary_emb(states, (following + step)[None, :, None].expand(3, -1, -1))
            early, late = (additive(m[:, None, None], states) for m in masks)
            for i, layer in enumerate(lm.layers):
                mask = early if i <= drop_after else late
                states = layer(states, attention_mask=mask, position_embeddings=rotary, past_key_values=cache)
            logits = model.lm_head(lm.norm(states[:, -1]))
    is_image = batch.inputs["input_ids"] == model.config.image_token_id
    kept = [at_scale_1(keep[i, is_image[i]].nonzero()[:, 0].cpu(), w) for i, (_, w) in enumerate(batch.grids)]
    return Outcome(run.decode(torch.stack(tokens, 1)), kept, {})


METHODS = [Method("fastv", "in the language model", "FastV, K = 2 (Chen et al. 2024, arXiv 2403.06764)", answer)]
