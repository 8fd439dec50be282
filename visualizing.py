"""Pictures of what was chosen and why. Each function turns arrays into a PIL image and keeps nothing.

- `relevance_overlay`: where the image is relevant to the question
- `score_maps`: the three ways of knowing, side by side
- `what_the_model_sees`: the image rebuilt from its tokens
- `homunculus`: the tokens as a map, and the image with each place enlarged by its share of them; bare, without
  titles, these two are `token_map` and `magnified`
- `tension_bars`: the balances between opponents
- `summary`: all of these, the question and its answers on one sheet

Arrays may be numpy arrays or tensors of any dtype and device. A grid is `(h, w)` cells; an allocation is
`(N, 3)` whole numbers `(scale, y, x)`: a token at scale s shows the s x s cells whose top left is (y, x).
Pictures are drawn for twice the density of the screen, so their text is large.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw

from .sheets import ACCENT, INK, LINE, MUTED, PAPER, WIDTH, fit, font_for, panel, sheet

CELL = 32  # px that one token shows at scale 1
SCALE_COLOURS = {1: ACCENT, 2: (12, 133, 153), 4: (76, 81, 191)}  # others take the last
NOTES = {
    "propositional": "what information is here",
    "perspectival": "what stands out from here",
    "participatory": "what this question asks for here",
}
_HEAT = np.array([(20, 16, 48), (74, 26, 112), (152, 38, 122), (218, 72, 88), (248, 138, 60), (255, 226, 128)])


def heat(values) -> np.ndarray:
    """[0, 1] of any shape -> `[..., 3]` RGB from 0 to 255: dark indigo to pale yellow, lighter with every step."""
    place = np.clip(values, 0, 1) * (len(_HEAT) - 1)
    return np.stack([np.interp(place, range(len(_HEAT)), _HEAT[:, c]) for c in range(3)], -1)


def relevance_overlay(image: Image.Image, relevance, alpha: float = 0.72) -> Image.Image:
    """`relevance [h, w]` in [0, 1] as heat over the greyed image, of the image's size.

    The heat is the more opaque the higher, up to `alpha`: what is irrelevant stays to be seen, without colour.
    """
    image, relevance = _picture(image), _map("relevance", relevance)
    smooth = Image.fromarray(relevance.astype(np.float32)).resize(image.size, Image.Resampling.BICUBIC)
    smooth = np.clip(np.asarray(smooth), 0, 1)[..., None]
    opacity = alpha * (0.35 + 0.65 * smooth)
    return _image(np.asarray(image.convert("L"))[..., None] * (1 - opacity) + heat(smooth[..., 0]) * opacity)


def score_maps(image: Image.Image, maps: Mapping[str, object]) -> Image.Image:
    """Labelled panels in a row, one for each `{name: [h, w] in [0, 1]}`."""
    if not maps:
        raise ValueError("maps is empty: pass at least one {name: [h, w]}.")
    return sheet([_score_panels(image, maps)])


def what_the_model_sees(image: Image.Image, allocation, grid: Sequence[int]) -> Image.Image:
    """The image rebuilt from its tokens, 32 px a cell: `[32 h, 32 w]`.

    A token at scale s is its region, shrunk s-fold by area and enlarged again. Finer tokens lie on coarser
    ones. What no token covers is faint and hatched: the model has nothing of it.
    """
    allocation, (h, w) = _tokens(allocation, grid)
    native = _picture(image).resize((w * CELL, h * CELL), Image.Resampling.BICUBIC)
    y, x = np.mgrid[: h * CELL, : w * CELL]
    ghost = np.asarray(native.convert("L"))[..., None] * 0.12 + np.array(PAPER) * 0.82
    ghost -= 22 * ((x + y) % 12 < 2)[..., None]
    seen = _image(ghost)
    for s, top, left in sorted(allocation.tolist(), reverse=True):
        right, bottom = min(left + s, w) * CELL, min(top + s, h) * CELL
        region = native.crop((left * CELL, top * CELL, right, bottom))
        if s > 1:
            region = region.reduce(s).resize(region.size, Image.Resampling.BILINEAR)
        seen.paste(region, (left * CELL, top * CELL))
    return seen


def homunculus(image: Image.Image, allocation, grid: Sequence[int]) -> Image.Image:
    """Two panels: every token on the image, and the image with each place enlarged by its share of the tokens.

    The name is Penfield's (1937): the body as the cortex draws it, fingers large and back small.
    """
    return sheet([_homunculus_panels(image, *_tokens(allocation, grid))])


def tension_bars(tensions: Mapping[str, float]) -> Image.Image:
    """One balance for each `{"left↔right": v}`, v in [0, 1]: 0 is all the left opponent, 1 all the right."""
    if not tensions:
        raise ValueError("tensions is empty: pass at least one {'left↔right': v}.")
    row, pad = 104, 28
    bars = Image.new("RGB", (WIDTH, row * len(tensions) + 8), PAPER)
    draw = ImageDraw.Draw(bars)
    for i, (name, value) in enumerate(tensions.items()):
        left, arrow, right = name.partition("↔")
        value = float(value)
        if not arrow or not 0 <= value <= 1:
            raise ValueError(f"tensions hold {name!r}: {value}: pass 'left↔right' and a value in [0, 1].")
        y = row * i + 66
        at = pad + value * (WIDTH - 2 * pad)
        for text, place, anchor, mine in ((left, 0, "ls", value < 0.5), (right, WIDTH, "rs", value > 0.5)):
            draw.text((place, y - 30), text, INK if mine else MUTED, font_for(26), anchor)
        draw.rounded_rectangle((0, y - 4, WIDTH, y + 4), 4, LINE)
        draw.rounded_rectangle((*sorted((WIDTH / 2, at))[:1], y - 4, max(WIDTH / 2, at), y + 4), 4, ACCENT)
        draw.line((WIDTH / 2, y - 14, WIDTH / 2, y + 14), MUTED, 2)
        draw.ellipse((at - 15, y - 15, at + 15, y + 15), ACCENT, PAPER, 4)
        draw.text((WIDTH / 2, y - 30), f"{value:.2f}", MUTED, font_for(22), "ms")
    return bars


def summary(
    image: Image.Image,
    question: str,
    answers: Mapping[str, str],
    relevance,
    maps: Mapping[str, object],
    allocation,
    grid: Sequence[int],
    tensions: Mapping[str, float],
    caption: str = "",
) -> Image.Image:
    """Everything on one sheet, under the question and `{who: answer}` and above the `caption`."""
    image = _picture(image)
    allocation, grid = _tokens(allocation, grid)
    size = fit(image.size)
    shown = image.resize(size, Image.Resampling.LANCZOS)
    of = f"{len(allocation):,} of {grid[0] * grid[1]:,} tokens ({len(allocation) / (grid[0] * grid[1]):.0%})"
    seen = what_the_model_sees(image, allocation, grid)
    top = [
        panel(shown, "The image", f"{image.width:,} x {image.height:,} px"),
        panel(relevance_overlay(shown, relevance), "Relevance", "where this question looks", key=_key()),
        panel(seen, "What the model sees", of),
    ]
    last = [*_homunculus_panels(image, allocation, grid)]
    if tensions:
        last.append(panel(tension_bars(tensions), "Tensions", "what is weighed against what"))
    return sheet([top, _score_panels(shown, maps), last], question, answers, caption)


def _score_panels(image: Image.Image, maps: Mapping[str, object]) -> list[Image.Image]:
    overlays = {name: relevance_overlay(image, _map(name, values)) for name, values in maps.items()}
    return [panel(overlay, n.capitalize(), NOTES.get(n, ""), key=_key()) for n, overlay in overlays.items()]


def _homunculus_panels(image: Image.Image, allocation: np.ndarray, grid: tuple[int, int]) -> list[Image.Image]:
    scales, counts = np.unique(allocation[:, 0], return_counts=True)
    legend = [(_colour(s), f"{n} at scale {s}") for s, n in zip(scales.tolist(), counts, strict=True)]
    return [
        panel(token_map(image, allocation, grid), "Tokens", legend or "none"),
        panel(magnified(image, allocation, grid), "Homunculus", "each place as large as its share of tokens"),
    ]


def token_map(image: Image.Image, allocation, grid: Sequence[int]) -> Image.Image:
    """Every token's outline over the faded image, coloured by scale."""
    allocation, (h, w) = _tokens(allocation, grid)
    image = _picture(image)
    cell = max(6, round(2 * WIDTH / w))
    faded = np.asarray(image.convert("L").resize((w * cell, h * cell), Image.Resampling.LANCZOS))[..., None]
    picture = _image(faded * 0.45 + np.array(PAPER) * 0.52)
    fill = picture.copy()
    boxes = [
        (_colour(s), (x * cell, y * cell, min(x + s, w) * cell - 1, min(y + s, h) * cell - 1))
        for s, y, x in sorted(allocation.tolist(), reverse=True)
    ]
    for colour, box in boxes:
        ImageDraw.Draw(fill).rectangle(box, colour)
    picture = Image.blend(picture, fill, 0.42)
    for colour, box in boxes:
        ImageDraw.Draw(picture).rectangle(box, None, colour, max(2, cell // 14))
    return picture


def magnified(image: Image.Image, allocation, grid: Sequence[int]) -> Image.Image:
    """The image with each place as large as its share of the tokens: the homunculus's second panel, bare."""
    return _warp(_picture(image), _density(*_tokens(allocation, grid)))


def _density(allocation: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Tokens per cell `[h, w]`: a token at scale s gives 1 / s^2 to each cell that it covers."""
    density = np.zeros(grid)
    for s, y, x in allocation.tolist():
        density[y : y + s, x : x + s] += 1 / s**2
    return density


def _warp(image: Image.Image, density: np.ndarray) -> Image.Image:
    """The image redrawn so that area follows `density [h, w]`, with its cells' lines to show how.

    Knothe-Rosenblatt: heights follow the rows' sums, then widths within a row follow that row. The density is
    smoothed, and a quarter of the area is dealt out evenly, so that nothing tears or vanishes.
    """
    h, w = density.shape
    for axis, n in ((0, h), (1, w)):
        for _ in range(max(2, n // 6)):
            before, after = (np.take(density, np.clip(np.arange(n) + k, 0, n - 1), axis) for k in (-1, 1))
            density = (before + 2 * density + after) / 4
    density = 0.75 * density / max(density.mean(), 1e-9) + 0.25
    width, height = (2 * n for n in fit(image.size))
    source = np.asarray(image.resize((width, height), Image.Resampling.LANCZOS)).astype(np.float32)
    places = [(np.arange(n) + 0.5) / n for n in (height, width)]
    rows = _invert(density.sum(1), places[0])  # [height], in cells
    columns = np.stack([_invert(row, places[1]) for row in _between(density, rows - 0.5)])  # [height, width], in cells
    lines = zip(_between(source, rows / h * height - 0.5), columns / w * width - 0.5, strict=True)
    warped = np.stack([_between(line, x) for line, x in lines])
    every = max(1, round(max(h, w) / 16))
    line = np.zeros((height, width), bool)
    line[1:] |= np.diff(rows // every)[:, None] != 0
    line[:, 1:] |= np.diff(columns // every, axis=1) != 0
    warped[line] = warped[line] * 0.35 + 255 * 0.65
    return _image(warped).reduce(2)


def _invert(mass: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Where, in cells, the running sum of `mass [n]` reaches each of `places` in [0, 1]."""
    total = np.concatenate([[0], np.cumsum(mass)])
    return np.interp(places, total / total[-1], np.arange(len(total)))


def _between(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """`values [n, ...]` at fractional indices `at [m]`, linearly; beyond the ends they stay."""
    at = np.clip(at, 0, len(values) - 1)
    low = at.astype(int)
    mix = (at - low).reshape(-1, *[1] * (values.ndim - 1))
    return values[low] * (1 - mix) + values[np.minimum(low + 1, len(values) - 1)] * mix


def _colour(scale: int) -> tuple[int, int, int]:
    return SCALE_COLOURS.get(scale, SCALE_COLOURS[4])


def _key() -> Image.Image:
    return _image(np.tile(heat(np.linspace(0, 1, 120)), (12, 1, 1)))


def _image(array: np.ndarray) -> Image.Image:
    return Image.fromarray(np.clip(array + 0.5, 0, 255).astype(np.uint8))


def _picture(image: Image.Image) -> Image.Image:
    if not isinstance(image, Image.Image):
        raise ValueError(f"image is a {type(image).__name__}: pass a PIL image.")
    return image.convert("RGB")


def _array(value) -> np.ndarray:
    """A tensor of any dtype and device, or anything that numpy reads."""
    return np.asarray(value.detach().cpu().double().numpy() if hasattr(value, "detach") else value, dtype=np.float64)


def _map(name: str, value) -> np.ndarray:
    value = _array(value)
    if value.ndim != 2 or not value.size or not (np.abs(value - 0.5) <= 0.5 + 1e-3).all():
        raise ValueError(f"{name} is {list(value.shape)}: pass [h, w] of numbers in [0, 1].")
    return value


def _tokens(allocation, grid: Sequence[int]) -> tuple[np.ndarray, tuple[int, int]]:
    """An allocation as whole numbers `(N, 3)`, each token within the grid."""
    h, w = (int(n) for n in grid)
    tokens = _array(allocation)
    tokens = tokens if tokens.size else tokens.reshape(0, 3)
    if tokens.ndim != 2 or tokens.shape[1] != 3 or h < 1 or w < 1:
        raise ValueError(f"allocation is {list(tokens.shape)} on a grid {h}x{w}: pass (N, 3) rows of (scale, y, x).")
    s, y, x = tokens.T
    wrong = (tokens % 1 != 0).any(1) | (s < 1) | (y < 0) | (y >= h) | (x < 0) | (x >= w)
    if wrong.any():
        raise ValueError(
            f"allocation holds {tokens[wrong][0].tolist()}: pass whole (scale, y, x) with the top left cell in {h}x{w}."
        )
    return tokens.astype(int), (h, w)
