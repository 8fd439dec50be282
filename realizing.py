"""Only the chosen tokens go through Qwen3-VL, where they truly are: the last of ARR-COC's five stages.

An allocation and an image's patches become what the vision tower would have computed itself (patches, taps into the
learned position table, rotary positions, sequence lengths) and what the language model needs (a shortened prompt and
its 4-row position ids). Two realizers:

- *before*: the tower is given the chosen patches alone; coarse tokens are cut from a pyramid of the image.
- *after*: the whole image goes through the tower and tokens are picked from its output, as published pruners do.

Nothing of Qwen3-VL is copied or patched: its forward takes all of this as arguments.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .patches import from_patches, pad_to, to_patches


def places(allocation: Tensor, h: int, w: int, merge_size: int = 2, rule: str = "native") -> tuple[Tensor, Tensor]:
    """Where tokens stand, and their patches: the one place where this is decided.

    Args:
        allocation (`[n, 3]`): rows `(scale, y, x)`.
        h, w: the native grid in cells.
        rule: `"native"`, at the centre of the cells covered (inside the image), or `"corner"`, at the first of them.

    Returns:
        `[n, 2]` float32, each token's (y, x) in cells, as M-RoPE counts them, and `[n, merge_size**2, 2]` float32, each
        of its patches' (y, x) in native patches, as the tower counts them. Whole numbers at scale 1.
    """
    scale, corner = allocation[:, :1], allocation[:, 1:]
    steps = torch.arange(merge_size, device=allocation.device)
    within = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1).reshape(1, -1, 2)
    first = corner[:, None] * merge_size + within * scale[:, None]  # [n, m * m, 2] patches
    end = torch.tensor([h, w], device=allocation.device)

    def centre(first: Tensor, scale: Tensor, end: Tensor) -> Tensor:
        first = torch.minimum(first, end - 1)
        last = torch.minimum(first + scale - 1, end - 1) if rule == "native" else first
        return (first + last).float() / 2

    return centre(corner, scale, end), centre(first, scale[:, None], end * merge_size)


def gather_patches(patches: Tensor, allocation: Tensor, h: int, w: int, **layout: int) -> Tensor:
    """The tower's input rows for one image's allocation.

    `patches [h * w * m * m, D]`, a still image's rows of `pixel_values`, any dtype -> `[n * m * m, D]`. A token at
    scale s shows its s x s cells shrunk by area averaging; beyond the image's edge, the edge is repeated.
    `layout` is the processor's `patch_size`, `temporal_patch_size` and `merge_size`.
    """
    unit = layout["merge_size"] ** 2
    allocation = allocation.to(patches.device)
    rows = patches.reshape(h * w, unit, -1)
    scale, y, x = allocation.T
    if bool((scale == 1).all()):
        return rows[y * w + x].flatten(0, 1)
    out = rows.new_empty(len(allocation), unit, patches.shape[1])
    image = from_patches(patches, (h * layout["merge_size"], w * layout["merge_size"]), **layout)
    cell = layout["patch_size"] * layout["merge_size"]
    for s in scale.unique().tolist():
        at = (scale == s).nonzero()[:, 0]
        level, columns = rows, w
        if s > 1:
            columns = -(-w // s)
            shrunk = F.avg_pool2d(pad_to(image[None], s * cell), s)[0]
            level = to_patches(shrunk, **layout).reshape(-1, unit, patches.shape[1])
        out = out.index_put((at,), level[(y[at] // s) * columns + x[at] // s])
    return out.flatten(0, 1)


def tower_inputs(
    allocations: Sequence[Tensor], grids: Sequence[tuple[int, int]], side: int, **rule
) -> dict[str, Tensor]:
    """What the vision tower would have computed from `grid_thw`, for chosen tokens only. One or more images.

    Args:
        allocations, grids: each image's `[n, 3]` and its `(h, w)` in cells.
        side: rows of the square learned position table (`num_position_embeddings ** 0.5`).
        rule: `merge_size` and `rule` of `places`.

    Returns:
        The tower's keyword arguments: `interp_indices`, `interp_weights [N, 4]` (bilinear taps, corners aligned),
        `position_ids [N, 2]`, `cu_seqlens [images + 1]` int32 and `max_seqlen`; N counts patches.
    """
    indices, weights, positions, lengths = [], [], [], []
    for allocation, (h, w) in zip(allocations, grids, strict=True):
        at = places(allocation, h, w, **rule)[1].flatten(0, 1)
        size = torch.tensor([h, w], device=at.device) * rule.get("merge_size", 2)
        source = at * (side - 1) / (size - 1)  # where each patch falls in the table, corners aligned
        low = source.floor().clamp(max=side - 1)
        share, low = source - low, low.long()
        high = (low + 1).clamp(max=side - 1)
        rows, columns = torch.stack([low[:, 0], high[:, 0]], 1), torch.stack([low[:, 1], high[:, 1]], 1)
        indices.append((rows[:, :, None] * side + columns[:, None]).flatten(1))
        by_row, by_column = (torch.stack([1 - share[:, i], share[:, i]], 1) for i in (0, 1))
        weights.append((by_row[:, :, None] * by_column[:, None]).flatten(1))
        positions.append(at)
        lengths.append(len(at))
    cu_seqlens = F.pad(torch.tensor(lengths, device=at.device).cumsum(0, dtype=torch.int32), (1, 0))
    return {
        "interp_indices": torch.cat(indices),
        "interp_weights": torch.cat(weights),
        "position_ids": torch.cat(positions),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max(lengths),
    }


def pool_features(features: Tensor, allocation: Tensor, h: int, w: int) -> Tensor:
    """The *after* realizer: tokens from the full tower output of one image, `[h * w, d]` -> `[n, d]`.

    At scale 1 these are rows as they are; a coarse token is the mean over the cells that it covers inside the image.
    """
    scale, y, x = allocation.to(features.device).T
    out = features[y * w + x]
    for s in set(scale.tolist()) - {1}:
        at = (scale == s).nonzero()[:, 0]
        grid = features.T.reshape(1, -1, h, w)
        pooled = F.avg_pool2d(grid, s, ceil_mode=True, count_include_pad=False)[0]  # [d, h / s, w / s]
        out = out.index_put((at,), pooled[:, y[at] // s, x[at] // s].T)
    return out


def shorten(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    is_image: Tensor,
    allocations: Sequence[Tensor],
    grids: Sequence[tuple[int, int]],
    pad: int,
    **rule,
) -> dict[str, Tensor]:
    """Takes the placeholders of tokens that were not chosen out of a batch of prompts.

    Args:
        input_ids, attention_mask (`[B, L]`): the prompts as the processor made them.
        position_ids (`[3, B, L]`): stock M-RoPE positions of the full prompts.
        is_image (`[B, L]` bool): image placeholders, `h * w` for each image, in the images' order.
        allocations, grids: each image's `[n, 3]` and `(h, w)` in cells.
        pad: the token that fills up shorter rows, on the side that the given prompts are padded on (left if none is).
        rule: `merge_size` and `rule` of `places`.

    Returns:
        `input_ids`, `attention_mask`, `kept [B, l]` (the column that each token had, -1 for padding) and
        `position_ids [4, B, l]`: text positions, then true t, h, w. They are whole numbers (int64) unless a coarse
        token stands between two cells (float32). Text after an image continues where stock has it.
    """
    real = attention_mask.bool()
    keep = real.clone()
    positions = position_ids.float()
    rows, columns = is_image.nonzero(as_tuple=True)  # images in order, each a run of h * w placeholders
    start = 0
    for allocation, (h, w) in zip(allocations, grids, strict=True):
        row, at = rows[start], columns[start : start + h * w]
        n = len(allocation)
        keep[row, at[n:]] = False
        place = places(allocation.to(positions.device), h, w, **rule)[0]
        positions[1:, row, at[:n]] = positions[1:, row, at[0], None] + place.T
        start += h * w
    lengths = keep.sum(1)
    width = int(lengths.max())
    left = bool(real[:, -1].all())
    # Kept columns in order, padding before or after them.
    rank = torch.argsort(keep.long(), dim=1, stable=True, descending=not left)
    kept = rank[:, -width:] if left else rank[:, :width]
    slot = torch.arange(width, device=kept.device)
    valid = slot >= (width - lengths)[:, None] if left else slot < lengths[:, None]
    positions = positions.gather(2, kept.expand(3, -1, -1))
    text = (valid.long().cumsum(-1) - 1).clamp(min=0)
    positions = torch.cat([text[None].to(positions.dtype), positions])
    positions = torch.where(valid, positions, torch.ones_like(positions))
    if bool((positions == positions.round()).all()):
        positions = positions.long()
    return {
        "input_ids": torch.where(valid, input_ids.gather(1, kept), pad),
        "attention_mask": valid.to(attention_mask.dtype),
        "position_ids": positions,
        "kept": torch.where(valid, kept, -1),
    }
