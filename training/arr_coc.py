"""Train where to look: ARR-COC's learned parts, on a frozen base or with a LoRA on it.

    python train.py arr-coc --model checkpoints/tiny --out runs/arr_coc                     # rendered scenes
    python train.py arr-coc --model ORG/arr-coc-vis --dataset my_vqa --out runs/arr_coc     # rows of your own

Each row is an image, a question, its answer, and where it has them the boxes of the evidence. The curriculum:

0. *cells* (rendered scenes): the retina learns what stands in each cell, no question is asked;
1. *grounded*: relevance learns the evidence boxes, no token is spent;
2. (*video*: relevance carried from frame to frame. Not there yet.)
3. *answers*: end to end. A budget is drawn for every image, its tokens are chosen and realized, and the answer's loss
   comes back through the hard choice; evidence stays in the loss, and hard rows count twice. With --distil the answer
   is taught by what the same model says with all its tokens, too (Hinton et al. 2015).

Two ways of passing a gradient through the choice: `straight-through` gates each realized token by its gain without
changing it (Bengio et al. 2013); `perturbed` compares two noisy choices and makes the better one likelier (the score
function of a Plackett-Luce choice, Williams 1992).
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoConfig, AutoProcessor, Qwen3VLConfig, Trainer, TrainerCallback, TrainingArguments

from arr_coc import ArrCocConfig, ArrCocForConditionalGeneration, ArrCocOutput
from arr_coc.attending import attend, token_gain, tokens_per_cell
from arr_coc.balancing import TENSIONS
from arr_coc.patches import to_pixels
from arr_coc.texture import detail, texture
from benchmarks.metrics import box_mass, evidence_cells, evidence_recall
from benchmarks.scene_vocabulary import COLOURS, KINDS
from benchmarks.scenes import QUESTION_TYPES

from .base import begin_log, elapsed
from .batches import hops

STAGES = ("cells", "grounded", "answers")
CHOICES = ("straight-through", "perturbed")


@dataclass
class Row:
    """One question about one image."""

    image: object  # PIL image or uint8 [H, W, 3]
    question: str
    answer: str
    boxes: list = field(default_factory=list)  # evidence, (x0, y0, x1, y1) in pixels of the image
    starts: int = 0  # how many of the boxes, the first ones, the question starts from; 0: not known
    whole: bool = False  # the question is about the whole image: everything is evidence
    hard: bool = False
    cells: np.ndarray | None = None  # what stands in each cell, [3, h, w] int64: kind, colour and which thing, 0 = none


class SceneRows(IterableDataset):
    """Endless groups of questions, a group for each rendered scene. Process r of n takes every n-th scene.

    favour: question types that every second scene of a process is asked alone.
    """

    def __init__(
        self, first: int, questions: int, size: int, split: str = "train", rank: int = 0, world: int = 1,
        favour: Sequence[str] = (),
    ):  # fmt: skip
        self.first, self.questions, self.size, self.split = first, questions, size, split
        self.rank, self.world, self.favour = rank, world, tuple(favour)

    def __iter__(self) -> Iterator[list[Row]]:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        offset, stride = (info.id, info.num_workers) if info else (0, 1)
        for turn in count(offset, stride):
            seed, types = self.first + self.rank + self.world * turn, self.favour if turn // stride % 2 else ()
            if rows := scene_rows(seed, self.split, self.size, self.questions, types):
                yield rows


def scene_rows(seed: int, split: str, size: int, questions: int, types: Sequence[str] = ()) -> list[Row]:
    from benchmarks.scenes import cell_labels, make_scene

    scene = make_scene(seed, split, size, n_questions=questions, types=types)
    stands = cell_labels(scene)
    cells = np.stack([stands["kind"], stands["colour"], stands["thing"]])
    return [
        Row(scene.image, q.question, q.answer, list(q.boxes), len(hops(q)[0]), q.type == "whole", scene.hard, cells)
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
    `texture` and `detail` (lists), `evidence` (list of `[boxes, h, w]` bool, or None where a row says nothing),
    `starts` (`Row.starts`, a list) and `weight [B]`. For the stage "cells", `pixels` and `cells` alone.
    """

    def __init__(self, processor, config, hard_weight: float = 2.0, stage: str = STAGES[-1]):
        self.processor, self.config, self.hard_weight, self.stage = processor, config, hard_weight, stage
        self.layout = {
            "patch_size": config.vision_config.patch_size,
            "temporal_patch_size": config.vision_config.temporal_patch_size,
            "merge_size": config.vision_config.spatial_merge_size,
        }

    def __call__(self, groups: list[list[Row]]) -> dict:
        lists = ("patches", "pixels", "cells", "texture", "detail", "evidence", "starts", "questions")
        out = {name: [] for name in lists}
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
                out["starts"].append(row.starts)
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


