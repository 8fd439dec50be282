"""What the pixels say about each cell: the first of ARR-COC's five stages.

A *cell* is the square that one visual token shows at native resolution (32x32 px for Qwen3-VL). Here an
image's pixels become

- `texture`: an array `[C, h, w]` of 13 channels a cell, up to 40 with the switchable `GROUPS`;
- `detail`: `[S, h, w]`, how much of a cell is lost if it is shown 2-fold or 4-fold smaller.

Nothing is learned and nothing is kept: pure functions of one image (a batch of differently sized images is
a list), computed in float32 whatever the model's dtype (float64 stays, for gradient checks). Every range is
fixed, never stretched to the image at hand: a cell's values depend on its surroundings alone (but for
`colour_contrast`, which asks how common a colour is in the image).
Filters run where a cell is 16x16 px and pool to cells at the end: a filter run on one value a cell would
miss everything that is thinner than a cell.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from kornia.color import rgb_to_grayscale, rgb_to_lab
from kornia.filters import laplacian, spatial_gradient
from torch import Tensor

from .patches import finite, pad_to


class Channel(NamedTuple):
    name: str
    low: float
    high: float
    group: str  # the key of `GROUPS` that switches it on; "" is always on
    source: str


CHANNELS = (
    Channel("red", 0, 1, "", "mean of sRGB red over the cell"),
    Channel("green", 0, 1, "", "mean of sRGB green over the cell"),
    Channel("blue", 0, 1, "", "mean of sRGB blue over the cell"),
    Channel("lightness", 0, 1, "", "mean of CIE L* (D65) / 100"),
    Channel("red_green", -1, 1, "", "mean of CIE a* / 128: red above, green below"),
    Channel("edge_x", 0, 1, "", "largest |Sobel x| of luminance, 1 = a step from black to white"),
    Channel("edge_y", 0, 1, "", "largest |Sobel y| of luminance, 1 = a step from black to white"),
    Channel("edges", 0, 1, "", "mean Sobel magnitude m as m / (m + 0.1): how densely the cell is drawn"),
    Channel("y", 0, 1, "", "the cell's centre, top to bottom"),
    Channel("x", 0, 1, "", "the cell's centre, left to right"),
    Channel("eccentricity", 0, 1, "", "distance from the image's centre / half its diagonal"),
    Channel("saliency", 0, 1, "", "centre-surround colour difference, half a cell against 7x7 cells"),
    Channel("luminance", 0, 1, "", "mean of luma, Rec. 601"),
    Channel("faint_edges", 0, 1, "edges", "mean |Laplacian| over itself + luma's deviation: low-contrast text"),
    Channel("variance", 0, 1, "local", "luma's variance in the cell x 4: 1 = half black, half white"),
    Channel("entropy", 0, 1, "local", "entropy of luma's difference from the cell's mean, 9 bins / log 9"),
    Channel("blue_yellow", -1, 1, "opponency", "mean of CIE b* / 128: yellow above, blue below"),
    Channel("surround_fine", 0, 1, "surround", "as saliency, a quarter of a cell against 3x3 cells"),
    Channel("surround_coarse", 0, 1, "surround", "as saliency, a cell against 15x15 cells"),
    Channel("strokes", 0, 1, "text", "closing - opening of luma by 5x5 px of 16 a cell: strokes as thin as text's"),
    Channel("colour_name", 0, 1, "cluster", "which of the eleven basic colours is nearest, in `PALETTE`'s order / 10"),
    Channel("colour_contrast", 0, 1, "cluster", "distance of that colour from this image's others, by their share"),
    Channel("motion", 0, 1, "previous", "mean change d of luma since the previous frame as d / (d + 0.05); else 0"),
    Channel("previous_relevance", 0, 1, "previous", "the previous frame's relevance, passed in; else 0"),
    *(Channel(f"semantic_{i}", -1, 1, "semantic", "from outside, as from a glance; else 0") for i in range(16)),
)

# The red-green axis and the middle of three centre-surround scales are always on: `opponency` and `surround`
# add the rest.
GROUPS = {g: tuple(c.name for c in CHANNELS if c.group == g) for g in dict.fromkeys(c.group for c in CHANNELS) if g}

# The eleven basic colour terms (Berlin & Kay 1969) as sRGB. A fixed palette in place of k-means: the same
# colour has the same number in every image, and there is nothing to initialise. Neighbours look alike.
PALETTE = (
    *((0, 0, 0), (128, 128, 128), (255, 255, 255), (255, 160, 190), (220, 30, 30), (120, 70, 30)),
    *((245, 130, 30), (250, 225, 50), (40, 150, 50), (40, 80, 200), (130, 50, 150)),
)

_FINE = 16  # px a cell at which filters run
# RMS residual that counts as half lost; sensor noise is about 0.01, black text on white 0.2. With 0.08 coarse tokens
# seemed worth too much: at 5 % of the tokens the oracle answered 0.65 of 216 scenes, with 0.03 0.77, with 0.01 0.79.
_LOST = 0.03


def channel_names(groups: Sequence[str] = ()) -> tuple[str, ...]:
    """The texture array's channels, in order, for a choice of `GROUPS` (13 for none, 40 for all)."""
    if unknown := set(groups) - set(GROUPS):
        raise ValueError(f"texture groups {sorted(unknown)} are unknown: choose from {', '.join(GROUPS)}.")
    return tuple(channel.name for channel in CHANNELS if channel.group in {"", *groups})


