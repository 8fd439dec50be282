"""What is asked: our scenes, easy-VQA, and adapters for public data sets, all as samples of one shape.

A sample is a dict: `id`, `image` (PIL, RGB), `question` (as the model is given it), `answers` (accepted ones), `type`,
`stratum`, `boxes` (evidence, (x0, y0, x1, y1) in pixels; empty where none is known), `seed`. A task scores a prediction
in [0, 1] by the data set's own rule.

Adapters are pure functions of one row, written against the data sets' schemas on the Hub, so that they are tested on
rows of the same shape without it. Loading one needs the Hub, or a folder: `ARR_COC_DATA=/folder` with
`<folder>/<task>` written by `datasets.save_to_disk`.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from PIL import Image

from . import scenes

ONE_WORD = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."


@dataclass(frozen=True)
class Task:
    """`rows(n)` yields at most n samples, always the same; `score(prediction, sample)` is in [0, 1]."""

    name: str
    split: str
    rows: Callable[[int], Iterator[dict]]
    score: Callable[[str, dict], float]
    source: str
    max_new_tokens: int = 8


# ------------------------------------------------------------------------------------------------ scores


def exact(prediction: str, sample: dict) -> float:
    """1 where the words are the same, whatever the case, punctuation and articles."""
    said = _plain(prediction)
    return float(any(said == _plain(answer) for answer in sample["answers"]))


def vqa_accuracy(prediction: str, sample: dict) -> float:
    """Agreement with ten people: the mean over all nine-people subsets of min(matches / 3, 1) (Antol et al. 2015)."""
    said, given = _plain(prediction), [_plain(answer) for answer in sample["answers"]]
    if len(given) == 1:
        return float(said == given[0])
    match = sum(answer == said for answer in given)
    return sum(min((match - (answer == said)) / 3, 1.0) for answer in given) / len(given)


def anls(prediction: str, sample: dict, threshold: float = 0.5) -> float:
    """Average normalised Levenshtein similarity, 0 below the threshold (Biten et al. 2019)."""
    best = 0.0
    for answer in sample["answers"]:
        a, b = prediction.strip().lower(), answer.strip().lower()
        best = max(best, 1 - _levenshtein(a, b) / max(len(a), len(b), 1))
    return best if best >= threshold else 0.0


def relaxed(prediction: str, sample: dict) -> float:
    """ChartQA's: numbers within 5 %, other answers the same (Masry et al. 2022)."""
    said = prediction.strip().rstrip(".")
    for answer in sample["answers"]:
        a, b = _number(said), _number(answer)
        if a is not None and b is not None:
            if abs(a - b) <= 0.05 * abs(b) + 1e-12:
                return 1.0
        elif said.lower() == answer.strip().lower():
            return 1.0
    return 0.0


def option(prediction: str, sample: dict) -> float:
    """The right letter: alone, in brackets, after "answer is", or the option's own words."""
    said = prediction.strip()
    found = re.match(r"\(?([A-Z])\)?(?:[.,:)\s]|$)", said) or re.search(r"answer is:?\s*\(?([A-Z])\b", said, re.I)
    letter = found.group(1).upper() if found else None
    return float(letter == sample["answers"][0] or _plain(said) in map(_plain, sample["answers"][1:]))


def box_overlap(prediction: str, sample: dict) -> float:
    """1 where the predicted box, four numbers from 0 to 1000 of width and height, overlaps the true one by half."""
    numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", prediction)[-4:]]
    if len(numbers) < 4:
        return 0.0
    width, height = sample["image"].size
    x0, y0, x1, y1 = (n / 1000 * side for n, side in zip(numbers, (width, height) * 2, strict=True))
    a0, b0, a1, b1 = sample["boxes"][0]
    inside = max(0.0, min(x1, a1) - max(x0, a0)) * max(0.0, min(y1, b1) - max(y0, b0))
    union = max(0.0, x1 - x0) * max(0.0, y1 - y0) + (a1 - a0) * (b1 - b0) - inside
    return float(inside / union >= 0.5)


def _scene_score(prediction: str, sample: dict) -> float:
    size = sample["image"].size[::-1]
    return float(scenes.is_correct(prediction, sample["type"], sample["answers"][0], sample["boxes"], size))


