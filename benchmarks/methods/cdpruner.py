"""CDPruner: a determinantal point process conditioned on the question (Zhang et al. 2025, arXiv 2506.10967).

The kernel is `diag(r) S diag(r)`, S the cosine similarity of tokens and r their relevance to the question, so that its
minors are large for tokens that are relevant and unlike each other. The set is built by the fast greedy MAP of Chen,
Zhang & Zhou (NeurIPS 2018). The paper takes r from CLIP's text encoder, which Qwen3-VL lacks; here it is the cosine of
a token with the question's word embeddings, mean over words, scaled to [0, 1] per image as in the paper.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import Method, Tokens, after


def conditional_kernel(features: Tensor, relevance: Tensor) -> Tensor:
    """`[N, d]`, `[N]` -> the kernel `[N, N]`."""
    unit = F.normalize(features.float(), dim=-1)
    return relevance[:, None] * (unit @ unit.T) * relevance


def greedy_map(kernel: Tensor, k: int) -> Tensor:
    """The numbers of k items, each the one that raises the determinant of the chosen minor most, in that order.

    `kernel [N, N]` positive semidefinite. One row of its Cholesky factor a step: O(N k^2) in all.
    """
    n = len(kernel)
    gain = kernel.diagonal().clone().double()
    rows = gain.new_zeros(k, n)
    chosen = []
    for step in range(k):
        best = int(gain.argmax())
        chosen.append(best)
        row = kernel[best].double() - rows[:step].T @ rows[:step, best]
        rows[step] = row / gain[best].clamp(min=1e-12).sqrt()
        gain = gain - rows[step] ** 2
        gain[torch.tensor(chosen, device=gain.device)] = -torch.inf
    return torch.tensor(chosen, device=kernel.device)


def relevance(features: Tensor, question: Tensor) -> Tensor:
    """`[N, d]`, `[Q, d]` -> `[N]` in (0, 1]: mean cosine with the question's words, scaled over the image."""
    cosine = (F.normalize(features.float(), dim=-1) @ F.normalize(question.float(), dim=-1).T).mean(1)
    return (cosine - cosine.amin() + 1e-6) / (cosine.amax() - cosine.amin() + 1e-6)


def reduce(tokens: Tokens, budget: int):
    kernel = conditional_kernel(tokens.features, relevance(tokens.features, tokens.question()))
    return greedy_map(kernel, budget).sort().values, None


METHODS = [Method("cdpruner", "after the tower", "CDPruner (Zhang et al. 2025, arXiv 2506.10967)", after(reduce))]
