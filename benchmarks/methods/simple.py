"""Choices that ask nothing of the question: random, evenly spread, central, and the most detailed cells."""

import zlib

import torch
from torch import Tensor

from arr_coc.texture import detail

from .downscale import equal_latency
from .interface import Method, at_scale_1, before, pixels, top


def random_cells(h: int, w: int, budget: int, seed: int) -> Tensor:
    """`budget` cells of an `h x w` grid, the same for the same seed: `[k, 3]`."""
    order = torch.randperm(h * w, generator=torch.Generator().manual_seed(seed))
    return at_scale_1(order[:budget], w)


def uniform_cells(h: int, w: int, budget: int) -> Tensor:
    """`budget` cells as even as whole rows allow: `[k, 3]`. Rows are evenly spaced and differ by one cell at most."""
    budget = min(budget, h * w)
    rows = min(h, budget, max(-(-budget // w), round((budget * h / w) ** 0.5)))
    cells = []
    for r in range(rows):
        n = budget * (r + 1) // rows - budget * r // rows
        y = int((r + 0.5) * h / rows)
        cells += [y * w + int((c + 0.5) * w / n) for c in range(n)]
    return at_scale_1(torch.tensor(cells), w)


def central_cells(h: int, w: int, budget: int) -> Tensor:
    """The `budget` cells nearest to the image's centre: `[k, 3]`."""
    y, x = torch.meshgrid(torch.arange(h) - (h - 1) / 2, torch.arange(w) - (w - 1) / 2, indexing="ij")
    return at_scale_1(top(-(y**2 + x**2).flatten(), budget), w)


def _random(model, batch, i, budget):
    return random_cells(*batch.grids[i], budget, zlib.crc32(str(batch.samples[i]["id"]).encode()))


def _blind(model, batch, i, budget):
    lost = detail(pixels(model, batch, i), model.config.cell).mean(0)
    return at_scale_1(top(lost.flatten().cpu(), budget), batch.grids[i][1])


def at_equal_latency(choose):
    """The same choice with as many tokens as cost what ARR-COC costs at this budget."""

    def more(model, batch, i, budget):
        return choose(model, batch, i, equal_latency(model.config, *batch.grids[i], budget))

    return before(more)


def _uniform(model, batch, i, budget):
    return uniform_cells(*batch.grids[i], budget)


METHODS = [
    Method("random", "before the tower", "cells drawn at random, seeded by the sample", before(_random)),
    Method(
        "uniform",
        "before the tower",
        "evenly spaced cells",
        before(_uniform),
    ),
    Method(
        "centre",
        "before the tower",
        "the cells nearest to the centre",
        before(lambda model, batch, i, budget: central_cells(*batch.grids[i], budget)),
    ),
    Method("blind", "before the tower", "the cells that lose most by shrinking, whatever is asked", before(_blind)),
    Method("uniform_latency", "before the tower", "evenly spaced cells, at ARR-COC's cost", at_equal_latency(_uniform)),
    Method("blind_latency", "before the tower", "the most detailed cells, at ARR-COC's cost", at_equal_latency(_blind)),
]