def texture(
    pixels: Tensor,
    cell: int = 32,
    groups: Sequence[str] = (),
    *,
    previous: Tensor | None = None,
    previous_relevance: Tensor | None = None,
    semantic: Tensor | None = None,
) -> Tensor:
    """The texture array `[C, h, w]` of one image: `channel_names(groups)`, each in the range that `CHANNELS` states.

    `pixels [3, H, W]` in [0, 1], H and W multiples of `cell`. For the group `previous`: the previous frame's
    pixels, of the same size, and its relevance `[h, w]`. For the group `semantic`: `[16, h, w]`. What is not
    given is zero.
    """
    names = channel_names(groups)
    image = _checked("pixels", pixels, cell)
    h, w = image.shape[2] // cell, image.shape[3] // cell
    # Autocast would run the filters in the model's bf16, and the choice would change with it.
    with torch.autocast(image.device.type, enabled=False):
        rgb = _shrink(image, cell)  # [1, 3, 16h, 16w]
        luma = rgb_to_grayscale(rgb)  # [1, 1, 16h, 16w]
        lab = _exactly(rgb_to_lab, rgb)
        gradient = _exactly(spatial_gradient, luma)[:, 0]  # [1, 2, 16h, 16w]
        y, x, away = _places(h, w, rgb)
        lab_mean = _mean(lab)
        parts = [
            *_mean(rgb)[0],
            lab_mean[0, 0] / 100,
            lab_mean[0, 1] / 128,
            *F.max_pool2d(gradient.abs(), _FINE)[0] * 2,
            _saturate(_mean(_root(gradient.square().sum(1, keepdim=True))), 0.1)[0, 0],
            *(y, x, away, _centre_surround(lab, 2, 7)),
            _mean(luma)[0, 0],
        ]
        if "edges" in groups or "local" in groups:
            residual = luma - _mean(luma).repeat_interleave(_FINE, 2).repeat_interleave(_FINE, 3)
            variance = _mean(residual.square())[0, 0]
        if "edges" in groups:
            curve = _exactly(lambda x: laplacian(x, 3, "replicate", normalized=False), luma)
            curve = _mean(curve.abs())[0, 0] / 8
            parts += [curve / (curve + _root(variance) + 1e-3)]
        if "local" in groups:
            parts += [variance * 4, _entropy(residual)]
        if "opponency" in groups:
            parts += [lab_mean[0, 2] / 128]
        if "surround" in groups:
            parts += [_centre_surround(lab, 4, 3), _centre_surround(lab, 1, 15)]
        if "text" in groups:
            parts += [_strokes(luma)]
        if "cluster" in groups:
            parts += _nearest_colour(lab_mean[0])
        if "previous" in groups:
            parts += [_motion(luma, previous, cell), _given("previous_relevance", previous_relevance, (h, w), luma)]
        if "semantic" in groups:
            parts += [*_given("semantic", semantic, (16, h, w), luma)]
    assert len(parts) == len(names)
    return torch.stack(parts)


