"""What every method is given and what it gives back. A method is one answering function with a name and a source.

A sample is a dict with `id`, `image` (PIL), `question`, and where known `boxes` (evidence, (x0, y0, x1, y1) in pixels).
Images are `(h, w)` cells; *kept* is an allocation `[n, 3]` of rows `(scale, y, x)` as in `arr_coc.attending`.

Three kinds of method, each made by a function below from the one thing that sets it apart:
- `before(choose)`: chooses cells from the pixels; the tower never sees the others.
- `after(reduce)`: the whole image goes through the tower, then tokens are picked or merged.
- anything else writes its own `answer`.

No method changes an attention backend or leaves anything behind on the model. One that needs attention maps computes
its own q·kᵀ from a layer's inputs.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arr_coc import ArrCocOutput
from arr_coc.patches import to_pixels
from arr_coc.realizing import shorten


@dataclass
class Batch:
    """Samples as one left-padded prompt batch. `inputs` is the processor's, on the model's device."""

    samples: list[dict]
    inputs: dict[str, Tensor]
    grids: list[tuple[int, int]]
    seconds: float  # preprocessing of all samples
    _seen: dict = field(default_factory=dict)

    def shared(self, clock: "Clock", stage: str, key, make: Callable):
        """`make()`, run once for this batch whatever the method and budget; each that asks is charged its seconds."""
        if key not in self._seen:
            start = clock.now()
            with clock.stage(None):
                made = make()
            self._seen[key] = made, clock.now() - start
        made, seconds = self._seen[key]
        clock.add(stage, seconds)
        return made

    def seen(self, model, clock: "Clock", attention: bool = False):
        """The tower's output for all tokens, and `LastTowerLayer.attention` if that is asked for."""
        inputs, merge = self.inputs, model.config.vision_config.spatial_merge_size**2

        def tower():
            with LastTowerLayer(model.model.visual) as last:
                pixels, grids = inputs["pixel_values"], inputs["image_grid_thw"]
                return model.model.get_image_features(pixels, grids, return_dict=True), last

        full, last = self.shared(clock, "tower", "tower", tower)
        if not attention:
            return full, None
        lengths = [h * w * merge for h, w in self.grids]
        return full, self.shared(clock, "choose", "attention", lambda: last.attention(lengths, merge))

    def perceived(self, model, clock: "Clock", budgets: list[int]) -> ArrCocOutput:
        """`model.perceive`. What no question decides is seen once for this batch; each is charged what it took."""
        key = model.relevance.retina, model.config.participatory
        known = self._seen.get(key)
        perception = model.perceive(**self.inputs, num_visual_tokens=list(budgets), known=known)
        if known is None:
            self._seen[key] = perception
            return perception
        for stage in known.seconds.keys() & {"texture", "glance"}:
            clock.add("choose", known.seconds[stage] - perception.seconds[stage])
            perception.seconds[stage] = known.seconds[stage]
        return perception


@dataclass
class Outcome:
    """One entry a sample; `seconds` are of the whole batch, stage by stage.

    Attributes:
        kept: `[n, 3]` int64 on the CPU; of a merged token the place that it stands at.
        maps: per-cell scores `[h, w]` in [0, 1] by name, where a method has them.
    """

    answers: list[str]
    kept: list[Tensor]
    seconds: dict[str, float]
    maps: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """`answer(model, batch, budgets, run)` -> Outcome, with a budget in tokens for each image."""

    name: str
    drops: str  # where tokens drop: "nowhere", "before the tower", "after the tower", "in the language model"
    source: str  # the paper, or what it is
    answer: Callable
    spends: bool = True  # False: takes all tokens whatever the budget

    def run(self, model, processor, samples: Sequence[dict], share: float, max_new_tokens: int = 8) -> Outcome:
        """Answers `samples` with `share` of each image's tokens."""
        return self.on(model, processor, prepare(processor, samples, model.device), share, max_new_tokens)

    @torch.no_grad()
    def on(self, model, processor, batch: Batch, share: float, max_new_tokens: int = 8) -> Outcome:
        """As `run`, for a batch that was prepared before."""
        budgets = [max(1, round(share * h * w)) for h, w in batch.grids]
        with Clock(model) as clock:
            out = self.answer(model, batch, budgets, Run(processor, clock, max_new_tokens))
        out.seconds = {"preprocess": batch.seconds} | clock.seconds | out.seconds
        return out


