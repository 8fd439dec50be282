"""Rendered scenes with questions whose evidence is known: the ground of every accuracy figure.

- Deterministic: the same arguments give the same bytes in any process; a million scenes cost no storage.
- Two strata: `calm` grounds, and `dense` ones as detailed as the objects and full of strays, where choosing
  the most detailed cells without knowing the question must fail.
- Five splits in disjoint seed ranges: `train` and `valid` (seven in ten scenes by the normal recipe, three by
  the hard one), `normal`, `hard`, and `heldout` (colour-object pairs and phrasings seen nowhere else).
- Every question has one short right answer and the boxes of all objects that must be seen to give it.

    python -m benchmarks.scenes preview --split hard --out sheet.png
    python -m benchmarks.scenes timing
    python -m benchmarks.scenes card            # rewrites the figures in scenes_card.md
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, log

import numpy as np
from PIL import Image

from . import scene_painting as painting
from .scene_questions import Asker
from .scene_vocabulary import (
    CALM_GROUNDS,
    COLOURS,
    DENSE_GROUNDS,
    KINDS,
    LETTERS,
    PALETTE,
    PHRASES,
    QUESTION_TYPES,
    SMALLEST,
    STRAY_COLOURS,
    STRAYS,
    WORDS,
    plural,
)

SPLITS = ("train", "valid", "normal", "hard", "heldout")
STRATA = ("calm", "dense")
SPLIT_SEEDS = 1 << 40  # seeds a split owns: split i draws from [i * SPLIT_SEEDS, (i + 1) * SPLIT_SEEDS)
HARD_SHARE = 0.3  # of training scenes
HELD_OUT = frozenset(
    (colour, kind)
    for colour in COLOURS
    for kind in KINDS  # about 6 % of pairs, whatever the seed
    if kind != "sign" and zlib.crc32(f"{colour} {kind}".encode()) % 100 < 6
)
# side of the canvas from which it holds: objects (calm), objects (dense)
CROWD_SIZES = ((1024, (8, 20), (12, 40)), (400, (6, 14), (9, 30)), (200, (3, 8), (5, 14)), (0, (1, 3), (3, 5)))


@dataclass(frozen=True)
class Question:
    question: str
    answer: str
    type: str  # one of QUESTION_TYPES
    boxes: tuple[tuple[int, int, int, int], ...]  # x0, y0, x1, y1 in pixels; empty: the whole image


@dataclass(frozen=True)
class SceneObject:
    kind: str
    colour: str
    box: tuple[int, int, int, int]
    text: str = ""  # what a sign says, as answered (lower case)
    side: int = 0  # longer side of the sprite, or height of a sign's capitals, in pixels
    face: tuple[str, str] = ("", "")  # a sign's font and its text as drawn

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass
class Scene:
    image: np.ndarray  # uint8 [H, W, 3]
    questions: list[Question]
    stratum: str
    objects: list[SceneObject] = field(repr=False)  # in painting order: later ones lie on top
    seed: int
    split: str
    ground: str
    hard: bool = False  # made by the hard split's recipe


class Dice:
    """Uniform draws from one seeded stream. Plain floats: many times faster than a Generator's scalars."""

    def __init__(self, *entropy: int):
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
        self._stock: list[float] = []

    def draw(self) -> float:
        if not self._stock:
            self._stock = self._rng.random(1024).tolist()
        return self._stock.pop()

    def chance(self, share: float) -> bool:
        return self.draw() < share

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.draw()

    def log_uniform(self, low: float, high: float) -> float:
        return exp(self.uniform(log(low), log(high)))

    def integer(self, end: int) -> int:
        return int(self.draw() * end)

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + self.integer(high - low + 1)

    def pick(self, items: Sequence):
        return items[int(self.draw() * len(items))]

    def shuffled(self, items) -> list:
        items = list(items)
        for i in range(len(items) - 1, 0, -1):
            j = self.integer(i + 1)
            items[i], items[j] = items[j], items[i]
        return items