def detail(pixels: Tensor, cell: int = 32, scales: Sequence[int] = (2, 4)) -> Tensor:
    """How much of each cell is lost at each scale: `[3, H, W]` in [0, 1] -> `[len(scales), h, w]` in [0, 1).

    At scale s the image is shrunk s-fold by area averaging and enlarged again bilinearly, at full resolution,
    so that text of 9 px counts as lost. The loss is r / (r + 0.03), r the RMS difference over the cell's RGB
    (grey and colour alike). It depends on nothing beyond s px of the cell and never falls as `scales` grow.
    """
    if not scales or list(scales) != sorted(set(scales)) or scales[0] < 2:
        raise ValueError(f"scales are {list(scales)}: pass whole numbers from 2 on, in growing order.")
    image = _checked("pixels", pixels, cell)
    height, width = image.shape[2:]
    lost = []
    for s in scales:
        shrunk = F.avg_pool2d(pad_to(image, s), s)
        back = F.interpolate(shrunk, scale_factor=s, mode="bilinear")[..., :height, :width]
        # In place: fresh memory for each step would take longer than the arithmetic.
        lost.append(_root(F.avg_pool2d(back.sub_(image).square_().mean(1, keepdim=True), cell)))
    return _saturate(torch.cat(lost)[:, 0].cummax(0).values, _LOST)


