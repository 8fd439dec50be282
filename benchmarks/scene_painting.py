"""Masks and grounds for the scenes, from one small file that travels with the repository.

- `assets/scene_assets.npz` holds every glyph mask and texture, so a scene is the same bytes whatever
  fonts or libraries a machine has. `python -m benchmarks.scenes --pack-assets FILE.npz` rebuilds it.
- A ground is an index field `[H, W]` (uint8) and a palette `[256, 3]`: tint and contrast touch the
  palette alone, so colouring half a million pixels costs a fraction of a millisecond.
- Everything slow is made once a process and kept: mip levels, sprites, fields, noise.

Glyphs: DejaVu Sans (Bitstream Vera licence, changes in the public domain). Textures and photographs:
sample data bundled with scikit-image, whose documentation names each source.
"""

from functools import cache, cached_property, lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from .scene_vocabulary import DENSE_GROUNDS, PICTOGRAMS, SHAPES, STRAYS

ASSETS = Path(__file__).parent / "assets" / "scene_assets.npz"
MASK_SIDE = 128  # longest side of a stored mask, pixels
TEXT_HEIGHT = 40  # cap height of stored letters, pixels
TEXT_FONTS = ("DejaVuSans-Bold", "DejaVuSans", "DejaVuSerif-Bold")
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
TEXTURES = {
    "bricks": "brick.png",
    "grass": "grass.png",
    "gravel": "gravel.png",
    "coins": "coins.png",
    "page": "page.png",
}
PHOTOS = {"chelsea": "chelsea.png", "coffee": "coffee.png", "astronaut": "astronaut.png", "rocket": "rocket.jpg"}
FIELD_SIDE = 768  # pixels; larger canvases tile it
PHOTO_COLOURS = 64


# ---------------------------------------------------------------- packing (needs fonts and scikit-image)


def _glyph(character: str, font: str, side: int = MASK_SIDE) -> Image.Image:
    """One glyph as an 8-bit mask, cropped to its ink, its longer side `side` pixels."""
    big = ImageFont.truetype(_font_file(font), 4 * side)
    image = Image.new("L", (10 * side, 10 * side))
    ImageDraw.Draw(image).text((5 * side, 5 * side), character, font=big, fill=255, anchor="mm")
    image = image.crop(image.getbbox())
    scale = side / max(image.size)
    return image.resize([max(1, round(v * scale)) for v in image.size], Image.LANCZOS)


def _font_file(name: str) -> str:
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf")


