"""Where the tokens go: the fourth of ARR-COC's five stages.

From relevance to an *allocation*: rows `(scale, y, x)`, one a token. A token at scale s covers the s x s cells from
`(y, x)` on, shrunk to one cell's pixels. Two allocators stand behind `attend`:

- `topk`: the most relevant cells at scale 1, the rest is dropped.
- `lod`: a quadtree over scales 4, 2 and 1 in which each region holds nothing, one coarse token, or is split, child by
  child. What a region's n-th token is worth is known in closed form (`_region_values`), so the budget is spent by one
  sort: optimal pruning of a tree by its convex hull (Chou, Lookabaugh & Gray 1989; Shoham & Gersho 1988 for the
  Lagrangian that it solves). Top-K and plain downscaling are both among the trees it chooses from.

All of it takes one image, runs in float64 on the CPU over a few thousand numbers, and breaks ties by position: the
same relevance gives the same tokens on every device, in every batch and dtype. No gradient passes; training uses the
gain at the chosen tokens (`token_gain`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCALES = (1, 2, 4)

# A coarse token is worth 1 - WORTH * detail of its cells. The two numbers make contract 6 hold at every level of
# detail: where detail is the same everywhere, a quarter of the tokens is best spent at scale 2 throughout. That needs
# value per token 4 f2 >= 1, and a hull that does not skip scale 2: 4 (f2 - f4) >= 1 - f2, with f = 1 - WORTH * detail.
WORTH = {2: 0.7, 4: 0.9}

_LEAST = 1e-3  # least gain (of the most) and detail: every cell is worth something, so a budget can always be spent
_STEPS = 2.0**16  # both are rounded to 1 / _STEPS, so that rounding noise of the stages before cannot break a tie


class Shaping(nn.Module):
    """Relevance to gain: `sigmoid(steepness * (relevance - offset))`, both learned. `[h, w]` -> `[h, w]` in (0, 1)."""

    def __init__(self, steepness: float = 6.0, offset: float = 0.6):
        super().__init__()
        self.initial = (steepness, offset)
        self.steepness = nn.Parameter(torch.empty(()))
        self.offset = nn.Parameter(torch.empty(()))

    def reset_parameters(self):
        nn.init.constant_(self.steepness, self.initial[0])
        nn.init.constant_(self.offset, self.initial[1])

    def forward(self, relevance: Tensor) -> Tensor:
        return torch.sigmoid(self.steepness * (relevance - self.offset))


def attend(gain: Tensor, detail: Tensor, budget: int, allocator: str = "lod", neighbourhood: float = 0.0) -> Tensor:
    """Spends `budget` tokens on one image.

    Args:
        gain (`[h, w]`, finite, >= 0): what seeing each cell in full is worth, next to the others: only ratios count.
        detail (`[2, h, w]` in [0, 1]): the share of each cell lost at scale 2 and at scale 4.
        budget: tokens. With as many tokens as cells or more, every cell is kept at scale 1.
        allocator: `"lod"` or `"topk"`.
        neighbourhood: `"topk"` only: share of the 3x3 neighbourhood's mean gain added to each cell.

    Returns:
        `[n, 3]` int64 on the CPU, rows `(scale, y, x)` in raster order of the tokens' centres, no cell covered twice.
        `n` is the budget, or one or two less with `lod` where the last token would have torn a coarse one apart.

    Raises:
        ValueError: for a gain that is not finite, or shapes or a budget that do not fit.
    """
    if gain.dim() != 2 or detail.shape != (2, *gain.shape):
        raise ValueError(f"gain is {list(gain.shape)}, detail {list(detail.shape)}: pass [h, w] and [2, h, w].")
    if budget < 1:
        raise ValueError(f"budget is {budget}: an image needs at least 1 token.")
    gain, detail = (x.detach().to("cpu", torch.float64) for x in (gain, detail))
    if not (gain.isfinite().all() and detail.isfinite().all()):
        raise ValueError("gain or detail holds NaN or infinity: check the image's pixels and the model's weights.")
    h, w = gain.shape
    gain = gain / gain.max().clamp(min=torch.finfo(torch.float64).tiny)
    gain, detail = ((x * _STEPS).round() / _STEPS for x in (gain, detail))
    if budget >= h * w:
        return flat(h, w, 1)
    if allocator == "topk":
        return _topk(gain, budget, neighbourhood)
    if allocator == "lod":
        return _lod(gain, detail, budget)
    raise ValueError(f"allocator {allocator!r} is unknown: choose 'lod' or 'topk'.")


def flat(h: int, w: int, scale: int) -> Tensor:
    """The allocation of plain downscaling: `[n, 3]`, every place of an `h x w` grid at one scale."""
    y, x = torch.meshgrid(torch.arange(0, h, scale), torch.arange(0, w, scale), indexing="ij")
    return torch.stack([torch.full_like(y, scale), y, x], -1).reshape(-1, 3)


def flat_scale(h: int, w: int, tokens: int) -> int:
    """The smallest power of two at which an `h x w` grid takes at most `tokens` tokens."""
    scale = 1
    while -(-h // scale) * -(-w // scale) > max(tokens, 1):
        scale *= 2
    return scale


def resolve_budget(budget: int | float | str, gain: Tensor, coverage: float, least: int, most: int) -> int:
    """Tokens for one image: a count as it is, a share of its cells rounded, `"auto"` by how its gain spreads.

    `"auto"` is the smallest number of cells that hold `coverage` of the gain `[h, w]`, within `[least, most]`.
    """
    if budget == "all":
        return gain.numel()
    if budget == "auto":
        share = gain.detach().to("cpu", torch.float64).flatten().sort(descending=True).values.cumsum(0)
        needed = int((share < coverage * share[-1]).sum()) + 1
        return min(max(needed, least), most)
    if isinstance(budget, float):
        return max(1, round(budget * gain.numel()))
    return budget


def token_gain(gain: Tensor, allocation: Tensor) -> Tensor:
    """Mean gain over what each token covers: `[h, w]`, `[n, 3]` -> `[n]`, differentiable in the gain."""
    pooled = {s: F.avg_pool2d(gain[None], s, ceil_mode=True)[0] for s in allocation[:, 0].unique().tolist()}
    out = gain.new_zeros(len(allocation))
    for s, mean in pooled.items():
        at = (allocation[:, 0] == s).nonzero()[:, 0].to(gain.device)
        rows = allocation[allocation[:, 0] == s]
        out = out.index_put((at,), mean[(rows[:, 1] // s).to(gain.device), (rows[:, 2] // s).to(gain.device)])
    return out


def tokens_per_cell(allocation: Tensor, h: int, w: int) -> Tensor:
    """The homunculus as numbers: `[h, w]`, 1 / s^2 where a token at scale s covers the cell, 0 where nothing does."""
    out = torch.zeros(h, w, dtype=torch.float64)
    for s in allocation[:, 0].unique().tolist():
        _, y, x = allocation[allocation[:, 0] == s].T
        for dy in range(s):
            for dx in range(s):
                inside = (y + dy < h) & (x + dx < w)
                out[y[inside] + dy, x[inside] + dx] = 1 / s**2
    return out


def in_raster_order(allocation: Tensor, h: int, w: int) -> Tensor:
    """Sorts rows `(scale, y, x)` by their centres' row, then column, where a centre is that of the cells inside."""
    s, y, x = allocation.T
    row, column = y + (y + s).clamp(max=h), x + (x + s).clamp(max=w)  # twice the centre's coordinates: whole numbers
    return allocation[torch.argsort(row * (4 * w) + column, stable=True)]


