"""Qwen3-VL's patches, the rows of `pixel_values`, from pixels and back: a layout; nothing is seen or learned here."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def to_patches(pixels: Tensor, *, patch_size: int = 16, temporal_patch_size: int = 2, merge_size: int = 2) -> Tensor:
    """Cut one frame into the rows that Qwen3-VL's vision tower reads. A pure re-layout: no normalisation.

    `[C, H, W]`, any dtype -> `[h_p * w_p, C * temporal * patch * patch]`. Rows run in spatial-merge-block
    order `(h_p/m, w_p/m, m, m)`, columns are `(channel, temporal, row, column)`; the frame is repeated along
    the temporal axis, as the image processor does for a still image. Differentiable.
    """
    block = patch_size * merge_size
    if pixels.dim() != 3 or pixels.shape[1] % block or pixels.shape[2] % block or not pixels.numel():
        raise ValueError(f"pixels are {list(pixels.shape)}: pass one frame [C, H, W], H and W multiples of {block}.")
    c, height, width = pixels.shape
    blocks = pixels.reshape(c, height // block, merge_size, patch_size, width // block, merge_size, patch_size)
    rows = blocks.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)  # [h, w, m, m, C, 1, p, p]
    rows = rows.expand(-1, -1, -1, -1, -1, temporal_patch_size, -1, -1)
    return rows.reshape(height * width // patch_size**2, c * temporal_patch_size * patch_size**2)


def from_patches(
    patches: Tensor, grid_hw: Sequence[int], *, patch_size: int = 16, temporal_patch_size: int = 2, merge_size: int = 2
) -> Tensor:
    """Lay one frame's rows out as an image again: the inverse of `to_patches`.

    `[h_p * w_p, C * temporal * patch * patch]`, any dtype -> `[C, H, W]`. `grid_hw` counts patches, as the last
    two of `image_grid_thw` do. The frames of the temporal axis are averaged (a still image's are identical).
    """
    h, w = (int(n) for n in grid_hw)
    m, p = merge_size, patch_size
    if h < 1 or h % m or w < 1 or w % m:
        raise ValueError(f"grid_hw is {h}x{w} patches: pass sides that are multiples of {m}.")
    if patches.dim() != 2 or len(patches) != h * w or patches.shape[1] % (temporal_patch_size * p * p):
        wanted = f"[{h * w}, channels * {temporal_patch_size} * {p} * {p}]"
        raise ValueError(f"patches are {list(patches.shape)}: pass {wanted} for a grid of {h}x{w} patches.")
    blocks = patches.reshape(h // m, w // m, m, m, -1, temporal_patch_size, p, p)
    first, *others = blocks.permute(5, 4, 0, 2, 6, 1, 3, 7)  # [C, h/m, m, p, w/m, m, p] each
    image = first.clone(memory_format=torch.contiguous_format)
    for frame in others:
        image += frame
    return image.div_(temporal_patch_size).view(-1, h * p, w * p)


def to_pixels(
    patches: Tensor,
    grid_thw: Sequence[int],
    *,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    **layout: int,
) -> Tensor:
    """Undo the image processor: one image's (or video's) rows of `pixel_values` -> pixels.

    `[t * h_p * w_p, 3 * temporal * patch * patch]`, any dtype -> float32 `[t, 3, H, W]` in [0, 1]. `t` is 1 for
    an image. `mean` and `std` are the processor's `image_mean` and `image_std`, `layout` its `patch_size`,
    `temporal_patch_size` and `merge_size`.
    """
    t, h, w = (int(n) for n in grid_thw)
    if patches.dim() != 2 or t < 1 or len(patches) != t * h * w:
        grid = f"image_grid_thw {[t, h, w]}"
        raise ValueError(f"pixel_values are {list(patches.shape)} for {grid}: pass this image's {t * h * w} rows.")
    patches, *_ = finite("pixel_values", patches)
    frames = [from_patches(rows, (h, w), **layout) for rows in patches.split(h * w)]
    frames = torch.stack(frames) if t > 1 else frames[0][None]
    if frames.shape[1] != 3:
        raise ValueError(f"pixel_values hold {frames.shape[1]} channels a patch: convert the image to RGB first.")
    mean, std = (frames.new_tensor(values)[:, None, None] for values in (mean, std))
    return frames.mul_(std).add_(mean).clamp_(0, 1)


def pad_to(image: Tensor, multiple: int) -> Tensor:
    """`[B, C, H, W]` with its last rows and columns repeated until both sides are multiples of `multiple`."""
    missing = [-n % multiple for n in image.shape[-2:]]
    return F.pad(image, (0, missing[1], 0, missing[0]), mode="replicate") if any(missing) else image


def finite(name: str, x: Tensor) -> tuple[Tensor, float, float]:
    """`x` in float32 (float64 stays) with its least and greatest value, which must be numbers."""
    x = x if x.dtype == torch.float64 else x.float()
    low, high = (v.item() for v in torch.aminmax(x.detach()))
    if not float("-inf") < low <= high < float("inf"):
        raise ValueError(f"{name} hold NaN or infinite values: repair the image or leave it out.")
    return x, low, high
