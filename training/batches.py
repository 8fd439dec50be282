"""Rendered scenes as batches for the base: conversations as ids, which of them are answers, and what teaches beside.

Scenes are rendered by the data loader's workers and never repeat: batch k of a run always holds the same seeds. What
Qwen3-VL would ask the host for (sequence lengths, M-RoPE positions) is computed here. Workers send bytes and ids.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from arr_coc.attending import SCALES
from arr_coc.realizing import places
from arr_coc.texture import detail
from benchmarks import scenes
from benchmarks.scene_questions import percent

from .few import choose, pyramid_index
from .plan import Plan

CELL = 32  # pixels a side that one visual token shows at native resolution
SPELT = 4  # tokens of a sign's text that the probe must read
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


def rope_positions(length: int, first: int, grid: tuple[int, int], at: np.ndarray | None = None) -> np.ndarray:
    """M-RoPE's (time, height, width) of one conversation whose only picture starts at token `first`: `[3, length]`.

    A picture's tokens share one time and count cells down and across; text after it goes on from its longer side.
    `at` (`[n, 2]`): where its tokens stand, (y, x) in cells, if they are not all the cells.
    """
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1]) if at is None else at.T
    before = np.arange(first)
    after = first + max(grid) + np.arange(length - first - len(y))
    rows = (np.zeros(len(y), int), y, x)
    return np.stack([np.concatenate([before, first + row, after]) for row in rows])


class Conversations:
    """Turns (questions and answers about one picture) into ids through the model's own chat template."""

    def __init__(self, processor):
        self.tokenizer, self.template = processor.tokenizer, processor.chat_template
        self.image, self.end = processor.image_token_id, self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.header = self.tokenizer("<|im_start|>assistant\n").input_ids
        self.pad = self.tokenizer.pad_token_id
        self.behind = len(self.tokenizer("<|im_end|>\n").input_ids)  # tokens between a question and the header

    def written(self, scene: scenes.Scene) -> np.ndarray:
        """The first tokens of what each thing of a scene has written on it, `[1 + things, 4]`; -100 where there is
        none."""
        said = np.full((1 + len(scene.objects), SPELT), -100)
        for row, thing in zip(said[1:], scene.objects, strict=True):
            ids = self.tokenizer(thing.text).input_ids[:SPELT]
            row[: len(ids)] = ids
        return said

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

    def spoken(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of one conversation: the tokens that the assistant says `[n]`, the number of the answer that each belongs to
        `[n]` (an end-of-turn belongs to the answer that it ends), and each question's last token `[answers]`."""
        (said,) = np.nonzero(answer_mask(ids, self.header, self.end))
        ends = ids[said] == self.end
        number = np.cumsum(ends) - ends
        begins = said[np.searchsorted(number, np.arange(number[-1] + 1))]
        return said, number, begins - 1 - len(self.header) - self.behind


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


def hops(question: scenes.Question) -> tuple[tuple, tuple]:
    """The boxes to look at first, and those that this leads to: of "what is left of the umbrella?" the umbrella, then
    its neighbour. Without a relation all of them, both times."""
    boxes = question.boxes
    return (boxes[:1], boxes[1:]) if question.type == "relation" else (boxes, boxes)


def centres(scene: scenes.Scene) -> np.ndarray:
    """Digits of each thing's centre, x and y in percent of the picture as `pointing` asks, `[1 + things, 4]`."""
    x, y = np.array([(0, 0), *(percent(thing.centre, scene.image.shape[:2]) for thing in scene.objects)]).T
    return np.stack([x // 10, x % 10, y // 10, y % 10], 1)


class Scenes(IterableDataset):
    """Endless batches of rendered scenes. Batch k of rank r is the same whoever renders it, its seeds only its own.

    shrink: share of the batches from 256 px on whose pictures are shown at half their size.
    few: share of the batches in which each question is asked alone, through few tokens chosen for it.
    favour: question types that every second picture is asked about alone.
    """

    def __init__(
        self,
        plan: Plan,
        processor,
        *,
        seed: int,
        questions: int,
        start: int = 0,
        rank: int = 0,
        shrink: float = 0,
        few: float = 0,
        favour: Sequence[str] = (),
    ):
        self.plan, self.seed, self.questions, self.start, self.rank = plan, seed, questions, start, rank
        self.shrink, self.few, self.favour = shrink, few, tuple(favour)
        self.talk = Conversations(processor)
        self.stride = max(stage.batch for stage in plan.stages)
        if few and (odd := [stage.size for stage in plan.stages if stage.size % (CELL * SCALES[-1])]):
            raise ValueError(f"--few needs whole regions of {CELL * SCALES[-1]} px: {odd} px are not such sizes.")

    def __iter__(self) -> Iterator[dict]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for step in range(self.start + first, self.plan.total_steps, stride):
            stage = self.plan.stage(step)
            begin = SEEDS * self.seed + (step * self.plan.world + self.rank) * self.stride
            dice = np.random.default_rng([self.seed, step])  # alike on all ranks: none waits for another's longer batch
            times = 2 if stage.size >= 256 and dice.random() < self.shrink else 1
            share = None
            if dice.random() < self.few and not stage.tower_only:
                times, share = 1, float(np.exp(dice.uniform(np.log(0.05), np.log(0.9))))
            batch = [self.scene(begin + i, "train", stage.size) for i in range(stage.batch)]
            dice = np.random.default_rng([self.seed, step, self.rank])
            yield self.collate(batch, times, share, dice) | {"tower_only": stage.tower_only}

    def scene(self, seed: int, split: str, size: int):
        types = self.favour if split == "train" and seed % 2 else None
        scene = scenes.make_scene(seed, split=split, size=size, n_questions=self.questions, types=types)
        # The rare scene of which nothing can be asked is replaced by one from seeds that no run owns.
        return scene if scene.questions else self.scene(seed + scenes.SPLIT_SEEDS // 4, split, size)

    def collate(
        self,
        batch: list,
        times: int = 1,
        share: float | None = None,
        dice: np.random.Generator | None = None,
        known: float = 0.7,
    ) -> dict:
        """Scenes of one size, shown `times` smaller, as one batch of R rows.

        A row is a picture's whole conversation; or, with `share`, one of its questions through that share of its
        tokens, chosen by `few.choose` with the evidence `known` in that share of the rows.

        Returns images uint8 `[B, H, W, 3]`; input_ids `[R, L]` and position_ids `[3, R, L]` padded on the right;
        answer_index/answer_target/answer_question `[n]` (the token that predicts, what, for which question);
        look_index `[m]` and evidence `[m, 2, tokens]` (tokens that should look, and where, first and then: rows that
        sum to 1, or to 0 where nothing answers); kind/colour `[R, tokens]`; text and where `[R, tokens, 4]` (the first
        tokens of what is written there, and the digits of the centre of what stands there, in percent); first (the
        picture's first token); with `share` also allocation `[R, tokens, 3]` and picture `[R]` (which of the images).
        """
        talk, size = self.talk, batch[0].image.shape[:2]
        grid = size[0] // (CELL * times), size[1] // (CELL * times)
        scales = (1,) if share is None else SCALES
        grids = [(grid[0] // scale, grid[1] // scale) for scale in scales]
        labels = [self.labels(scene, [CELL * times * scale for scale in scales]) for scene in batch]
        sights = [  # [2, tokens of all scales] for each question of each scene: first and then
            [
                np.stack([np.concatenate([evidence_shares(boxes, size, g) for g in grids]) for boxes in hops(q)])
                for q in scene.questions
            ]
            for scene in batch
        ]
        if share is None:
            rows = [(i, range(len(scene.questions))) for i, scene in enumerate(batch)]
            shown = np.broadcast_to(np.arange(grid[0] * grid[1]), (len(rows), grid[0] * grid[1]))
            at, dtype, chosen = [None] * len(rows), np.int64, {}
        else:
            asked = max(1, round(1.2 / share))  # more questions of a picture the fewer tokens each: as much work
            rows = [(i, [k]) for i, scene in enumerate(batch) for k in range(len(scene.questions))[:asked]]
            tokens = max(1, round(share * grid[0] * grid[1]))
            lost = [detail(torch.from_numpy(scene.image).movedim(2, 0) / 255, CELL) for scene in batch]
            allocation = torch.stack([
                choose(sights[i][k].sum(0), labels[i]["thing"], lost[i], tokens, dice, known) for i, (k,) in rows
            ])  # fmt: skip
            shown = pyramid_index(allocation, *grid).numpy()
            at = places(allocation.flatten(0, 1), *grid)[0].view(*shown.shape, 2).numpy()
            dtype = np.float32  # a coarse token stands between cells
            chosen = {"allocation": allocation, "picture": torch.tensor([i for i, _ in rows])}
        turns = [[(batch[i].questions[k].question, batch[i].questions[k].answer) for k in each] for i, each in rows]
        ids = [talk.encode(each, shown.shape[1]) for each in turns]
        length = -(-max(map(len, ids)) // 16) * 16  # few different lengths: fewer allocations, fewer compilations
        first = int(np.argmax(ids[0] == talk.image))
        padded = np.full((len(rows), length), talk.pad)
        index, target, question, looks, evidence, asked = [], [], [], [], [], 0
        for r, ((i, numbers), row) in enumerate(zip(rows, ids, strict=True)):
            padded[r, : len(row)] = row
            said, number, last = talk.spoken(row)
            index.append(r * length + said - 1)
            target.append(row[said])
            question.append(asked + number)
            asked += len(numbers)
            # Where to look: from each token that predicts a part of an answer, and from the question's last one.
            looks.append(r * length + np.concatenate([said - 1, last]))
            seen = np.stack([sights[i][k][:, shown[r]] for k in numbers])
            seen /= np.maximum(seen.sum(2, keepdims=True), 1e-6)
            evidence.append(seen[np.concatenate([number, np.arange(len(numbers))])])
        arrays = {
            "images": shrunk(np.stack([scene.image for scene in batch]), times),
            "input_ids": padded,
            "position_ids": np.stack([rope_positions(length, first, grid, each) for each in at], 1).astype(dtype),
            "answer_index": np.concatenate(index),
            "answer_target": np.concatenate(target),
            "answer_question": np.concatenate(question),
            "look_index": np.concatenate(looks),
            "evidence": np.concatenate(evidence),
            **{
                k: np.stack([labels[i][k][row] for (i, _), row in zip(rows, shown, strict=True)])
                for k in ("kind", "colour", "text", "where")
            },
        }
        return {**{k: torch.from_numpy(np.ascontiguousarray(a)) for k, a in arrays.items()}, **chosen, "first": first}

    def labels(self, scene, sides: Sequence[int]) -> dict[str, np.ndarray]:
        """What the probe must read off each token of a scene whose cells have the first of `sides` px, then the next.

        kind and colour (0 empty), `[tokens]`; text (first tokens; -100 none) and where, `[tokens, 4]`. And thing, its
        number (0 empty), `[tokens]`, which the probe is not asked for.
        """
        cells = [scenes.cell_labels(scene, side) for side in sides]
        kind, colour, thing = (np.concatenate([c[k].reshape(-1) for c in cells]) for k in ("kind", "colour", "thing"))
        text, where = self.talk.written(scene)[thing], centres(scene)[thing]
        return {"kind": kind, "colour": colour, "text": text, "where": where, "thing": thing}


def shrunk(images: np.ndarray, times: int) -> np.ndarray:
    """uint8 `[B, H, W, 3]` by area average, rounded."""
    if times == 1:
        return images
    b, height, width, _ = images.shape
    blocks = images.reshape(b, height // times, times, width // times, times, 3)
    return (blocks.mean((2, 4), dtype=np.float32) + 0.5).astype(np.uint8)