def grounding_loss(perception: ArrCocOutput, masks: list[Tensor | None], weight: Tensor) -> Tensor:
    """How far relevance is from the evidence: the participatory map's cross-entropy, and -log of the gain's mass in it.

    Boxes weigh alike, so that what is compared with or counted is not lost beside what is large; and evidence and the
    rest of an image weigh alike, however few cells the evidence has. Rows without evidence count nothing; of
    whole-scene rows only the first term counts (all of the mass is inside).
    """
    total, count = weight.new_zeros(()), 0.0
    for i, boxes in enumerate(masks):
        if boxes is None:
            continue
        loss = finding_loss(perception.participatory[i], boxes)
        if not boxes.any(0).all():
            gain, inside = perception.gain[i], boxes.to(perception.gain[i])
            loss = loss - 0.5 * ((gain * inside).sum((1, 2)) / gain.sum()).clamp(min=1e-6).log().mean()
        total = total + weight[i] * loss
        count += float(weight[i])
    return total / max(count, 1.0)


def finding_loss(found: Tensor, boxes: Tensor) -> Tensor:
    """Cross-entropy of a map `[h, w]` in [0, 1] against boxes `[n, h, w]`: they weigh alike, and all as the rest."""
    p = found.float().clamp(1e-5, 1 - 1e-5)
    inside, outside = boxes.to(p), (~boxes.any(0)).to(p)
    loss = -((p.log() * inside).sum((1, 2)) / inside.sum((1, 2))).mean()
    return (loss - ((1 - p).log() * outside).sum() / outside.sum()) / 2 if outside.any() else loss


@torch.no_grad()
def grounding_scores(perception: ArrCocOutput, masks: list[Tensor | None]) -> dict[str, float]:
    """Means over rows with evidence that is not the whole image: share of it kept at scale 1, homunculus mass in it."""
    recall, mass = [], []
    for i, boxes in enumerate(masks):
        if boxes is None or (mask := boxes.any(0).cpu()).all():
            continue
        density = tokens_per_cell(perception.allocation[i], *perception.grid[i])
        recall.append(evidence_recall(density, mask))
        mass.append(box_mass(density, mask))
    if not recall:
        return {}
    return {"evidence_recall": float(np.mean(recall)), "evidence_mass": float(np.mean(mass))}


