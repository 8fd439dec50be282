"""What ARR-COC's parts are taught: the curriculum's losses, and the model with them as one module."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arr_coc import ArrCocForConditionalGeneration, ArrCocOutput
from arr_coc.attending import attend, token_gain, tokens_per_cell
from arr_coc.balancing import TENSIONS
from benchmarks.metrics import box_mass, evidence_recall
from benchmarks.scene_vocabulary import COLOURS, KINDS

CHOICES = ("straight-through", "perturbed")


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
        p = perception.participatory[i].float().clamp(1e-5, 1 - 1e-5)
        inside, outside = boxes.to(p), (~boxes.any(0)).to(p)
        loss = -((p.log() * inside).sum((1, 2)) / inside.sum((1, 2))).mean()
        if outside.any():
            loss = (loss - ((1 - p).log() * outside).sum() / outside.sum()) / 2
            gain = perception.gain[i]
            loss = loss - 0.5 * ((gain * inside).sum((1, 2)) / gain.sum()).clamp(min=1e-6).log().mean()
        total = total + weight[i] * loss
        count += float(weight[i])
    return total / max(count, 1.0)


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
        noise: float = 0.3, ground: float = 1.0, name: float = 0.5, distil: float = 0.0,
        unglanced: float = 0.0, seed: int = 0,
    ):  # fmt: skip
        super().__init__()
        self.model, self.stage, self.choice, self.budgets = model, stage, choice, budgets
        self.noise, self.ground, self.name, self.distil = noise, ground, name, distil
        self.unglanced = unglanced
        self.names = nn.ModuleList(nn.Linear(self.core.config.lens_dim, 1 + n) for n in (len(KINDS), len(COLOURS)))
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
        masks, weight = inputs.pop("evidence"), inputs.pop("weight")
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
        perception = core.perceive(**inputs, known=known, num_visual_tokens=shares)
        ground = grounding_loss(perception, masks, weight)
        said["ground"] = float(ground.detach())
        loss = self.ground * ground + self.name * named
        if self.stage == "answers":
            answer = self.answer_loss(inputs, labels, keep, perception, weight)
            said["answer"] = float(answer.detach())
            loss = loss + answer
        self.watch(perception, masks, said)
        return loss

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


def _log_likelihood(gain: Tensor, allocation: Tensor) -> Tensor:
    """Log of the chosen tokens' share of the gain, summed: Plackett-Luce but for drawing without replacement."""
    share = token_gain(gain, allocation) / gain.sum()
    return share.clamp(min=1e-9).log().mean()
