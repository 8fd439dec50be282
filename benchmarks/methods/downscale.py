"""The strong simple baseline: the whole image, smaller (VTC-Bench: it beats most published pruners at every ratio).

- `downscale`: as many tokens as the budget, or a few less where no grid of the image's shape has them.
- `downscale_latency`: as many as cost what choosing and spending cost ARR-COC, by the FLOP model of the model's own
  shapes. What a glance costs, downscaling may spend on more tokens.
"""

import torch
from PIL import Image

from arr_coc.attending import flat_scale

from ..flops import choosing_flops, prefill_flops
from .interface import Method, Outcome, prepare


def shape_for(h: int, w: int, budget: int, skew: float = 1.35) -> tuple[int, int]:
    """The grid of most cells within `budget` whose sides are stretched by at most `skew`, the least so of equals."""
    best = (1, 1)
    score = (0, 0.0)
    for rows in range(1, h + 1):
        columns = min(w, budget // rows)
        if not columns:
            break
        stretch = rows * w / (columns * h)
        stretch = max(stretch, 1 / stretch)
        better = (rows * columns if stretch <= skew else 0, -stretch)
        if better > score or score == (0, 0.0):
            best, score = (rows, columns), better
    return best


def equal_latency(config, h: int, w: int, budget: int, text: int = 32) -> int:
    """Tokens whose prefill alone costs what choosing among `h x w` cells and a prefill of `budget` tokens cost."""
    s = flat_scale(h, w, config.glance_tokens)
    glance = 0 if config.participatory == "texture" else -(-h // s) * -(-w // s)
    ours = prefill_flops(config, budget, text) + choosing_flops(config, h * w, text, glance)
    low, high = budget, h * w
    while low < high:  # the most tokens that cost no more
        middle = (low + high + 1) // 2
        low, high = (middle, high) if prefill_flops(config, middle, text) <= ours else (low, middle - 1)
    return low


def _smaller(budget_for):
    def answer(model, batch, budgets, run) -> Outcome:
        cell, samples, kept = model.config.cell, [], []
        with run.clock.stage("preprocess"):
            for sample, (h, w), budget in zip(batch.samples, batch.grids, budgets, strict=True):
                rows, columns = shape_for(h, w, budget_for(model.config, h, w, budget))
                image = sample["image"].convert("RGB").resize((columns * cell, rows * cell), Image.Resampling.BOX)
                samples.append(sample | {"image": image})
                kept.append(covering(h, w, rows, columns))
            sizes = {"shortest_edge": cell**2, "longest_edge": 2**26}
            small = prepare(_unresized(run.processor, sizes), samples, model.device)
        answers = run.generate(model, small.inputs, num_visual_tokens="all")
        return Outcome(answers, kept, {})

    return answer


class _unresized:
    """A processor that lets images of whole cells through as they are, however small."""

    def __init__(self, processor, size: dict):
        self.processor, self.size, self.image_processor = processor, size, processor.image_processor
        self.apply_chat_template = processor.apply_chat_template

    def __call__(self, **inputs):
        return self.processor(**inputs, images_kwargs={"size": self.size})


def covering(h: int, w: int, rows: int, columns: int) -> torch.Tensor:
    """What a `rows x columns` image shows of an `h x w` grid as rows `(scale, y, x)`, the scale rounded.

    Only for counting and drawing: nothing is realized from it. Scale 1 only where the image is not smaller.
    """
    scale = 1 if (rows, columns) == (h, w) else max(2, round((h * w / (rows * columns)) ** 0.5))
    y, x = torch.meshgrid(torch.arange(rows) * h // rows, torch.arange(columns) * w // columns, indexing="ij")
    return torch.stack([torch.full_like(y, scale), y, x], -1).reshape(-1, 3)


METHODS = [
    Method(
        "downscale",
        "before the tower",
        "the image area-averaged to the budget (VTC-Bench's baseline)",
        _smaller(lambda config, h, w, budget: budget),
    ),
    Method(
        "downscale_latency",
        "before the tower",
        "the image area-averaged to as many tokens as cost what ARR-COC costs, its glance included",
        _smaller(equal_latency),
    ),
]