def _plain(text: str) -> str:
    words = re.sub(r"[^\w\s:%$.-]", " ", text.lower()).split()
    return " ".join(word.rstrip(".") for word in words if word not in ("a", "an", "the"))


def _number(text: str) -> float | None:
    text = text.strip().replace(",", "").replace("$", "")
    try:
        return float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


def _levenshtein(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


# ------------------------------------------------------------------------------------------------ our own


def _scenes(split: str, size: int):
    def rows(n: int) -> Iterator[dict]:
        for row in scenes.evaluation_set(split, n, size):
            yield row | {"answers": [row["answer"]], "boxes": [list(box) for box in row["boxes"]]}

    return rows


EASY_SIDE = 512  # px; 64 as they come, which would be four tokens


def _easy_vqa(n: int) -> Iterator[dict]:
    """easy-VQA's test set, in an order that mixes its images and questions."""
    import easy_vqa

    questions, answers, images = easy_vqa.get_test_questions()
    paths = easy_vqa.get_test_image_paths()
    step = 4201  # a prime that shares no factor with the set's size: every question once, far apart
    for number in range(min(n, len(questions))):
        i = number * step % len(questions)
        kind = {"circle": "shape", "rectangle": "shape", "triangle": "shape", "yes": "yes/no", "no": "yes/no"}
        yield {
            "id": f"easy_vqa-{i:05d}",
            "image": Image.open(paths[images[i]]).convert("RGB").resize((EASY_SIDE, EASY_SIDE), Image.BICUBIC),
            "question": questions[i],
            "answers": [answers[i]],
            "type": kind.get(answers[i], "colour"),
            "stratum": "calm",
            "boxes": [],
            "seed": 0,
        }


# ------------------------------------------------------------------------------------------------ public data sets


def _row(id, image, question, answers, type="*", stratum="*", boxes=()) -> dict:
    return {
        "id": str(id),
        "image": image.convert("RGB"),
        "question": question,
        "answers": [str(a) for a in answers],
        "type": str(type),
        "stratum": str(stratum),
        "boxes": [list(map(float, box)) for box in boxes],
        "seed": 0,
    }


def vqav2(row: dict) -> dict:
    answers = [a["answer"] for a in row["answers"]]
    return _row(row["question_id"], row["image"], row["question"] + ONE_WORD, answers, row["answer_type"])


def textvqa(row: dict) -> dict:
    return _row(row["question_id"], row["image"], row["question"].capitalize() + ONE_WORD, row["answers"])


def docvqa(row: dict) -> dict:
    kind = (row.get("question_types") or ["*"])[0]
    return _row(row["questionId"], row["image"], row["question"] + ONE_WORD, row["answers"], kind)


def chartqa(row: dict) -> dict:
    id = f"{row['type']}-{row['question']}"
    return _row(id, row["image"], row["question"] + ONE_WORD, [row["answer"]], row["type"])


def gqa(row: dict) -> dict:
    return _row(row["id"], row["image"], row["question"] + ONE_WORD, [row["answer"]], row["types"]["structural"])


def pope(row: dict) -> dict:
    id = f"{row['category']}-{row['question_id']}"
    return _row(id, row["image"], row["question"].strip() + ONE_WORD, [row["answer"]], row["category"])


def realworldqa(row: dict) -> dict:
    choice = re.search(rf"^\s*{re.escape(row['answer'].strip())}[.)]\s*(.+)$", row["question"], re.M)
    kind = "choice" if choice else "open"
    answers = [row["answer"].strip(), *([choice.group(1)] if choice else [])]
    return _row(row.get("image_path") or row["question"], row["image"], row["question"], answers, kind)


def vstar(row: dict) -> dict:
    """Evidence boxes (x, y, width, height) come with the files of craigwu/vstar_bench, not with its table."""
    boxes = [(x, y, x + w, y + h) for x, y, w, h in row.get("bbox") or ()]
    question = re.sub(r"\s*Answer with the option's letter.*$", "", row["text"].strip(), flags=re.S) + LETTER
    return _row(row["question_id"], row["image"], question, [row["label"].strip()], row["category"], boxes=boxes)


def refcoco(row: dict) -> dict:
    x, y, w, h = row["bbox"]
    question = f"Locate {row['answer'][0]}. Output its bbox coordinates [x0, y0, x1, y1] from 0 to 1000."
    return _row(row["question_id"], row["image"], question, row["answer"], boxes=[(x, y, x + w, y + h)])


def _choice_or_words(prediction: str, sample: dict) -> float:
    return option(prediction, sample) if sample["type"] == "choice" else exact(prediction, sample)


@dataclass(frozen=True)
class Public:
    """Where a data set lies on the Hub and how it is read and scored."""

    path: str
    config: str | None
    split: str
    read: Callable[[dict], dict]
    score: Callable[[str, dict], float]
    max_new_tokens: int = 16


PUBLIC = {
    "vqav2": Public("lmms-lab/VQAv2", None, "validation", vqav2, vqa_accuracy),
    "textvqa": Public("lmms-lab/textvqa", None, "validation", textvqa, vqa_accuracy),
    "docvqa": Public("lmms-lab/DocVQA", "DocVQA", "validation", docvqa, anls, 32),
    "chartqa": Public("lmms-lab/ChartQA", None, "test", chartqa, relaxed),
    "gqa": Public("lmms-lab/GQA", "testdev_balanced_instructions", "testdev", gqa, exact),
    "pope": Public("lmms-lab/POPE", None, "test", pope, exact),
    "realworldqa": Public("lmms-lab/RealWorldQA", None, "test", realworldqa, _choice_or_words),
    "vstar": Public("lmms-lab/vstar-bench", None, "test", vstar, option),
    "refcoco": Public("lmms-lab/RefCOCO", None, "val", refcoco, box_overlap, 48),
}


def _public(name: str, public: Public):
    def rows(n: int) -> Iterator[dict]:
        from datasets import load_dataset, load_from_disk

        folder = os.path.join(os.environ.get("ARR_COC_DATA", ""), name)
        if os.environ.get("ARR_COC_DATA") and os.path.isdir(folder):
            data = load_from_disk(folder)
            data = data[public.split] if public.split in data else data
        else:
            data = load_dataset(public.path, public.config, split=public.split, streaming=True)
        if name == "gqa" and "image" not in (data.column_names or ()):
            data = _with_images(data, n)
        for row in islice(data, n):
            yield public.read(row)

    return rows


def _with_images(data, n: int) -> Iterator[dict]:
    """GQA keeps its images in a table of their own."""
    from datasets import load_dataset

    rows = list(islice(data, n))
    wanted = {row["imageId"] for row in rows}
    images = {}
    for row in load_dataset("lmms-lab/GQA", "testdev_balanced_images", split="testdev", streaming=True):
        if row["id"] in wanted:
            images[row["id"]] = row["image"]
            if len(images) == len(wanted):
                break
    return iter(row | {"image": images[row["imageId"]]} for row in rows)


TASKS: dict[str, Task] = {
    **{
        f"scenes_{split}{suffix}": Task(
            f"scenes_{split}{suffix}", split, _scenes(split, size), _scene_score, "benchmarks/scenes.py"
        )
        for suffix, size in (("", 512), ("_256", 256))  # 256 px: at a quarter of the cost
        for split in ("valid", "normal", "hard", "heldout")
    },
    "easy_vqa": Task("easy_vqa", "test", _easy_vqa, exact, "easy-VQA 1.0 (V. Zhou 2019), 64 px upscaled to 512"),
    **{
        name: Task(name, public.split, _public(name, public), public.score, public.path, public.max_new_tokens)
        for name, public in PUBLIC.items()
    },
}
SCENES = ("scenes_normal", "scenes_hard", "scenes_heldout")


def named(names: str | list[str]) -> list[Task]:
    """Tasks by name; `"scenes"` for the three test splits, `"scenes_256"` for them at 256 px.

    Raises:
        ValueError: for an unknown name, listing those that exist.
    """
    names = names.split(",") if isinstance(names, str) else list(names)
    groups = {"scenes": SCENES, "scenes_256": [f"{name}_256" for name in SCENES]}
    names = list(dict.fromkeys(m for name in names for m in groups.get(name, (name,))))
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"unknown task {', '.join(unknown)}: there are {', '.join([*TASKS, *groups])}.")
    return [TASKS[name] for name in names]