@dataclass
class Run:
    """What an answering function needs beside model and batch."""

    processor: object
    clock: "Clock"
    max_new_tokens: int

    def generate(self, model, inputs: dict, **how) -> list[str]:
        """Greedy answers to a left-padded batch."""
        out = model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False, **how)
        return self.decode(out[:, inputs["input_ids"].shape[1] :])

    def decode(self, ids: Tensor) -> list[str]:
        return [text.strip() for text in self.processor.batch_decode(ids, skip_special_tokens=True)]


def prepare(processor, samples: Sequence[dict], device="cpu") -> Batch:
    """One image and one question a sample, as the chat template puts them."""
    start = time.perf_counter()
    turns = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": s["question"]}]}] for s in samples
    ]
    texts = [processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    images = [s["image"].convert("RGB") for s in samples]
    inputs = processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt").to(device)
    merge = processor.image_processor.merge_size
    grids = [(h // merge, w // merge) for _, h, w in inputs["image_grid_thw"].tolist()]
    return Batch(list(samples), dict(inputs), grids, time.perf_counter() - start)


class Clock:
    """Wall seconds by stage. The tower, prefill and decoding time themselves through hooks; the rest uses `stage`."""

    def __init__(self, model):
        self.device, self.parts = model.device, (model.model.visual, model.model.language_model)
        self.seconds: dict[str, float] = {}
        self.busy, self.prefilled = False, False

    def __enter__(self):
        self.hooks = []
        for part, name in zip(self.parts, ("tower", "prefill"), strict=True):
            self.hooks.append(part.register_forward_pre_hook(lambda *_: self._start()))
            self.hooks.append(part.register_forward_hook(lambda *_, name=name: self._stop(name)))
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _start(self):
        if not self.busy:
            self.started = self.now()

    def _stop(self, name: str):
        if self.busy:
            return
        name = "decode" if name == "prefill" and self.prefilled else name
        self.prefilled |= name == "prefill"
        self.add(name, self.now() - self.started)

    def add(self, name: str, seconds: float):
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def stage(self, name: str | None):
        """Counts what runs inside as `name`, tower and language model included. None counts nothing."""
        outer, self.busy, start = self.busy, True, self.now()
        yield
        self.busy = outer
        if name is not None:
            self.add(name, self.now() - start)


# ------------------------------------------------------------------------------------------------ the three kinds


def before(choose: Callable) -> Callable:
    """`choose(model, batch, i, budget)` -> the i-th image's allocation `[n, 3]`, from pixels alone."""

    def answer(model, batch: Batch, budgets: list[int], run: Run) -> Outcome:
        with run.clock.stage("choose"):
            kept = [choose(model, batch, i, budget) for i, budget in enumerate(budgets)]
        return Outcome(run.generate(model, batch.inputs, perception=perception_of(batch, kept)), kept, {})

    return answer


def after(reduce: Callable, attention: bool = False) -> Callable:
    """`reduce(tokens, budget)` -> the cells kept, `[k]` in raster order, and how tokens are mixed into them.

    The mix is `[k, N]` with rows that sum to 1, applied to the tower's output and DeepStack's features alike, or None
    where tokens stay as they are. `attention` asks for `Tokens.received` and `Tokens.keys`.
    """

    def answer(model, batch: Batch, budgets: list[int], run: Run) -> Outcome:
        full, looks = batch.seen(model, run.clock, attention)
        kept, levels = [], [[] for _ in range(1 + len(full.deepstack_features))]
        with run.clock.stage("choose"):
            for i, ((h, w), budget) in enumerate(zip(batch.grids, budgets, strict=True)):
                received, keys = looks[i] if attention else (None, None)
                tokens = Tokens((h, w), full.pooler_output[i], lambda i=i: question(model, batch, i), received, keys)
                cells, mix = reduce(tokens, min(budget, h * w))
                kept.append(at_scale_1(cells.cpu(), w))
                for level, features in zip(levels, (full.pooler_output, *full.deepstack_features), strict=True):
                    level.append(features[i][cells] if mix is None else mix.to(features[i].dtype) @ features[i])
            short = shortened(model, batch, kept)
        spent = type(full)(pooler_output=tuple(levels[0]), deepstack_features=[tuple(level) for level in levels[1:]])
        answers = run.generate(model, short, mm_encoder_outputs={"image": spent}, num_visual_tokens="all")
        return Outcome(answers, kept, {})

    return answer


@dataclass
class Tokens:
    """One image after the tower, N = h * w tokens in raster order.

    Attributes:
        features: `[N, d]`, the tower's merged output.
        question: called, the question's word embeddings `[Q, d]`.
        received: `[N]`, the attention each token receives in the tower's last layer, mean over heads and askers.
        keys: `[N, d_k]`, its keys there, mean over heads and patches.
    """

    grid: tuple[int, int]
    features: Tensor
    question: Callable[[], Tensor] | None = None
    received: Tensor | None = None
    keys: Tensor | None = None


class LastTowerLayer:
    """Catches what enters the attention of the tower's last layer; `attention` reads q·kᵀ off it, a slice at a time."""

    def __init__(self, visual):
        self.layer = visual.blocks[-1].attn

    def __enter__(self):
        def catch(_, args, kwargs):
            self.states = args[0] if args else kwargs["hidden_states"]
            self.rotary = kwargs["position_embeddings"]

        self.hook = self.layer.register_forward_pre_hook(catch, with_kwargs=True)
        return self

    def __exit__(self, *_):
        self.hook.remove()

    def attention(self, lengths: list[int], merge: int, at_once: int = 1024) -> list[tuple[Tensor, Tensor]]:
        """For each image of `lengths` patches, `merge` to a token: `Tokens.received` and `Tokens.keys`."""
        from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

        layer = self.layer
        qkv = layer.qkv(self.states).unflatten(-1, (3, layer.num_heads, -1))
        query, key = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], *self.rotary)  # [patches, heads, d]
        out = []
        for q, k in zip(query.split(lengths), key.split(lengths), strict=True):
            received = torch.zeros(len(k), device=k.device)
            for part in q.split(at_once):
                scores = torch.einsum("qhd,khd->hqk", part, k).float() * layer.scaling
                received += scores.softmax(-1).mean(0).sum(0)
            received = (received / len(q)).unflatten(0, (-1, merge)).sum(1)
            out.append((received, k.float().mean(1).unflatten(0, (-1, merge)).mean(1)))
        return out


# ------------------------------------------------------------------------------------------------ small helpers


def perception_of(batch: Batch, kept: list[Tensor]) -> ArrCocOutput:
    """What `generate` needs to spend an allocation that others chose."""
    return ArrCocOutput(grid=batch.grids, allocation=kept, gain=[torch.ones(grid) for grid in batch.grids])


def shortened(model, batch: Batch, kept: list[Tensor]) -> dict[str, Tensor]:
    """The prompts with one placeholder for each kept token and true positions, ready for `mm_encoder_outputs`."""
    inputs, config = batch.inputs, model.config
    positions, _ = model.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )
    short = shorten(
        inputs["input_ids"],
        inputs["attention_mask"],
        positions,
        inputs["input_ids"] == config.image_token_id,
        kept,
        batch.grids,
        pad=config.text_config.pad_token_id or config.turn_end_token_id,
        merge_size=config.vision_config.spatial_merge_size,
    )
    return {name: short[name] for name in ("input_ids", "attention_mask", "position_ids")}


