"""Looking at the scenes: contact sheets, timing, distributions, blind guessing, and the card that shows them.

python -m benchmarks.scenes preview --split normal --stratum dense --out sheet.png
python -m benchmarks.scenes timing --size 512
python -m benchmarks.scenes stats --scenes 300
python -m benchmarks.scenes card
python -m benchmarks.scenes --pack-assets benchmarks/assets/scene_assets.npz
"""

import argparse
import textwrap
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from . import scenes
from .scene_painting import pack_assets
from .scene_vocabulary import QUESTION_TYPES


def contact_sheet(
    split: str, size: int, stratum: str | None, first: int, count: int, columns: int = 4, boxes: bool = True
) -> Image.Image:
    """Scenes with their questions below; a question's evidence boxes carry its number."""
    rows, line = -(-count // columns), 13
    text_height = 7 * line
    sheet = Image.new("RGB", (columns * (size + 8), rows * (size + text_height + 8)), "white")
    draw = ImageDraw.Draw(sheet)
    for place in range(count):
        scene = scenes.make_scene(first + place, split, size, stratum=stratum)
        x, y = place % columns * (size + 8), place // columns * (size + text_height + 8)
        image = Image.fromarray(scene.image)
        pen = ImageDraw.Draw(image)
        for number, asked in enumerate(scene.questions):
            for box in asked.boxes if boxes else ():
                pen.rectangle([box[0] - 2, box[1] - 2, box[2] + 1, box[3] + 1], outline=(255, 0, 255))
                pen.text((box[0], box[1] - 12), str(number), fill=(255, 0, 255), stroke_width=1, stroke_fill="white")
            words = f"{number} {asked.question} {asked.answer}"
            draw.text((x, y + size + 2 + number * line), textwrap.shorten(words, size // 6), fill="black")
        sheet.paste(image, (x, y))
    return sheet


def timing(size: int, count: int = 100) -> float:
    """Median milliseconds per scene with six questions, after warming the caches."""
    seconds = []
    for seed in range(count + 30):
        start = time.perf_counter()
        scenes.make_scene(seed, "train", size)
        seconds.append(time.perf_counter() - start)
    return 1000 * sorted(seconds[30:])[count // 2]


def gather(split: str, count: int, size: int = 512) -> list[scenes.Question]:
    return [asked for seed in range(count) for asked in scenes.make_scene(seed, split, size).questions]


def blind_guess(known: list, asked: list, key) -> dict[str, float]:
    """Accuracy by type (`*`: all) of the answer most frequent among `known` with the same `key(question)`.

    Questions whose key was never seen get their type's most frequent answer.
    """
    answers, fallback = defaultdict(Counter), defaultdict(Counter)
    for question in known:
        answers[key(question)][question.answer] += 1
        fallback[question.type][question.answer] += 1
    right, total = Counter(), Counter()
    for question in asked:
        counts = answers.get(key(question)) or fallback[question.type]
        guess = counts.most_common(1)[0][0]
        for name in (question.type, "*"):
            total[name] += 1
            right[name] += scenes.is_correct(guess, question.type, question.answer, question.boxes)
    return {name: right[name] / total[name] for name in (*QUESTION_TYPES, "*") if total[name]}


def detail_recall(count: int, share: float = 0.1, size: int = 512, cell: int = 32) -> dict[tuple[str, str], float]:
    """Share of evidence boxes whose centre lies in one of the `share` most detailed cells, by (stratum, extent).

    Detail is the mean gradient of a cell: the choice of one who sees the image and not the question.
    """
    hits = defaultdict(list)
    for seed in range(count):
        scene = scenes.make_scene(seed, "normal", size)
        grey = scene.image.astype(np.float32).mean(2)
        edges = np.abs(np.diff(grey, axis=0, prepend=grey[:1])) + np.abs(np.diff(grey, axis=1, prepend=grey[:, :1]))
        n = size // cell
        detail = edges[: n * cell, : n * cell].reshape(n, cell, n, cell).mean((1, 3))
        chosen = detail >= np.sort(detail, axis=None)[-round(share * n * n)]
        for asked in scene.questions:
            for x0, y0, x1, y1 in asked.boxes:
                hit = chosen[min(n - 1, (y0 + y1) // 2 // cell), min(n - 1, (x0 + x1) // 2 // cell)]
                hits[scene.stratum, scenes.extent([(x0, y0, x1, y1)])].append(hit)
    return {key: float(np.mean(values)) for key, values in sorted(hits.items())}


def statistics(count: int, size: int = 512) -> str:
    """Markdown: types by split, commonest answers by type, and blind guessing."""
    known = gather("train", 4 * count, size)
    by_split = {split: gather(split, count, size) for split in ("normal", "hard", "heldout")}
    by_split = {"train": known, **by_split}
    lines = [
        f"Share of question types, over {count} scenes of {size} px a split ({4 * count} of train):",
        "",
        "| type | " + " | ".join(by_split) + " |",
        "| --- |" + " --- |" * len(by_split),
    ]
    counts = {split: Counter(asked.type for asked in questions) for split, questions in by_split.items()}
    for type_ in QUESTION_TYPES:
        lines.append(
            f"| {type_} | " + " | ".join(f"{counts[s][type_] / len(by_split[s]):.3f}" for s in by_split) + " |"
        )
    lines.append(
        "| questions a scene | "
        + " | ".join(f"{len(q) / (4 * count if s == 'train' else count):.2f}" for s, q in by_split.items())
        + " |"
    )
    lines += [
        "",
        "The answers most often right in `normal`, by type:",
        "",
        "| type | different answers | most frequent |",
        "| --- | --- | --- |",
    ]
    for type_ in QUESTION_TYPES:
        answers = Counter(asked.answer for asked in by_split["normal"] if asked.type == type_)
        top = ", ".join(f"{answer} {n / answers.total():.2f}" for answer, n in answers.most_common(7))
        lines.append(f"| {type_} | {len(answers)} | {top} |")
    lines += [
        "",
        "Blind guessing (accuracy without the image; answers counted on train): the most frequent answer of the "
        "question's type, and of the same question's exact text.",
        "",
        "| type | " + " | ".join(f"{s}, by type | {s}, by text" for s in list(by_split)[1:]) + " |",
        "| --- |" + " --- |" * 6,
    ]
    guesses = [
        blind_guess(known, by_split[s], key)
        for s in list(by_split)[1:]
        for key in (lambda q: q.type, lambda q: q.question)
    ]
    for type_ in (*QUESTION_TYPES, "*"):
        lines.append(f"| {type_} | " + " | ".join(f"{guess.get(type_, float('nan')):.3f}" for guess in guesses) + " |")
    lines += [
        "",
        "Blind selection on `normal`: share of evidence boxes whose centre lies in the 10 % of cells with most "
        "detail (choosing at random: 0.10), for evidence within a cell and larger:",
        "",
        "| stratum | evidence | share |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {stratum} | {reach} | {value:.2f} |" for (stratum, reach), value in detail_recall(count, 0.1, size).items()
    ]
    return "\n".join(lines)


def write_card(path: Path, count: int):
    """Renew the card's figures between its markers and its example sheets."""
    folder = path.parent / "assets"
    for split in ("normal", "hard"):
        sheet = contact_sheet(split, 512, None, 2, 2, 2)
        sheet.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(folder / f"scenes_{split}.png", optimize=True)
    before, rest = path.read_text().split("<!-- figures -->")
    after = rest.split("<!-- /figures -->")[1]
    path.write_text(f"{before}<!-- figures -->\n{statistics(count)}\n<!-- /figures -->{after}")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scenes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("preview", "timing", "stats", "card"))
    parser.add_argument("--split", default="normal", choices=scenes.SPLITS)
    parser.add_argument("--stratum", choices=scenes.STRATA)
    parser.add_argument("--size", type=int, default=512, help="side in pixels")
    parser.add_argument("--seed", type=int, default=0, help="first seed of a preview")
    parser.add_argument("--scenes", type=int, help="how many scenes (preview 8, stats and card 400)")
    parser.add_argument("--out", default="scenes.png", help="where a preview goes")
    parser.add_argument("--no-boxes", action="store_true", help="preview without evidence boxes")
    parser.add_argument("--pack-assets", metavar="FILE", help="rebuild the shipped masks and textures")
    args = parser.parse_args()
    if args.pack_assets:
        pack_assets(args.pack_assets)
    elif args.command == "preview":
        contact_sheet(args.split, args.size, args.stratum, args.seed, args.scenes or 8, boxes=not args.no_boxes).save(
            args.out
        )
    elif args.command == "timing":
        print(f"{timing(args.size):.1f} ms a scene of {args.size} px with six questions (median)")
    elif args.command == "stats":
        print(statistics(args.scenes or 400, args.size))
    elif args.command == "card":
        write_card(Path(__file__).parent / "scenes_card.md", args.scenes or 400)
    else:
        parser.print_help()