class Learner(nn.Module):
    """The model with the curriculum's loss as its forward pass, so that distributed training sees all of it.

    `seen` gathers what each batch said, for the log.
    """

    def __init__(
        self, model, stage: str, choice: str = CHOICES[0], budgets: tuple[float, float] = (0.04, 0.5),
        noise: float = 0.3, ground: float = 1.0, name: float = 0.5, start: float = 0.5, distil: float = 0.0,
        unglanced: float = 0.0, seed: int = 0,
    ):  # fmt: skip
        super().__init__()
        self.model, self.stage, self.choice, self.budgets = model, stage, choice, budgets
        self.noise, self.ground, self.name, self.start, self.distil = noise, ground, name, start, distil
        self.unglanced = unglanced
        self.names = nn.ModuleList(nn.Linear(self.core.config.lens_dim, 1 + n) for n in (len(KINDS), len(COLOURS)))
        self.begin = nn.Linear(self.core.config.lens_dim, 1)
        self.core.relevance.lens.blocks[0].register_forward_hook(lambda _, __, out: self.heard.append(out))
        self.heard: list[Tensor] = []  # what the lens's first block made of each image and question
        self.dice = np.random.default_rng(seed)
        self.seen: list[dict[str, float]] = []

    @property
    def core(self) -> ArrCocForConditionalGeneration:
        """The model itself, without the LoRA around it."""
        return self.model if isinstance(self.model, ArrCocForConditionalGeneration) else self.model.get_base_model()

    def forward(self, **inputs) -> Tensor:
        """One batch of `Collate` -> its loss, for a share of the batches (`unglanced`) without the glance."""
        config = self.core.config
        usual = config.participatory
        if usual == "both" and self.dice.random() < self.unglanced:
            config.participatory = "texture"
        try:
            return self.loss(**inputs)
        finally:
            config.participatory = usual

    def loss(self, **inputs) -> Tensor:
        core = self.core
        pixels, cells = inputs.pop("pixels"), inputs.pop("cells")
        retina, named, said = None, pixels[0].new_zeros(()), {}
        if core.config.participatory != "glance":  # it sees an image once for all its questions, as does the thumbnail
            alike = all(image.shape == pixels[0].shape for image in pixels)
            retina = [
                seen
                for images in ([torch.stack(pixels)] if alike else [image[None] for image in pixels])
                for seen in core.relevance.retina(images, [n // core.config.cell for n in images.shape[2:]])
            ]
            if any(each is not None for each in cells):
                named, right = self.naming_loss(retina, cells)
                said = {"cells": float(named.detach()), "named": right}
        if self.stage == "cells":
            self.seen.append(said)
            return named
        masks, starts, weight = inputs.pop("evidence"), inputs.pop("starts"), inputs.pop("weight")
        labels, keep = inputs.pop("labels"), inputs.pop("answer_tokens")
        known = ArrCocOutput(
            grid=[tuple(t.shape[1:]) for t in inputs["texture"]],
            texture=inputs.pop("texture"),
            detail=inputs.pop("detail"),
        )
        patches, row = inputs.pop("patches"), [i for i, n in enumerate(inputs.pop("questions")) for _ in range(n)]
        known.retina = [retina and retina[i] for i in row]
        if self.stage == "answers":
            inputs["pixel_values"] = torch.cat([patches[i] for i in row])
        else:  # all that is asked of the pixels is known: the right number of rows will do, and is no copy
            rows = sum(len(patches[i]) for i in row)
            inputs["pixel_values"] = patches[0].new_zeros(()).expand(rows, patches[0].shape[1])
        if core.config.participatory != "texture":
            grids = dict(zip(row, known.grid, strict=True))
            thumbnails = core.thumbnails(patches, [grids[i] for i in range(len(patches))])
            known.thumbnail = [thumbnails[i] for i in row]
        low, high = np.log(self.budgets)
        shares = np.exp(self.dice.uniform(low, high, len(masks))).tolist()
        self.heard.clear()
        perception = core.perceive(**inputs, known=known, num_visual_tokens=shares)
        ground, start = grounding_loss(perception, masks, weight), self.starting_loss(masks, starts)
        said |= {"ground": float(ground.detach()), "start": float(start.detach())}
        loss = self.ground * ground + self.name * named + self.start * start
        if self.stage == "answers":
            answer = self.answer_loss(inputs, labels, keep, perception, weight)
            said["answer"] = float(answer.detach())
            loss = loss + answer
        self.watch(perception, masks, said)
        return loss

    def starting_loss(self, masks: list[Tensor | None], starts: list[int]) -> Tensor:
        """Cross-entropy of reading what a question starts from off the cells behind the lens's first block, where rows
        say it: only what is found there can lead the later blocks to its neighbour. The reading is not part of the
        model."""
        each = []
        for i, n in enumerate(starts):
            if n and not masks[i].any(0).all():
                cells = self.heard[i][: masks[i][0].numel()]
                found = self.begin(F.layer_norm(cells, cells.shape[-1:])).sigmoid()
                each.append(finding_loss(found.reshape(masks[i].shape[1:]), masks[i][:n]))
        return torch.stack(each).mean() if each else torch.zeros((), device=self.begin.weight.device)

    def naming_loss(self, retina: list[Tensor], cells: list[Tensor | None]) -> tuple[Tensor, float]:
        """Cross-entropy of reading kind and colour of what stands in each cell off what the retina saw there, linearly,
        and the share of the things whose kind is read rightly.

        Things weigh alike, however many cells they fill: a part of a large one often does not tell what it is. Each
        empty cell weighs a tenth. Images that do not say what stands in their cells count nothing; one must. The
        reading is not part of the model.
        """
        known = [i for i, each in enumerate(cells) if each is not None]
        seen = torch.cat([retina[i].flatten(1).T for i in known])
        kind, colour = torch.cat([cells[i][:2].flatten(1) for i in known], 1)
        things = [cells[i][2].flatten() for i in known]
        weight = torch.cat([torch.where(t > 0, 1 / t.bincount()[t], 0.1) for t in things])
        names, colours = (head(seen).float() for head in self.names)
        each = F.cross_entropy(names, kind, reduction="none") + F.cross_entropy(colours, colour, reduction="none")
        share = weight * (kind > 0)
        right = (share * (names.argmax(1) == kind)).sum() / share.sum().clamp(min=1)
        return (each * weight).sum() / weight.sum(), float(right)

    def answer_loss(self, inputs: dict, labels: Tensor, keep: int, perception: ArrCocOutput, weight: Tensor) -> Tensor:
        """Cross-entropy of the answers from the chosen tokens, rows weighted; its gradient reaches the gain.

        With `distil`, plus that many times the KL divergence from the answers with all tokens, `KL(all || chosen)`.
        """
        target = labels[:, -keep:]
        answers = target >= 0

        def said(**spend) -> Tensor:  # [B, keep, vocabulary]
            # Prompts are padded on the left, so the answers stand at the end, shortened or not.
            return self.model(**inputs, **spend, logits_to_keep=keep + 1).logits[:, :-1].float()

        teacher = None
        if self.distil:
            with torch.no_grad():
                teacher = said(num_visual_tokens="all").log_softmax(-1)

        def per_row(perception: ArrCocOutput) -> Tensor:
            logits = said(perception=perception)
            each = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=-100, reduction="none")
            if teacher is not None:
                apart = F.kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="none").sum(-1)
                each = each + self.distil * apart * answers
            return each.sum(1) / answers.sum(1)

        if self.choice == "straight-through":
            return (per_row(perception) * weight).sum() / weight.sum()
        with torch.no_grad():
            tries = [self.perturbed(perception) for _ in range(2)]
            first, second = (per_row(t) for t in tries)
        likely = [
            torch.stack([_log_likelihood(perception.gain[i], t.allocation[i]) for i in range(len(weight))])
            for t in tries
        ]
        surrogate = (first - second) / 2 * (likely[0] - likely[1])
        value = (first + second) / 2
        return ((value + surrogate - surrogate.detach()) * weight).sum() / weight.sum()

    def perturbed(self, perception: ArrCocOutput) -> ArrCocOutput:
        config, out = self.core.config, ArrCocOutput(**perception)
        out.allocation = []
        for gain, lost, budget in zip(perception.gain, perception.detail, perception.budget, strict=True):
            gumbel = -torch.log(-torch.log(torch.rand_like(gain).clamp(1e-9, 1 - 1e-7)))
            noisy = gain * (self.noise * gumbel).exp()
            out.allocation.append(attend(noisy / noisy.amax(), lost, budget, config.allocator))
        return out

    def watch(self, perception: ArrCocOutput, masks: list, said: dict):
        tensions = torch.stack([t.detach() for t in perception.tensions]).mean(0).tolist()
        names = [name.replace("↔", "_") for name in TENSIONS]
        said |= dict(zip((f"tension/{n}" for n in names), tensions, strict=True))
        said |= {"budget": float(np.mean(perception.budget)), **grounding_scores(perception, masks)}
        self.seen.append(said)

    def report(self) -> dict[str, float]:
        """Means over what was seen since the last report, and the shaping as it is now."""
        shaping, keys = self.core.relevance.shaping, {k for row in self.seen for k in row}
        means = {k: round(float(np.mean([r[k] for r in self.seen if k in r])), 5) for k in sorted(keys)}
        self.seen.clear()
        return means | {"steepness": float(shaping.steepness.detach()), "offset": float(shaping.offset.detach())}