def pixels(model, batch: Batch, i: int) -> Tensor:
    """The i-th image as the tower is given it, `[3, H, W]` in [0, 1]."""
    config, (h, w) = model.config, batch.grids[i]
    merge = config.vision_config.spatial_merge_size
    sizes = [a * b * merge**2 for a, b in batch.grids]
    rows = batch.inputs["pixel_values"].split(sizes)[i]
    layout = {"patch_size": config.vision_config.patch_size, "merge_size": merge}
    layout["temporal_patch_size"] = config.vision_config.temporal_patch_size
    return to_pixels(rows, (1, h * merge, w * merge), mean=config.image_mean, std=config.image_std, **layout)[0]


def question(model, batch: Batch, i: int) -> Tensor:
    """The i-th question's word embeddings, `[Q, d]`: the tokens of its text, encoded as they stand in the prompt."""
    ids, config = batch.inputs["input_ids"][i], model.config
    end = int((ids == config.vision_end_token_id).nonzero()[-1]) + 1
    stop = int((ids[end:] == config.turn_end_token_id).nonzero()[0]) + end
    return model.get_input_embeddings()(ids[end:stop])


def at_scale_1(cells: Tensor, w: int) -> Tensor:
    """Cell numbers `[k]` in any order -> an allocation `[k, 3]` in raster order."""
    cells = cells.sort().values
    return torch.stack([torch.ones_like(cells), cells // w, cells % w], -1)


def top(scores: Tensor, k: int) -> Tensor:
    """The k greatest of `[N]`, ties by position: cell numbers `[k]` in raster order."""
    return torch.argsort(scores, descending=True, stable=True)[:k].sort().values