def _centre_surround(lab: Tensor, centres: int, surround: int) -> Tensor:
    """`[h, w]`: the largest Lab distance between one of a cell's `centres`^2 parts and `surround`^2 cells around it.

    Itti, Koch & Niebur 1998, with the plain colour distance of Achanta et al. 2009 in place of feature maps.
    Their surround is the whole image; ours is a window, so that a cell never depends on what is far away.
    """
    part = F.avg_pool2d(lab, _FINE // centres)
    around = F.avg_pool2d(_mean(lab), surround, 1, surround // 2, count_include_pad=False)
    around = around.repeat_interleave(centres, 2).repeat_interleave(centres, 3)
    apart = _root((part - around).square().sum(1, keepdim=True))
    return _saturate(F.max_pool2d(apart, centres), 30.0)[0, 0]


def _entropy(residual: Tensor) -> Tensor:
    """`[h, w]`: entropy of `residual`'s histogram in each cell over 9 soft bins from -0.5 to 0.5, of its most."""
    place = (residual.clamp(-0.5, 0.5) + 0.5) * 8
    # A value is shared between its two bins: hard bins would make a flat cell on a border flip with rounding.
    share = _mean(torch.cat([(1 - (place - b).abs()).clamp_min(0) for b in range(9)], 1))
    return -torch.special.xlogy(share, share.clamp_min(1e-12)).sum(1)[0] / torch.log(share.new_tensor(9.0))


def _strokes(luma: Tensor) -> Tensor:
    """`[h, w]`: mean of closing minus opening by 5x5 px: light or dark strokes up to 4 px of a cell's 16 wide."""

    def grow(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 5, 1, 2)

    closing, opening = -grow(-grow(luma)), grow(-grow(-luma))
    return _mean(closing - opening)[0, 0]


def _nearest_colour(lab: Tensor) -> list[Tensor]:
    """Two `[h, w]` from cell colours `[3, h, w]`: the nearest of `PALETTE`, and how it differs from the others.

    The latter is the histogram contrast of Cheng et al. 2011: the mean Lab distance to the colours of the
    image's cells, over 100.
    """
    named = rgb_to_lab(torch.tensor(PALETTE).double().T[..., None] / 255)[..., 0].T.to(lab)  # [11, 3]
    nearest = (lab.flatten(1).T[:, None] - named).square().sum(-1).argmin(1)  # [h * w]
    share = torch.bincount(nearest, minlength=len(named)) / len(nearest)
    apart = (named[:, None] - named).square().sum(-1).sqrt()  # [11, 11]
    contrast = ((apart * share).sum(1) / 100).clamp_max(1)
    return [part.view(lab.shape[1:]).to(lab) for part in (nearest / (len(named) - 1), contrast[nearest])]


def _motion(luma: Tensor, previous: Tensor | None, cell: int) -> Tensor:
    """`[h, w]`: how much luma has changed since the frame `previous [3, H, W]`."""
    if previous is None:
        return torch.zeros_like(_mean(luma)[0, 0])
    before = rgb_to_grayscale(_shrink(_checked("previous", previous, cell), cell))
    if before.shape != luma.shape:
        raise ValueError(f"previous is {list(previous.shape)}: pass a frame of the same size as pixels.")
    return _saturate(_mean((luma - before).abs()), 0.05)[0, 0]


def _given(name: str, value: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """`value` in `like`'s dtype and place, or zeros."""
    if value is None:
        return like.new_zeros(shape)
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} is {list(value.shape)}: pass {list(shape)} for this image.")
    return value.to(like)


def _places(h: int, w: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`y`, `x` and eccentricity, each `[h, w]` in [0, 1], at the cells' centres."""
    y, x = ((torch.arange(n, device=like.device, dtype=like.dtype) + 0.5) / n for n in (h, w))
    y, x = torch.meshgrid(y, x, indexing="ij")
    away = ((y - 0.5) * h).square() + ((x - 0.5) * w).square()
    return y, x, away.sqrt() / (0.5 * (h * h + w * w) ** 0.5)


def _shrink(image: Tensor, cell: int) -> Tensor:
    """Area average to 16 px a cell (a cell smaller than that is enlarged by repetition)."""
    size = [n // cell * _FINE for n in image.shape[2:]]
    return F.interpolate(image, size, mode="area") if cell % _FINE else F.avg_pool2d(image, cell // _FINE)


def _mean(x: Tensor) -> Tensor:
    """Mean over each cell, `[1, C, 16h, 16w]` -> `[1, C, h, w]`."""
    return F.avg_pool2d(x, _FINE)


def _root(x: Tensor) -> Tensor:
    """Square root with a finite slope at 0, where it is exactly 0."""
    return (x + 1e-12).sqrt() - 1e-6


def _saturate(x: Tensor, half: float) -> Tensor:
    """[0, inf) -> [0, 1), with `half` at 0.5."""
    return x / (x + half)


def _exactly(function, x: Tensor) -> Tensor:
    """Run a kornia function without TF32: on a GPU its convolutions would round to ten bits, and choices differ."""
    return function(x.double()).to(x.dtype) if x.is_cuda else function(x)


def _checked(name: str, pixels: Tensor, cell: int) -> Tensor:
    """One image as float `[1, 3, H, W]`, or a ValueError that says what to pass instead."""
    if pixels.dim() != 3 or pixels.shape[0] != 3:
        raise ValueError(f"{name} are {list(pixels.shape)}: pass one RGB image [3, H, W].")
    if pixels.shape[1] % cell or pixels.shape[2] % cell or not pixels.numel():
        raise ValueError(f"{name} are {list(pixels.shape)}: resize or pad H and W to multiples of {cell} px.")
    pixels, low, high = finite(name, pixels)
    if low < -1e-3 or high > 1 + 1e-3:
        raise ValueError(f"{name} range from {low:.3g} to {high:.3g}: scale them to [0, 1] (`to_pixels` does).")
    return pixels[None]
