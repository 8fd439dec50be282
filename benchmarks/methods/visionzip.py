"""VisionZip: dominant tokens, and the rest merged into contextual ones (Yang et al., CVPR 2025, arXiv 2412.04467).

Dominant tokens are those that receive most attention in the tower (Qwen's has no class token: mean over all askers).
Contextual tokens are evenly spaced among the others; each other token joins the one whose keys are most like its own,
and they are averaged. Shares as in the paper, 54 dominant to 10 contextual.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import Method, Tokens, after, top

_CONTEXTUAL = 10 / 64


def dominant_and_contextual(received: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`[N]`, `[N, d]` -> the cells `[k]` in raster order, and the mix `[k, N]`."""
    n = len(received)
    contextual = min(round(k * _CONTEXTUAL), n - (k - round(k * _CONTEXTUAL)))
    dominant = top(received, k - contextual)
    mix = torch.zeros(n, n, device=keys.device)
    mix[dominant, dominant] = 1
    if contextual:
        others = torch.ones(n, dtype=torch.bool, device=keys.device).index_fill(0, dominant, False).nonzero()[:, 0]
        steps = torch.arange(contextual, device=keys.device) * len(others) // contextual
        targets = others[steps]
        unit = F.normalize(keys.float(), dim=-1)
        joins = targets[(unit[others] @ unit[targets].T).argmax(1)]
        joins[steps] = targets  # a target stays its own
        mix[joins, others] = 1
        dominant = torch.cat([dominant, targets]).sort().values
    mix = mix[dominant]
    return dominant, mix / mix.sum(1, keepdim=True)


def reduce(tokens: Tokens, budget: int):
    return dominant_and_contextual(tokens.received, tokens.keys, budget)


METHODS = [
    Method(
        "visionzip", "after the tower", "VisionZip (Yang et al. 2024, arXiv 2412.04467)", after(reduce, attention=True)
    )
]