def _shape(name: str) -> Image.Image:
    side = 4 * MASK_SIDE
    image = Image.new("L", (side, side))
    draw = ImageDraw.Draw(image)
    if name in ("circle", "ring"):
        draw.ellipse((0, 0, side - 1, side - 1), fill=255)
        if name == "ring":
            draw.ellipse([side * 0.24] * 2 + [side * 0.76] * 2, fill=0)
    else:
        corners, turn = {
            "square": (4, 45),
            "diamond": (4, 0),
            "triangle": (3, -90),
            "pentagon": (5, -90),
            "hexagon": (6, 0),
        }[name]
        angles = np.deg2rad(turn + np.arange(corners) * 360 / corners)
        points = np.stack([np.cos(angles), np.sin(angles)], 1)
        points = (points - points.min(0)) / (points.max(0) - points.min(0)).max() * (side - 1)
        draw.polygon([tuple(p) for p in points], fill=255)
    image = image.crop(image.getbbox())
    return image.resize([v // 4 for v in image.size], Image.LANCZOS)


def _silhouette(ink: Image.Image) -> Image.Image:
    """The ink with every enclosed region filled."""
    padded = Image.new("L", (ink.width + 2, ink.height + 2))
    padded.paste(ink, (1, 1))
    outside = padded.point(lambda v: 255 if v > 96 else 0)
    ImageDraw.floodfill(outside, (0, 0), 128)
    filled = outside.point(lambda v: 0 if v == 128 else 255).crop((1, 1, ink.width + 1, ink.height + 1))
    return Image.fromarray(np.maximum(np.asarray(filled.filter(ImageFilter.GaussianBlur(0.7))), np.asarray(ink)))


def pack_assets(path=ASSETS):
    """Draw every mask from matplotlib's fonts, take every texture from scikit-image, write one file."""
    import skimage

    data = Path(skimage.__file__).parent / "data"
    arrays = {f"body/{name}": _shape(name) for name in SHAPES}
    for name, (point, tint, _) in PICTOGRAMS.items():
        ink = _glyph(chr(point), "DejaVuSans")
        arrays[f"body/{name}"] = _silhouette(ink) if tint == "filled" else ink
        if tint == "filled":
            arrays[f"ink/{name}"] = ink
    for number, stray in enumerate(STRAYS):
        arrays[f"stray/{number}"] = _glyph(stray, "DejaVuSans", MASK_SIDE // 2)
    for font in TEXT_FONTS:
        for character in CHARACTERS:
            arrays[f"text/{font}/{character}"] = _letter(character, font)
    # 32 grey levels and 64 colours keep the file small.
    for name, file in TEXTURES.items():
        image = Image.open(data / file).convert("L")
        scale = min(1, 288 / min(image.size))  # shrunk, never enlarged: detail is the point
        image = image.resize([round(v * scale) for v in image.size], Image.LANCZOS).crop(
            (0, 0, min(288, image.width), min(288, image.height))
        )
        low, high = np.percentile(image, (1, 99))
        arrays[f"texture/{name}"] = np.clip((np.asarray(image) - low) / (high - low) * 31, 0, 31).round()
    for name, file in PHOTOS.items():
        image = Image.open(data / file).convert("RGB")
        image = image.resize([round(v * 320 / min(image.size)) for v in image.size], Image.LANCZOS)
        left = (image.width - 320) // 2
        image = image.crop((left, 0, left + 320, 320)).quantize(PHOTO_COLOURS, dither=Image.Dither.NONE)
        arrays[f"photo/{name}"] = np.asarray(image)
        arrays[f"photo_palette/{name}"] = np.array(image.getpalette()[: 3 * PHOTO_COLOURS]).reshape(-1, 3)
    arrays = {key: np.asarray(value).astype(np.uint8) for key, value in arrays.items()}
    # One flat array and its index: a thousand tiny members would cost more than what they hold.
    np.savez_compressed(
        path,
        names=np.array(list(arrays)),
        shapes=np.array([(*a.shape, 1)[:3] for a in arrays.values()]),
        values=np.concatenate([a.ravel() for a in arrays.values()]),
    )


def _letter(character: str, font: str) -> np.ndarray:
    """`[80, advance]`: baseline at row 60, so that letters of one font can stand side by side."""
    big = ImageFont.truetype(_font_file(font), 100)
    cap = -big.getbbox("H", anchor="ls")[1]
    face = ImageFont.truetype(_font_file(font), 100 * TEXT_HEIGHT / cap)
    image = Image.new("L", (max(1, round(face.getlength(character))), 2 * TEXT_HEIGHT))
    ImageDraw.Draw(image).text((0, 1.5 * TEXT_HEIGHT), character, font=face, fill=255, anchor="ls")
    return np.asarray(image)


# ---------------------------------------------------------------- masks


@cache
def assets() -> dict[str, np.ndarray]:
    with np.load(ASSETS) as file:
        names, shapes, values = file["names"], file["shapes"], file["values"]
    ends = np.cumsum(shapes.prod(1))
    out = {}
    for name, shape, end in zip(names.tolist(), shapes.tolist(), ends.tolist(), strict=True):
        array = values[end - shape[0] * shape[1] * shape[2] : end].reshape(shape)
        out[name] = array[:, :, 0] if shape[2] == 1 else array
    return out


@cache
def _mip(key: str, level: int) -> Image.Image:
    """A stored mask halved `level` times."""
    if level == 0:
        return Image.fromarray(assets()[key])
    image = _mip(key, level - 1)
    return image.resize((max(1, (image.width + 1) // 2), max(1, (image.height + 1) // 2)), Image.BOX)


def _mask(key: str, side: int) -> Image.Image:
    """The mask with its longer side `side` pixels, from the next larger mip level."""
    level = 0
    while max(_mip(key, level).size) >= 4 * side:
        level += 1
    full, source = _mip(key, 0), _mip(key, level)
    scale = side / max(full.size)
    return source.resize([max(1, round(v * scale)) for v in full.size], Image.BILINEAR)


@cache
def fill_share(kind: str) -> float:
    """Share of the kind's box that its body covers."""
    return float(assets()[f"body/{kind}"].mean() / 255)


class Sprite:
    """Masks of one thing at one size: `body` takes the colour, `ink` its lines, `rim` is `margin` pixels wider."""

    def __init__(self, body: Image.Image, ink: Image.Image | None = None, margin: int = 1):
        self.size, self.body, self.ink, self.margin = body.size, body, ink, margin
        # The largest of eight shifted copies: a dilation, far cheaper than a rank filter.
        self.rim = Image.new("L", (body.width + 2 * margin, body.height + 2 * margin))
        for dx, dy in ((0, 1), (1, 0), (1, 2), (2, 1), (0, 0), (0, 2), (2, 0), (2, 2)):
            shifted = Image.new("L", self.rim.size)
            shifted.paste(body, (dx * margin, dy * margin))
            self.rim = ImageChops.lighter(self.rim, shifted)

    @cached_property
    def shadow(self) -> Image.Image:
        return self.rim.point(_fade(0.4))

    @cached_property
    def faint_rim(self) -> Image.Image:
        return self.rim.point(_fade(0.65))

    @cached_property
    def faint(self) -> Image.Image:
        """The body, a fifth transparent."""
        return self.body.point(_fade(0.82))


@cache
def _fade(share: float) -> list[int]:
    return [int(v * share) for v in range(256)]


@lru_cache(maxsize=3000)
def _small_sprite(kind: str, side: int) -> Sprite:
    return _make_sprite(kind, side)


def _make_sprite(kind: str, side: int) -> Sprite:
    if kind.startswith("stray/"):
        return Sprite(_mask(kind, side))
    ink = f"ink/{kind}"
    return Sprite(_mask(f"body/{kind}", side), _mask(ink, side) if ink in assets() else None, 1 if side < 96 else 2)


def sprite(kind: str, side: int) -> Sprite:
    """Cached below 80 px, where there are many; above, made anew, since few are alike."""
    return _small_sprite(kind, side) if side < 80 else _make_sprite(kind, side)


@lru_cache(maxsize=4096)
def text_mask(text: str, font: str, height: int) -> Image.Image:
    """A line of text whose capitals are `height` pixels high, cropped to its ink."""
    strip = Image.fromarray(np.concatenate([assets()[f"text/{font}/{c}"] for c in text], 1))
    strip = strip.crop(strip.getbbox())
    scale = height / TEXT_HEIGHT
    return strip.resize((max(1, round(strip.width * scale)), max(1, round(strip.height * scale))), Image.LANCZOS)


# ---------------------------------------------------------------- grounds


def _grey(low, high) -> np.ndarray:
    """Palette `[256, 3]` from one colour to another."""
    return np.linspace(low, high, 256)


@cache
def _fields() -> dict[str, list[np.ndarray]]:
    """Index fields `[768, 768]` by ground, several where one would be learnt by heart."""
    rng = np.random.Generator(np.random.PCG64(20))
    fields = {}
    for name in TEXTURES:
        tile = assets()[f"texture/{name}"] * 8
        larger = Image.fromarray(tile).resize([round(1.4 * side) for side in tile.shape[::-1]], Image.BICUBIC)
        fields[name] = [_mirror(tile), _mirror(np.asarray(larger))]
    fields["photo"] = []
    for name in PHOTOS:
        tile = assets()[f"photo/{name}"]
        fields["photo"] += [_mirror(tile), _mirror(np.asarray(Image.fromarray(tile).resize((560, 560), Image.NEAREST)))]
    # Veins: where smooth noise crosses its middle.
    fields["marble"] = [
        np.abs(_octaves(rng, (8, 16, 32, 64)).astype(np.int16) * 2 - 255).astype(np.uint8) for _ in range(3)
    ]
    fields["leaves"] = [_leaves(rng) for _ in range(3)]
    fields["scribble"] = [_scribble(rng) for _ in range(3)]
    return fields


def _mirror(tile: np.ndarray) -> np.ndarray:
    """Tile `[h, w]` out to the field's side, mirrored so that no seam shows."""
    doubled = np.block([[tile, tile[:, ::-1]], [tile[::-1], tile[::-1, ::-1]]])
    repeats = [-(-FIELD_SIDE // side) for side in doubled.shape]
    return np.ascontiguousarray(np.tile(doubled, repeats)[:FIELD_SIDE, :FIELD_SIDE])


def _octaves(rng, cells: tuple[int, ...]) -> np.ndarray:
    """Noise summed over octaves (`cells` lattice points across), stretched to 0-255."""
    total = np.zeros((FIELD_SIDE, FIELD_SIDE), np.float32)
    for n in cells:
        lattice = Image.fromarray(rng.random((n + 1, n + 1), np.float32))
        total += np.asarray(lattice.resize((FIELD_SIDE, FIELD_SIDE), Image.BICUBIC)) / n**0.5
    low, high = total.min(), total.max()
    return ((total - low) * (255 / (high - low))).astype(np.uint8)


def _leaves(rng) -> np.ndarray:
    """Overlapping leaf shapes in many greys: edges everywhere and at every angle."""
    image = Image.fromarray(_octaves(rng, (8, 32, 96)))
    draw = ImageDraw.Draw(image)
    for _ in range(2600):
        x, y, turn = rng.random(3) * (FIELD_SIDE, FIELD_SIDE, np.pi)
        length, grey = 8 + 22 * rng.random() ** 2, int(rng.integers(20, 250))
        along = np.array([np.cos(turn), np.sin(turn)]) * length
        across = np.array([-along[1], along[0]]) * 0.3
        centre = np.array([x, y])
        draw.polygon([tuple(p) for p in (centre - along, centre + across, centre + along, centre - across)], fill=grey)
        draw.line([*(centre - along), *(centre + along)], fill=max(0, grey - 60))
    return np.asarray(image)


def _scribble(rng) -> np.ndarray:
    """Short pen strokes and arcs."""
    image = Image.new("L", (FIELD_SIDE, FIELD_SIDE), 200)
    draw = ImageDraw.Draw(image)
    for _ in range(1500):
        x, y = rng.random(2) * FIELD_SIDE
        w, h = 6 + 34 * rng.random(2)
        start = int(rng.integers(360))
        grey, width = int(rng.integers(0, 140)), int(rng.integers(1, 4))
        if rng.random() < 0.5:
            draw.arc([x, y, x + w, y + h], start, start + int(rng.integers(60, 250)), fill=grey, width=width)
        else:
            draw.line([x, y, x + w - 20, y + h - 20], fill=grey, width=width)
    return np.asarray(image)


@lru_cache(maxsize=4)
def _noise(bits: int) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(7))
    return rng.integers(0, 1 << bits, (FIELD_SIDE, FIELD_SIDE, 3), np.uint8)


def _window(field: np.ndarray, height: int, width: int, dice) -> np.ndarray:
    """A random window `[height, width]` of the field, flipped at random; tiled first if it is too small."""
    if height > field.shape[0] or width > field.shape[1]:
        field = np.tile(field, (-(-height // field.shape[0]), -(-width // field.shape[1])) + (1,) * (field.ndim - 2))
    y, x = dice.integer(field.shape[0] - height + 1), dice.integer(field.shape[1] - width + 1)
    view = field[y : y + height, x : x + width]
    return view[:, ::-1] if dice.chance(0.5) else view


def paint_ground(name: str, height: int, width: int, dice) -> Image.Image:
    """An RGB image of the ground `name`; `dice` decides its colours, place and contrast."""
    tint = [dice.uniform(40, 225) for _ in range(3)]
    if name == "plain":
        return Image.new("RGB", (width, height), tuple(int(v) for v in tint))
    # From a dark to a light variant of one tint, or between two tints.
    other = [dice.uniform(20, 240) for _ in range(3)]
    if name in DENSE_GROUNDS:
        dark, light = (
            [v * dice.uniform(0.0, 0.35) for v in tint],
            [255 - (255 - v) * dice.uniform(0.1, 0.6) for v in tint],
        )
        ends = (dark, light) if name != "leaves" or dice.chance(0.5) else (dark, other)
    else:
        step = dice.uniform(45, 100) * (-1 if sum(tint) > 384 else 1)  # enough that it is not taken for plain
        ends = (tint, [t + step + 0.2 * (o - t) for t, o in zip(tint, other, strict=True)])
    if name == "gradient":
        ramp = np.linspace(0, 127.5, height)[:, None] + np.linspace(0, 127.5, width)[None] * dice.uniform(0, 1)
        field = (ramp[::-1] if dice.chance(0.5) else ramp).astype(np.uint8)
        field = field * 2 if field.max() < 128 else field
    elif name in ("stripes", "checks"):
        period = dice.uniform(24, 96)
        angle = dice.integer(3) if name == "stripes" else 0
        wave = 0.5 + 0.5 * np.sin(np.arange(height + width) * (2 * np.pi / period))
        wave = (wave * 255).astype(np.uint8) if name == "stripes" else (wave > 0.5).astype(np.uint8) * 255
        if name == "checks":
            field = wave[:height, None] ^ wave[None, :width]
        elif angle == 2:  # wave[x + y]: the diagonal, without computing it
            field = np.lib.stride_tricks.sliding_window_view(wave, width)[:height]
        else:
            field = np.broadcast_to(wave[:height, None] if angle else wave[None, :width], (height, width))
    else:
        choices = _fields()[name]
        number = dice.integer(len(choices))
        field = _window(choices[number], height, width, dice)
    if name == "photo":
        palette = np.zeros((256, 3))
        shift = np.array([dice.uniform(-24, 24) for _ in range(3)])
        palette[:PHOTO_COLOURS] = (
            assets()[f"photo_palette/{list(PHOTOS)[number // 2]}"] * dice.uniform(0.8, 1.15) + shift
        )
    else:
        palette = _grey(*ends)
    image = Image.fromarray(np.ascontiguousarray(field))
    image.putpalette(np.clip(palette, 0, 255).astype(np.uint8).tobytes())
    return image.convert("RGB")


def add_noise(pixels: np.ndarray, bits: int, dice):
    """Flip the low `bits` bits of `[H, W, 3]` uint8 at random, in place: noise that never overflows."""
    if bits:
        pixels ^= _window(_noise(bits), *pixels.shape[:2], dice)
