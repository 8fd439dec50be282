"""Rendered scenes as batches for the base: conversations as ids, which of them are answers, and what teaches beside.

Scenes are rendered by the data loader's workers and never repeat: batch k of a run always holds the same seeds. What
Qwen3-VL would ask the host for (sequence lengths, M-RoPE positions) is computed here. Workers send bytes and ids.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from benchmarks import scenes
from benchmarks.scene_questions import percent

from .plan import Plan

CELL = 32  # pixels a side that one visual token shows at native resolution
SEEDS = 1 << 32  # scenes that one run's --seed owns, of the training split's 2**40


def answer_mask(ids: np.ndarray, header: Sequence[int], end: int) -> np.ndarray:
    """Which tokens of one conversation the assistant says: each answer and its end-of-turn, `[L]` bool.

    An answer starts after `header` ("<|im_start|>assistant\\n") and runs to the next `end`, inclusive.
    """
    n = len(header)
    starts = np.flatnonzero(np.all([ids[k : len(ids) - n + 1 + k] == token for k, token in enumerate(header)], 0)) + n
    ends = np.flatnonzero(ids == end)
    steps = np.zeros(len(ids) + 1, int)
    steps[starts] = 1
    steps[ends[np.searchsorted(ends, starts)] + 1] = -1
    return np.cumsum(steps[:-1]) > 0


def rope_positions(length: int, first: int, grid: tuple[int, int]) -> np.ndarray:
    """M-RoPE's (time, height, width) of one conversation whose only picture starts at token `first`: `[3, length]`.

    A picture's tokens share one time and count cells down and across; text after it goes on from its longer side.
    """
    h, w = grid
    y, x = np.divmod(np.arange(h * w), w)
    before = np.arange(first)
    after = first + max(h, w) + np.arange(length - first - h * w)
    rows = (np.zeros(h * w, int), y, x)
    return np.stack([np.concatenate([before, first + row, after]) for row in rows])


class Conversations:
    """Turns (questions and answers about one picture) into ids through the model's own chat template."""

    def __init__(self, processor):
        self.tokenizer, self.template = processor.tokenizer, processor.chat_template
        self.image, self.end = processor.image_token_id, self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.header = self.tokenizer("<|im_start|>assistant\n").input_ids
        self.pad = self.tokenizer.pad_token_id
        self.behind = len(self.tokenizer("<|im_end|>\n").input_ids)  # tokens between a question and the header

    def first_tokens(self, scene: scenes.Scene) -> np.ndarray:
        """The first token of what each thing of a scene has written on it, `[1 + things]`; -100 where there is none."""
        said = [self.tokenizer(thing.text).input_ids[0] if thing.text else -100 for thing in scene.objects]
        return np.array([-100, *said])

    def encode(self, turns: Sequence[tuple[str, str]], cells: int) -> np.ndarray:
        """`[(question, answer)]` about one picture of `cells` visual tokens -> ids `[L]`."""
        messages = []
        for question, answer in turns:
            picture = [] if messages else [{"type": "image"}]
            messages.append({"role": "user", "content": [*picture, {"type": "text", "text": question}]})
            messages.append({"role": "assistant", "content": answer})
        text = self.tokenizer.apply_chat_template(messages, chat_template=self.template, tokenize=False)
        ids = np.array(self.tokenizer(text).input_ids)
        first = int(np.argmax(ids == self.image))
        return np.concatenate([ids[:first], np.full(cells, self.image), ids[first + 1 :]])


def evidence_shares(boxes, size: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """Boxes of a picture of `size` -> how much of each cell they cover, `[h * w]` float32 of sum 1 (0 without boxes).

    Each box has the same weight, so that a small thing counts as much as a large one.
    """
    shares = np.zeros(grid, np.float32)
    for x0, y0, x1, y1 in boxes:
        rows, columns = (
            (np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)).clip(0)
            for edges, low, high in (
                (np.linspace(0, size[0], grid[0] + 1), y0, y1),
                (np.linspace(0, size[1], grid[1] + 1), x0, x1),
            )
        )
        shares += np.outer(rows, columns) / (rows.sum() * columns.sum())
    return shares.reshape(-1) / max(len(boxes), 1)


