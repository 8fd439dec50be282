"""The configuration of ARR-COC: Qwen3-VL's own, and what decides where its visual tokens go."""

import math
import os
import re
from numbers import Integral, Real

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from .texture import GROUPS


def check_budget(budget, name: str = "num_visual_tokens"):
    """Returns `budget` if it is one: a positive int, a share in (0, 1] as a float, `"auto"` or `"all"`.

    Raises:
        ValueError: for anything else, naming the argument and what it may be.
    """
    if isinstance(budget, str) and budget in ("auto", "all"):
        return budget
    if isinstance(budget, Integral) and not isinstance(budget, bool) and budget > 0:
        return int(budget)
    if (
        isinstance(budget, Real)
        and not isinstance(budget, (bool, Integral))
        and math.isfinite(budget)
        and 0 < budget <= 1
    ):
        return float(budget)
    raise ValueError(
        f"{name}={budget!r} is not a budget: give a positive whole number of tokens (200), a share of the image's "
        'cells as a float in (0, 1] (0.2), "auto" or "all".'
    )


@strict
class ArrCocConfig(Qwen3VLConfig):
    r"""
    Everything of [`Qwen3VLConfig`], and:

    num_visual_tokens (`int | float | str`, defaults to 200):
        The budget of each image unless a call says otherwise: tokens, a share in (0, 1], `"auto"` or `"all"`.
    min_visual_tokens, max_visual_tokens (`int`, default to 64 and 400):
        The range of `"auto"`.
    auto_coverage (`float`, defaults to 0.9):
        `"auto"` spends the fewest tokens whose cells hold this share of the image's gain.
    allocator (`str`, defaults to `"lod"`):
        `"lod"`, tokens at scales 4, 2 and 1, or `"topk"`, the most relevant cells at scale 1.
    topk_neighbourhood (`float`, defaults to 0):
        `"topk"` only: adds this share of the 3x3 neighbourhood's mean relevance, so that chosen cells hold together.
    realize (`str`, defaults to `"before"`):
        Tokens are dropped `"before"` the vision tower (fast) or `"after"` it (as published pruners do).
    texture_groups (`list[str]`, defaults to none):
        Channel groups beyond the 13 standard ones, named as in `texture.GROUPS`.
    participatory (`str`, defaults to `"both"`):
        What the question is compared with: `"texture"` (cheap, blind to what a thing is, of no use until trained), the
        `"glance"` (coarse tokens of the image half-way through the model), or `"both"`.
    glance_tokens (`int`, defaults to 64):
        The most coarse tokens that the glance spends on an image.
    glance_layers (`int`, *optional*):
        Language layers that the glance runs through; half of them unless set.
    glance_readout_layers (`int`, defaults to 4):
        How many of the glance's last layers are read for question-to-cell affinity.
    lens_dim, policy_dim (`int`, default to 128 and 64):
        Widths of the learned parts: the lens of participatory knowing, and the balancing policy.
    weights_normalisation (`str`, defaults to `"softmax"`):
        How the policy's three weights are normalised: `"softmax"` or `"sigmoid"`.
    place (`str`, defaults to `"native"`):
        Where a coarse token stands: `"native"`, the centre of what it covers in the native grid's coordinates, or
        `"corner"`, its first cell. Decided in `realizing.places`.
    user_turn_token_ids (`list[int]`), turn_end_token_id (`int`):
        The tokens that open a user's turn (`<|im_start|>user`, newline) and close any turn (`<|im_end|>`): what stands
        between them is the question.
    image_mean, image_std (`list[float]`, default to 0.5):
        The image processor's normalisation, undone to read pixels.
    base_model_name_or_path (`str`, *optional*), base_model_revision (`str`, *optional*):
        With a base named, the checkpoint holds the add-on alone and the base's weights come from there; the revision
        is the base's 40-hex commit, mandatory unless the base is a local folder. Without, the checkpoint is merged.
    """

    model_type = "arr_coc"

    num_visual_tokens: int | float | str = 200
    min_visual_tokens: int = 64
    max_visual_tokens: int = 400
    auto_coverage: float | int = 0.9
    allocator: str = "lod"
    topk_neighbourhood: float | int = 0.0
    realize: str = "before"
    texture_groups: list[str] | tuple[str, ...] = ()
    participatory: str = "both"
    glance_tokens: int = 64
    glance_layers: int | None = None
    glance_readout_layers: int = 4
    lens_dim: int = 128
    policy_dim: int = 64
    weights_normalisation: str = "softmax"
    place: str = "native"
    user_turn_token_ids: list[int] | tuple[int, ...] = (151644, 872, 198)
    turn_end_token_id: int = 151645
    image_mean: list[float | int] | tuple[float | int, ...] = (0.5, 0.5, 0.5)
    image_std: list[float | int] | tuple[float | int, ...] = (0.5, 0.5, 0.5)
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None

    @property
    def cell(self) -> int:
        """Pixels on a side of a cell, the place of one native visual token (32 for Qwen3-VL)."""
        return self.vision_config.patch_size * self.vision_config.spatial_merge_size

    @property
    def num_glance_layers(self) -> int:
        """Language layers that the glance runs through."""
        return self.glance_layers or max(1, self.text_config.num_hidden_layers // 2)

    @property
    def num_texture_channels(self) -> int:
        """Channels of the texture array, `C`."""
        return 13 + sum(len(GROUPS[group]) for group in self.texture_groups)

    def validate_budget(self):
        check_budget(self.num_visual_tokens)
        if not 0 < self.min_visual_tokens <= self.max_visual_tokens:
            raise ValueError(
                f"min_visual_tokens={self.min_visual_tokens} and max_visual_tokens={self.max_visual_tokens} are not a "
                "range: 0 < min <= max is needed."
            )
        if not 0 < self.auto_coverage <= 1:
            raise ValueError(f"auto_coverage={self.auto_coverage} must lie in (0, 1].")

    def validate_choices(self):
        for name, choices in {
            "allocator": ("lod", "topk"),
            "realize": ("before", "after"),
            "participatory": ("texture", "glance", "both"),
            "weights_normalisation": ("softmax", "sigmoid"),
            "place": ("native", "corner"),
        }.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, choices))}.")
        unknown = set(self.texture_groups) - GROUPS.keys()
        if unknown:
            raise ValueError(f"texture_groups {sorted(unknown)} are unknown; there are {sorted(GROUPS)}.")

    def validate_widths(self):
        for name in ("glance_tokens", "glance_readout_layers", "lens_dim", "policy_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.glance_layers is not None and self.glance_layers < 1:
            raise ValueError(f"glance_layers={self.glance_layers} must be at least 1, or None for half of the layers.")
        if self.lens_dim % 4:
            raise ValueError(f"lens_dim={self.lens_dim} must be a multiple of 4, the lens's heads.")
        if self.topk_neighbourhood < 0:
            raise ValueError(f"topk_neighbourhood={self.topk_neighbourhood} must not be negative.")

    def validate_processing(self):
        if not self.user_turn_token_ids:
            raise ValueError("user_turn_token_ids is empty: name at least one token that opens a user's turn.")
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != 3:
                raise ValueError(f"{name}={getattr(self, name)} must have 3 numbers, one for each of RGB.")
        if min(self.image_std) <= 0:
            raise ValueError(f"image_std={self.image_std} must be above 0.")

    def validate_base(self):
        base, revision = self.base_model_name_or_path, self.base_model_revision
        if base is None or os.path.isdir(base):
            return
        if revision is None or not re.fullmatch(r"[0-9a-f]{40}", revision):
            raise ValueError(
                f"base_model_revision={revision!r} is not a commit: pin {base} by the 40 hexadecimal digits of one of "
                "its commits, so that its weights can never change under this add-on."
            )


ArrCocConfig.register_for_auto_class()

__all__ = ["ArrCocConfig"]