def _topk(gain: Tensor, budget: int, neighbourhood: float) -> Tensor:
    if neighbourhood:
        gain = gain + neighbourhood * F.avg_pool2d(gain[None], 3, 1, 1, count_include_pad=False)[0]
    chosen = torch.argsort(gain.flatten(), descending=True, stable=True)[:budget].sort().values
    return torch.stack([torch.ones_like(chosen), chosen // gain.shape[1], chosen % gain.shape[1]], -1)


def _lod(gain: Tensor, detail: Tensor, budget: int) -> Tensor:
    h, w = gain.shape
    gain, detail = gain.clamp(min=_LEAST), detail.clamp(min=_LEAST)
    leaves = _blocks(gain)  # [b, 4, 4]: 4x4 regions, the 2x2 blocks in each, the cells in each of those
    coarse2 = _blocks(gain * (1 - WORTH[2] * detail[0])).sum(-1)  # [b, 4]
    coarse4 = _blocks(gain * (1 - WORTH[4] * detail[1])).sum((-1, -2))  # [b]

    # A 2x2 block: its first token shows all of it coarsely or its best cell; with more it is split, best cells first.
    leaf_gain, leaf_order = torch.sort(leaves, dim=-1, descending=True, stable=True)
    block_worth, block_steps = _region_values(coarse2, leaf_gain)  # both [b, 4, 4]
    # A 4x4 region: likewise, with the steps of its four blocks, best first, in the place of cells.
    steps, step_order = _ranked(block_steps.flatten(1))  # [b, 16]; equal steps stay block by block
    region_worth, region_steps = _region_values(coarse4, steps)

    # Spend: the budget's best steps over all regions. Steps fall within a region, so what is taken of it is a prefix.
    ranked = _ranked(region_steps.flatten())[1][:budget]
    n = torch.bincount(ranked // 16, minlength=len(leaves))  # [b] tokens for each region
    # Only the region where the budget ran out can stop between two corners of its hull. Two or three tokens that
    # would tear a coarse one apart for less than it is worth are left unspent.
    n = torch.where((n > 1) & (n < 4) & (region_worth.gather(1, (n - 1).clamp(min=0)[:, None])[:, 0] < coarse4), 1, n)

    whole4 = (n == 1) & (coarse4 >= steps[:, 0])
    taken = torch.arange(16)[None] < torch.where(whole4, 0, n)[:, None]
    n2 = torch.zeros(len(n), 4, dtype=torch.int64).scatter_add_(1, step_order // 4, taken.long())  # [b, 4]
    torn = (n2 > 1) & (n2 < 4) & (block_worth.gather(2, (n2 - 1).clamp(min=0)[..., None])[..., 0] < coarse2)
    n2 = torch.where(torn, 1, n2)
    whole2 = (n2 == 1) & (coarse2 >= leaf_gain[..., 0])
    taken = torch.arange(4) < torch.where(whole2, 0, n2)[..., None]
    kept = torch.zeros_like(taken).scatter_(2, leaf_order, taken)  # [b, 4, 4]

    columns = -(-w // 4)
    region, block, cell = kept.nonzero().T
    rows = [_row(1, region, columns, block, cell)]
    region, block = whole2.nonzero().T
    rows.append(_row(2, region, columns, block))
    rows.append(_row(4, whole4.nonzero()[:, 0], columns))
    return in_raster_order(torch.cat(rows), h, w)


def _blocks(x: Tensor) -> Tensor:
    """`[h, w]` -> `[b, 4, 4]`: 4x4 regions in raster order, their 2x2 blocks, those blocks' cells; zeros outside."""
    h, w = x.shape
    x = F.pad(x, (0, -w % 4, 0, -h % 4))
    rows, columns = x.shape[0] // 4, x.shape[1] // 4
    return x.reshape(rows, 2, 2, columns, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(-1, 4, 4)


def _row(scale: int, region: Tensor, columns: int, block: Tensor | None = None, cell: Tensor | None = None) -> Tensor:
    """Rows `(scale, y, x)` of the cells, blocks or regions with these numbers."""
    y, x = region // columns * 4, region % columns * 4
    for number, size in ((block, 2), (cell, 1)):
        if number is not None:
            y, x = y + number // 2 * size, x + number % 2 * size
    return torch.stack([torch.full_like(y, scale), y, x], -1)


def _region_values(coarse: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """What a region's tokens are worth.

    Args:
        coarse (`[...]`): one coarse token's worth.
        steps (`[..., m]`, falling): what each further token adds when the region is split.

    Returns:
        The worth of 1 to m tokens if the region is split, and the slopes of the concave hull over all choices, which
        fall: `[..., m]` each.
    """
    split = steps.cumsum(-1)
    worth = torch.cat([torch.maximum(split[..., :1], coarse[..., None]), split[..., 1:]], -1)
    # Only the first token can stand out, so the hull leaves it by the steepest line and then follows the steps.
    after = (worth[..., 1:] - worth[..., :1]) / torch.arange(1, steps.shape[-1], dtype=steps.dtype)
    far = after.max(-1, keepdim=True)
    skipped = torch.arange(steps.shape[-1] - 1) <= far.indices
    return split, torch.cat([worth[..., :1], torch.where(skipped, far.values, steps[..., 1:])], -1)


def _ranked(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts falling along the last axis, equal values (to about nine digits) in their order: values and indices."""
    order = torch.argsort((steps * 2.0**30).round(), dim=-1, descending=True, stable=True)
    return steps.gather(-1, order), order