def centres(scene: scenes.Scene) -> np.ndarray:
    """Digits of each thing's centre, x and y in percent of the picture as `pointing` asks, `[1 + things, 4]`."""
    x, y = np.array([(0, 0), *(percent(thing.centre, scene.image.shape[:2]) for thing in scene.objects)]).T
    return np.stack([x // 10, x % 10, y // 10, y % 10], 1)


class Scenes(IterableDataset):
    """Endless batches of rendered scenes. Batch k of rank r is the same whoever renders it, its seeds only its own."""

    def __init__(
        self, plan: Plan, processor, *, seed: int, questions: int, start: int = 0, rank: int = 0, shrink: float = 0
    ):
        self.plan, self.seed, self.questions, self.start, self.rank = plan, seed, questions, start, rank
        self.shrink = shrink  # share of the batches from 256 px on whose pictures are shown at half their size
        self.talk = Conversations(processor)
        self.stride = max(stage.batch for stage in plan.stages)

    def __iter__(self) -> Iterator[dict]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for step in range(self.start + first, self.plan.total_steps, stride):
            stage = self.plan.stage(step)
            begin = SEEDS * self.seed + (step * self.plan.world + self.rank) * self.stride
            dice = np.random.default_rng([self.seed, step, self.rank])
            times = 2 if stage.size >= 256 and dice.random() < self.shrink else 1
            batch = self.collate([self.scene(begin + i, "train", stage.size) for i in range(stage.batch)], times)
            yield batch | {"tower_only": stage.tower_only}

    def scene(self, seed: int, split: str, size: int):
        scene = scenes.make_scene(seed, split=split, size=size, n_questions=self.questions)
        # The rare scene of which nothing can be asked is replaced by one from seeds that no run owns.
        return scene if scene.questions else self.scene(seed + scenes.SPLIT_SEEDS // 4, split, size)

    def collate(self, batch: list, times: int = 1) -> dict:
        """Scenes of one size, shown `times` smaller -> images uint8 `[B, H, W, 3]`, input_ids `[B, L]` and position_ids
        `[3, B, L]` padded on the right, answer_index/answer_target/answer_question `[n]` (the token that predicts,
        what, for which question), look_index `[m]` and evidence `[m, cells]` (tokens that should look, and where: rows
        that sum to 1, or to 0 where nothing answers), kind/colour/text `[B, cells]`, where `[B, cells, 4]` (digits of
        the centre of what stands there, in percent), first (the picture's first token)."""
        talk, (height, width) = self.talk, batch[0].image.shape[:2]
        grid = height // (CELL * times), width // (CELL * times)
        rows = [talk.encode([(q.question, q.answer) for q in s.questions], grid[0] * grid[1]) for s in batch]
        length = -(-max(map(len, rows)) // 64) * 64  # few different lengths: fewer allocations, fewer compilations
        first = int(np.argmax(rows[0] == talk.image))
        ids = np.full((len(rows), length), talk.pad)
        index, target, question = [], [], []
        looks, evidence = [], []
        asked = 0
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            (said,) = np.nonzero(answer_mask(row, talk.header, talk.end))
            index.append(i * length + said - 1)
            target.append(row[said])
            ends = row[said] == talk.end
            number = np.cumsum(ends) - ends  # an end-of-turn belongs to the answer that it ends
            question.append(asked + number)
            each = np.arange(len(batch[i].questions))
            asked += len(each)
            # Where to look: from each token that predicts a part of an answer, and from the question's last one.
            last = said[np.searchsorted(number, each)] - 1 - len(talk.header) - talk.behind
            looks.append(i * length + np.concatenate([said - 1, last]))
            shares = np.stack([evidence_shares(q.boxes, (height, width), grid) for q in batch[i].questions])
            evidence.append(shares[np.concatenate([number, each])])
        cells = [scenes.cell_labels(s, CELL * times) for s in batch]
        images = np.stack([s.image for s in batch])
        if times > 1:  # area average, rounded
            blocks = images.reshape(len(batch), height // times, times, width // times, times, 3)
            images = (blocks.mean((2, 4), dtype=np.float32) + 0.5).astype(np.uint8)
        arrays = {
            "images": images,
            "input_ids": ids,
            "position_ids": np.repeat(rope_positions(length, first, grid)[:, None], len(rows), 1),
            "answer_index": np.concatenate(index),
            "answer_target": np.concatenate(target),
            "answer_question": np.concatenate(question),
            "look_index": np.concatenate(looks),
            "evidence": np.concatenate(evidence),
            "kind": np.stack([c["kind"].reshape(-1) for c in cells]),
            "colour": np.stack([c["colour"].reshape(-1) for c in cells]),
            "text": np.stack([talk.first_tokens(s)[c["thing"].reshape(-1)] for s, c in zip(batch, cells, strict=True)]),
            "where": np.stack([centres(s)[c["thing"].reshape(-1)] for s, c in zip(batch, cells, strict=True)]),
        }
        return {**{name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}, "first": first}
