"""Train the small Qwen3-VL of checkpoints/tiny from scratch, on rendered scenes, and ask it the test questions.

Notable
- Scenes are rendered by the data loader's workers and never repeat: batch k of a run always holds the same seeds.
- Workers send bytes and ids; patches are cut and normalised on the device, equal to the processor's pixel_values.
- What Qwen3-VL would ask the host for (grids, sequence lengths, M-RoPE positions) is computed ahead.
- Plain Hugging Face `Trainer`: accelerate launch, mixed precision and resuming work as usual.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accelerate.utils import broadcast
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AutoProcessor,
    PrinterCallback,
    Qwen3VLForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.trainer_utils import get_last_checkpoint
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from arr_coc.checkpoints.make_tiny import tiny_config
from arr_coc.patches import to_patches
from benchmarks import scenes
from benchmarks.metrics import wilson

# SIZE:BATCH:WEIGHT of the stages unless --stage says otherwise, with a GPU and without
CUDA_STAGES = ("128:512:1", "256:256:2", "512:128:7")
CPU_STAGES = ("128:64:2", "256:32:3", "512:16:5")
CELL = 32  # pixels a side that one visual token shows at native resolution
SEEDS = 1 << 32  # scenes that one run's --seed owns, of the training split's 2**40

# ---------------------------------------------------------------------------------------------------------------
# Text: conversations as ids, and which of them are answers


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
    height, width = scene.image.shape[:2]
    percent = [[min(99, int(100 * c / side)) for c, side in zip(thing.centre, (width, height), strict=True)]
               for thing in scene.objects]  # fmt: skip
    x, y = np.array([[0, 0], *percent]).T
    return np.stack([x // 10, x % 10, y // 10, y % 10], 1)


# ---------------------------------------------------------------------------------------------------------------
# Pictures: bytes to the tower's rows, on the device


def pixel_values(images: Tensor) -> Tensor:
    """uint8 pictures `[B, H, W, 3]` -> Qwen3-VL's normalised rows `[B * patches, 1536]`, float, as its processor's."""
    rows = torch.vmap(partial(to_patches, patch_size=16, temporal_patch_size=2, merge_size=2))(images.movedim(3, 1))
    return (rows.flatten(0, 1).float() - 127.5) / 127.5  # mean and deviation of 0.5 on a range of 255


@lru_cache(maxsize=16)
def tower_inputs(n: int, size: tuple[int, int], table_side: int, device: torch.device) -> dict[str, Tensor]:
    """What the tower computes from `grid_thw` with host round trips, for `n` pictures of one `size` (height, width)."""
    h, w = size[0] // 16, size[1] // 16
    grid = torch.tensor([[1, h, w]])
    taps, weights = get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=table_side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    places = get_vision_position_ids(grid, 2)
    tables = {
        "grid_thw": grid.repeat(n, 1),
        "interp_indices": taps.repeat(n, 1),  # [n * patches, 4]
        "interp_weights": weights.repeat(n, 1),  # [n * patches, 4]
        "position_ids": places.repeat(n, 1),  # [n * patches, 2]
        "cu_seqlens": torch.arange(n + 1, dtype=torch.int32) * (h * w),
    }
    return {**{name: table.to(device) for name, table in tables.items()}, "max_seqlen": h * w}


def folded_attention(module, query, key, value, attention_mask=None, *, scaling, dropout=0.0, max_length_q, **_):
    """Attention within pictures of equal length, as one batch instead of stock's loop over them.

    Takes the flash interface's packed `[1, heads, pictures * length, d]`; every picture has `max_length_q` patches.
    """
    q, k, v = (x[0].transpose(0, 1).unflatten(0, (-1, max_length_q)).transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, scale=scaling, dropout_p=dropout)  # [pictures, heads, length, d]
    return out.transpose(1, 2).flatten(0, 1).unsqueeze(0), None


class LinearPatchEmbed(nn.Module):
    """The tower's patch embedding as the matrix product that its non-overlapping Conv3d is; shares the weights."""

    def __init__(self, embed: nn.Module):
        super().__init__()
        self.proj = embed.proj

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.proj.weight.flatten(1), self.proj.bias)


