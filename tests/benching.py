"""A model of the tiny checkpoint's classes and vocabulary, a twentieth of its size, and samples to ask it about."""

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from arr_coc import ArrCocConfig, ArrCocForConditionalGeneration
from arr_coc.checkpoints.make_tiny import TINY

VISION = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 48}
TEXT = {"num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2}


def tiny_processor():
    return AutoProcessor.from_pretrained(TINY)


def small_model() -> ArrCocForConditionalGeneration:
    """Random weights, always the same."""
    fields = ArrCocConfig.from_pretrained(TINY).to_dict()
    fields["vision_config"] |= VISION | {"deepstack_visual_indexes": [0, 1], "initializer_range": 0.2}
    fields["text_config"] |= TEXT
    ids = tiny_processor().tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    fields |= {"glance_tokens": 8, "user_turn_token_ids": ids[:1], "turn_end_token_id": ids[1]}
    torch.manual_seed(0)
    model = ArrCocForConditionalGeneration._from_config(
        ArrCocConfig(**fields), attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [ids[1]], 0
    return model


def sample(i: int, h: int = 6, w: int = 8) -> dict:
    """An image of `h x w` cells, blocks of random colours, and one of three questions."""
    rng = np.random.default_rng(i)
    image = np.kron(rng.integers(0, 255, (h * 4, w * 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    words = ("what colour is the star?", "point to the umbrella", "how many anchors are there in all?")
    return {
        "id": f"s{i}",
        "image": Image.fromarray(image),
        "question": words[i % 3],
        "answers": ["red"],
        "type": ("attribute", "pointing", "counting")[i % 3],
        "stratum": ("calm", "dense")[i % 2],
        "boxes": [(40, 40, 90, 100)],
        "seed": i,
    }
