"""A few hundred test pictures with question, answer and evidence boxes, for the dataset's viewer.

They are WebP, so that the repository stays small; what was measured is rendered anew, bit for bit, from `split`,
`id` and `seed` by `benchmarks.scenes.evaluation_set`.
"""

import io
from pathlib import Path

from . import whole
from .tasks import SCENES, TASKS

QUALITY = 60


def rows(n: int):
    for name in SCENES:
        for sample in TASKS[name].rows(n):
            buffer = io.BytesIO()
            sample["image"].save(buffer, "WEBP", quality=QUALITY, method=6)
            yield {
                "id": sample["id"],
                "split": TASKS[name].split,
                "image": {"bytes": buffer.getvalue(), "path": f"{sample['id']}.webp"},
                "question": sample["question"],
                "answer": sample["answers"][0],
                "question_type": sample["type"],
                "stratum": sample["stratum"],
                "boxes": sample["boxes"],
                "seed": sample["seed"],
            }


def features():
    from datasets import Features, Image, List, Value

    text = Value("string")
    names = ("id", "split", "image", "question", "answer", "question_type", "stratum", "boxes", "seed")
    special = {"image": Image(), "boxes": List(List(Value("int32"), length=4)), "seed": Value("int64")}
    return Features({name: special.get(name, text) for name in names})


def main(args) -> int:
    from datasets import Dataset

    path = Path(args.data) / "pictures" / "scenes.parquet"
    made = list(rows(args.n))
    whole.write(path, Dataset.from_list(made, features=features()).to_parquet)
    print(f"{path}: {len(made)} pictures, {path.stat().st_size / 1e6:.1f} MB")
    return 0
