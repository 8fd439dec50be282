"""A random model of Qwen3-VL's classes, small enough for every test, and prompts made without a tokenizer."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may reach the network

from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from arr_coc import ArrCocConfig, ArrCocForConditionalGeneration

torch.set_num_threads(1)  # the tensors are tiny: threads only get in each other's way
settings.register_profile("arr_coc", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("arr_coc")

IMAGE, VIDEO, VISION_START, VISION_END, IM_START, IM_END, USER, ASSISTANT, NEWLINE = 90, 91, 92, 93, 94, 95, 96, 97, 98

VISION = dict(
    depth=3,
    hidden_size=32,
    num_heads=2,
    intermediate_size=64,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    num_position_embeddings=64,
    deepstack_visual_indexes=[0, 1],
    out_hidden_size=48,
)
TEXT = dict(
    vocab_size=100,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    pad_token_id=0,
    eos_token_id=IM_END,
    initializer_range=0.3,
)
TOKENS = dict(
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=VISION_START,
    vision_end_token_id=VISION_END,
    user_turn_token_ids=[IM_START, USER, NEWLINE],
    turn_end_token_id=IM_END,
)


NEXT_TURN = [IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE, 21, 22, IM_END, NEWLINE, IM_START, USER, NEWLINE]


def make_config(**fields) -> ArrCocConfig:
    text, vision = TEXT | fields.pop("text", {}), VISION | fields.pop("vision", {})
    return ArrCocConfig(
        text_config=text,
        vision_config=vision | {"initializer_range": 0.3},
        tie_word_embeddings=True,
        glance_tokens=16,
        **TOKENS,
        **fields,
    )


def make_model(seed: int = 0, attn_implementation: str = "sdpa", dtype=torch.float32, **fields):
    torch.manual_seed(seed)
    model = ArrCocForConditionalGeneration._from_config(
        make_config(**fields), attn_implementation=attn_implementation, dtype=dtype
    )
    model.generation_config.pad_token_id = 0
    return model.eval()


@pytest.fixture(scope="session")
def model():
    """Shared by all tests: never change it."""
    return make_model()


def as_stock(model: ArrCocForConditionalGeneration) -> Qwen3VLForConditionalGeneration:
    """Transformers' own class with the same weights, dtype and attention."""
    fields = {k: v for k, v in model.config.to_dict().items() if k in Qwen3VLConfig.__dataclass_fields__}
    stock = Qwen3VLForConditionalGeneration._from_config(
        Qwen3VLConfig(**{k: v for k, v in fields.items() if k not in ("architectures", "dtype")}),
        attn_implementation=model.config._attn_implementation,
        dtype=model.dtype,
    )
    wrong = stock.load_state_dict(model.state_dict(), strict=False)
    assert not wrong.missing_keys and all(k.startswith("relevance.") for k in wrong.unexpected_keys)
    stock.generation_config.pad_token_id = 0
    return stock.eval()


@contextmanager
def counted(model):
    """Counts what is expensive: `{"tower": runs, "layers": runs of the first language layer}`."""
    runs = {"tower": 0, "layers": 0}

    def count(name):
        def hook(*_):
            runs[name] += 1

        return hook

    hooks = [
        model.model.visual.register_forward_pre_hook(count("tower")),
        model.model.language_model.layers[0].register_forward_pre_hook(count("layers")),
    ]
    yield runs
    for hook in hooks:
        hook.remove()


_processor = Qwen2VLImageProcessor(
    patch_size=16,
    merge_size=2,
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
    size={"shortest_edge": 32 * 32, "longest_edge": 2048 * 2048},
)


def random_image(h: int, w: int, seed: int = 0) -> torch.Tensor:
    """`[3, 32 h, 32 w]` uint8: blocks, lines and noise, so that cells differ in every map."""
    g = torch.Generator().manual_seed(seed)
    image = torch.rand(3, 8 * h, 8 * w, generator=g).repeat_interleave(4, 1).repeat_interleave(4, 2)
    calm = (torch.rand(h, w, generator=g) > 0.5).float().repeat_interleave(32, 0).repeat_interleave(32, 1)
    base = torch.rand(3, h, w, generator=g).repeat_interleave(32, 1).repeat_interleave(32, 2)
    return ((image * (1 - calm) + base * calm) * 255).to(torch.uint8)


def make_inputs(samples: list[list], padding: str = "left") -> dict[str, torch.Tensor]:
    """Samples are lists of turns' parts: an image `(h, w, seed)` in cells, or a list of token ids; then a batch.

    Each sample is one user turn, opened and closed as the chat template does; the part `NEXT_TURN` closes it, answers
    it and opens another.
    """
    rows, images = [], []
    for parts in samples:
        row = [IM_START, USER, NEWLINE]
        for part in parts:
            if isinstance(part, tuple):
                images.append(random_image(*part))
                row += [VISION_START, *[IMAGE] * (part[0] * part[1]), VISION_END]
            else:
                row += part
        rows.append(row + [IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE])
    length = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(length - len(row), None) if padding == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = torch.tensor(row), 1
    out = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).int()}
    if images:
        done = [_processor(i, return_tensors="pt") for i in images]
        out["pixel_values"] = torch.cat([d["pixel_values"] for d in done])
        out["image_grid_thw"] = torch.cat([d["image_grid_thw"] for d in done])
    return out


@pytest.fixture(scope="session")
def processor():
    """The embedded model's own."""
    from transformers import AutoProcessor

    from arr_coc.checkpoints.make_tiny import TINY

    return AutoProcessor.from_pretrained(TINY)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, processor):
    """The embedded model's classes and files with random weights, merged layout: a path."""
    from arr_coc.checkpoints.make_tiny import tiny_config
    from training.arr_coc import adopt

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(tiny_config(processor.tokenizer)).save_pretrained(path / "stock")
    adopt(str(path / "stock"), processor, lens_dim=32).save_pretrained(path)
    processor.save_pretrained(path)
    return path