def overheard(attention: Callable) -> Callable:
    """An attention that leaves its queries and keys, `[B, heads, L, d]`, with its module: `Learner.gaze` reads them."""

    @torch.compiler.disable  # compiled, each length would be compiled anew
    def attend(module, query, key, *rest, **options):
        module.overheard = query, key
        return attention(module, query, key, *rest, **options)

    return attend


def causal_attention(module, query, key, value, attention_mask=None, *, scaling, dropout=0.0, **_):
    """Causal attention `[B, heads, L, d]` as matrix products over blocks of 64 queries. No padding on the left.

    On a CPU, forward and backward in bfloat16 take 0.44 of torch's fused kernel (64 x 8 heads x 192 tokens of 32).
    """
    b, heads, length, d = query.shape
    repeats = heads // key.shape[1]
    q = query.reshape(b * heads, length, d)
    k, v = (x.repeat_interleave(repeats, 1).view(b * heads, length, d) for x in (key, value))
    out = []
    for start in range(0, length, 64):
        end = min(start + 64, length)
        later = q.new_full((end - start, end), float("-inf")).triu(start + 1)
        scores = torch.baddbmm(later, q[:, start:end], k[:, :end].transpose(1, 2), alpha=scaling)
        out.append(torch.bmm(scores.softmax(-1), v[:, :end]))
    return torch.cat(out, 1).view(b, heads, length, d).transpose(1, 2), None


def quicken(model: Qwen3VLForConditionalGeneration, on_cpu: bool = True) -> Qwen3VLForConditionalGeneration:
    """Make the model fit for many small pictures a batch. For training on `tower_inputs` only; same weights, same
    results. ("flash" in the name selects the tower's packed path.)"""
    AttentionInterface.register("folded_flash", folded_attention)
    model.model.visual.config._attn_implementation = "folded_flash"
    model.model.visual.patch_embed = LinearPatchEmbed(model.model.visual.patch_embed)
    attention = causal_attention if on_cpu else sdpa_attention_forward
    AttentionInterface.register("overheard", overheard(attention))
    model.model.language_model.config._attn_implementation = "overheard"
    return model


