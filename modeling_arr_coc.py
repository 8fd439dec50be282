"""ARR-COC on Qwen3-VL: relevance is read off the pixels, and only the chosen tokens go through the model.

Modifications of `Qwen3VLForConditionalGeneration`, none of whose code is copied or patched:

- `perceive` runs the stages texture, knowing, balancing and attending, and returns all that they said.
- `generate` and `forward` spend what was perceived: chosen patches through the vision tower, a shortened prompt with
  every token's true position through the language model. With `num_visual_tokens="all"` they are the stock ones.
- `from_pretrained` and `save_pretrained` know two layouts: base by reference plus a small add-on, and merged.
"""

import copy
import errno
import hashlib
import json
import os
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.dynamic_module_utils import custom_object_save
from transformers.generation.streamers import BaseStreamer
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    BaseModelOutputWithDeepstackFeatures,
    Qwen3VLForConditionalGeneration,
    apply_rotary_pos_emb,
    repeat_kv,
)
from transformers.utils import ModelOutput, cached_file

from .attending import Shaping, attend, flat, flat_scale, resolve_budget, token_gain
from .balancing import Policy, balance
from .configuration_arr_coc import ArrCocConfig, check_budget
from .knowing import Affinity, Lens, Retina, Silent, perspectival, propositional, to_grid
from .patches import finite, to_pixels
from .realizing import gather_patches, pool_features, shorten, tower_inputs
from .texture import detail, texture

ADD_ON = "arr_coc.safetensors"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # what transformers calls them, and looks for first
AUTO_MAP = {
    "AutoConfig": "configuration_arr_coc.ArrCocConfig",
    "AutoModel": "modeling_arr_coc.ArrCocForConditionalGeneration",
    "AutoModelForImageTextToText": "modeling_arr_coc.ArrCocForConditionalGeneration",
}


@dataclass
class ArrCocOutput(ModelOutput):
    """Everything the stages said. Lists have one entry an image, in the images' order; images may differ in size.

    Attributes:
        grid: `(h, w)` in cells.
        texture: `[C, h, w]` float32.
        detail: `[2, h, w]` in [0, 1], what is lost at scales 2 and 4.
        retina: `[lens_dim, h, w]`, what the retina sees in each cell; None where only the glance is asked.
        thumbnail: `[1 + deepstack layers, n, hidden]`, what the vision tower makes of the glance's coarse tokens: the
            merger's output and the deepstack features; None without a glance or a question.
        propositional, perspectival, participatory: `[h, w]` in [0, 1].
        weights: `[3]`, positive, of the three balanced terms.
        tensions: `[3]` in (0, 1), in the order of `balancing.TENSIONS`, the share of the second opponent.
        relevance: `[h, w]` in [0, 1].
        gain: `[h, w]` in (0, 1), relevance shaped into what the allocator maximises.
        allocation: `[n, 3]` int64 on the CPU, rows `(scale, y, x)`.
        budget: tokens that could have been spent.
        seconds: wall time of `texture`, `glance`, `knowing`, `balancing` and `attending` over all images. Work on an
            accelerator is not waited for.
    """

    grid: list[tuple[int, int]] | None = None
    texture: list[Tensor] | None = None
    detail: list[Tensor] | None = None
    retina: list[Tensor | None] | None = None
    thumbnail: list[Tensor | None] | None = None
    propositional: list[Tensor] | None = None
    perspectival: list[Tensor] | None = None
    participatory: list[Tensor] | None = None
    weights: list[Tensor] | None = None
    tensions: list[Tensor] | None = None
    relevance: list[Tensor] | None = None
    gain: list[Tensor] | None = None
    allocation: list[Tensor] | None = None
    budget: list[int] | None = None
    seconds: dict[str, float] | None = None


class Relevance(nn.Module):
    """All that ARR-COC learns, kept in float32."""

    def __init__(self, config: ArrCocConfig):
        super().__init__()
        text = config.text_config
        read = min(config.glance_readout_layers, config.num_glance_layers)
        self.affinity = Affinity(read * text.num_attention_heads)
        self.retina = Retina(config.lens_dim)
        self.lens = Lens(config.num_texture_channels, text.hidden_size, config.lens_dim)
        self.policy = Policy(text.hidden_size, config.policy_dim, config.weights_normalisation)
        self.shaping = Shaping()
        self.float()

    def _apply(self, fn, recurse=True):
        """Moves with the model, but is never cast with it: the choice must not change with the model's dtype."""

        def move(x: Tensor) -> Tensor:
            moved = fn(x)
            return moved if moved.dtype == torch.float32 else x.to(moved.device, torch.float32)

        return super()._apply(move, recurse)


class ArrCocForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Qwen3-VL that realizes relevance. See the module's docstring and `perceive`, `generate`, `forward`."""

    config: ArrCocConfig
    config_class = ArrCocConfig
    _keep_in_fp32_modules_strict = ["relevance"]

    def __init__(self, config: ArrCocConfig):
        super().__init__(config)
        if config.num_glance_layers > config.text_config.num_hidden_layers:
            raise ValueError(
                f"glance_layers={config.glance_layers}, but the language model has only "
                f"{config.text_config.num_hidden_layers} layers."
            )
        self.relevance = Relevance(config)
        self.post_init()

    def _init_weights(self, module):
        # Only modules with parameters of their own are offered here.
        if isinstance(module, (Affinity, Silent, Shaping)):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    # --------------------------------------------------------------------------------------------- perceive

    def perceive(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        num_visual_tokens: int | float | str | list | None = None,
        known: ArrCocOutput | None = None,
        **_,
    ) -> ArrCocOutput:
        """Decides, for each image and the question beside it, where its tokens go. The vision tower sees no fine patch.

        Args:
            input_ids, attention_mask (`[B, L]`), pixel_values (`[patches, D]`), image_grid_thw (`[images, 3]`): as the
                processor made them; its further outputs are accepted and not needed.
            num_visual_tokens: the budget of each image, or a list with one an image: a positive int, a share in
                (0, 1], `"auto"` or `"all"`; the config's unless given.
            known: what was perceived of the same images with another question; what does not depend on the question
                (texture, detail, retina, thumbnail) is not computed again.

        Returns:
            [`ArrCocOutput`], which `generate` and `forward` accept as `perception` beside the same inputs.

        Raises:
            ValueError: budgets, images and placeholders that do not fit each other, or pixels that are not finite.
        """
        prompt = _Prompt(input_ids, attention_mask, pixel_values, image_grid_thw, self.config)
        return self._perceive(prompt, num_visual_tokens, known)

    def _perceive(self, prompt: "_Prompt", num_visual_tokens, known: ArrCocOutput | None = None) -> ArrCocOutput:
        budgets = self._budgets(num_visual_tokens, len(prompt.grids))
        out = ArrCocOutput(**{name: [] for name in ArrCocOutput.__dataclass_fields__})
        out.grid, out.seconds = prompt.grids, {}
        if not prompt.grids:
            return out
        # Autocast would round the choice to bf16, and it would change with the caller's settings.
        exact = torch.autocast(prompt.patches[0].device.type, enabled=False)
        with _timed(out.seconds, "texture"), exact:
            self._see(prompt, out, known)
        questions = [prompt.question(row) for row in prompt.image_rows]
        embedded = [self.get_input_embeddings()(question).detach() for question in questions]
        glances, out.thumbnail = [None] * len(questions), [None] * len(questions)
        if self.config.participatory != "texture":
            with _timed(out.seconds, "glance"):
                out.thumbnail = list(known.thumbnail) if known and known.thumbnail else out.thumbnail
                new = [i for i, question in enumerate(questions) if len(question) and out.thumbnail[i] is None]
                seen = self.thumbnails([prompt.patches[i] for i in new], [prompt.grids[i] for i in new])
                for i, each in zip(new, seen, strict=True):
                    out.thumbnail[i] = each
                glances = self._glance(prompt, questions, out.thumbnail)
        with _timed(out.seconds, "knowing"), exact:
            for i in range(len(prompt.grids)):
                out.propositional.append(propositional(out.detail[i]))
                out.perspectival.append(perspectival(out.texture[i]))
                out.participatory.append(self._participate(out, i, embedded[i], glances[i]))
        with _timed(out.seconds, "balancing"), exact:
            for i, maps in enumerate(zip(out.propositional, out.perspectival, out.participatory, strict=True)):
                asked = embedded[i].mean(0) if len(embedded[i]) else embedded[i].new_zeros(embedded[i].shape[1])
                weights, tensions = self.relevance.policy(asked, maps)
                out.weights.append(weights)
                out.tensions.append(tensions)
                out.relevance.append(balance(maps, weights, tensions))
                out.gain.append(self.relevance.shaping(out.relevance[i]))
        with _timed(out.seconds, "attending"):
            config = self.config
            for i, (gain, budget) in enumerate(zip(out.gain, budgets, strict=True)):
                spend = resolve_budget(
                    budget, gain, config.auto_coverage, config.min_visual_tokens, config.max_visual_tokens
                )
                out.budget.append(spend)
                out.allocation.append(attend(gain, out.detail[i], spend, config.allocator, config.topk_neighbourhood))
        return out

    def _see(self, prompt: "_Prompt", out: ArrCocOutput, known: ArrCocOutput | None):
        if known is not None:
            if list(known.grid) != prompt.grids:
                raise ValueError(
                    f"known is of images with grids {known.grid}, the inputs have {prompt.grids}: pass what `perceive` "
                    "returned for these images."
                )
            out.texture, out.detail = list(known.texture), list(known.detail)
            out.retina = list(known.retina or [None] * len(out.texture))
            return
        config = self.config
        for patches, (_, h, w) in zip(prompt.patches, prompt.grid_thw.tolist(), strict=True):
            pixels = to_pixels(
                patches.float(), (1, h, w), mean=config.image_mean, std=config.image_std, **self._layout
            )[0]
            out.texture.append(texture(pixels, config.cell, config.texture_groups))
            out.detail.append(detail(pixels, config.cell))
            looked = config.participatory != "glance"
            out.retina.append(self.relevance.retina(pixels[None], out.texture[-1].shape[1:])[0] if looked else None)

    def _participate(self, out: ArrCocOutput, i: int, embedded: Tensor, glance: "_Glance | None") -> Tensor:
        """One image's participatory map, `[h, w]`. Without a question nothing is asked for anywhere: 0.5 throughout."""
        grid = out.grid[i]
        logits = torch.zeros(grid, device=embedded.device)
        if not len(embedded):
            return logits.sigmoid()
        seen = (None, None) if self.config.participatory == "glance" else (out.texture[i], out.retina[i])
        states = None
        if glance is not None:
            logits = to_grid(self.relevance.affinity(glance.query, glance.neutral, glance.key), glance.scale, *grid)
            states = glance.question, glance.cells, glance.scale
        return (logits + self.relevance.lens(grid, embedded, *seen, states)).sigmoid()

    def _thumbnail_grid(self, h: int, w: int) -> tuple[int, int, int]:
        """At which scale the glance sees a grid `h x w`, and that thumbnail's height and width in tokens."""
        scale = flat_scale(h, w, self.config.glance_tokens)
        return scale, -(-h // scale), -(-w // scale)

    @torch.no_grad()
    def thumbnails(self, pixel_values: list[Tensor], grids: list[tuple[int, int]]) -> list[Tensor]:
        """What the vision tower makes of each image's coarse tokens, for the glance. No question is needed.

        Args:
            pixel_values: `[patches, D]` an image, as the processor made them.
            grids: `(h, w)` in cells.

        Returns:
            `[1 + deepstack layers, n, hidden]` an image, as `ArrCocOutput.thumbnail`.
        """
        if not grids:
            return []
        merge = self.config.vision_config.spatial_merge_size
        rows, sizes = [], []
        for patches, (h, w) in zip(pixel_values, grids, strict=True):
            scale, *size = self._thumbnail_grid(h, w)
            rows.append(gather_patches(patches, flat(h, w, scale), h, w, **self._layout))
            sizes.append([1, *(merge * side for side in size)])
        sizes = torch.tensor(sizes, device=rows[0].device)
        seen = self.model.get_image_features(torch.cat(rows), sizes, return_dict=True)
        return [torch.stack(levels) for levels in zip(seen.pooler_output, *seen.deepstack_features, strict=True)]

    @torch.no_grad()
    def _glance(
        self, prompt: "_Prompt", questions: list[Tensor], thumbnail: list[Tensor | None]
    ) -> list["_Glance | None"]:
        """A few coarse tokens of each image beside its question, half-way through the language model.

        Each image is glanced at on its own, as the stock model sees a thumbnail: `<|im_start|>user`, the thumbnail,
        the question. What stands elsewhere in the prompt cannot leak in, and neither can the answer in training. None
        for an image without a question.
        """
        asked = [i for i, question in enumerate(questions) if len(question)]
        if not asked:
            return [None] * len(questions)
        config, lm = self.config, self.model.language_model
        prompts = []
        device = prompt.input_ids.device
        opening = torch.tensor(config.user_turn_token_ids, device=device)
        start, end = (
            torch.tensor([x], device=device) for x in (config.vision_start_token_id, config.vision_end_token_id)
        )
        sizes = [self._thumbnail_grid(*prompt.grids[i]) for i in asked]
        for i, (_, h, w) in zip(asked, sizes, strict=True):
            pads = torch.full((h * w,), config.image_token_id, device=device)
            prompts.append(torch.cat([opening, start, pads, end, questions[i]]))
        merge = config.vision_config.spatial_merge_size
        grids = torch.tensor([[1, merge * h, merge * w] for _, h, w in sizes], device=device)
        seen, *deeper = torch.cat([thumbnail[i] for i in asked], 1)  # each [tokens of all images, hidden]

        # Padding stands on the right, where a causal model's earlier tokens never see it: no mask is needed.
        ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        real = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        is_image = (ids == config.image_token_id) & real
        positions, _ = self.model.get_rope_index(ids, is_image.int(), grids, attention_mask=real)
        states = lm.embed_tokens(ids)
        states = states.masked_scatter(is_image[..., None], seen.to(states.dtype))
        mask = create_causal_mask(
            config=lm.config, inputs_embeds=states, attention_mask=None, past_key_values=None, position_ids=None
        )
        rotary = lm.rotary_emb(states, positions)
        queries, keys = [], []
        last = config.num_glance_layers
        for i, layer in enumerate(lm.layers[:last]):
            if i >= last - config.glance_readout_layers:
                query, key = _query_key(layer, states, rotary)
                queries.append(query)
                keys.append(key)
            states = layer(states, attention_mask=mask, position_embeddings=rotary)
            if i < len(deeper):
                states = states.masked_scatter(is_image[..., None], states[is_image] + deeper[i].to(states.dtype))
        queries, keys = torch.cat(queries, 1), torch.cat(keys, 1)  # [images, heads, l, d]

        out: list[_Glance | None] = [None] * len(questions)
        for j, (i, (scale, h, w)) in enumerate(zip(asked, sizes, strict=True)):
            first = len(opening) + 1
            cells, neutral = slice(first, first + h * w), slice(first + h * w, first + h * w + 1)
            question = slice(first + h * w + 1, int(lengths[j]))
            out[i] = _Glance(
                scale=scale,
                query=queries[j, :, question],
                neutral=queries[j, :, neutral],
                key=keys[j, :, cells],
                question=states[j, question],
                cells=states[j, cells],
            )
        return out

    @property
    def _layout(self) -> dict[str, int]:
        vision = self.config.vision_config
        return {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.spatial_merge_size,
        }

    @property
    def _rule(self) -> dict:
        return {"merge_size": self.config.vision_config.spatial_merge_size, "rule": self.config.place}

    def _budgets(self, num_visual_tokens, images: int) -> list:
        if num_visual_tokens is None:
            num_visual_tokens = self.config.num_visual_tokens
        if isinstance(num_visual_tokens, (list, tuple)):
            if len(num_visual_tokens) != images:
                raise ValueError(
                    f"num_visual_tokens has {len(num_visual_tokens)} budgets for {images} images: give one for each "
                    "image, in the order in which they stand in the prompts, or a single one for all."
                )
            return [check_budget(b, f"num_visual_tokens[{i}]") for i, b in enumerate(num_visual_tokens)]
        return [check_budget(num_visual_tokens)] * images

    # -------------------------------------------------------------------------------------------------- spend

    def _chooses(self, inputs: dict, perception: ArrCocOutput | None, num_visual_tokens) -> bool:
        """Whether anything is to be chosen: not without images, with all budgets `"all"`, or embeddings for ids."""
        if perception is not None and num_visual_tokens is not None:
            raise ValueError("num_visual_tokens came beside a perception, which has its budget: pass one of them.")
        grids = inputs.get("image_grid_thw")
        budgets = [] if perception is not None else self._budgets(num_visual_tokens, 0 if grids is None else len(grids))
        if inputs.get("input_ids") is None or (inputs.get("pixel_values") is None and grids is None):
            return False
        return perception is not None or grids is None or any(budget != "all" for budget in budgets)

    def _spend(self, inputs: dict, perception: ArrCocOutput | None, num_visual_tokens) -> tuple[dict, Tensor]:
        """Inputs as the processor made them -> inputs for the stock model with the chosen tokens only, and `kept`."""
        grids, pixels = inputs.get("image_grid_thw"), inputs.get("pixel_values")
        prompt = _Prompt(inputs["input_ids"], inputs.get("attention_mask"), pixels, grids, self.config)
        if perception is None:
            perception = self._perceive(prompt, num_visual_tokens)
        if prompt.grids != perception.grid:
            raise ValueError(
                f"perception is of images with grids {perception.grid}, the inputs have {prompt.grids}: pass the "
                "perception that `perceive` returned for these inputs."
            )
        for allocation, (h, w) in zip(perception.allocation, prompt.grids, strict=True):
            scale, y, x = allocation.T
            inside = (scale > 0) & (y >= 0) & (y < h) & (x >= 0) & (x < w)
            if not 0 < len(allocation) <= h * w or not bool(inside.all()):
                raise ValueError(
                    f"perception.allocation does not fit an image of {h}x{w} cells: give it 1 to {h * w} rows "
                    "(scale, y, x) inside the image."
                )
        with torch.no_grad():
            types = inputs.get("mm_token_type_ids")
            if types is None:
                types = prompt.is_image.int() + 2 * (prompt.input_ids == self.config.video_token_id).int()
            positions, _ = self.model.get_rope_index(
                prompt.input_ids, types, grids, inputs.get("video_grid_thw"), attention_mask=prompt.attention_mask
            )
        short = shorten(
            prompt.input_ids,
            prompt.attention_mask,
            positions,
            prompt.is_image,
            perception.allocation,
            prompt.grids,
            pad=self.config.text_config.pad_token_id or self.config.turn_end_token_id,
            **self._rule,
        )
        kept = short.pop("kept")
        dropped = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids")
        spent = {k: v for k, v in inputs.items() if k not in dropped} | short
        spent["mm_encoder_outputs"] = {"image": self._realize(prompt, perception)}
        if inputs.get("pixel_values_videos") is not None:
            spent["mm_encoder_outputs"]["video"] = self.model.get_video_features(
                inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True
            )
        return spent, kept

    def _realize(self, prompt: "_Prompt", perception: ArrCocOutput) -> BaseModelOutputWithDeepstackFeatures:
        """The chosen tokens' features, one entry an image: `[n, d]`, DeepStack's likewise.

        In training each token is gated by its gain, straight through: the forward value is unchanged, and a token
        whose feature lowers the loss raises the relevance of its place.
        """
        visual, counts = self.model.visual, [len(a) for a in perception.allocation]
        chosen = list(zip(perception.allocation, prompt.grids, strict=True))
        if self.config.realize == "after":
            full = self.model.get_image_features(torch.cat(prompt.patches), prompt.grid_thw, return_dict=True)
            levels = [
                [pool_features(x, a, h, w) for x, (a, (h, w)) in zip(level, chosen, strict=True)]
                for level in (full.pooler_output, *full.deepstack_features)
            ]
        else:
            rows = [
                gather_patches(patches, a, h, w, **self._layout)
                for patches, (a, (h, w)) in zip(prompt.patches, chosen, strict=True)
            ]
            allocations = [a.to(rows[0].device) for a in perception.allocation]
            side = int(self.config.vision_config.num_position_embeddings**0.5)
            seen = visual(
                torch.cat(rows).to(visual.dtype),
                grid_thw=prompt.grid_thw,
                return_dict=True,
                **tower_inputs(allocations, prompt.grids, side, **self._rule),
            )
            levels = [list(level.split(counts)) for level in (seen.pooler_output, *seen.deepstack_features)]
        if self.training and any(gain.requires_grad for gain in perception.gain):
            for i, (allocation, _) in enumerate(chosen):
                gate = token_gain(perception.gain[i], allocation)[:, None]
                gate = (1 + gate - gate.detach()).to(levels[0][i].dtype)
                for level in levels:
                    level[i] = level[i] * gate.to(level[i].device)
        return BaseModelOutputWithDeepstackFeatures(
            pooler_output=tuple(levels[0]), deepstack_features=[tuple(level) for level in levels[1:]]
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        mm_encoder_outputs: dict | None = None,
        num_visual_tokens: int | float | str | list | None = None,
        perception: ArrCocOutput | None = None,
        **kwargs,
    ):
        """As stock, on the chosen tokens only. Logits are those of the shortened prompts; labels are shortened alike.

        Args:
            num_visual_tokens: the budget, as in [`perceive`]. Of no effect where there are no raw pixels (a decoding
                step, or `mm_encoder_outputs`), or with `inputs_embeds`.
            perception: what `perceive` returned for these inputs; then nothing is chosen anew.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "pixel_values": pixel_values,
            "pixel_values_videos": pixel_values_videos,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
            "mm_token_type_ids": mm_token_type_ids,
            "position_ids": position_ids,
            "mm_encoder_outputs": mm_encoder_outputs,
        }
        raw = mm_encoder_outputs is None and pixel_values is not None
        if raw and not self._chooses(inputs, perception, num_visual_tokens):
            finite("pixel_values", pixel_values)
        elif raw:
            inputs, kept = self._spend(inputs, perception, num_visual_tokens)
            if labels is not None:
                labels = torch.where(kept < 0, -100, labels.gather(1, kept.clamp(min=0)))
        return super().forward(
            **inputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def generate(
        self,
        inputs: Tensor | None = None,
        *args,
        num_visual_tokens: int | float | str | list | None = None,
        perception: ArrCocOutput | None = None,
        **kwargs,
    ):
        """Stock `generate` in all its modes, on the chosen tokens only; returns the caller's own prompts and answers.

        Args:
            num_visual_tokens: the budget, as in [`perceive`].
            perception: what `perceive` returned for these inputs; then nothing is chosen anew, and there is no budget.
        """
        if inputs is not None:
            kwargs["input_ids"] = inputs
        chooses = self._chooses(kwargs, perception, num_visual_tokens)
        self._check_cache(kwargs, chooses)
        if not chooses:
            if kwargs.get("pixel_values") is not None:  # `forward` is given features, no pixels
                finite("pixel_values", kwargs["pixel_values"])
            return super().generate(None, *args, **kwargs)
        prompt = kwargs["input_ids"]
        kwargs = self._count_new_tokens(kwargs, prompt.shape[1])
        with torch.no_grad():
            kwargs, _ = self._spend(kwargs, perception, num_visual_tokens)
        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = _PromptFirst(kwargs["streamer"], prompt)
        out = super().generate(None, *args, **kwargs)
        sequences = out.sequences if isinstance(out, ModelOutput) else out
        answers = sequences[:, kwargs["input_ids"].shape[1] :]
        whole = prompt.to(answers.device).repeat_interleave(len(answers) // len(prompt), 0)
        sequences = torch.cat([whole, answers], 1)
        if not isinstance(out, ModelOutput):
            return sequences
        out.sequences = sequences
        return out

    def _check_cache(self, inputs: dict, chooses: bool):
        cache, ids = inputs.get("past_key_values"), inputs.get("input_ids")
        filled = 0 if cache is None else cache.get_seq_length()
        if not filled:
            return
        # Placeholders that the cache lacks, and no pixels for them: it was filled with chosen tokens.
        bare = ids is not None and inputs.get("pixel_values") is None
        if chooses or (bare and bool((ids[:, filled:] == self.config.image_token_id).any())):
            raise ValueError(
                "past_key_values already holds tokens, and their number depends on what was chosen then: pass an empty "
                'cache, or num_visual_tokens="all" in every turn.'
            )

    def _count_new_tokens(self, kwargs: dict, length: int) -> dict:
        """Lengths that count the caller's prompt become lengths that count new tokens, since the prompt is shorter."""
        configs = [c for c in (kwargs.get("generation_config"), self.generation_config) if c is not None]

        def setting(name: str) -> int | None:
            values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
            return next((value for value in values if value is not None), None)

        counted = {}
        for total, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            given = setting(total)
            if given is not None and setting(new) is None:
                counted[new] = max(given - length, 0)
        if counted.get("max_new_tokens") == 0:
            raise ValueError(
                f"max_length={setting('max_length')}, but the prompt alone has {length} tokens: use max_new_tokens."
            )
        return {k: v for k, v in kwargs.items() if k not in ("max_length", "min_length")} | counted

    # ------------------------------------------------------------------------------------------- save and load

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """As stock, for both layouts. With a base by reference, its weights come from the base's pinned commit.

        Raises:
            ValueError: an add-on that does not fit (missing or unexpected weights, other shapes); a weights file of
                either that cannot be read or, in the Hub's cache, is not what was downloaded.
            OSError: a repository or revision that is not there, or a cache that is full or cannot be written.
        """
        hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "proxies", "subfolder")
        own = {k: kwargs[k] for k in hub if kwargs.get(k) is not None}
        # Not isinstance(config, ArrCocConfig): a local folder's own code is loaded twice, by the Auto class and for us.
        if config is None or isinstance(config, (str, os.PathLike)):
            config, unused = ArrCocConfig.from_pretrained(
                config or pretrained_model_name_or_path, return_unused_kwargs=True, **own, **_config_fields(kwargs)
            )
            kwargs = {k: v for k, v in kwargs.items() if k not in _config_fields(kwargs)}
        if config.base_model_name_or_path is None or pretrained_model_name_or_path is None:
            with _naming_trouble(pretrained_model_name_or_path, own):
                return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        config = copy.deepcopy(config)
        base, revision = config.base_model_name_or_path, config.base_model_revision
        commit = getattr(config, "_commit_hash", None)
        add_on = _find_add_on(pretrained_model_name_or_path, own | ({"_commit_hash": commit} if commit else {}))
        of_base = {
            k: v for k, v in kwargs.items() if k not in ("revision", "subfolder", "code_revision", "adapter_kwargs")
        }
        of_base |= {"_commit_hash": revision, "revision": revision or "main"}
        with _naming_trouble(base, {k: v for k, v in of_base.items() if k in hub}):
            loaded = super().from_pretrained(base, *args, config=config, **of_base)
        model, info = loaded if isinstance(loaded, tuple) else (loaded, None)
        model._load_add_on(add_on)
        model.config.name_or_path = model.name_or_path = str(pretrained_model_name_or_path)
        if info is None:
            return model
        info["missing_keys"] = type(info["missing_keys"])(
            k for k in info["missing_keys"] if not k.startswith("relevance.")
        )
        return model, info

    _keys_to_ignore_on_load_missing = [r"^relevance\."]

    def _load_add_on(self, path: str):
        _check_file(path)
        weights, own = load_file(path), self.relevance.state_dict()
        problems = [f"missing {k}" for k in own.keys() - weights.keys()]
        problems += [f"unexpected {k}" for k in weights.keys() - own.keys()]
        problems += [
            f"{k} is {list(weights[k].shape)}, not {list(own[k].shape)}"
            for k in own.keys() & weights.keys()
            if own[k].shape != weights[k].shape
        ]
        if problems:
            raise ValueError(
                f"add-on {path} does not fit this base and config: {'; '.join(sorted(problems))}. Use the add-on that "
                "was trained for them, or the config that it was saved with."
            )
        self.relevance.load_state_dict(weights)

    def save_pretrained(self, save_directory, is_main_process: bool = True, state_dict: dict | None = None, **kwargs):
        """As stock where the checkpoint is merged; config, code and add-on alone while a base is referenced."""
        if self.config.base_model_name_or_path is None:
            self.config.auto_map = dict(AUTO_MAP)
            return super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if kwargs.get("push_to_hub"):
            raise ValueError("push_to_hub=True is not for an add-on: save it, then call push_to_hub(repo_id).")
        if not is_main_process:
            return
        os.makedirs(save_directory, exist_ok=True)
        config = copy.deepcopy(self.config)
        config.architectures, config.auto_map = [type(self).__name__], dict(AUTO_MAP)
        custom_object_save(self, save_directory)
        config.save_pretrained(save_directory)
        self.generation_config.save_pretrained(save_directory)
        weights = self.state_dict() if state_dict is None else state_dict
        weights = {k.removeprefix("relevance."): v for k, v in weights.items() if k.startswith("relevance.")}
        weights = {k: v.detach().float().cpu().contiguous() for k, v in weights.items()}
        target = os.path.join(save_directory, ADD_ON)
        save_file(weights, target + ".part", metadata={"format": "pt"})
        os.replace(target + ".part", target)


