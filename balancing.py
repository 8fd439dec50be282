"""Opponent processing: the third of ARR-COC's five stages.

Three score maps become one relevance map. What each is worth is not fixed: a small policy reads the question and a
summary of the maps and sets three *tensions*, each a value in (0, 1) between two opponents, and three weights.

    T1 = l1 * propositional + (1 - l1) * participatory            compress <-> particularize
    T2 = l2 * perspectival + (1 - l2) * (1 - perspectival)        exploit <-> explore
    T3 = l3 * raw + (1 - l3) * (raw + 0.3 * distance)             focus <-> diversify

with `raw` the mean of the three maps and `distance` that to the nearest strong cell. Relevance is the weighted mean
of T1, T2 and T3 over its own maximum. Untrained, tensions are neutral (0.5) and weights 0.4, 0.3, 0.3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .knowing import Silent

TENSIONS = ("compress↔particularize", "exploit↔explore", "focus↔diversify")
WEIGHTS = (0.4, 0.3, 0.3)
_FAR = 0.3  # the most that distance adds in T3


class Policy(nn.Module):
    """Question and maps to weights and tensions.

    Tensions are shown as the share of the *second* opponent, `1 - l`: 1 is wholly particularizing, exploring,
    diversifying.
    """

    def __init__(self, hidden_size: int, dim: int, normalisation: str = "softmax"):
        super().__init__()
        self.normalisation = normalisation
        self.read = nn.Linear(hidden_size + 9, dim)
        self.decide = Silent(dim, 6)

    def forward(self, question: Tensor, maps: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The question's mean embedding `[d]` and three `[h, w]` maps -> weights `[3]` and tensions `[3]` in (0, 1)."""
        summary = torch.stack([f for m in maps for f in (m.mean(), m.amax(), m.std(unbiased=False))])
        x = torch.cat([F.layer_norm(question.float(), question.shape), summary])
        logits = self.decide(F.gelu(self.read(x)))
        start = logits.new_tensor(WEIGHTS)
        if self.normalisation == "softmax":
            return (logits[:3] + start.log()).softmax(0), logits[3:].sigmoid()
        return (logits[:3] + start.logit()).sigmoid(), logits[3:].sigmoid()


def balance(maps: tuple[Tensor, Tensor, Tensor], weights: Tensor, tensions: Tensor) -> Tensor:
    """One image's relevance, `[h, w]` in [0, 1] with its maximum at 1.

    Args:
        maps: propositional, perspectival and participatory, `[h, w]` in [0, 1] each.
        weights (`[3]`, positive), tensions (`[3]` in (0, 1), the share of the second opponent): the policy's.
    """
    propositional, perspectival, participatory = maps
    l1, l2, l3 = 1 - tensions
    raw = torch.stack(maps).mean(0)
    mixed = torch.stack(
        [
            l1 * propositional + (1 - l1) * participatory,
            l2 * perspectival + (1 - l2) * (1 - perspectival),
            raw + (1 - l3) * _FAR * distance_to_strong(raw),
        ]
    )
    relevance = torch.einsum("k,khw->hw", weights / weights.sum(), mixed)
    return relevance / relevance.amax().clamp(min=1e-6)


@torch.no_grad()
def distance_to_strong(raw: Tensor, share: float = 0.1) -> Tensor:
    """How far each cell is from the nearest of the `share` strongest cells: `[h, w]` in [0, 1], over the diagonal.

    Computed on coordinates, `[h * w, k]` distances. A flat map has no strong cell and is 0 throughout.
    """
    h, w = raw.shape
    flat = (raw.flatten().double() * 2**16).round()
    if flat.amax() == flat.amin():
        return torch.zeros_like(raw)
    strong = torch.argsort(flat, descending=True, stable=True)[: max(1, round(share * len(flat)))]
    y, x = torch.meshgrid(torch.arange(h, device=raw.device), torch.arange(w, device=raw.device), indexing="ij")
    at = torch.stack([y, x], -1).reshape(-1, 2).to(raw.dtype)
    nearest = torch.cdist(at, at[strong], compute_mode="donot_use_mm_for_euclid_dist").amin(1)
    return (nearest / (h * h + w * w) ** 0.5).reshape(h, w)
