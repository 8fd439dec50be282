"""LLaVA-PruMerge+: attended tokens and evenly spaced ones, others merged in (Shang et al. 2024, arXiv 2403.15388).

The paper takes the outliers of attention (above the third quartile by 1.5 interquartile ranges) and adds evenly spaced
tokens. With a fixed budget, outliers take up to half of it and evenly spaced tokens the rest. To each kept token are
added the pruned ones whose keys are nearest to its own, each times the attention that it received (shares of 1 in all),
so that the kept one stays the most of it, as in the authors' code. Divided by the weights' sum, so that features keep
their size; the authors' one extra token, the sum of all that was pruned, has no place in an image and is left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import Method, Tokens, after, top

_NEIGHBOURS = 32


def outliers(received: Tensor) -> Tensor:
    """`[N]` -> `[N]` bool: above the third quartile by more than 1.5 interquartile ranges."""
    low, high = torch.quantile(received.float(), received.new_tensor([0.25, 0.75]).float())
    return received > high + 1.5 * (high - low)


def prune_and_merge(received: Tensor, keys: Tensor, k: int, neighbours: int = _NEIGHBOURS) -> tuple[Tensor, Tensor]:
    """`[N]`, `[N, d]` -> the cells `[k]` in raster order, and the mix `[k, N]`."""
    n = len(received)
    attended = top(received, min(int(outliers(received).sum()), k // 2))
    others = torch.ones(n, dtype=torch.bool, device=keys.device).index_fill(0, attended, False).nonzero()[:, 0]
    spread = others[torch.arange(k - len(attended), device=keys.device) * len(others) // max(k - len(attended), 1)]
    cells = torch.cat([attended, spread]).sort().values
    mix = torch.zeros(k, n, device=keys.device)
    pruned = torch.ones(n, dtype=torch.bool, device=keys.device).index_fill(0, cells, False).nonzero()[:, 0]
    if len(pruned):
        unit = F.normalize(keys.float(), dim=-1)
        near = pruned[(unit[cells] @ unit[pruned].T).topk(min(neighbours, len(pruned)), dim=1).indices]
        mix.scatter_(1, near, received[near].float())
    mix.scatter_(1, cells[:, None], 1.0)
    return cells, mix / mix.sum(1, keepdim=True)


def reduce(tokens: Tokens, budget: int):
    return prune_and_merge(tokens.received, tokens.keys, budget)


METHODS = [
    Method(
        "prumerge_plus",
        "after the tower",
        "LLaVA-PruMerge+ (Shang et al. 2024, arXiv 2403.15388)",
        after(reduce, attention=True),
    )
]
