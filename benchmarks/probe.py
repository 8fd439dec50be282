"""Different questions about one image: how far apart are their allocations? Cosine distance of homunculi, by budget."""

import json
from pathlib import Path

import torch
from tqdm.auto import tqdm

from . import metrics, whole
from .methods import prepare
from .runner import load
from .scenes import make_scene


@torch.no_grad()
def probe(model, processor, split: str, images: int, share: float, questions: int = 4) -> dict:
    """Over `images` scenes with several local questions each: mean distance and its 95 % interval."""
    from PIL import Image

    apart = []
    for seed in tqdm(range(images), desc=f"{split} {share:.0%}", mininterval=5):
        scene = make_scene(seed, split, n_questions=questions + 2)
        asked = [q for q in scene.questions if q.boxes][:questions]
        if len(asked) < 2:
            continue
        image = Image.fromarray(scene.image)
        samples = [{"id": str(i), "image": image, "question": q.question} for i, q in enumerate(asked)]
        batch = prepare(processor, samples, model.device)
        seen = model.perceive(**batch.inputs, num_visual_tokens=share)
        drawn = [metrics.homunculus(a, g) for a, g in zip(seen.allocation, seen.grid, strict=True)]
        apart.append(metrics.distinctiveness(drawn))
    apart = torch.tensor(apart)
    interval = 1.96 * float(apart.std()) / len(apart) ** 0.5
    return {
        "split": split,
        "budget": share,
        "images": len(apart),
        "distance": float(apart.mean()),
        "interval": interval,
    }


def main(args) -> int:
    if args.out:  # before minutes of work that it could not take
        Path(args.out).mkdir(parents=True, exist_ok=True)
    model, processor = load(args.model, args.device, "float32")
    pairs = [(split, share) for split in args.splits.split(",") for share in args.budgets]
    rows = [probe(model, processor, split, args.images, share) for split, share in pairs]
    for row in rows:
        print(
            f"{row['split']} {row['budget']:.0%}: {row['distance']:.3f} +- {row['interval']:.3f}, n = {row['images']}"
        )
    if args.out:
        whole.write_text(Path(args.out) / "probe.json", json.dumps(rows, indent=1) + "\n")
    return 0