class _Prompt:
    """A batch of prompts taken apart, and checked before any work is done."""

    def __init__(self, input_ids, attention_mask, pixel_values, image_grid_thw, config: ArrCocConfig):
        self.config = config
        self.input_ids = input_ids
        self.attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.is_image = (input_ids == config.image_token_id) & self.attention_mask.bool()
        self.grid_thw = image_grid_thw
        self.grids, self.patches, self.image_rows = [], [], []
        if (pixel_values is None) != (image_grid_thw is None):
            given, missing = ("pixel_values", "image_grid_thw")[:: 1 if image_grid_thw is None else -1]
            raise ValueError(f"{given} came without {missing}: pass both, as the processor returns them.")
        merge = config.vision_config.spatial_merge_size
        if image_grid_thw is not None:
            for t, h, w in image_grid_thw.tolist():
                if t != 1 or h % merge or w % merge or min(h, w) < merge:
                    raise ValueError(
                        f"image_grid_thw holds {[t, h, w]}: a still image's is [1, h, w], in multiples of {merge}."
                    )
                self.grids.append((h // merge, w // merge))
            counts = image_grid_thw.prod(-1).tolist()
            if sum(counts) != len(pixel_values):
                raise ValueError(
                    f"pixel_values has {len(pixel_values)} rows, image_grid_thw asks for {sum(counts)}: pass both as "
                    "the processor returned them."
                )
            finite("pixel_values", pixel_values)
            self.patches = list(pixel_values.split(counts))
        cells, found = sum(h * w for h, w in self.grids), int(self.is_image.sum())
        if cells != found:
            raise ValueError(
                f"the prompts hold {found} image placeholders for {len(self.grids)} images with {cells} cells: pass "
                "every image that a prompt names and no other. A placeholder typed into a question counts too; keep "
                "it text with apply_chat_template(..., sanitize_control_tokens=True)."
            )
        rows, columns = self.is_image.nonzero(as_tuple=True)
        start = 0
        for h, w in self.grids:
            run = slice(start, start + h * w)
            if rows[run].unique().numel() != 1 or int(columns[run][-1] - columns[run][0]) != h * w - 1:
                raise ValueError(
                    "image placeholders do not stand in one run for each image, in the images' order: a placeholder "
                    "was typed into a question, or prompts and images were shuffled."
                )
            self.image_rows.append(int(rows[start]))
            start += h * w

    def question(self, row: int) -> Tensor:
        """The question's token ids, `[Q]`: the text of the last user turn, or all text where there is no such turn."""
        config = self.config
        ids = self.input_ids[row][self.attention_mask[row].bool()]
        opening = torch.tensor(config.user_turn_token_ids, device=ids.device)
        if len(ids) >= len(opening):
            starts = (ids.unfold(0, len(opening), 1) == opening).all(1).nonzero()[:, 0]
            if len(starts):
                turn = ids[starts[-1] + len(opening) :]
                ends = (turn == config.turn_end_token_id).nonzero()[:, 0]
                return self._text(turn[: ends[0]] if len(ends) else turn)
        return self._text(ids[ids != config.turn_end_token_id])

    def _text(self, ids: Tensor) -> Tensor:
        config = self.config
        vision = (
            config.image_token_id,
            config.video_token_id,
            config.vision_start_token_id,
            config.vision_end_token_id,
        )
        return ids[~torch.isin(ids, torch.tensor(vision, device=ids.device))]


@dataclass
class _Glance:
    """What the glance at one image leaves: its `scale`, and the arguments of `knowing.Affinity` and `knowing.Lens`."""

    scale: int
    query: Tensor
    neutral: Tensor
    key: Tensor
    question: Tensor
    cells: Tensor


class _PromptFirst(BaseStreamer):
    """Hands a streamer the caller's own prompt in the place of the shortened one."""

    def __init__(self, streamer: BaseStreamer, prompt: Tensor):
        self.streamer, self.prompt = streamer, prompt

    def put(self, value):
        if self.prompt is not None:
            value, self.prompt = self.prompt.cpu(), None
        self.streamer.put(value)

    def end(self):
        self.streamer.end()


def _query_key(layer: nn.Module, states: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A decoder layer's queries, scaled, and keys, with rotary positions: `[B, l, d]` -> `[B, heads, l, head_dim]`.

    Read beside the layer's own attention, so that no backend has to give its weights away.
    """
    attention = layer.self_attn
    x = layer.input_layernorm(states)
    shape = (*x.shape[:-1], -1, attention.head_dim)
    query = attention.q_norm(attention.q_proj(x).view(shape)).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    return query * attention.scaling, repeat_kv(key, attention.num_key_value_groups)


@contextmanager
def _timed(seconds: dict[str, float], stage: str):
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def _config_fields(kwargs: dict) -> dict:
    return {k: v for k, v in kwargs.items() if k in ArrCocConfig.__dataclass_fields__ and k != "dtype"}


@contextmanager
def _naming_trouble(where, hub: dict):
    """Around the loading of weights: a damaged file or an unfit cache is named, with its mend."""
    try:
        yield
    except (SafetensorError, ValueError, RuntimeError):  # what the weights may be to blame for
        _check_weights(where, hub)
        raise
    except OSError as error:
        if trouble := _cache_trouble(error, where, hub):
            raise trouble from error
        raise
    _check_weights(where, hub)


def _check_weights(where, hub: dict):
    """Checks the files that transformers loads, as far as they are here."""
    here = {"local_files_only": True, "force_download": False, "_raise_exceptions_for_missing_entries": False}
    here |= {"_raise_exceptions_for_connection_errors": False}
    found = (cached_file(str(where), name, **hub | here) for name in WEIGHTS if where is not None)
    first = next((path for path in found if path), None)
    if first is not None:
        _check_file(first)
        shards = _shards(first) if first.endswith(".json") else []
        for path in (os.path.join(os.path.dirname(first), name) for name in shards):
            if os.path.exists(path):
                _check_file(path)


def _check_file(path: str):
    """Refuses weights, or an index of them, that cannot be read or, in the Hub's cache, are not what was downloaded.

    There a file is a link to a blob, called by its SHA-256 or, where git itself holds it, by git's SHA-1. A blob may in
    turn be a link to one that repositories share, called otherwise. Elsewhere, and on a system without links, nothing
    says what a file should be. It takes about 0.6 s a GB.
    """
    link = os.readlink(path) if os.path.islink(path) else ""
    if blob := re.search(r"[/\\]blobs[/\\]([0-9a-f]{40}|[0-9a-f]{64})$", link):
        wanted = blob[1]
        found = hashlib.sha256() if len(wanted) == 64 else hashlib.sha1(b"blob %d\0" % os.path.getsize(path))
        with open(path, "rb") as file:
            while block := file.read(2**20):
                found.update(block)
        if found.hexdigest() != wanted:
            raise ValueError(
                f"{path} is not what was downloaded: its hash is {found.hexdigest()}, and should be {wanted}. Delete "
                f"{os.path.realpath(path)} and load again, or load once with force_download=True."
            )
    try:
        if path.endswith(".json"):
            _shards(path)
        else:
            with safe_open(path, "pt"):
                pass
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it, and download or save it again.") from error


def _shards(index: str) -> list[str]:
    with open(index, encoding="utf-8") as file:
        return sorted(set(json.load(file)["weight_map"].values()))


def _cache_trouble(error: BaseException, where, hub: dict) -> OSError | None:
    """A download's error in plain words, where the cache is to blame."""
    if isinstance(error.__cause__, PermissionError):  # transformers tells it in words of its own
        error = error.__cause__
    mends = {errno.ENOSPC: "make room there", errno.EDQUOT: "make room there"}
    mends |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable")
    if getattr(error, "errno", None) not in mends or os.path.isdir(where):
        return None
    return OSError(
        error.errno,
        f"{where} cannot be kept in the Hub's cache ({error.strerror}): {mends[error.errno]}, or name another folder "
        "by cache_dir=... or the variable HF_HOME, and load again",
        hub.get("cache_dir") or constants.HF_HUB_CACHE,
    )


def _find_add_on(path, hub: dict) -> str:
    try:
        return cached_file(str(path), ADD_ON, **hub)
    except (OSError, HFValidationError) as error:
        raise _cache_trouble(error, path, hub) or ValueError(
            f"{path} names a base model but holds no {ADD_ON}: it is not an ARR-COC add-on, or its download failed "
            f"({error})."
        ) from error


ArrCocForConditionalGeneration.register_for_auto_class("AutoModel")
ArrCocForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")

__all__ = ["ArrCocConfig", "ArrCocForConditionalGeneration", "ArrCocOutput"]