class ArrCocTrainer(Trainer):
    """`Trainer` of a `Learner`. What it says of a run goes to whatever `--report-to` names.

    With `average`, the share that it keeps at each step, a running mean of ARR-COC's parts goes along.
    """

    def __init__(self, learner: Learner, *args, average: float = 0.0, **kwargs):
        relevance, mean = learner.core.relevance, get_ema_multi_avg_fn(average)
        self.average = AveragedModel(relevance, multi_avg_fn=mean) if average else None
        super().__init__(learner, *args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)

    def log(self, logs: dict, *args, **kwargs):
        if "loss" in logs:
            logs |= self.accelerator.unwrap_model(self.model).report()
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        """The state to resume from: what is trained, alone. The frozen base lies where it was."""
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            learned = {name: p.detach().cpu() for name, p in self.model.named_parameters() if p.requires_grad}
            torch.save(learned, folder / "pytorch_model.bin")
            if self.average:
                torch.save(self.average.state_dict(), folder / "average.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        learned = torch.load(Path(resume_from_checkpoint) / "pytorch_model.bin", weights_only=True)
        wanted = {name for name, p in self.model.named_parameters() if p.requires_grad}
        if wanted != learned.keys():
            raise ValueError(f"{resume_from_checkpoint} is of another run: {sorted(wanted ^ learned.keys())[:3]} ...")
        self.model.load_state_dict(learned, strict=False)
        if self.average:
            self.average.load_state_dict(torch.load(Path(resume_from_checkpoint) / "average.bin", weights_only=True))


def _log_likelihood(gain: Tensor, allocation: Tensor) -> Tensor:
    """Log of the chosen tokens' share of the gain, summed: Plackett-Luce but for drawing without replacement."""
    share = token_gain(gain, allocation) / gain.sum()
    return share.clamp(min=1e-9).log().mean()


class Pictures(TrainerCallback):
    """Relevance of fixed rows, drawn as training goes: into `out/pictures`, TensorBoard and Weights & Biases."""

    def __init__(self, rows: list[Row], processor, out: Path, every: int):
        self.rows, self.processor, self.out, self.every = rows, processor, out / "pictures", every

    def on_train_begin(self, args, state, control, **_):
        self.board = None
        if "tensorboard" in args.report_to and state.is_world_process_zero:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.out))

    def on_step_end(self, args, state, control, model=None, **_):
        if (
            self.every
            and (state.global_step % self.every == 0 or state.global_step == 1)
            and state.is_world_process_zero
        ):
            sheet = self.draw(model.core, state.global_step)
            if self.board:
                self.board.add_image("relevance", np.asarray(sheet), state.global_step, dataformats="HWC")
                self.board.flush()
            if "wandb" in args.report_to:
                import wandb

                wandb.log({"relevance": wandb.Image(sheet)}, commit=False)

    @torch.no_grad()
    def draw(self, core: ArrCocForConditionalGeneration, step: int):
        from PIL import Image

        from arr_coc.visualizing import relevance_overlay

        self.out.mkdir(parents=True, exist_ok=True)
        tiles = []
        for row in self.rows:
            image = row.image if isinstance(row.image, Image.Image) else Image.fromarray(row.image)
            inputs = chat_inputs(self.processor, image, row.question).to(core.device)
            perception = core.perceive(**inputs, num_visual_tokens=0.2)
            tiles.append(relevance_overlay(image, perception.relevance[0].float().cpu()).resize((256, 256)))
        sheet = Image.new("RGB", (256 * len(tiles), 256))
        for i, tile in enumerate(tiles):
            sheet.paste(tile, (256 * i, 0))
        sheet.save(self.out / f"{step:07d}.jpg", quality=85)
        return sheet


