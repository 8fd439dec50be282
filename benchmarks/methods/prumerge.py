"""LLaVA-PruMerge+: attended tokens and evenly spaced ones, the pruned merged in (Shang et al. 2024, arXiv 2403.15388).

The paper takes the outliers of attention (above the third quartile by 1.5 interquartile ranges) and adds evenly spaced
tokens. With a fixed budget, outliers take up to half of it and evenly spaced tokens the rest. Each kept token becomes
the mean of itself and its nearest pruned tokens by keys, weighted by attention.
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
    mix.scatter_(1, cells[:, None], received[cells, None].float())
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
