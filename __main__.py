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
import time
import warnings
from pathlib import Path

TINY = Path(__file__).resolve().parent / "checkpoints" / "tiny"
MAX_PIXELS = 50_000_000


class Refused(ValueError):
    """Input that cannot be used; the message names it and the mend."""


def open_image(path: str):
    """An image file as upright RGB, its size checked before any pixel is decoded."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below, in our words
            with Image.open(path) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise Refused(
                        f"{path} is {width} x {height} px, more than {MAX_PIXELS // 10**6} megapixels: make it smaller."
                    )
                return ImageOps.exif_transpose(image).convert("RGB")
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise Refused(f"{path} cannot be opened ({error.strerror}): give the path of an image file.") from error
    except Image.DecompressionBombError as error:
        raise Refused(f"{path} is gigantic ({error}): make it smaller.") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{path} is not an image that can be read, or it is damaged ({error}).") from error


def parse_budget(text: str):
    """A budget as typed: `200`, `0.2`, `auto` or `all`."""
    from arr_coc.configuration_arr_coc import check_budget

    value = text
    for kind in (int, float):
        try:
            value = kind(text)
            break
        except ValueError:
            continue
    try:
        return check_budget(value, "--budget")
    except ValueError as error:
        raise Refused(str(error)) from error


def load(model: str, revision: str | None = None, device: str | None = None, dtype: str = "auto"):
    """A checkpoint in either layout, a folder or a Hub id -> model and processor."""
    import torch
    from transformers import AutoProcessor

    from arr_coc import ArrCocForConditionalGeneration

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        loaded = ArrCocForConditionalGeneration.from_pretrained(model, revision=revision or "main", dtype=dtype)
        return loaded.to(device).eval(), AutoProcessor.from_pretrained(model, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise Refused(f"--model {model} cannot be loaded: {error}") from error


def ask(model, processor, image, question: str, budget=None, max_new_tokens: int = 64) -> dict:
    """Both answers to one question.

    Returns:
        `{"stock": run, "arr_coc": run, "perception": ArrCocOutput}`, a run being `{"answer", "tokens", "seconds"}` with
        the visual tokens and the wall seconds of each stage; `total` is all of them.
    """
    import torch

    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]
    inputs = processor.apply_chat_template(
        messages,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        sanitize_control_tokens=True,
    ).to(model.device)

    def answer(**how):
        out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **how)
        return processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()

    def wait():
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = wait()
    stock = answer(num_visual_tokens="all")
    stocked = wait()
    with torch.no_grad():
        perception = model.perceive(**inputs, num_visual_tokens=budget)
    ours = answer(perception=perception)
    total = wait() - stocked
    stages = dict(perception.seconds)
    stages["language"] = total - sum(stages.values())
    h, w = perception.grid[0]
    return {
        "stock": {"answer": stock, "tokens": h * w, "seconds": {"total": stocked - start}},
        "arr_coc": {"answer": ours, "tokens": len(perception.allocation[0]), "seconds": stages | {"total": total}},
        "perception": perception,
    }


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