def chat_inputs(processor, image, question: str):
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]
    return processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def config_field(text: str) -> tuple[str, object]:
    """`FIELD=VALUE` as typed, the value as JSON where it is JSON."""
    name, found, value = text.partition("=")
    if not found or name not in ArrCocConfig.__dataclass_fields__:
        raise argparse.ArgumentTypeError(f"{text} is not FIELD=VALUE with a field of ArrCocConfig")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def add_arguments(p: argparse.ArgumentParser):
    p.add_argument("--model", default="checkpoints/tiny", help="a folder or a Hub id of ARR-COC, either layout")
    p.add_argument("--revision", default="main")
    p.add_argument("--learned", help="a folder or a Hub id of ARR-COC whose learned parts to begin with, where they "
                   "fit: after its base was trained on, say")  # fmt: skip
    p.add_argument("--out", type=Path, required=True, help="where checkpoints, pictures and the trained model go")
    p.add_argument("--dataset", help="a `datasets` folder or Hub id with image, question, answer (and boxes) columns; "
                   "without it scenes are rendered")  # fmt: skip
    p.add_argument("--dataset-split", default="train")
    p.add_argument("--stage", choices=STAGES, default="answers", help="0 cells, 1 grounded, 3 answers (default)")
    p.add_argument("--choice", choices=CHOICES, default="straight-through", help="the gradient through the choice")
    p.add_argument("--noise", type=float, default=0.3, help="perturbed: the noise's share (default 0.3)")
    p.add_argument("--ground", type=float, default=1.0, help="weight of the evidence's loss (default 1)")
    p.add_argument("--name", type=float, default=0.5, help="weight of naming what stands in each cell, where rows say "
                   "it (default 0.5)")  # fmt: skip
    p.add_argument("--start", type=float, default=0.5, help="weight of finding what a question starts from, where rows "
                   "say it (default 0.5)")  # fmt: skip
    p.add_argument("--unglanced", type=float, default=0.25, help="share of the steps that choose without a glance, so "
                   'that participatory="texture" learns, too (default 0.25)')  # fmt: skip
    p.add_argument("--distil", type=float, default=0.0, help="weight of the loss against all tokens (default 0)")
    p.add_argument("--hard-weight", type=float, default=2.0, help="loss weight of hard rows (default 2)")
    p.add_argument("--budgets", type=float, nargs=2, default=(0.04, 0.5), metavar=("LOW", "HIGH"),
                   help="shares of the cells between which budgets are drawn (default 0.04 0.5)")  # fmt: skip
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--seconds", type=float, default=0, help="end by the clock, if that comes before the steps do")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", type=config_field,
                   help="a field of ArrCocConfig, where --model is a stock checkpoint: --set lens_dim=96")  # fmt: skip
    p.add_argument("--pictures", type=int, default=4, help="images a step and process (default 4)")
    p.add_argument("--questions", type=int, default=4, help="questions an image, where scenes are rendered (default 4)")
    p.add_argument("--size", type=int, default=512, help="pixels on a side, where scenes are rendered (default 512)")
    p.add_argument("--favour", nargs="+", default=(), choices=QUESTION_TYPES, metavar="TYPE", help=(
        "every second rendered scene is asked these types alone"))  # fmt: skip
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--weight-decay", type=float, default=0.01)
    p.add_argument("--average", type=float, default=0.0, metavar="SHARE", help="save a running mean of what is learned "
                   "that keeps SHARE of itself at each step (0.99: about 100 steps')")  # fmt: skip
    p.add_argument("--warmup", type=float, default=0.05, help="share of the steps (default 0.05)")
    p.add_argument(
        "--lora", type=int, default=0, help="rank of a LoRA on the language model's attention (default none)"
    )
    p.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 1))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--first-scene", type=int, default=1 << 36, help="seed of the first scene; keep apart from the base's"
    )
    p.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--log-every", type=int, default=20)
    p.add_argument("--picture-every", type=int, default=200, help="steps between relevance pictures; 0 for none")
    p.add_argument("--save-every", type=int, default=500)
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUT")
    p.add_argument(
        "--report-to", default="none", help="tensorboard, wandb, ... (default none; log.jsonl is always written)"
    )
    p.add_argument("--device", default=None, help="cpu to keep off a GPU")


