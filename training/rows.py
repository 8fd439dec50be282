"""What ARR-COC's parts are trained on: questions about images, with where their evidence lies, and batches of them."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from arr_coc.patches import to_pixels
from arr_coc.texture import detail, texture
from benchmarks.metrics import evidence_cells

STAGES = ("cells", "grounded", "answers")


@dataclass
class Row:
    """One question about one image."""

    image: object  # PIL image or uint8 [H, W, 3]
    question: str
    answer: str
    boxes: list = field(default_factory=list)  # evidence, (x0, y0, x1, y1) in pixels of the image
    whole: bool = False  # the question is about the whole image: everything is evidence
    hard: bool = False
    cells: np.ndarray | None = None  # what stands in each cell, [3, h, w] int64: kind, colour and which thing, 0 = none


class SceneRows(IterableDataset):
    """Endless groups of questions, a group for each rendered scene. Process r of n takes every n-th scene.

    Args:
        favour: question types that every second scene of a process is asked alone.
        start: how many groups a process has had before: a resumed run goes on there.
    """

    def __init__(
        self, first: int, questions: int, size: int, split: str = "train", rank: int = 0, world: int = 1,
        favour: Sequence[str] = (), start: int = 0,
    ):  # fmt: skip
        self.first, self.questions, self.size, self.split = first, questions, size, split
        self.rank, self.world, self.favour, self.start = rank, world, tuple(favour), start

    def __iter__(self) -> Iterator[list[Row]]:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        offset, stride = (info.id, info.num_workers) if info else (0, 1)
        for turn in count(self.start + offset, stride):
            seed, types = self.first + self.rank + self.world * turn, self.favour if turn // stride % 2 else ()
            how = self.split, self.size, self.questions
            yield scene_rows(seed, *how, types) or scene_rows(seed, *how)  # there may be nothing to ask of these types


def scene_rows(seed: int, split: str, size: int, questions: int, types: Sequence[str] = ()) -> list[Row]:
    """A rendered scene's questions, of `types` alone where any are named: then there may be none."""
    from benchmarks.scenes import cell_labels, make_scene

    scene = make_scene(seed, split, size, n_questions=questions, types=types)
    stands = cell_labels(scene)
    cells = np.stack([stands["kind"], stands["colour"], stands["thing"]])
    return [
        Row(scene.image, q.question, q.answer, list(q.boxes), q.type == "whole", scene.hard, cells)
        for q in scene.questions
    ]


class DatasetRows(Dataset):
    """Rows of a `datasets` dataset with VQAv2-like columns, a group of one each.

    Columns: `image`; `question`; `answer`, or `answers` (strings, or dicts with `answer`; the most frequent is taken),
    or `multiple_choice_answer`; and optionally `boxes` or `bbox`, evidence as (x0, y0, x1, y1) in pixels.
    """

    def __init__(self, name: str, split: str):
        from datasets import Dataset as HubDataset
        from datasets import load_dataset, load_from_disk

        data = load_from_disk(name) if os.path.isdir(name) else load_dataset(name, split=split)
        self.data = data if isinstance(data, HubDataset) else data[split]
        columns = set(self.data.column_names)
        self.answer = next((c for c in ("answer", "multiple_choice_answer", "answers") if c in columns), None)
        lacking = {"image", "question"} - columns | ({"answer"} if self.answer is None else set())
        if lacking:
            raise ValueError(f"--dataset {name} lacks the columns {sorted(lacking)}; it has {sorted(columns)}.")
        self.boxes = next((c for c in ("boxes", "bbox") if c in columns), None)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> list[Row]:
        row = self.data[i]
        answer = row[self.answer]
        if isinstance(answer, (list, tuple)):
            texts = [a["answer"] if isinstance(a, dict) else a for a in answer]
            answer = max(texts, key=texts.count)
        return [Row(row["image"].convert("RGB"), row["question"], str(answer), row[self.boxes] if self.boxes else [])]


