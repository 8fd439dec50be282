"""DivPrune: the tokens most different from each other (Alvar et al., CVPR 2025, arXiv 2503.02175)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import Method, Tokens, after


def max_min_diverse(features: Tensor, k: int) -> Tensor:
    """Greedy max-min diversity under cosine distance: `[N, d]` -> the numbers of k tokens, in the order of choice.

    First the token farthest from its nearest neighbour, then always the one farthest from all chosen so far.
    """
    unit = F.normalize(features.float(), dim=-1)
    apart = 1 - unit @ unit.T
    nearest = apart.masked_fill(torch.eye(len(apart), dtype=torch.bool, device=apart.device), torch.inf).amin(0)
    chosen = nearest.argmax(keepdim=True)
    nearest = apart[chosen[0]]
    for _ in range(k - 1):
        best = nearest.index_fill(0, chosen, -torch.inf).argmax(keepdim=True)
        chosen = torch.cat([chosen, best])
        nearest = torch.minimum(nearest, apart[best[0]])
    return chosen


def reduce(tokens: Tokens, budget: int):
    return max_min_diverse(tokens.features, budget).sort().values, None


METHODS = [Method("divprune", "after the tower", "DivPrune (Alvar et al. 2025, arXiv 2503.02175)", after(reduce))]