def adopt(folder: str, processor, **fields) -> ArrCocForConditionalGeneration:
    """A stock Qwen3-VL checkpoint with fresh ARR-COC parts, merged; a user's turn opens as the tokenizer says."""
    stock = Qwen3VLConfig.from_pretrained(folder)
    tokenizer = processor.tokenizer
    kept = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings")
    config = ArrCocConfig(
        text_config=stock.text_config.to_dict(),
        vision_config=stock.vision_config.to_dict(),
        user_turn_token_ids=tokenizer("<|im_start|>user\n")["input_ids"],
        turn_end_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        image_mean=list(processor.image_processor.image_mean),
        image_std=list(processor.image_processor.image_std),
        **{name: getattr(stock, name) for name in kept},
        **fields,
    )
    return ArrCocForConditionalGeneration.from_pretrained(folder, config=config, dtype=torch.float32)


def begin_with(relevance: nn.Module, learned: dict[str, Tensor]) -> list[str]:
    """Gives learned parts another model's values where their shapes agree. Returns the names that start afresh.

    Raises:
        ValueError: where nothing agrees.
    """
    own = relevance.state_dict()
    fits = {name: value for name, value in learned.items() if name in own and value.shape == own[name].shape}
    if not fits:
        raise ValueError("none of the learned parts fits: give the --set that --learned was trained with.")
    relevance.load_state_dict(fits, strict=False)
    return sorted(own.keys() - fits.keys())


