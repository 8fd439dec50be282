"""The scenes among the app's examples: one for each reason to care, where it can be one that the model answers rightly.

    python examples/make_examples.py                           # draws again what examples.json lists
    python examples/make_examples.py --pick checkpoints/tiny   # chooses anew, for a newly trained model

An example shows what the app does; that it was chosen among right answers is why no figure is taken from it. For a
reason that the model cannot serve yet, the scene is kept, marked `"right": false`, and the app says so.
"""

import argparse
import json
from pathlib import Path

from PIL import Image

from benchmarks.scenes import is_correct, make_scene, vocabulary

HERE = Path(__file__).resolve().parent
REASONS = {  # why: question type, stratum, budget, and what the evidence must be; then wider, where none is answered
    "Tiny text": (
        ("reading", "dense", "20%", lambda q: 0 < longest(q) <= 48),
        ("reading", "calm", "20%", lambda q: 0 < longest(q) <= 48),
        ("reading", "calm", "50%", lambda q: 0 < longest(q) <= 80),
    ),
    "Many objects": (
        ("counting", "calm", "20%", lambda q: len(q.boxes) >= 2),
        ("counting", "calm", "50%", lambda q: len(q.boxes) >= 1),
    ),
    "Pointing": (("pointing", "calm", "20%", lambda q: True), ("pointing", "calm", "50%", lambda q: True)),
    "One thing": (
        ("identity", "dense", "20%", lambda q: 0 < longest(q) <= 64),
        ("identity", "calm", "20%", lambda q: True),
    ),
    "Whole scene": (
        ("whole", "dense", "5%", lambda q: "background" in q.question),
        ("whole", "calm", "10%", lambda q: True),
    ),
}
ANSWERED = ("answered by neither", "answered by stock alone", "answered by ARR-COC alone", "answered by both")


def longest(question) -> int:
    return max((max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in question.boxes), default=0)


def pick(model: str, side: int, tries: int) -> list[dict]:
    """For each reason the first question that both arms answer rightly; else that ARR-COC does; else one unanswered."""
    from arr_coc.answering import ask, load, parse_budget

    model, processor = load(model)
    words = {word for phrase in vocabulary() for word in phrase.split()}
    rows = []
    for why, ways in REASONS.items():
        row, best = None, -1
        for kind, stratum, budget, fits in ways:
            for seed, scene, question in fitting(kind, stratum, side, tries, fits):
                if not set(question.question.strip("?.").split()) <= words:  # misspelt: it would look like ours
                    continue
                got = ask(model, processor, Image.fromarray(scene.image), question.question, parse_budget(budget), 16)
                arr_coc, stock = (
                    is_correct(got[arm]["answer"], kind, question.answer, question.boxes, side)
                    for arm in ("arr_coc", "stock")
                )
                if 2 * arr_coc + stock > best:
                    best = 2 * arr_coc + stock
                    where = {"split": "valid", "seed": seed, "size": side, "stratum": stratum}
                    row = {"file": why.lower().replace(" ", "-") + ".jpg", "question": question.question}
                    row |= {"budget": budget, "why": why, "of": "scenes", "right": bool(arr_coc), "scene": where}
                if best == 3:
                    break
            if best >= 2:
                break
        print(f"{why}: {row['question']!r}, {ANSWERED[best]}" if row else f"{why}: no scene fits", flush=True)
        rows += [(best, row)] if row else []
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]  # the page opens with one that both answer


def fitting(kind: str, stratum: str, side: int, tries: int, fits):
    """The scenes' questions whose evidence is as it must be: seed, scene, question."""
    for seed in range(tries):
        scene = make_scene(seed, "valid", side, 8, stratum, (kind,))
        yield from ((seed, scene, question) for question in scene.questions if fits(question))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pick", metavar="MODEL", help="a checkpoint to choose for")
    parser.add_argument("--size", type=int, default=512, help="side of the scenes, in pixels")
    parser.add_argument("--tries", type=int, default=60, help="scenes looked at for each reason")
    args = parser.parse_args()
    rows = json.loads((HERE / "examples.json").read_text())
    if args.pick:
        rows = pick(args.pick, args.size, args.tries) + [row for row in rows if row["of"] != "scenes"]
    for row in rows:
        if where := row.get("scene"):
            size = where["size"] if isinstance(where["size"], int) else tuple(where["size"])
            image = make_scene(where["seed"], where["split"], size, 8, where["stratum"]).image
            Image.fromarray(image).save(HERE / row["file"], quality=88)
    (HERE / "examples.json").write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
