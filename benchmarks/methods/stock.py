"""Qwen3-VL as it is, all tokens."""

from arr_coc.attending import flat

from .interface import Method, Outcome


def answer(model, batch, budgets, run) -> Outcome:
    answers = run.generate(model, batch.inputs, num_visual_tokens="all")
    return Outcome(answers, [flat(h, w, 1) for h, w in batch.grids], {})


METHODS = [Method("stock", "nowhere", "Qwen3-VL (Bai et al. 2025), unchanged", answer, spends=False)]
