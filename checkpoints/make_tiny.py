"""The embedded default's small files: architecture, tokenizer, processors, chat template. Weights: `train.py base`.

    python -m checkpoints.make_tiny                                     # tokenizer, processors, chat template
    python -m checkpoints.make_tiny --weights runs/arr_coc/model        # and a trained model's weights

Everything has Qwen3-VL's own classes, names and layout, so that `AutoProcessor` and
`Qwen3VLForConditionalGeneration` load the folder as they load the real model; only sizes differ.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from arr_coc import ArrCocForConditionalGeneration
from benchmarks import whole

TINY = Path(__file__).resolve().parent / "tiny"
VOCABULARY = 1280
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

# Qwen3-VL's turns, without its tools: the system's turn only if there is one, a placeholder where a picture stands.
CHAT_TEMPLATE = """\
{%- macro content_of(message) -%}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + content_of(message) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# What people ask of any picture. Scenes teach the words of scenes; these keep free questions to few tokens.
_OPENINGS = """
what is this|what is in this picture|what do you see|what can you see in the image|describe this image|describe the
picture in detail|describe what is happening|what is happening here|tell me about this photo|what is the main subject|
who is in the picture|what are they doing|what is the person doing|what is he holding|what is she wearing|where was
this taken|where is this|when was this taken|what time of day is it|what season is it|what is the weather like|is it
raining|is it sunny|is it day or night|is this indoors or outdoors|how many people are there|how many animals can you
see|how many cars are in the street|is there a person|is there an animal|are there any trees|can you read the text|
what does the text say|what does the label say|read the small print|what is written here|what is the title|what number
is on the shirt|what brand is it|what kind of food is this|what breed is the dog|what type of vehicle is that|what
material is it made of|what shape is it|what colour is the car|what color is her hair|what is on the table|what is on
the left side|what is on the right|what is in the background|what is in the foreground|what is behind the house|what is
next to the chair|what is under the bed|what is between the two people|which one is bigger|which is closer to the
camera|which object is the smallest|is the man smiling|is the door open|is the light on|is anyone looking at the
camera|does this look real|does it look dangerous|could you help me find the key|please find the umbrella|please point
to the cat|show me where the ball is|locate the red button|where should I click|what would happen next|why is this
funny|what is unusual about this image|what emotion does this show|how old is this person|how far away is it|how tall
is the building|how much does it cost|what is the price|what is the total|which bar is the highest|what does the chart
show|what is the value in the second row|list all the objects|name three things in the picture|summarize the page|
translate the sign|answer yes or no|answer with one word|answer in one sentence|give a short answer|I do not know|I am
not sure|there is no such thing|yes, there is|no, there is not|it is on the left|it is at the top|in the middle of the
image|in the bottom right corner|near the centre|a black and white photograph|a large group of people|a small wooden
table|a close up view of a face|two children playing in the park|the quick brown fox jumps over the lazy dog
"""
_NOUNS = """
man woman child boy girl baby person people face hand eye hair hat shirt shoe bag glasses dog cat bird horse cow sheep
elephant bear zebra giraffe fish flower tree grass leaf sky cloud sun moon star sea beach river mountain hill field road
street car bus truck train bicycle motorcycle boat aeroplane airplane traffic light house building door window wall
floor roof room kitchen table chair sofa bed lamp clock book phone screen computer keyboard bottle cup glass plate bowl
fork knife spoon food bread cake pizza apple banana orange fruit vegetable ball kite toy game team player umbrella
word letter number sign text line menu map ticket box key ring tool machine chart graph page picture image photo
""".split()


def everyday_questions() -> Iterator[str]:
    """Phrases that people put to any picture, in plain, capitalised and polite forms. About 1,000 of them."""
    for phrase in " ".join(_OPENINGS.split()).split("|"):
        phrase = phrase.strip()
        yield from (phrase, phrase.capitalize() + "?", f"Please tell me: {phrase}?", f"{phrase}. Thank you!")
    for noun in _NOUNS:
        yield from (f"Is there a {noun} in the image?", f"what colour is the {noun}?", f"How many {noun}s are there?")
        yield from (f"where is the {noun}", noun, f"The {noun} is on the left of the other {noun}.")