class Collate:
    """Groups of rows -> a batch for `ArrCocForConditionalGeneration`, with texture computed here, by the workers.

    Beside the processor's tensors, of which `patches` has an entry an image, for `questions` rows each, as have
    `pixels` (`[3, H, W]` in [0, 1]) and `cells` (`[3, h, w]` or None): `labels` (answers and end of turn, else -100),
    `texture` and `detail` (lists), `evidence` (list of `[boxes, h, w]` bool, or None where a row says nothing) and
    `weight [B]`. For the stage "cells", `pixels` and `cells` alone.
    """

    def __init__(self, processor, config, hard_weight: float = 2.0, stage: str = STAGES[-1]):
        self.processor, self.config, self.hard_weight, self.stage = processor, config, hard_weight, stage
        self.layout = {
            "patch_size": config.vision_config.patch_size,
            "temporal_patch_size": config.vision_config.temporal_patch_size,
            "merge_size": config.vision_config.spatial_merge_size,
        }

    def __call__(self, groups: list[list[Row]]) -> dict:
        out = {name: [] for name in ("patches", "pixels", "cells", "texture", "detail", "evidence", "questions")}
        grids, texts, lengths, weight = [], [], [], []
        config, tokenizer = self.config, self.processor.tokenizer
        for group in groups:
            image = group[0].image
            width, height = (
                image.size if hasattr(image, "size") and not isinstance(image, np.ndarray) else image.shape[1::-1]
            )
            seen = self.processor.image_processor(images=[image], return_tensors="pt")
            grid = seen["image_grid_thw"][0]
            h, w = int(grid[1]) // 2, int(grid[2]) // 2
            one = to_pixels(seen["pixel_values"], grid, mean=config.image_mean, std=config.image_std, **self.layout)[0]
            out["patches"].append(seen["pixel_values"])
            out["pixels"].append(one)
            fits = group[0].cells is not None and group[0].cells.shape[1:] == (h, w)
            out["cells"].append(torch.from_numpy(group[0].cells) if fits else None)
            if self.stage == "cells":
                continue
            out["questions"].append(len(group))
            made = texture(one, config.cell, config.texture_groups), detail(one, config.cell)
            for row in group:
                prompt = self.processor.apply_chat_template(
                    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row.question}]}],
                    add_generation_prompt=True,
                )
                prompt = prompt.replace("<|image_pad|>", "<|image_pad|>" * (h * w), 1)
                ids = tokenizer(prompt)["input_ids"]
                answer = tokenizer(row.answer)["input_ids"] + [config.turn_end_token_id]
                texts.append(ids + answer)
                lengths.append(len(answer))
                grids.append(grid)
                out["texture"].append(made[0])
                out["detail"].append(made[1])
                out["evidence"].append(evidence(row, h, w, height, width))
                weight.append(self.hard_weight if row.hard else 1.0)
        if self.stage == "cells":
            return {name: out[name] for name in ("pixels", "cells")}
        length = max(map(len, texts))
        out["input_ids"] = torch.full((len(texts), length), tokenizer.pad_token_id)
        out["attention_mask"] = torch.zeros_like(out["input_ids"])
        out["labels"] = torch.full_like(out["input_ids"], -100)
        for i, (ids, n) in enumerate(zip(texts, lengths, strict=True)):
            out["input_ids"][i, length - len(ids) :] = torch.tensor(ids)
            out["attention_mask"][i, length - len(ids) :] = 1
            out["labels"][i, length - n :] = torch.tensor(ids[-n:])
        out["mm_token_type_ids"] = (out["input_ids"] == config.image_token_id).int()
        out["image_grid_thw"], out["weight"] = torch.stack(grids), torch.tensor(weight)
        out["answer_tokens"] = max(lengths)
        return out


def evidence(row: Row, h: int, w: int, height: int, width: int) -> Tensor | None:
    """`[boxes, h, w]` bool: the cells that each of a row's boxes reaches into; for the whole scene one of all cells,
    None where nothing is known."""
    if row.whole:
        return torch.ones(1, h, w, dtype=torch.bool)
    if not len(row.boxes):
        return None
    return torch.stack([evidence_cells([box], (h, w), (height, width)) for box in row.boxes])