class Clock(TrainerCallback):
    """Ends a run by the clock; the learning rate follows whichever of steps and seconds is further on."""

    def __init__(self, steps: int, seconds: float, warmup: float):
        self.steps, self.seconds, self.warmup, self.spent = steps, seconds, warmup, 0.0

    def rate(self, step: int) -> float:
        progress = min(1.0, max(step / self.steps, self.spent / self.seconds if self.seconds else 0.0))
        return min(1.0, (step + 1) / max(1, self.warmup * self.steps)) * (1 + math.cos(math.pi * progress)) / 2

    def on_train_begin(self, args, state, control, **_):
        self.begin = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        self.spent = elapsed(self.begin, args)
        if self.seconds and self.spent > self.seconds:
            control.should_training_stop = True


class Average(TrainerCallback):
    """Moves the trainer's running mean along with each step, where there is one."""

    def __init__(self, trainer: ArrCocTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, model=None, **_):
        if self.trainer.average:
            self.trainer.average.update_parameters(model.core.relevance)


class JsonLog(TrainerCallback):
    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args, state, control, **_):
        if state.is_world_process_zero:
            begin_log(self.path, state.global_step)

    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero:
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": state.global_step} | logs) + "\n")


def train(args: argparse.Namespace):
    """Run one stage of the curriculum and save the model, in the layout it came in, to `args.out / "model"`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    processor = AutoProcessor.from_pretrained(args.model, revision=args.revision)
    if AutoConfig.from_pretrained(args.model, revision=args.revision).model_type == ArrCocConfig.model_type:
        model = ArrCocForConditionalGeneration.from_pretrained(args.model, revision=args.revision, dtype=torch.float32)
    else:
        model = adopt(args.model, processor, **dict(args.set))
    if args.learned:
        other = ArrCocForConditionalGeneration.from_pretrained(args.learned)
        afresh = begin_with(model.relevance, other.relevance.state_dict())
        print(f"begins with the learned parts of {args.learned}; afresh: {', '.join(afresh) or 'nothing'}")
    model.requires_grad_(False)
    model.relevance.requires_grad_(True)
    model.relevance.retina.gathers = args.stage == "cells"
    tuned = None
    if args.lora:
        from peft import LoraConfig, get_peft_model

        target = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)"
        tuned = get_peft_model(model, LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules=target))
        model.relevance.requires_grad_(True)
    if args.stage == "cells" and (args.dataset or model.config.participatory == "glance"):
        raise ValueError(
            "--stage cells needs rendered scenes, which say what stands in each cell, and a model that has a use for "
            'its retina: leave --dataset out, and set participatory to "both" or "texture".'
        )
    args.out.mkdir(parents=True, exist_ok=True)
    settings = TrainingArguments(
        output_dir=str(args.out / "state"), max_steps=args.steps, per_device_train_batch_size=args.pictures,
        learning_rate=args.lr, weight_decay=args.weight_decay, max_grad_norm=1.0,
        bf16=args.bf16, use_cpu=args.device == "cpu" or not torch.cuda.is_available(),
        logging_steps=args.log_every, save_steps=args.save_every, save_total_limit=1, seed=args.seed,
        remove_unused_columns=False, dataloader_num_workers=args.workers, report_to=args.report_to,
        dataloader_prefetch_factor=2 if args.workers else None, dataloader_persistent_workers=bool(args.workers),
        ddp_find_unused_parameters=True,
        accelerator_config={"dispatch_batches": False, "split_batches": False},
    )  # fmt: skip
    rank, world = settings.process_index, settings.world_size
    if args.dataset:
        data, fixed = DatasetRows(args.dataset, args.dataset_split), None
        fixed = [data[i][0] for i in range(min(4, len(data)))]
    else:
        data = SceneRows(
            args.first_scene, args.questions, args.size, rank=rank, world=world, favour=args.favour
        )  # fmt: skip
        fixed = [scene_rows(seed, "valid", args.size, 1)[0] for seed in range(4)]
    clock = Clock(args.steps, args.seconds, args.warmup)
    learner = Learner(
        tuned or model, args.stage, args.choice, tuple(args.budgets), args.noise, args.ground, args.name, args.start,
        args.distil, args.unglanced, args.seed + rank,
    )  # fmt: skip
    learned = [p for p in learner.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=args.lr, weight_decay=args.weight_decay)
    trainer = ArrCocTrainer(
        learner, settings, optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, clock.rate)),
        train_dataset=data, data_collator=Collate(processor, model.config, args.hard_weight, args.stage),
        callbacks=[clock, JsonLog(args.out / "log.jsonl"), Pictures(fixed, processor, args.out, args.picture_every)],
        average=args.average,
    )  # fmt: skip
    trainer.add_callback(Average(trainer))
    trainer.train(resume_from_checkpoint=args.resume or None)
    if not trainer.is_world_process_zero():
        return
    if tuned is not None:
        model = tuned.merge_and_unload()
    if trainer.average:
        model.relevance.load_state_dict(trainer.average.module.state_dict())
    model.save_pretrained(args.out / "model")
    processor.save_pretrained(args.out / "model")
    print(f"saved {args.out / 'model'}")
