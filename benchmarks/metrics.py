"""What is measured of a choice and of an answer. Pure functions of one sample, or of columns of many.

An allocation is `[n, 3]` rows `(scale, y, x)`; a grid is `(h, w)` cells; boxes are (x0, y0, x1, y1) in pixels of an
image of `size` (height, width). *Homunculus*: tokens per cell, the magnification that each place gets.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from arr_coc.attending import tokens_per_cell

# ------------------------------------------------------------------------------------------------ where tokens went


def evidence_cells(boxes: Sequence, grid: tuple[int, int], size: tuple[int, int], margin: float = 0.1) -> Tensor:
    """`[h, w]` bool: cells that a box reaches into by more than `margin` of their side; of a tiny box at least one.

    No boxes, no cells.
    """
    (h, w), (height, width) = grid, size
    out = torch.zeros(h, w, dtype=torch.bool)
    for x0, y0, x1, y1 in boxes:
        top, left = min(int(y0 * h / height + margin), h - 1), min(int(x0 * w / width + margin), w - 1)
        bottom, right = math.ceil(y1 * h / height - margin), math.ceil(x1 * w / width - margin)
        out[top : max(bottom, top + 1), left : max(right, left + 1)] = True
    return out


def homunculus(kept: Tensor, grid: tuple[int, int]) -> Tensor:
    """`[h, w]` float64, tokens per cell."""
    return tokens_per_cell(kept, *grid).double()


def evidence_recall(density: Tensor, evidence: Tensor) -> float:
    """Share of the evidence cells that are kept at scale 1."""
    return float((density[evidence] == 1).double().mean())


def box_mass(density: Tensor, evidence: Tensor) -> float:
    """Share of the tokens spent inside the evidence."""
    return float(density[evidence].sum() / density.sum())


def box_iou(density: Tensor, evidence: Tensor, heat: Tensor | None = None) -> float:
    """Overlap of the evidence with as many of the most magnified cells, over their union.

    Cells at the same scale are told apart by `heat [h, w]` in [0, 1], where there is one. Where cells still tie for the
    last places each counts by the share of them that would be taken, so that no order of cells is favoured.
    """
    k = int(evidence.sum())
    if heat is not None:
        density = 32 * density + heat.double()  # densities are sixteenths: heat never outweighs a scale
    level = density.flatten().sort(descending=True).values[k - 1]
    tied = density == level
    taken = (density > level).double() + tied.double() * (k - float((density > level).sum())) / float(tied.sum())
    inside = float(taken[evidence].sum())
    return inside / (2 * k - inside)


def pointing_game(scores: Tensor, evidence: Tensor) -> float:
    """1 where the greatest score `[h, w]` lies in the evidence (Zhang et al. 2018); ties count by their share."""
    best = scores == scores.amax()
    return float(evidence[best].double().mean())


def distinctiveness(densities: Sequence[Tensor]) -> float:
    """Mean cosine distance between the homunculi that different questions draw of one image (at least two)."""
    flat = torch.nn.functional.normalize(torch.stack([d.flatten().double() for d in densities]), dim=1)
    apart = 1 - flat @ flat.T
    n = len(flat)
    return float(apart[~torch.eye(n, dtype=torch.bool)].mean())


def reliability(scores: Tensor, truth: Tensor, bins: int = 10) -> Tensor:
    """How a heat map's values and the evidence agree: `[N]` in [0, 1], `[N]` bool -> `[bins, 3]` float64.

    Of the cells in each bin their number, the sum of their scores, and how many are evidence: counts of several images
    add up.
    """
    scores, truth = scores.double().flatten(), truth.double().flatten()
    number = (scores * bins).long().clamp(0, bins - 1)
    columns = (torch.ones_like(scores), scores, truth)
    return torch.stack([torch.zeros(bins).double().index_add_(0, number, x) for x in columns], 1)


def calibration_error(counts: Tensor) -> float:
    """Expected calibration error of `reliability`'s counts (Naeini et al. 2015): 0 where scores are chances."""
    n, scores, truth = counts.T
    return float((scores - truth).abs().sum() / n.sum().clamp(min=1))


# ------------------------------------------------------------------------------------------------ answers


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share of `hits` in `n` (Wilson 1927)."""
    if not n:
        return 0.0, 1.0
    p = hits / n
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> dict[str, float]:
    """McNemar's exact test of two methods on the same samples: `only_a`, `only_b` and the two-sided p.

    Under the null each of the discordant samples falls to either side with chance one half.
    """
    if len(a) != len(b):
        raise ValueError(f"paired answers are needed, not {len(a)} and {len(b)}.")
    only_a = sum(bool(x) and not y for x, y in zip(a, b, strict=True))
    only_b = sum(bool(y) and not x for x, y in zip(a, b, strict=True))
    n, k = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return {
        "only_a": only_a,
        "only_b": only_b,
        "p": min(1.0, float(2 * tail / 2**n) if n < 1000 else _normal_tail(n, k)),
    }


def _normal_tail(n: int, k: int) -> float:
    """Twice the binomial tail for many samples, with the correction for continuity."""
    return math.erfc(max(0.0, (n / 2 - k - 0.5) / math.sqrt(n / 4)) / math.sqrt(2))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def placement(kept: Tensor, grid: tuple[int, int], boxes: Sequence, size: tuple[int, int], heat: Tensor | None = None):
    """The measures of one sample's choice that the evidence allows, else None: the columns of `samples`.

    `heat [h, w]` is what points, and what tells cells of one scale apart; without one the homunculus alone does.
    """
    names = ("evidence_recall", "box_mass", "iou", "pointing_hit")
    evidence = evidence_cells(boxes, grid, size)
    if not evidence.any():
        return dict.fromkeys(names)
    density = homunculus(kept, grid)
    points = pointing_game(density if heat is None else heat, evidence)
    return dict(
        zip(
            names,
            (evidence_recall(density, evidence), box_mass(density, evidence), box_iou(density, evidence, heat), points),
            strict=True,
        )
    )
