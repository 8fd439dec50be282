"""The small Qwen3-VL as it learns: stock's weights and results, made fit for many small pictures, and its losses.

Patches are cut and normalised on the device, equal to the processor's pixel_values; what the tower would ask the host
for (its grids' tables) is computed once for each size.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen3VLForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from arr_coc import realizing
from arr_coc.attending import SCALES
from arr_coc.checkpoints.make_tiny import tiny_config
from arr_coc.patches import to_patches
from benchmarks import scenes, whole

from .batches import SPELT
from .few import pyramid_index


def pixel_values(images: Tensor, scale: int = 1) -> Tensor:
    """uint8 pictures `[B, H, W, 3]` -> Qwen3-VL's normalised rows `[B * patches, 1536]`, float, as its processor's.

    `scale`: of pictures shrunk so many times, by area average.
    """
    images = images.movedim(3, 1)
    images = F.avg_pool2d(images.float(), scale) if scale > 1 else images
    rows = torch.vmap(partial(to_patches, patch_size=16, temporal_patch_size=2, merge_size=2))(images)
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


def folded(attention: Callable) -> Callable:
    """`attention(q, k, v, scale=)` within pictures of equal length, as one batch instead of stock's loop over them.

    Takes the flash interface's packed `[1, heads, pictures * length, d]`; every picture has `max_length_q` patches.
    """

    def attend(module, query, key, value, attention_mask=None, *, scaling, dropout=0.0, max_length_q, **_):
        q, k, v = (x[0].transpose(0, 1).unflatten(0, (-1, max_length_q)).transpose(1, 2) for x in (query, key, value))
        out = attention(q, k, v, scale=scaling)  # [pictures, heads, length, d]
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0), None

    return attend


class LinearPatchEmbed(nn.Module):
    """The tower's patch embedding as the matrix product that its non-overlapping Conv3d is; shares the weights."""

    def __init__(self, embed: nn.Module):
        super().__init__()
        self.proj = embed.proj

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.proj.weight.flatten(1), self.proj.bias)


def overheard(attention: Callable) -> Callable:
    """An attention that leaves its queries and keys, `[B, heads, L, d]`, with its module if that is listened to.

    `Learner.gaze` listens, and takes them away again: no layer holds on to a batch.
    """

    @torch.compiler.disable  # compiled, each length would be compiled anew
    def attend(module, query, key, *rest, **options):
        if hasattr(module, "overheard"):
            module.overheard = query, key
        return attention(module, query, key, *rest, **options)

    return attend