def tiny_tokenizer(corpus: Iterable[str], size: int = VOCABULARY) -> Qwen2Tokenizer:
    """A byte-level BPE of `size` entries, special tokens included, cut as Qwen's own: words, and single digits.

    All 256 bytes are entries, so that any text survives encoding and decoding (up to Unicode's NFC, as in Qwen).
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    bpe.train_from_iterator(corpus, trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if bpe.get_vocab_size() != size:
        raise ValueError(f"The corpus yields {bpe.get_vocab_size()} entries, not {size}: give more text.")
    return Qwen2Tokenizer(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|endoftext|>", "<|im_end|>")],
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )


def tiny_processor(tokenizer: Qwen2Tokenizer) -> Qwen3VLProcessor:
    """Qwen3-VL's processor. Pictures of 128 to 2048 px a side pass unresized where their sides are multiples of 32."""
    image = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**image, size={"shortest_edge": 64 * 64, "longest_edge": 2048 * 2048}),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**image, size={"shortest_edge": 64 * 64, "longest_edge": 2048 * 2048}),
        chat_template=CHAT_TEMPLATE,
    )


def tiny_config(tokenizer: Qwen2Tokenizer) -> Qwen3VLConfig:
    """The small Qwen3-VL: 6 + 6 layers, 7.6 M parameters, every mechanism of the real one (DeepStack, M-RoPE, GQA)."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return Qwen3VLConfig(
        vision_config={
            "depth": 6, "hidden_size": 160, "num_heads": 5, "intermediate_size": 480, "out_hidden_size": 256,
            "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 1024,
            "deepstack_visual_indexes": [1, 3],
        },
        text_config={
            "vocab_size": len(tokenizer), "num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 528,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 32768,
            # 16 frequencies shared out over (time, height, width) in turn; the base suits grids of 4 to 64 cells.
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
            },
            "pad_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "tie_word_embeddings": True,
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )  # fmt: skip


def corpus(scenes: int) -> Iterator[str]:
    """The tokenizer's text: scenes' questions, answers and vocabulary, and everyday questions."""
    from benchmarks.scenes import corpus as scene_text
    from benchmarks.scenes import vocabulary

    yield from scene_text(scenes)
    for word in vocabulary():  # an answer stands alone: as one token, it is one decision
        yield from (word,) * (150 if word.isalpha() else 1)
    for phrase in everyday_questions():
        yield from (phrase,) * 3


def save_tiny(tokenizer: Qwen2Tokenizer, out: Path):
    """Write everything but the weights, in the file layout of Qwen3-VL's own repository."""
    processor = tiny_processor(tokenizer)
    for part in (processor.tokenizer, processor.image_processor, processor.video_processor):
        part.processor_class = "Qwen3VLProcessor"  # what `AutoProcessor` goes by
        part.save_pretrained(out)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = tiny_config(tokenizer)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(out)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=False).save_pretrained(out)


def adopt_weights(trained: Path, out: Path):
    """A model that `train.py arr-coc` saved -> `out`: its weights in bfloat16 (what ARR-COC learned, too, which is
    float32 again once loaded) and its config, without the code that a saved model carries: this package is the code."""
    model = ArrCocForConditionalGeneration.from_pretrained(trained, dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        config.pop("auto_map", None)
        (Path(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        weights = load_file(Path(folder) / "model.safetensors")
        weights = {name: value.bfloat16() for name, value in weights.items()}
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        for name in ("model.safetensors", "config.json", "generation_config.json"):
            whole.write(out / name, partial(shutil.copyfile, Path(folder) / name))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TINY)
    parser.add_argument("--scenes", type=int, default=5000, help="scenes whose questions and answers are read")
    parser.add_argument("--weights", type=Path, help="a trained model's folder: take its weights and config")
    args = parser.parse_args()
    if args.weights and not args.weights.is_dir():
        parser.error(f"--weights {args.weights} is no folder: give a trained model's, OUT/model of train.py arr-coc")
    if args.weights:
        adopt_weights(args.weights, args.out)
    else:
        save_tiny(tiny_tokenizer(corpus(args.scenes)), args.out)


if __name__ == "__main__":
    main()
