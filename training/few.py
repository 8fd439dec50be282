"""Few tokens, as the base must learn to answer from: each question with tokens of its own, at several scales.

What is chosen ranges from what a good selector leaves (the evidence in full, the rest coarsely) to what a blind one
does, so that no method at test time meets a model that has never seen its like.
"""

import numpy as np
import torch
from torch import Tensor

from arr_coc.attending import attend


def choose(
    sight: np.ndarray, thing: np.ndarray, lost: Tensor, tokens: int, dice: np.random.Generator, known: float
) -> Tensor:
    """Exactly `tokens` tokens for one question, `[tokens, 3]` rows (scale, y, x), by `attending.attend`.

    Args:
        sight (`[cells, ...]`): how much of the evidence each cell holds; only the cells at scale 1 are read.
        thing (`[cells, ...]`): number of the thing that stands in each cell, 0 where nothing does; likewise.
        lost (`[2, h, w]`): `texture.detail`.
        known: how often the evidence is worth something. Each other thing is by chance, from nothing to as much: a
            selector is drawn to some and not to others.
    """
    h, w = lost.shape[1:]
    cells = slice(h * w)
    worth = np.r_[0, 2 * dice.random() * dice.random(thing[cells].max()) ** 2]
    gain = dice.random() * dice.random(h * w) + worth[thing[cells]]
    if dice.random() < known:
        gain = gain + (sight[cells] > 0) * (1 + 2 * dice.random(h * w))
    gain = torch.from_numpy(gain.reshape(h, w))
    allocator = "lod" if dice.random() < 0.75 else "topk"
    lost = lost ** dice.uniform(0.4, 1)  # coarse tokens by turns rare and common
    for budget in range(tokens, tokens + 3):  # lod may leave a token or two unspent; rows of one batch are equally long
        allocation = attend(gain, lost, budget, allocator)
        if len(allocation) == tokens:
            return allocation
    return attend(gain, lost, tokens, "topk")


def pyramid_index(allocation: Tensor, h: int, w: int) -> Tensor:
    """Rows `[..., 3]` -> `[...]`: their numbers among an image's tokens at scale 1, then 2, then 4, each in raster
    order. `h` and `w` are multiples of 4."""
    scale, y, x = allocation.unbind(-1)
    before = torch.tensor([0, 0, h * w, 0, h * w + h * w // 4], device=allocation.device)
    return before[scale] + y // scale * (w // scale) + x // scale
