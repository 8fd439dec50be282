"""Pixel redundancy before the tower, after PixelPrune's idea (arXiv 2604.00886): what neighbours foretell is dropped.

The paper predicts a patch from those before it and drops it below a threshold. A budget asks for a ranking instead:
cells by how far their pixels are from the most alike of three neighbours before them. The question plays no part.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import Method, at_scale_1, before, pixels, top


def surprise(image: Tensor, cell: int) -> Tensor:
    """`[3, H, W]` -> `[h, w]`: mean absolute difference from the most alike of the cells left, above and diagonally.

    The first cell has none and is never redundant.
    """
    c, height, width = image.shape
    cells = image.reshape(c, height // cell, cell, width // cell, cell).permute(1, 3, 0, 2, 4).flatten(2)  # [h, w, P]
    padded = F.pad(cells.permute(2, 0, 1), (1, 0, 1, 0), value=torch.inf).permute(1, 2, 0)
    before = (padded[1:, :-1], padded[:-1, 1:], padded[:-1, :-1])
    return torch.stack([(cells - other).abs().mean(-1) for other in before]).amin(0)


def choose(model, batch, i, budget) -> Tensor:
    return at_scale_1(
        top(surprise(pixels(model, batch, i), model.config.cell).flatten().cpu(), budget), batch.grids[i][1]
    )


METHODS = [
    Method("pixelprune", "before the tower", "pixel redundancy (PixelPrune's idea, arXiv 2604.00886)", before(choose))
]
