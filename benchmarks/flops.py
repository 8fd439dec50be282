"""What a prefill costs, counted from a config: the FLOP model beside every measurement.

Two for a multiplication with its addition; matrices, convolutions and attention scores are counted, norms and softmax
are not, nor the fixed filters of texture.
"""

from arr_coc.knowing import Lens, Retina


def tower_flops(config, tokens: int) -> float:
    """The vision tower on `tokens` merged tokens of one image (full attention), patch embedding and mergers too."""
    v = config.vision_config
    patches, d = tokens * v.spatial_merge_size**2, v.hidden_size
    embed = 2 * patches * v.in_channels * v.temporal_patch_size * v.patch_size**2 * d
    block = 2 * patches * (4 * d * d + 2 * d * v.intermediate_size) + 4 * patches**2 * d
    wide = d * v.spatial_merge_size**2
    merger = 2 * tokens * (wide * wide + wide * v.out_hidden_size)
    return embed + v.depth * block + (1 + len(v.deepstack_visual_indexes)) * merger


def language_flops(config, tokens: int, layers: int | None = None) -> float:
    """`tokens` of any kind through the first `layers` language layers (all of them unless given), causal attention."""
    t = config.text_config
    layers = t.num_hidden_layers if layers is None else layers
    d, queries = t.hidden_size, t.num_attention_heads * t.head_dim
    matrices = 2 * d * queries + 2 * d * t.num_key_value_heads * t.head_dim + 3 * d * t.intermediate_size
    return layers * (2 * tokens * matrices + 2 * tokens**2 * queries)


def prefill_flops(config, visual: int, text: int) -> float:
    """A prefill of one image in `visual` tokens with `text` others, and the last token's logits."""
    t = config.text_config
    return tower_flops(config, visual) + language_flops(config, visual + text) + 2 * t.hidden_size * t.vocab_size


def glance_flops(config, cells: int, text: int) -> float:
    """The glance at `cells` coarse tokens with a question of `text` tokens."""
    return tower_flops(config, cells) + language_flops(config, cells + text, config.num_glance_layers)


def retina_flops(config, cells: int) -> float:
    """The retina on an image of `cells` cells."""
    fine, middle, coarse = Retina.WIDTHS
    quarter, eighth, sixteenth = (cells * (config.cell / n) ** 2 for n in (4, 8, 16))  # positions at each resolution
    weights = quarter * 49 * 3 * fine + eighth * 9 * (fine + middle) * middle
    weights += sixteenth * 9 * (middle + 2 * coarse) * coarse + cells * 2 * coarse * config.lens_dim
    return 2 * weights


def lens_flops(config, cells: int, text: int) -> float:
    """The lens's blocks over `cells` cells and a question of `text` tokens."""
    d, tokens = config.lens_dim, cells + text
    return Lens.BLOCKS * (2 * tokens * 8 * d * d + 4 * tokens**2 * d)


def choosing_flops(config, cells: int, text: int, glance: int = 0) -> float:
    """ARR-COC's choice among `cells` for a question of `text` tokens, with a glance of `glance` coarse ones."""
    looked = glance_flops(config, glance, text) if glance else 0.0
    seen = 0.0 if config.participatory == "glance" else retina_flops(config, cells)
    return looked + seen + lens_flops(config, cells, text)


def method_flops(config, drops: str, native: int, budget: int, text: int, glance: int | None = None) -> float:
    """A prefill in which `native` visual tokens become `budget` where `drops` says; `glance`: by ARR-COC's choice, with
    a glance of so many coarse tokens."""
    head = 2 * config.text_config.hidden_size * config.text_config.vocab_size
    looked = 0.0 if glance is None else choosing_flops(config, native, text, glance)
    if drops == "nowhere":
        return looked + prefill_flops(config, native, text)
    if drops == "before the tower":
        return looked + prefill_flops(config, budget, text)
    if drops == "after the tower":
        return looked + tower_flops(config, native) + language_flops(config, budget + text) + head
    early = max(2, len(config.vision_config.deepstack_visual_indexes))
    late = config.text_config.num_hidden_layers - early
    whole = tower_flops(config, native) + language_flops(config, native + text, early)
    return looked + whole + language_flops(config, budget + text, late) + head