def drop_cells(inputs: dict, share: float, generator: torch.Generator):
    """Keep a random `share` of each picture's visual tokens, at their true places, before the tower. In place.

    How strongly cells with something in them are preferred is random per picture, from not at all to always, so that
    the base meets both what blind and what good selection leaves it.
    """
    labels, first, tower = inputs["kind"], inputs["first"], inputs["tower"]
    b, cells = labels.shape
    keep = max(1, round(share * cells))
    draw = partial(torch.rand, generator=generator, device=labels.device)
    kept = (draw(b, cells) + (labels > 0) * draw(b, 1)).topk(keep).indices.sort(1).values  # [B, keep]
    row = torch.arange(b, device=labels.device)[:, None]

    def of_cells(patches: Tensor) -> Tensor:  # [B * cells * 4, c] -> [B * keep * 4, c]
        return patches.view(b, cells, -1)[row, kept].view(b * keep * 4, -1)

    inputs["patches"] = of_cells(inputs["patches"])
    tower = {**tower, **{k: of_cells(tower[k]) for k in ("interp_indices", "interp_weights", "position_ids")}}
    tower["cu_seqlens"] = torch.arange(b + 1, dtype=torch.int32, device=labels.device) * (keep * 4)
    inputs["tower"] = {**tower, "max_seqlen": keep * 4}

    def of_tokens(sequence: Tensor) -> Tensor:  # [..., B, L] -> [..., B, L - cells + keep]
        pictures = sequence[..., first : first + cells]
        chosen = pictures.gather(-1, kept.expand(*pictures.shape[:-1], keep))
        return torch.cat([sequence[..., :first], chosen, sequence[..., first + cells :]], -1)

    at, length = inputs["answer_index"], inputs["input_ids"].shape[1]
    inputs["answer_index"] = at - (at // length + 1) * (cells - keep)
    inputs["input_ids"], inputs["position_ids"] = of_tokens(inputs["input_ids"]), of_tokens(inputs["position_ids"])
    inputs |= {name: inputs[name].gather(1, kept) for name in ("kind", "colour", "text")}
    inputs["where"] = inputs["where"][row, kept]
    look = inputs["look_index"]
    seen = inputs["evidence"].gather(1, kept[look // length])
    inputs["evidence"] = seen / seen.sum(1, keepdim=True).clamp(min=1e-6)
    inputs["look_index"] = look - (look // length + 1) * (cells - keep)


# ---------------------------------------------------------------------------------------------------------------
# base: the plan, the data, the model that learns


@dataclass
class Stage:
    """`SIZE:BATCH:WEIGHT`: pictures of SIZE px, BATCH a step and process, for WEIGHT of the run (relative).

    `:tower` behind it: only the probes' loss, so that the tower alone learns, at a fifth of the cost of a picture.
    """

    size: int
    batch: int
    weight: float
    tower_only: bool = False

    @classmethod
    def parse(cls, text: str) -> "Stage":
        size, batch, weight, *part = text.split(":")
        if part not in ([], ["tower"]):
            raise ValueError(f"a stage is SIZE:BATCH:WEIGHT or SIZE:BATCH:WEIGHT:tower, not {text!r}")
        return cls(int(size), int(batch), float(weight), bool(part))


@dataclass
class Plan:
    """How far the run is, which stage that makes it, and the learning rate's factor.

    Measured in pictures (exact: the stage of step k is fixed) or in seconds (a loan's worth: stages change by the
    clock; `now` is shared with the workers).
    """

    stages: list[Stage]
    pictures: int = 0  # of the whole run; 0 where seconds decide
    seconds: float = 0.0
    world: int = 1
    warmup: int = 6400  # pictures
    decay: float = 0.4  # the last share of the run, over which the rate falls to zero
    done_pictures: int = 0
    done_seconds: float = 0.0
    now: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64).share_memory_())

    def __post_init__(self):
        weights = np.array([stage.weight for stage in self.stages])
        if not self.pictures and not self.seconds:
            self.pictures = int(weights.sum())
        self.bounds = np.cumsum(weights) / weights.sum()
        shares = weights / weights.sum() * self.pictures
        steps = [max(1, round(n / (s.batch * self.world))) for n, s in zip(shares, self.stages, strict=True)]
        self.ends = np.cumsum(steps)  # the step at which each stage is over
        if not self.seconds:  # whole steps
            self.pictures = self.world * sum(n * s.batch for n, s in zip(steps, self.stages, strict=True))

    @property
    def total_steps(self) -> int:
        return 10**9 if self.seconds else int(self.ends[-1])

    @property
    def progress(self) -> float:
        if self.seconds:
            return min(1.0, self.done_seconds / self.seconds)
        return min(1.0, self.done_pictures / self.pictures)

    def stage(self, step: int) -> Stage:
        index = int(self.now) if self.seconds else int(np.searchsorted(self.ends, step, "right"))
        return self.stages[min(index, len(self.stages) - 1)]

    def advance(self, pictures: int, seconds: float):
        self.done_pictures, self.done_seconds = pictures, seconds
        self.now.fill_(min(int(np.searchsorted(self.bounds, self.progress, "right")), len(self.stages) - 1))

    def rate(self, _step: int = 0) -> float:
        warm = (self.done_pictures + 1) / self.warmup if self.warmup else 1.0
        return min(1.0, warm, (1 - self.progress) / self.decay)


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
            asked += int(ends.sum())
            # Where to look: from each token that predicts a part of an answer, and from the question's last one.
            last = said[np.searchsorted(number, np.arange(number[-1] + 1))] - 1 - len(talk.header) - talk.behind
            looks.append(i * length + np.concatenate([said - 1, last]))
            shares = np.stack([evidence_shares(q.boxes, (height, width), grid) for q in batch[i].questions])
            evidence.append(shares[np.concatenate([number, np.arange(number[-1] + 1)])])
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


class Learner(nn.Module):
    """Qwen3-VL and its training-only probe: what stands in each cell must be read off the merger's output, in words.

    A cell's vector times the embeddings of the names of kinds and colours, and of a sign's first token, must pick the
    right ones, and a linear layer the digits of the thing's centre. Vision so speaks the language model's words from
    the start. And two heads of each middle layer must look where the answer lies (`gaze`), as those of large models
    come to do by themselves. Nothing of this is part of the checkpoint.
    """

    def __init__(
        self, model: Qwen3VLForConditionalGeneration, tokenizer, probe_weight: float = 0.5, gaze_weight: float = 0.5
    ):
        super().__init__()
        self.model, self.probe_weight, self.gaze_weight = model, probe_weight, gaze_weight
        layers = model.model.language_model.layers
        self.lookers = [layer.self_attn for layer in layers[(len(layers) - 1) // 2 : -1]]  # 2, 3 and 4 of six
        for name, words in (("kind", scenes.KINDS), ("colour", scenes.COLOURS)):  # as answers, and inside sentences
            ids = [[tokenizer(form).input_ids[0] for form in (word, f" {word}")] for word in words]
            self.register_buffer(name, torch.tensor(ids), persistent=False)
        self.nothing = nn.Parameter(torch.zeros(2, model.config.text_config.hidden_size))  # an empty cell's "word"
        self.where = nn.Linear(model.config.text_config.hidden_size, 4 * 10)
        self.allocate: Callable[[dict], None] | None = None  # may shorten a batch in place; see `drop_cells`

    def probe(self, cells: Tensor, labels: dict) -> Tensor:
        """Loss of naming what is in cells `[n, d]`; labels `[B, cells]`: kind, colour (0 empty), text (-100 none)."""
        words = self.model.get_input_embeddings().weight
        weight = torch.where(labels["kind"].flatten() > 0, 1.0, 0.1)
        loss = F.cross_entropy((cells @ words.T).float(), labels["text"].flatten(), reduction="sum")
        loss = loss / (labels["text"] >= 0).sum().clamp(min=1)
        for nothing, name in zip(self.nothing, ("kind", "colour"), strict=True):
            names = torch.cat([nothing[None], words[getattr(self, name)].mean(1)])
            each = F.cross_entropy((cells @ names.T).float(), labels[name].flatten(), reduction="none")
            loss = loss + (each * weight).sum() / weight.sum()
        things = labels["kind"].flatten() > 0
        digits = self.where(cells[things]).float().unflatten(1, (4, 10)).flatten(0, 1)
        each = F.cross_entropy(digits, labels["where"].flatten(0, 1)[things].flatten(), reduction="sum")
        return loss + each / max(len(digits), 1)

    def gaze(self, inputs: dict) -> Tensor:
        """Cross-entropy from the evidence to where the first group of heads of each middle layer looks in the picture.

        Supervised attention (Liu et al. 2016, for translation): over the picture's cells alone, so how much a head
        looks at the picture at all stays free.
        """
        has = inputs["evidence"].sum(1) > 0
        evidence, look = inputs["evidence"][has], inputs["look_index"][has]
        b, cells = look // inputs["input_ids"].shape[1], slice(inputs["first"], inputs["first"] + evidence.shape[1])
        loss = evidence.new_zeros(())
        for attention in self.lookers:
            query, key = attention.overheard
            group = query.shape[1] // key.shape[1]
            q = query[:, :group].transpose(1, 2).flatten(0, 1)[look]  # [m, group, d]
            scores = torch.einsum("mgd,mcd->mgc", q, key[:, 0, cells][b]).float() * attention.scaling
            loss = loss - (evidence[:, None] * scores.log_softmax(-1)).sum(-1).mean(-1).sum()
            del attention.overheard
        return loss / (len(self.lookers) * max(len(evidence), 1))

    def forward(self, images: Tensor, return_logits: bool = False, tower_only: bool = False, **inputs):
        """One batch of `Scenes.collate` -> losses (scalars), and the answers' logits `[n, vocabulary]` if asked."""
        stock = self.model.model
        n, height, width, _ = images.shape
        inputs["patches"] = pixel_values(images)
        inputs["tower"] = tower_inputs(n, (height, width), stock.visual.num_grid_per_side, images.device)
        if self.allocate is not None and self.training:
            self.allocate(inputs)
        seen = stock.visual(inputs["patches"], return_dict=True, **inputs["tower"])
        cells = seen.pooler_output  # [B * cells, d]
        probe = self.probe(cells, inputs)
        if tower_only:
            none = probe.new_tensor(torch.nan)
            return {"loss": probe, "answers": none, "probe": probe.detach(), "gaze": none}
        seen.pooler_output, seen.deepstack_features = (cells,), [(f,) for f in seen.deepstack_features]
        # Padding stands on the right, where causal attention never looks from: no mask is needed.
        said = stock(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            mm_encoder_outputs={"image": seen},
            use_cache=False,
        ).last_hidden_state
        logits = self.model.lm_head(said.flatten(0, 1)[inputs["answer_index"]]).float()
        answers = F.cross_entropy(logits, inputs["answer_target"])
        gaze = self.gaze(inputs)
        losses = {"loss": answers + self.probe_weight * probe + self.gaze_weight * gaze}
        losses |= {"answers": answers.detach(), "probe": probe.detach(), "gaze": gaze.detach()}
        return {**losses, "logits": logits} if return_logits else losses


def small_model(processor, folder: Path | None = None) -> Qwen3VLForConditionalGeneration:
    """The small Qwen3-VL in float32, fresh or with a folder's weights. Weights of an add-on beside them are left."""
    model = Qwen3VLForConditionalGeneration(tiny_config(processor.tokenizer))
    if folder:
        lacking, _ = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        if set(lacking) - {"lm_head.weight"}:  # the head is the embedding
            raise ValueError(f"{folder} lacks weights: {sorted(lacking)[:3]} ...")
    return model


def save_weights(model: Qwen3VLForConditionalGeneration, folder: Path):
    """model.safetensors in bfloat16, as one: a reader sees the old file or the new one. The tied head is left out."""
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    weights.pop("lm_head.weight")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors.part", metadata={"format": "pt"})
    os.replace(folder / "model.safetensors.part", folder / "model.safetensors")


class BaseTrainer(Trainer):
    """`Trainer` with its own endless loader, a rate that follows `Plan`, and losses kept on the device until logged."""

    def __init__(self, *args, plan: Plan, workers: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.plan, self.workers = plan, workers
        self.losses: list[Tensor] = []  # [4] a step: loss, answers, probe, gaze
        self.waited = 0.0  # seconds spent waiting for the workers

    def get_train_dataloader(self) -> DataLoader:
        # Not through accelerate: each process renders its own seeds, so nothing needs sharding or dispatching.
        more = {"prefetch_factor": 2, "persistent_workers": True} if self.workers else {}
        pin = self.args.device.type == "cuda"
        return DataLoader(self.train_dataset, batch_size=None, num_workers=self.workers, pin_memory=pin, **more)

    def get_batch_samples(self, *args, **kwargs):
        start = time.monotonic()
        samples = super().get_batch_samples(*args, **kwargs)
        self.waited += time.monotonic() - start
        return samples

    def _prepare_input(self, data):
        if isinstance(data, dict):
            return {key: self._prepare_input(value) for key, value in data.items()}
        return data.to(self.args.device, non_blocking=True) if isinstance(data, Tensor) else data

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.plan.rate)
        return self.lr_scheduler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.batch_pictures, self.batch_size_px = inputs["images"].shape[:2]
        out = model(**inputs)
        self.losses.append(torch.stack([out["loss"].detach(), out["answers"], out["probe"], out["gaze"]]))
        return out["loss"]

    def save_model(self, output_dir=None, _internal_call=False):
        """The state to resume from: weights in full precision, the probe, and how far the plan has come."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), folder / "pytorch_model.bin")
        clock = {"pictures": self.plan.done_pictures, "seconds": self.plan.done_seconds}
        (folder / "clock.json").write_text(json.dumps(clock))


# ---------------------------------------------------------------------------------------------------------------
# What is seen of a run: bar, log, curves, quick evaluation, files


def elapsed(begin: float, args: TrainingArguments) -> float:
    """Seconds since `begin` (`time.monotonic()`), the first process's: all must agree on what the clock says."""
    seconds = torch.tensor(time.monotonic() - begin)
    return float(broadcast(seconds.to(args.device)) if args.world_size > 1 else seconds)


class Report(TrainerCallback):
    """Keeps the plan's clock; logs, evaluates, saves and stops by it. One row of log.jsonl is one JSON object."""

    def __init__(self, trainer: BaseTrainer, out: Path, args: argparse.Namespace):
        self.trainer, self.out, self.args, self.plan = trainer, out, args, trainer.plan
        self.pictures0, self.seconds0 = self.plan.done_pictures, self.plan.done_seconds
        self.rows: list[dict] = []
        self.validation: dict[int, tuple] = {}
        self.last_answers: dict[str, float] = {}

    def on_train_begin(self, args, state, control, **_):
        self.begin = time.monotonic()
        self.logged = self.evaluated = self.saved = self.seconds0
        self.logged_pictures, self.pictures = self.pictures0, self.pictures0
        self.bar = tqdm(total=100.0, unit="%", disable=not state.is_world_process_zero, bar_format=(
            "{l_bar}{bar}| [{elapsed}<{remaining}{postfix}]"), mininterval=5)  # fmt: skip

    def on_step_end(self, args, state, control, **_):
        seconds = self.seconds0 + elapsed(self.begin, args)
        self.pictures += self.trainer.batch_pictures * self.plan.world
        self.plan.advance(self.pictures, seconds)
        over = self.plan.progress >= 1 or state.global_step >= self.plan.total_steps
        pause = self.args.pause_after and seconds - self.seconds0 >= self.args.pause_after
        control.should_training_stop = control.should_training_stop or over or bool(pause)
        last = control.should_training_stop
        if last or seconds - self.logged >= self.args.log_every:
            self.log(state, seconds)
        if last or (self.args.eval_every and seconds - self.evaluated >= self.args.eval_every):
            self.evaluate(state, seconds)
        if last or seconds - self.saved >= self.args.save_every:
            control.should_save = True
            self.saved = seconds
            if state.is_world_process_zero:
                save_weights(self.trainer.model.model, self.out)
                record = describe(self.args, self.plan, self.trainer.model.model, self.rows)
                (self.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")

    def write(self, row: dict):
        self.rows.append(row)
        with open(self.out / "log.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def log(self, state, seconds: float):
        loss, answers, probe, gaze = torch.stack(self.trainer.losses).unbind(1)
        self.trainer.losses.clear()
        if not loss.mean().isfinite():
            raise FloatingPointError(f"The loss is {loss.mean()} at step {state.global_step}: lower --lr.")
        answers, gaze = (  # none while the tower learns alone
            round(float(x.nanmean()), 4) if x.isfinite().any() else None for x in (answers, gaze)
        )
        span = max(seconds - self.logged, 1e-9)
        row = {
            "step": state.global_step, "pictures": self.pictures, "seconds": round(seconds, 1),
            "progress": round(self.plan.progress, 4), "size": self.trainer.batch_size_px,
            "batch": self.trainer.batch_pictures, "lr": self.plan.rate() * self.args.lr,
            "loss": round(float(loss.mean()), 4), "answers": answers, "probe": round(float(probe.mean()), 4),
            "gaze": gaze,
            "pictures_per_second": round((self.pictures - self.logged_pictures) / span, 1),
            "waiting": round(self.trainer.waited / span, 3),  # share of the time spent waiting for the workers
        }  # fmt: skip
        if torch.cuda.is_available():
            row["gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self.logged, self.logged_pictures, self.trainer.waited = seconds, self.pictures, 0.0
        if state.is_world_process_zero:
            self.write(row)
            self.bar.set_postfix(self.last_answers | {k: row[k] for k in ("loss", "answers", "probe", "gaze", "size")})
            self.bar.update(100 * self.plan.progress - self.bar.n)

    def evaluate(self, state, seconds: float):
        """Exact answers by question type on fixed scenes, each token given the true ones before it (no generation)."""
        self.evaluated = seconds
        if not state.is_world_process_zero or not self.args.eval_scenes:
            return
        size = self.plan.stage(state.global_step - 1).size  # not the last batch's: it may have been shrunk
        if size not in self.validation:
            data = self.trainer.train_dataset
            made = [data.scene(seed, "valid", size) for seed in range(self.args.eval_scenes)]
            groups = [made[i : i + 64] for i in range(0, len(made), 64)]
            self.validation[size] = [(data.collate(g), [q for s in g for q in s.questions]) for g in groups]
        right = defaultdict(list)
        learner, decode = self.trainer.model, self.trainer.train_dataset.talk.tokenizer.decode
        learner.eval()
        for batch, questions in self.validation[size]:
            with torch.no_grad(), self.trainer.compute_loss_context_manager():
                out = learner(**self.trainer._prepare_inputs(batch), return_logits=True)
            said = out["logits"].argmax(-1).cpu()
            for i, q in enumerate(questions):
                answer = decode(said[batch["answer_question"] == i], skip_special_tokens=True)
                right[q.type].append(scenes.is_correct(answer, q.type, q.answer, q.boxes, size))
        learner.train()
        row = {kind: round(float(np.mean(hits)), 4) for kind, hits in sorted(right.items())}
        row["all"] = round(float(np.mean(sum(right.values(), []))), 4)
        self.last_answers = {"right": row["all"]}
        self.write({"step": state.global_step, "seconds": round(seconds, 1), "eval_size": size, "accuracy": row})

    def on_train_end(self, args, state, control, **_):
        self.bar.close()


def plot_curves(log: Path, png: Path):
    """log.jsonl -> a picture of losses and accuracies over pictures seen. Silent where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [r for r in rows if "loss" in r]
    evals = [r for r in rows if "accuracy" in r]
    clock = np.array(sorted((r["seconds"], r["pictures"]) for r in losses)).T  # an evaluation knows only its second
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for name in ("answers", "probe", "gaze"):
        left.plot([r["pictures"] for r in losses], np.array([r.get(name) for r in losses], float), label=name)
    left.set(xlabel="pictures", ylabel="loss", yscale="log")
    left.legend()
    for name in sorted({name for r in evals for name in r["accuracy"]}):
        points = [(np.interp(r["seconds"], *clock), r["accuracy"][name]) for r in evals if name in r["accuracy"]]
        right.plot(*zip(*points, strict=True), label=name, marker="o", ms=3, lw=3 if name == "all" else 1)
    right.set(xlabel="pictures", ylabel="right answers (teacher-forced)", ylim=(0, 1))
    if evals:
        right.legend(fontsize=7)
    figure.savefig(png, dpi=110)
    plt.close(figure)


def describe(args: argparse.Namespace, plan: Plan, model: nn.Module, rows: list[dict]) -> dict:
    """The training record that the checkpoint's card quotes: the exact command, what ran it, how it ended."""
    cuda = torch.cuda.is_available() and args.device != "cpu"
    return {
        "command": shlex.join(["python", "train.py", *sys.argv[1:]]),
        "seed": args.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stages": [vars(stage) for stage in plan.stages],
        "pictures": plan.done_pictures,
        "seconds": round(plan.done_seconds, 1),
        "finished": plan.progress >= 1,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "processes": plan.world,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "last": [row for row in rows if "loss" in row][-1:],
        "accuracy": [row for row in rows if "accuracy" in row][-1:],
    }


def train(args: argparse.Namespace):
    """Train the small Qwen3-VL from scratch (or from `--init`, or go on with `--resume`)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are the parallelism
    torch.set_float32_matmul_precision("high")
    transformers.set_seed(args.seed)
    on_cpu = args.device == "cpu" or not torch.cuda.is_available()
    state = args.state or args.out / "state"
    settings = TrainingArguments(
        output_dir=str(state), use_cpu=on_cpu, bf16=args.bf16, max_steps=1, per_device_train_batch_size=1,
        learning_rate=args.lr, adam_beta1=0.9, adam_beta2=0.98, weight_decay=0.05, max_grad_norm=1.0,
        optim="adamw_torch_fused", save_strategy="no", save_total_limit=1, logging_strategy="no", report_to="none",
        disable_tqdm=True, logging_nan_inf_filter=False, ignore_data_skip=True, remove_unused_columns=False,
        ddp_find_unused_parameters=any(stage.tower_only for stage in args.stage or ()), seed=args.seed,
        data_seed=args.seed, log_level="error",
    )  # fmt: skip
    plan = Plan(
        args.stage or [Stage.parse(s) for s in (CPU_STAGES if on_cpu else CUDA_STAGES)],
        pictures=args.pictures, seconds=args.seconds, world=settings.world_size, warmup=args.warmup,
    )  # fmt: skip
    settings.max_steps = plan.total_steps
    args.out.mkdir(parents=True, exist_ok=True)
    processor = AutoProcessor.from_pretrained(args.files)
    model = small_model(processor, args.init)
    checkpoint = get_last_checkpoint(state) if args.resume and state.is_dir() else None
    start = 0
    if args.resume and checkpoint:
        clock = json.loads((Path(checkpoint) / "clock.json").read_text())
        plan.advance(clock["pictures"], clock["seconds"])
        start = int(checkpoint.rpartition("-")[2])
    elif args.resume:
        print(f"Nothing to resume in {state}: starting afresh.")
    data = Scenes(
        plan, processor, seed=args.seed, questions=args.questions, start=start, rank=settings.process_index,
        shrink=args.shrink,
    )  # fmt: skip
    learner = Learner(quicken(model, on_cpu), processor.tokenizer, args.probe, args.gaze)
    if args.drop:
        learner.allocate = Dropping(plan, args.drop, args.drop_from, args.seed)
    if args.compile:
        for block in [*model.model.visual.blocks, *model.model.language_model.layers]:
            block.compile()
    trainer = BaseTrainer(learner, settings, train_dataset=data, plan=plan, workers=args.workers)
    if settings.process_index == 0:
        if not checkpoint:
            (args.out / "log.jsonl").unlink(missing_ok=True)
        processor.save_pretrained(args.out)  # with them OUT is a checkpoint of Qwen3-VL's own layout
        shutil.copy(args.files / "generation_config.json", args.out)
        tiny_config(processor.tokenizer).save_pretrained(args.out)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Report(trainer, args.out, args))
    trainer.train(resume_from_checkpoint=checkpoint)
    if settings.process_index == 0:
        plot_curves(args.out / "log.jsonl", args.out / "curves.png")
        print((args.out / "training.json").read_text())


class Dropping:
    """Calls `drop_cells` on a `chance` of batches once the plan is past `after`; the same batches whenever resumed."""

    def __init__(self, plan: Plan, chance: float, after: float, seed: int):
        self.plan, self.chance, self.after, self.seed = plan, chance, after, seed

    def __call__(self, inputs: dict):
        dice = np.random.default_rng([self.seed, self.plan.done_pictures])
        if self.plan.progress < self.after or dice.random() > self.chance:
            return
        generator = torch.Generator(inputs["kind"].device).manual_seed(int(dice.integers(2**62)))
        drop_cells(inputs, float(np.exp(dice.uniform(np.log(0.05), np.log(0.9)))), generator)


# ---------------------------------------------------------------------------------------------------------------
# evaluate: greedy answers on the fixed test sets


def evaluate(args: argparse.Namespace):
    """Greedy answers of the stock class to the fixed questions of a split: accuracy by type and by stratum."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    processor = AutoProcessor.from_pretrained(args.files)
    processor.tokenizer.padding_side = "left"
    model = small_model(processor, args.model).eval().to(device)
    autocast = torch.autocast(device.type, torch.bfloat16) if args.bf16 else nullcontext()
    ends = [processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id]
    hits, wrong = defaultdict(list), []

    def answer(rows: list[dict]):
        turns = [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": r["question"]}]}] for r in rows
        ]
        text = [processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
        inputs = processor(text=text, images=[r["image"] for r in rows], padding=True, return_tensors="pt").to(device)
        with torch.inference_mode(), autocast:
            out = model.generate(
                **inputs, max_new_tokens=args.max_new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[1]
            )
        said = processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for row, prediction in zip(rows, said, strict=True):
            right = scenes.is_correct(prediction, row["type"], row["answer"], row["boxes"], args.size)
            for key in ("all", row["type"], row["stratum"]):
                hits[key].append(right)
            if not right:
                wrong.append({key: row[key] for key in ("id", "question", "answer")} | {"prediction": prediction})

    rows = []
    for row in tqdm(scenes.evaluation_set(args.split, args.n, args.size), total=args.n, mininterval=10):
        rows.append(row)
        if len(rows) == args.batch:
            answer(rows)
            rows = []
    if rows:
        answer(rows)
    result = {"model": str(args.model), "split": args.split, "size": args.size, "groups": {}}
    for key, group in hits.items():
        low, high = wilson(sum(group), len(group))
        result["groups"][key] = {"n": len(group), "accuracy": sum(group) / len(group), "low": low, "high": high}
        print(f"{args.split:8} {key:12} n={len(group):5}  {sum(group) / len(group):.3f}  [{low:.3f}, {high:.3f}]")
    if args.json:
        args.json.write_text(json.dumps(result | {"wrong": wrong[:200]}, indent=1) + "\n")
