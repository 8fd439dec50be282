"""Sheets of paper: panels, each a picture with its title and a note, in rows under a question and its answers.

Sizes are in pixels for twice the density of the screen.
"""

import re
from bisect import bisect
from collections.abc import Mapping
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

PAPER, INK, MUTED, LINE = (252, 252, 250), (28, 32, 44), (104, 111, 125), (222, 224, 226)
ACCENT = (232, 89, 12)
WIDTH, GAP, MARGIN = 560, 32, 48  # of a panel, between panels, around the sheet


def panel(picture: Image.Image, title: str, note: str | list, key: Image.Image | None = None) -> Image.Image:
    """A picture of the panel's width under its title and a note (a text, or colours and texts).

    `key` is a strip of the picture's colours from 0 to 1.
    """
    picture = picture.resize(fit(picture.size), Image.Resampling.LANCZOS)
    paper = Image.new("RGB", (WIDTH, picture.height + 88), PAPER)
    draw = ImageDraw.Draw(paper)
    draw.text((0, 34), title, INK, font_for(30), "ls")
    x = 0
    for colour, text in [(None, note)] if isinstance(note, str) else note:
        if colour:
            draw.rounded_rectangle((x, 50, x + 18, 68), 3, colour)
            x += 26
        draw.text((x, 67), text, MUTED, font_for(22), "ls")
        x += draw.textlength(text, font_for(22)) + 20
    if key:
        paper.paste(key, (WIDTH - 20 - key.width, 55))
        for place, text, anchor in ((-148, "0", "rs"), (0, "1", "rs")):
            draw.text((WIDTH + place, 67), text, MUTED, font_for(20), anchor)
    paper.paste(picture, ((WIDTH - picture.width) // 2, 88))
    return paper


def sheet(rows: list, question: str = "", answers: Mapping[str, str] | None = None, caption: str = "") -> Image.Image:
    """Rows of panels on paper, under the question and the answers and above the caption."""
    rows = [row for row in rows if row]
    width = max(len(row) for row in rows) * (WIDTH + GAP) - GAP
    indent = max((font_for(30, who).getlength(who) for who in answers or ()), default=0) + 28
    lines = [(line, font_for(42, question), 63, 0, "") for line in wrap(question, font_for(42, question), width)]
    for who, answer in (answers or {}).items():
        wrapped = wrap(answer, font_for(30, answer), width - indent) or [""]
        lines += [(line, font_for(30, answer), 45, indent, who * (i == 0)) for i, line in enumerate(wrapped)]
    foot = wrap(caption, font_for(24, caption), width)
    height = sum(line[2] for line in lines) + sum(max(p.height for p in row) + GAP for row in rows) + 36 * len(foot)
    paper = Image.new("RGB", (width + 2 * MARGIN, height + 2 * MARGIN - GAP + 20 * (bool(lines) + bool(foot))), PAPER)
    draw, y = ImageDraw.Draw(paper), MARGIN
    for text, font, tall, left, who in lines:
        y += tall
        draw.text((MARGIN, y - tall // 3), who, ACCENT, font_for(30, who), "ls")
        draw.text((MARGIN + left, y - tall // 3), text, INK, font, "ls")
    y += 20 * bool(lines)
    for row in rows:
        for i, each in enumerate(row):
            paper.paste(each, (MARGIN + i * (WIDTH + GAP), y))
        y += max(p.height for p in row) + GAP
    for i, line in enumerate(foot):
        draw.text((MARGIN, y + 36 * i + 24), line, MUTED, font_for(24, caption), "ls")
    return paper


def wrap(text: str, font, width: float) -> list[str]:
    """Lines of at most `width` px, broken at spaces; a word that is longer is broken where it must be."""
    lines = []
    for paragraph in text.splitlines():
        line = ""
        for word in re.findall(r"\S+|\s+", paragraph):
            while font.getlength(line + word.rstrip()) > width:
                if not line:
                    fits = max(1, bisect(range(len(word)), width, key=lambda n: font.getlength(word[:n])) - 1)
                    line, word = word[:fits], word[fits:]
                lines, line, word = [*lines, line.strip()], "", word.lstrip()
            line += word
        lines.append(line.strip())
    return lines


@lru_cache
def font_for(size: int, text: str = ""):
    """PIL's own font where it has the letters, else the widest of the machine's (or again PIL's)."""
    if all(letter.isascii() or letter in "°±·‘’“”…" for letter in text):
        return ImageFont.load_default(size)
    for name in ("NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "msyh.ttc", "DejaVuSans.ttf", "Arial.ttf"):
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


def fit(size: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the same shape within a panel (which is at most half again as tall as wide)."""
    factor = min(WIDTH / size[0], 1.5 * WIDTH / size[1])
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))