def causal_attention(module, query, key, value, attention_mask=None, *, scaling, dropout=0.0, **_):
    """Causal `blocked_attention`, `[B, heads, L, d]`. No padding on the left."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    return blocked_attention(query, key, value, scale=scaling, block=64, causal=True).transpose(1, 2), None


@torch.compiler.disable  # compiled, each length would be compiled anew
def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, block: int = 256, causal: bool = False
) -> Tensor:
    """Attention `[B, heads, L, d]` as matrix products over blocks of queries.

    On a CPU, forward and backward in bfloat16 take 0.6 of torch's fused kernel (8 x 5 heads x 1,024 patches of 32), and
    causal, in blocks of 64, 0.44 (64 x 8 heads x 192 tokens of 32).
    """
    heads, length = q.shape[1:3]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = []
    for start in range(0, length, block):
        end = min(start + block, length)
        seen = end if causal else length
        later = q.new_full((end - start, seen), float("-inf")).triu(start + 1) if causal else q.new_zeros(())
        scores = torch.baddbmm(later, q[:, start:end], k[:, :seen].transpose(1, 2), beta=int(causal), alpha=scale)
        out.append(torch.bmm(scores.softmax(-1), v[:, :seen]))
    return torch.cat(out, 1).unflatten(0, (-1, heads))


def quicken(model: Qwen3VLForConditionalGeneration, on_cpu: bool = True) -> Qwen3VLForConditionalGeneration:
    """Make the model fit for many small pictures a batch. For training on `tower_inputs` only; same weights, same
    results. ("flash" in the name selects the tower's packed path.)"""
    within = blocked_attention if on_cpu else F.scaled_dot_product_attention
    AttentionInterface.register("folded_flash", folded(within))
    model.model.visual.config._attn_implementation = "folded_flash"
    model.model.visual.patch_embed = LinearPatchEmbed(model.model.visual.patch_embed)
    AttentionInterface.register("overheard", overheard(causal_attention if on_cpu else sdpa_attention_forward))
    model.model.language_model.config._attn_implementation = "overheard"
    return model


def few_inputs(images: Tensor, allocation: Tensor, picture: Tensor, side: int) -> tuple[Tensor, dict]:
    """The tower's patches and tables for rows that each see `allocation [R, n, 3]` of `images[picture]`.

    Equal to `realizing.gather_patches` and `realizing.tower_inputs`, row by row.
    """
    b, (h, w) = len(images), (n // 32 for n in images.shape[1:3])
    levels = torch.cat([pixel_values(images, scale).view(b, -1, 4, 1536) for scale in SCALES], 1)
    patches = levels[picture[:, None], pyramid_index(allocation, h, w)]  # [R, n, 4, 1536]
    r, n = allocation.shape[:2]
    tables = realizing.tower_inputs([allocation.flatten(0, 1)], [(h, w)], side)
    tables["cu_seqlens"] = torch.arange(r + 1, dtype=torch.int32, device=images.device) * (n * 4)
    tables["grid_thw"] = torch.tensor([[1, h * 2, w * 2]], device=images.device).repeat(r, 1)
    return patches.flatten(0, 2), {**tables, "max_seqlen": n * 4}


class Learner(nn.Module):
    """Qwen3-VL and its training-only probe: what stands in each cell must be read off the merger's output, in words.

    A cell's vector times the embeddings of the names of kinds and colours, and of a sign's first token, must pick the
    right ones (its next three tokens through a linear layer each), and a linear layer the digits of the thing's centre.
    Vision so speaks the language model's words from the start. And the middle layers must look where the answer lies
    (`gaze`), as those of large models come to do by themselves. Nothing of this is part of the checkpoint.
    """

    def __init__(
        self, model: Qwen3VLForConditionalGeneration, tokenizer, probe_weight: float = 0.5, gaze_weight: float = 0.5
    ):
        super().__init__()
        self.model, self.probe_weight, self.gaze_weight = model, probe_weight, gaze_weight
        layers = model.model.language_model.layers
        self.lookers = [layer.self_attn for layer in layers[(len(layers) - 1) // 2 : -1]]  # 2, 3 and 4 of six
        for attention in self.lookers:
            attention.overheard = None
        for name, words in (("kind", scenes.KINDS), ("colour", scenes.COLOURS)):  # as answers, and inside sentences
            ids = [[tokenizer(form).input_ids[0] for form in (word, f" {word}")] for word in words]
            self.register_buffer(name, torch.tensor(ids), persistent=False)
        hidden = model.config.text_config.hidden_size
        self.nothing = nn.Parameter(torch.zeros(2, hidden))  # an empty cell's "word"
        self.spell = nn.Linear(hidden, (SPELT - 1) * hidden)
        self.where = nn.Linear(hidden, 4 * 10)

    def probe(self, cells: Tensor, labels: dict) -> Tensor:
        """Loss of naming what is in tokens `[n, d]`; labels `[R, tokens]` kind and colour (0 empty), `[R, tokens, 4]`
        text (-100 none) and where."""
        words = self.model.get_input_embeddings().weight
        weight = torch.where(labels["kind"].flatten() > 0, 1.0, 0.1)
        text = labels["text"].flatten(0, 1)
        signs, text = cells[text[:, 0] >= 0], text[text[:, 0] >= 0]
        letters = torch.cat([signs[:, None], self.spell(signs).unflatten(1, (SPELT - 1, -1))], 1)  # [signs, 4, d]
        each = F.cross_entropy((letters @ words.T).float().flatten(0, 1), text.flatten(), reduction="sum")
        loss = each / (text >= 0).sum().clamp(min=1)
        for nothing, name in zip(self.nothing, ("kind", "colour"), strict=True):
            names = torch.cat([nothing[None], words[getattr(self, name)].mean(1)])
            each = F.cross_entropy((cells @ names.T).float(), labels[name].flatten(), reduction="none")
            loss = loss + (each * weight).sum() / weight.sum()
        things = labels["kind"].flatten() > 0
        digits = self.where(cells[things]).float().unflatten(1, (4, 10)).flatten(0, 1)
        each = F.cross_entropy(digits, labels["where"].flatten(0, 1)[things].flatten(), reduction="sum")
        return loss + each / max(len(digits), 1)

    def gaze(self, inputs: dict) -> Tensor:
        """Cross-entropy from the evidence to where the heads of each middle layer look in the picture, taken together.

        Supervised attention (Liu et al. 2016, for translation). Together is the mean of their looks: one head may find
        by colour and another by kind. Over the picture's cells alone: how much they look at it at all stays free.
        The first of the layers looks for what a question starts from, the others for what it leads to (`hops`).
        """
        evidence, look = inputs["evidence"], inputs["look_index"]
        cells = slice(inputs["first"], inputs["first"] + evidence.shape[2])
        loss = evidence.new_zeros(())
        for layer, attention in enumerate(self.lookers):
            query, key = attention.overheard
            key = key[:, :, cells].repeat_interleave(query.shape[1] // key.shape[1], 1)
            scores = (query @ key.mT * attention.scaling).transpose(1, 2).flatten(0, 1)  # [B * L, heads, cells]
            together = scores[look].float().log_softmax(-1).logsumexp(1) - np.log(query.shape[1])
            loss = loss - (evidence[:, min(layer, 1)] * together).sum()
            attention.overheard = None
        return loss / (len(self.lookers) * evidence[:, 1].sum().clamp(min=1))

    def forward(self, images: Tensor, return_logits: bool = False, tower_only: bool = False, **inputs):
        """One batch of `Scenes.collate` -> losses (scalars), and the answers' logits `[n, vocabulary]` if asked."""
        stock = self.model.model
        n, height, width, _ = images.shape
        side = stock.visual.num_grid_per_side
        if "allocation" in inputs:
            patches, tower = few_inputs(images, inputs["allocation"], inputs["picture"], side)
        else:
            patches, tower = pixel_values(images), tower_inputs(n, (height, width), side, images.device)
        seen = stock.visual(patches, return_dict=True, **tower)
        cells = seen.pooler_output  # [R * tokens, d]
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
    """model.safetensors in bfloat16, without the tied head."""
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    weights.pop("lm_head.weight")
    write_weights(weights, folder)


def write_weights(weights: dict[str, Tensor], folder: Path):
    """model.safetensors as one: a reader sees the old file or the new one."""
    whole.write(folder / "model.safetensors", lambda part: save_file(weights, part, metadata={"format": "pt"}))
