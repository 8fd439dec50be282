"""The scenes among the app's examples: one for each reason to care, which the given model answers rightly.

    python examples/make_examples.py                                   # draws again what examples.json lists
    python examples/make_examples.py --pick checkpoints/tiny --size 256    # chooses anew, for a newly trained model

An example shows what the app does; that it was chosen among right answers is why no figure is taken from it.
"""

import argparse
import json
from pathlib import Path

from PIL import Image

from benchmarks.scenes import is_correct, make_scene, vocabulary

HERE = Path(__file__).resolve().parent
REASONS = {  # why: question type, stratum, budget, and what the evidence must be
    "Tiny text": ("reading", "dense", "20%", lambda q: 0 < longest(q) <= 48),
    "Many objects": ("counting", "calm", "20%", lambda q: len(q.boxes) >= 2),
    "Pointing": ("pointing", "calm", "20%", lambda q: True),
    "One thing": ("identity", "dense", "20%", lambda q: 0 < longest(q) <= 64),
    "Whole scene": ("whole", "dense", "5%", lambda q: "background" in q.question),
}


def longest(question) -> int:
    return max((max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in question.boxes), default=0)


def pick(model: str, side: int, tries: int) -> list[dict]:
    """For each reason the first scene whose question both arms answer rightly; else the first that ARR-COC does."""
    from arr_coc.answering import ask, load, parse_budget

    model, processor = load(model)
    words = {word for phrase in vocabulary() for word in phrase.split()}
    rows = []
    for why, (kind, stratum, budget, fits) in REASONS.items():
        best = None
        for seed in range(tries):
            scene = make_scene(seed, "valid", side, 8, stratum, (kind,))
            for question in scene.questions:
                plain = set(question.question.strip("?.").split()) <= words  # no misspelt one: it would look like ours
                if not (plain and fits(question)):
                    continue
                got = ask(model, processor, Image.fromarray(scene.image), question.question, parse_budget(budget), 16)
                right = [
                    is_correct(got[arm]["answer"], kind, question.answer, question.boxes, side)
                    for arm in ("arr_coc", "stock")
                ]
                if right[0] and (best is None or right[1]):
                    where = {"split": "valid", "seed": seed, "size": side, "stratum": stratum}
                    file = why.lower().replace(" ", "-") + ".jpg"
                    best = {"file": file, "question": question.question, "budget": budget, "why": why, "of": "scenes"}
                    best, both = best | {"scene": where}, right[1]
                if best and both:
                    break
            if best and both:
                break
        print(f"{why}: {best and best['question']}", flush=True)
        rows += [best] if best else []
    return rows


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
