"""The ceiling of choosing: the evidence boxes are known. Not a method; nobody has them before the answer."""

import torch

from arr_coc.attending import attend
from arr_coc.texture import detail

from ..metrics import evidence_cells
from .interface import Method, before, pixels

_ELSEWHERE = 0.05  # what a cell without evidence is worth, so that what is left over shows the rest


def _oracle(allocator: str):
    def choose(model, batch, i, budget):
        sample, grid = batch.samples[i], batch.grids[i]
        lost = detail(pixels(model, batch, i), model.config.cell).cpu()
        mask = evidence_cells(sample.get("boxes") or (), grid, sample["image"].size[::-1])
        gain = torch.where(mask, 1.0, _ELSEWHERE) if mask.any() else torch.ones(grid)
        if allocator == "topk":  # among cells of one worth, those with most detail first
            gain = gain * (1 + lost.mean(0)) / 2
        return attend(gain, lost, budget, allocator)

    return choose


METHODS = [
    Method("oracle", "before the tower", "the evidence boxes, then the rest coarsely", before(_oracle("lod"))),
    Method("oracle_topk", "before the tower", "the evidence boxes at scale 1, then detail", before(_oracle("topk"))),
]