# ---------------------------------------------------------------- what stands where


def kinds_at(side: float) -> list[str]:
    """Kinds that can be told apart when their longer side is `side` pixels."""
    return _KINDS_AT[min(int(side), len(_KINDS_AT) - 1)]


_KINDS_AT = [
    [kind for kind in KINDS if kind != "sign" and SMALLEST[kind] <= max(side, 12)]
    for side in range(max(SMALLEST.values()) + 1)
]


@dataclass
class _Thing:
    """An object before it has a place."""

    kind: str
    side: int
    width: int
    height: int
    colour: str = ""
    text: str = ""
    face: tuple[str, str] = ("", "")


class _Layout:
    """Chooses things and their places for one canvas `[height, width]`."""

    def __init__(self, dice: Dice, height: int, width: int, split: str, stratum: str, hard: bool):
        self.dice, self.height, self.width = dice, height, width
        self.split, self.dense, self.hard = split, stratum == "dense", hard
        self.short = min(height, width)
        _, calm, dense = next(row for row in CROWD_SIZES if self.short >= row[0])
        low, high = dense if self.dense else calm
        if not self.dense and dice.chance(0.15):
            high = dense[1]  # a crowd on a calm ground: crowding must not be told from the ground
        self.count = dice.between(low, high)

    def objects(self) -> list[SceneObject]:
        things = self._things()
        self._colour(things)
        # Large ones first: what is painted later lies on top and is whole.
        things.sort(key=lambda thing: -thing.width * thing.height)
        placed: list[SceneObject] = []
        self._covered: list[float] = []  # share of each placed box that later ones may hide
        for thing in things:
            box = self._place(thing, placed)
            if box:
                placed.append(SceneObject(thing.kind, thing.colour, box, thing.text, thing.side, thing.face))
                # Hiding this much of the box hides at most 30 % of the body; a sign's text is never hidden.
                self._covered.append(0.0 if thing.kind == "sign" else 0.3 * painting.fill_share(thing.kind))
        return placed

    def _things(self) -> list[_Thing]:
        dice, things = self.dice, []
        area = self.width * self.height * (0.34 if self.dense else 0.28)
        signs = (
            min(self.count // 2, dice.between(0, 4 if self.hard else 3)) if self.count > 2 else int(dice.chance(0.3))
        )
        for _ in range(signs):
            things.append(self._sign())
            area -= things[-1].width * things[-1].height
        repeats = self._repeats(self.count - signs)
        used = set()
        while len(things) < self.count:
            # The area that is left, shared by those still to come, keeps one giant from starving the rest.
            left = max(area, 0)
            high = max(18.0, min(self.short / 2, (0.6 * left) ** 0.5, 256 if self.short <= 768 else self.short / 3))
            side = dice.log_uniform(12, high)
            kinds = [kind for kind in kinds_at(side) if kind not in used]
            if self.split == "heldout" and dice.chance(0.5):
                kinds = [kind for kind in kinds if kind in _HELD_OUT_KINDS] or kinds
            if not kinds:
                side, kinds = 32.0, [kind for kind in KINDS if kind not in used and kind != "sign"]
            kind = dice.pick(kinds)
            used.add(kind)
            times = repeats.pop() if repeats and dice.chance(0.4) else 1
            for _ in range(min(times, self.count - len(things))):
                things.append(self._thing(kind, max(SMALLEST[kind], round(side))))
                area -= things[-1].width * things[-1].height
                side = min(high, max(12, side * dice.uniform(0.75, 1.3)))
        return things

    def _repeats(self, count: int) -> list[int]:
        """How often the first few kinds are repeated: groups to count, and look-alikes."""
        groups = 0 if count < 4 else (1 if count < 10 else 2) + self.hard
        return [self.dice.between(2, max(2, min(6, count // (1 + groups)))) for _ in range(groups)]

    def _thing(self, kind: str, side: int) -> _Thing:
        return _Thing(kind, side, *painting.sprite(kind, side).size)

    def _sign(self) -> _Thing:
        dice, scale = self.dice, self.short / 512
        tiny = self.hard and dice.chance(0.5)
        height = dice.between(9, 11) if tiny else round(dice.log_uniform(9, max(16, 48 * min(scale, 2))))
        choice = dice.draw()
        if choice < 0.6:
            text = dice.pick(WORDS).upper()
        elif choice < 0.9:
            text = str(dice.between(2, 999) if dice.chance(0.5) else dice.between(2, 99))
        else:
            text = dice.pick(LETTERS)
        drawn = text.lower() if len(text) > 1 and dice.chance(0.4 if self.hard else 0.15) else text
        font = dice.pick(painting.TEXT_FONTS[: 3 if self.hard else 2]) if height > 11 else painting.TEXT_FONTS[0]
        while True:
            mask = painting.text_mask(drawn, font, height)
            pad = max(3, round(height * 0.4))
            if mask.width + 2 * pad < 0.7 * self.width or height <= 9:
                break
            height = max(9, int(height * 0.8))
        return _Thing("sign", height, mask.width + 2 * pad, mask.height + 2 * pad, "", text.lower(), (font, drawn))

    def _colour(self, things: list[_Thing]):
        """Some colours occur once, so that "the red thing" means one; the others are shared."""
        dice = self.dice
        colours = dice.shuffled(COLOURS)
        single = dice.between(1, 3) if len(things) > 3 else 1
        rare, common = colours[:single], colours[single:]
        # One or two colours that most share, at times: then "most common" has an answer.
        weights = common + common[:1] * dice.pick((0, 2, 5))
        group_colour: dict[str, str] = {}
        lone = [thing for thing in things if sum(t.kind == thing.kind for t in things) == 1 and thing.kind != "sign"]
        rares = dict(zip(map(id, dice.shuffled(lone)), rare, strict=False))
        signs = dice.shuffled(common)
        for thing in things:
            if thing.kind == "sign":
                thing.colour = signs.pop()
                continue
            choices = [rares[id(thing)]] if id(thing) in rares else weights
            if thing.kind in group_colour and dice.chance(0.4):
                choices = [group_colour[thing.kind]]
            if self.split == "heldout":
                new = [c for c in (COLOURS if id(thing) not in rares else choices) if (c, thing.kind) in HELD_OUT]
                choices = new if new and dice.chance(0.8) else choices
            else:
                choices = [c for c in choices if (c, thing.kind) not in HELD_OUT] or [
                    c for c in weights if (c, thing.kind) not in HELD_OUT
                ]
            thing.colour = dice.pick(choices)
            group_colour.setdefault(thing.kind, thing.colour)

    def _place(self, thing: _Thing, placed: list[SceneObject]) -> tuple[int, int, int, int] | None:
        """A box that hides too much of nobody, or None after some tries."""
        dice, w, h = self.dice, thing.width, thing.height
        free_x, free_y = self.width - w - 4, self.height - h - 4
        if free_x < 0 or free_y < 0:
            return None
        at_edge = self.hard and thing.kind == "sign" and dice.chance(0.6)
        for attempt in range(14):
            x, y = 2 + dice.integer(free_x + 1), 2 + dice.integer(free_y + 1)
            if at_edge:
                x, y = dice.pick(((2, y), (2 + free_x, y), (x, 2), (x, 2 + free_y)))
            elif placed and attempt < 3 and dice.chance(0.35):
                x, y = self._beside(dice.pick(placed), w, h)
                if not (2 <= x <= 2 + free_x and 2 <= y <= 2 + free_y):
                    continue
            hidden = self._hidden(x, y, x + w, y + h, thing.colour, placed)
            if hidden is not None:
                for number, share in hidden:
                    self._covered[number] -= share
                return x, y, x + w, y + h
        return None

    def _beside(self, other: SceneObject, w: int, h: int) -> tuple[int, int]:
        """A corner for a `w` x `h` box right beside, above or below another: material for relations."""
        x0, y0, x1, y1 = other.box
        gap = 4 + self.dice.integer(max(8, self.short // 14))
        shift = self.dice.uniform(0.3, 0.7)
        across_x, across_y = int(x0 + (x1 - x0 - w) * shift), int(y0 + (y1 - y0 - h) * shift)
        return self.dice.pick(
            ((x0 - gap - w, across_y), (x1 + gap, across_y), (across_x, y0 - gap - h), (across_x, y1 + gap))
        )

    def _hidden(self, x0, y0, x1, y1, colour, placed) -> list[tuple[int, float]] | None:
        """What a new box would hide of each placed one, or None where that is too much."""
        hidden = []
        for number, other in enumerate(placed):
            a0, b0, a1, b1 = other.box
            if x0 - 2 >= a1 or a0 >= x1 + 2 or y0 - 2 >= b1 or b0 >= y1 + 2:  # rims are two pixels wide
                continue
            inside = (min(x1 + 2, a1) - max(x0 - 2, a0)) * (min(y1 + 2, b1) - max(y0 - 2, b0))
            share = inside / ((a1 - a0) * (b1 - b0))
            if share > self._covered[number] or colour == other.colour:
                return None
            hidden.append((number, share))
        return hidden


_HELD_OUT_KINDS = frozenset(kind for _, kind in HELD_OUT)


# ---------------------------------------------------------------- painting


def _contrast(colour: str) -> tuple[int, int, int]:
    """What lines and rims are drawn in, on this colour."""
    return (240, 240, 240) if colour == "black" else (16, 16, 20)


def _tint(dice: Dice, colour: str) -> tuple[int, int, int]:
    return tuple(min(255, max(0, v + dice.between(-10, 10))) for v in PALETTE[colour])


def _paint(
    dice: Dice, height: int, width: int, ground: str, stratum: str, hard: bool, objects: list[SceneObject]
) -> np.ndarray:
    image = painting.paint_ground(ground, height, width, dice)
    if stratum == "dense":
        for _ in range(int(height * width / 512**2 * dice.uniform(40, 80)) + 2):
            _paint_stray(dice, image)
    faint, shadows = hard and dice.chance(0.4), dice.chance(0.4)
    shift = dice.between(2, 5)
    for thing in objects:
        x0, y0, x1, y1 = thing.box
        if thing.kind == "sign":
            _paint_sign(dice, image, thing, faint)
            continue
        sprite = painting.sprite(thing.kind, thing.side)
        rim = (x0 - sprite.margin, y0 - sprite.margin)
        if shadows and thing.side > 24 and not faint:
            image.paste((0, 0, 0), (rim[0] + shift, rim[1] + shift), sprite.shadow)
        image.paste(_contrast(thing.colour), rim, sprite.faint_rim if faint else sprite.rim)
        image.paste(_tint(dice, thing.colour), (x0, y0), sprite.faint if faint else sprite.body)
        if sprite.ink:
            image.paste(_contrast(thing.colour), (x0, y0), sprite.ink)
    pixels = np.array(image)
    painting.add_noise(pixels, dice.between(0, 4), dice)
    return pixels


def _paint_stray(dice: Dice, image: Image.Image):
    side = int(dice.log_uniform(12, max(16, min(image.size) / 9)))
    sprite = painting.sprite(f"stray/{dice.integer(len(STRAYS))}", min(side, 79))
    x, y = dice.integer(image.width) - side // 2, dice.integer(image.height) - side // 2
    image.paste((16, 16, 20) if dice.chance(0.7) else (235, 235, 235), (x - 1, y - 1), sprite.rim)
    image.paste(dice.pick(STRAY_COLOURS), (x, y), sprite.body)


def _paint_sign(dice: Dice, image: Image.Image, sign: SceneObject, faint: bool):
    x0, y0, x1, y1 = sign.box
    colour = _tint(dice, sign.colour)
    light = colour[0] * 0.3 + colour[1] * 0.59 + colour[2] * 0.11 > 110
    ink = (14, 14, 18) if light else (250, 250, 250)
    if faint:  # low contrast: letters half-way to the plate
        ink = tuple((2 * a + b) // 3 for a, b in zip(ink, colour, strict=True))
    image.paste(_contrast(sign.colour), (x0 - 1, y0 - 1, x1 + 1, y1 + 1))
    image.paste(colour, sign.box)
    mask = painting.text_mask(sign.face[1], sign.face[0], sign.side)
    image.paste(ink, (x0 + (x1 - x0 - mask.width) // 2, y0 + (y1 - y0 - mask.height) // 2), mask)


# ---------------------------------------------------------------- scenes


def make_scene(
    seed: int,
    split: str = "train",
    size: int | tuple[int, int] = 512,
    n_questions: int = 6,
    stratum: str | None = None,
    types: Sequence[str] | None = None,
) -> Scene:
    """The scene with this seed of this split.

    `size`: side, or (height, width), 128 to 2048 pixels. `types`: only these question types. The image depends
    on neither `n_questions` nor `types`. Fewer questions come back where the scene does not hold enough.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if not (128 <= min(height, width) and max(height, width) <= 2048):
        raise ValueError(f"size must be between 128 and 2048 pixels, not {size}")
    if not 0 <= seed < SPLIT_SEEDS:
        raise ValueError(f"seed must be in [0, 2**40), not {seed}")
    unique_seed = SPLITS.index(split) * SPLIT_SEEDS + seed
    dice = Dice(unique_seed, height, width)
    drawn, hard_draw = dice.pick(STRATA), dice.draw()
    stratum = stratum or drawn
    hard = split == "hard" or (split in ("train", "valid") and hard_draw < HARD_SHARE)
    objects = _Layout(dice, height, width, split, stratum, hard).objects()
    ground = dice.pick(DENSE_GROUNDS if stratum == "dense" else CALM_GROUNDS)
    image = _paint(dice, height, width, ground, stratum, hard, objects)
    asker = Asker(
        Dice(unique_seed, height, width, 1), objects, (height, width), split, hard, ground, HELD_OUT, kinds_at
    )
    questions = [Question(*asked) for asked in asker.questions(n_questions, types or QUESTION_TYPES)]
    return Scene(image, questions, stratum, objects, seed, split, ground, hard)


def object_map(scene: Scene) -> np.ndarray:
    """uint8 `[H, W]`: 1 + the index of the visible object at each pixel, 0 where none is."""
    ids = Image.new("L", scene.image.shape[1::-1])
    for number, thing in enumerate(scene.objects, 1):
        if thing.kind == "sign":
            ids.paste(number, thing.box)
        else:
            body = painting.sprite(thing.kind, thing.side).body
            ids.paste(number, thing.box[:2], body.point(_SOLID))
    return np.asarray(ids)


_SOLID = [0] * 128 + [255] * 128


def cell_labels(scene: Scene, cell: int = 32) -> dict[str, np.ndarray]:
    """What stands in each cell: `kind`, `colour` and `thing` of the scene, int64 `[h, w]`, 0 = empty, else 1 + index.

    The visible object that covers most of the cell, if that is at least 5 % of it; the cell that holds most of
    an object counts whatever the share. `h, w`: the sides over `cell`, rounded as Qwen's processor rounds.
    """
    height, width = scene.image.shape[:2]
    h, w = max(1, round(height / cell)), max(1, round(width / cell))
    ids = object_map(scene)[::2, ::2]  # every second pixel is enough to find a majority
    rows, columns = np.arange(0, height, 2) * h // height, np.arange(0, width, 2) * w // width
    n = len(scene.objects) + 1
    index = (rows[:, None] * (w * n) + columns[None] * n) + ids
    cover = np.bincount(index.ravel(), minlength=h * w * n).reshape(h * w, n)[:, 1:]
    counts = cover >= 0.05 * (cell / 2) ** 2
    kind, colour, best = (np.zeros((h, w), np.int64) for _ in range(3))
    if n > 1:
        counts[cover.argmax(0), np.arange(n - 1)] = True
        cover = cover * counts
        best = np.where(cover.max(1) > 0, cover.argmax(1) + 1, 0).reshape(h, w)
        kind = np.array([0] + [1 + KINDS.index(thing.kind) for thing in scene.objects])[best]
        colour = np.array([0] + [1 + COLOURS.index(thing.colour) for thing in scene.objects])[best]
    return {"kind": kind, "colour": colour, "thing": best}


# ---------------------------------------------------------------- answers and words


def normalise(text: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9 ]+", " ", text.lower()).split())


def is_correct(prediction: str, question_type: str, answer: str, boxes=(), size: int | tuple[int, int] = 512) -> bool:
    """The same words; for `pointing`, a point inside the evidence box grown by 2 % of the image.

    `size` is the image's side or (height, width), by which percent become pixels.
    """
    if question_type != "pointing":
        return normalise(prediction) == normalise(answer)
    numbers = re.findall(r"\d+", prediction)
    if len(numbers) != 2:
        return False
    height, width = (size, size) if isinstance(size, int) else size
    x, y = ((int(n) + 0.5) / 100 * side for n, side in zip(numbers, (width, height), strict=True))
    dx, dy = 0.02 * width, 0.02 * height
    return any(x0 - dx <= x <= x1 + dx and y0 - dy <= y <= y1 + dy for x0, y0, x1, y1 in boxes)


def extent(boxes, cell: int = 32) -> str:
    """How far a question's evidence reaches: `small` (some of it within a cell), `large`, or `whole` (no boxes)."""
    if not boxes:
        return "whole"
    return "small" if min(max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in boxes) <= cell else "large"


def vocabulary() -> list[str]:
    """Every phrase, name, colour, sign word and number that questions and answers are made of."""
    phrases = [re.sub(r"\s*\{\w+\}\s*", " ", phrase).strip() for forms in PHRASES.values() for phrase in forms]
    names = [*KINDS, *map(plural, KINDS), *COLOURS, *CALM_GROUNDS, *DENSE_GROUNDS, *WORDS, *LETTERS.lower()]
    return sorted({*phrases, *names, "few", "some", "many", "yes", "no", *map(str, range(1000))})


def corpus(n: int, seed: int = 0) -> Iterator[str]:
    """`n` lines "question answer" as in training, to train a tokenizer on."""
    made = 0
    while made < n:
        for asked in make_scene(seed, "train", 256).questions[: n - made]:
            yield f"{asked.question} {asked.answer}"
            made += 1
        seed += 1


def evaluation_set(split: str, n_questions: int, size: int | tuple[int, int] = 512) -> Iterator[dict]:
    """The standard test questions: types in turn, strata in turn, one question an image, always the same."""
    for number in range(n_questions):
        kind = QUESTION_TYPES[number % len(QUESTION_TYPES)]
        stratum = STRATA[number // len(QUESTION_TYPES) % 2]
        for attempt in range(64):  # not every scene holds a question of every type
            scene = make_scene(number * 64 + attempt, split, size, 1, stratum, (kind,))
            if scene.questions:
                break
        else:
            raise ValueError(f"no {kind} question in 64 scenes of {split} at {size}")
        yield {
            "id": f"{split}-{number:06d}",
            "image": Image.fromarray(scene.image),
            **vars(scene.questions[0]),
            "stratum": scene.stratum,
            "extent": extent(scene.questions[0].boxes),
            "seed": scene.seed,
        }


def __getattr__(name: str):
    """`Scenes` and `ScenesConfig`, the `datasets` builder: imported on demand, since scenes need only numpy and PIL."""
    if name in ("Scenes", "ScenesConfig"):
        from . import scenes_dataset

        return getattr(scenes_dataset, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


if __name__ == "__main__":
    from .scenes_report import main

    main()
