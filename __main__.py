"""Ask one question about one image, with stock Qwen3-VL and with ARR-COC, and see where ARR-COC looked.

    python -m arr_coc photo.jpg "What does the sign say?"
    python -m arr_coc photo.jpg "How many cups are there?" --budget 0.1 --out cups.png
    python -m arr_coc photo.jpg "Describe the scene." --model ORG/arr-coc-vis --revision v1.0 --json

Prints both answers with the visual tokens and the seconds that they took, stage by stage, and writes one picture: the
relevance, the three ways of knowing, what the model sees, and the homunculus. The default model is the small one that
comes with the package; it knows rendered scenes and little else.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from arr_coc.answering import TINY, Refused, ask, load, open_image, parse_budget


def picture(image, question: str, result: dict, caption: str = ""):
    """`visualizing.summary` of what `ask` returned."""
    from arr_coc.balancing import TENSIONS
    from arr_coc.visualizing import summary

    seen = result["perception"]
    return summary(
        image,
        question,
        {"stock": result["stock"]["answer"], "ARR-COC": result["arr_coc"]["answer"]},
        seen.relevance[0],
        {name: getattr(seen, name)[0] for name in ("propositional", "perspectival", "participatory")},
        seen.allocation[0],
        seen.grid[0],
        dict(zip(TENSIONS, seen.tensions[0].tolist(), strict=True)),
        caption,
    )


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m arr_coc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image", help="path of an image file (JPEG, PNG, WebP, ...)")
    parser.add_argument("question", help="what to ask about it")
    parser.add_argument(
        "--budget", help='visual tokens: 200, a share such as 0.2, "auto" or "all" (the model\'s default)'
    )
    parser.add_argument(
        "--model", default=str(TINY), help="a folder or a Hub id (default: the small model shipped here)"
    )
    parser.add_argument("--revision", help="the Hub model's tag or commit; pin it")
    parser.add_argument("--out", default="arr_coc.png", help="where to write the picture (default arr_coc.png)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="the longest answer (default 64)")
    parser.add_argument("--no-warm-up", action="store_true", help="time the very first run, with all that it loads")
    parser.add_argument("--json", action="store_true", help="print one JSON object in the place of the table")
    args = parser.parse_args(argv)
    try:
        if not args.question.strip():
            raise Refused("the question is empty: ask something about the image.")
        budget = parse_budget(args.budget) if args.budget else None
        out = Path(args.out)
        if not out.parent.is_dir() or out.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
            raise Refused(f"--out {args.out} must be a .png, .jpg or .webp file in a folder that exists.")
        image = open_image(args.image)
        model, processor = load(args.model, args.revision, args.device)
        if not args.no_warm_up:
            ask(model, processor, image, args.question, budget, max_new_tokens=1)
        result = ask(model, processor, image, args.question, budget, args.max_new_tokens)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stock, ours = result["stock"], result["arr_coc"]
    ratio = stock["seconds"]["total"] / ours["seconds"]["total"]
    caption = f"{ours['tokens']} of {stock['tokens']} visual tokens"
    part = out.with_name(f".{out.stem}.part{out.suffix}")
    picture(image, args.question, result, caption).save(part)
    os.replace(part, out)
    if args.json:
        report = {"image": args.image, "question": args.question, "model": args.model, "revision": args.revision}
        print(json.dumps(report | {"stock": stock, "arr_coc": ours, "ratio": ratio, "picture": str(out)}))
        return 0
    for name, run in (("stock", stock), ("ARR-COC", ours)):
        print(f"{name:<8} {run['tokens']:>5} tokens  {run['seconds']['total']:>7.3f} s   {run['answer']}")
    stages = "  ".join(f"{k} {v * 1e3:.1f}" for k, v in ours["seconds"].items() if k != "total")
    print(f"ARR-COC's milliseconds: {stages}")
    print(f"stock takes {ratio:.2f} times as long; where ARR-COC looked: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
