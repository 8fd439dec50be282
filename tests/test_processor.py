"""With the real processor: chat template in, text out, and the pipeline that most users will start from."""

import pytest
import torch
from conftest import random_image
from PIL import Image
from transformers import AutoProcessor, TextStreamer, pipeline

from arr_coc import ArrCocForConditionalGeneration
from arr_coc.modeling_arr_coc import _Prompt


@pytest.fixture(scope="module")
def tiny(folder):
    return ArrCocForConditionalGeneration.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)


def picture(h, w, seed=0):
    return Image.fromarray(random_image(h, w, seed).permute(1, 2, 0).numpy())


def asked(processor, *content, **kwargs):
    messages = [{"role": "user", "content": list(content)}]
    return processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt", **kwargs
    )


def image(value):
    return {"type": "image", "image": value}


def text(value):
    return {"type": "text", "text": value}


def test_the_readmes_way(tiny):
    model, processor = tiny
    inputs = asked(processor, image(picture(8, 10)), text("What colour is the star?"))
    p = model.perceive(**inputs, num_visual_tokens=20)
    assert p.grid == [(8, 10)] and 18 <= len(p.allocation[0]) <= 20
    out = model.generate(**inputs, perception=p, max_new_tokens=5)
    assert torch.equal(out[:, : inputs.input_ids.shape[1]], inputs.input_ids)
    answer = processor.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert len(answer) == 1 and isinstance(answer[0], str)


def test_the_question_is_the_users_words_alone(tiny):
    """Neither template nor image tokens, and of several turns the last."""
    model, processor = tiny
    words = "Where is the red circle?"
    for content in ([image(picture(4, 4)), text(words)], [text(words), image(picture(4, 4))]):
        inputs = asked(processor, *content)
        prompt = _Prompt(**{k: inputs[k] for k in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")},
                         config=model.config)  # fmt: skip
        assert processor.decode(prompt.question(0)) == words


def test_a_batch_of_chats_with_different_images(tiny):
    model, processor = tiny
    chats = [
        [{"role": "user", "content": [image(picture(6, 4)), text("How many squares are there?")]}],
        [{"role": "user", "content": [image(picture(3, 9, 1)), image(picture(4, 4, 2)), text("Which is larger?")]}],
        [{"role": "user", "content": [text("Hello.")]}],
    ]
    processor.tokenizer.padding_side = "left"
    batch, singles = (
        [
            processor.apply_chat_template(
                part, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
            )
            for part in parts
        ]
        for parts in ([chats], chats)
    )
    out = model.generate(**batch[0], num_visual_tokens=9, max_new_tokens=4)
    for row, single in enumerate(singles):
        alone = model.generate(**single, num_visual_tokens=9, max_new_tokens=4)[0, single.input_ids.shape[1] :]
        together = out[row, batch[0].input_ids.shape[1] :][: len(alone)]
        assert torch.equal(alone, together)


def test_a_text_streamer_prints_the_answer_alone(tiny, capsys):
    model, processor = tiny
    inputs = asked(processor, image(picture(6, 4)), text("What is this?"))
    streamer = TextStreamer(processor.tokenizer, skip_prompt=True)
    out = model.generate(**inputs, num_visual_tokens=8, max_new_tokens=6, do_sample=False, streamer=streamer)
    wanted = processor.decode(out[0, inputs.input_ids.shape[1] :])
    assert capsys.readouterr().out.strip() == wanted.strip()


def test_a_typed_placeholder_is_refused_or_stays_text_if_sanitized(tiny):
    model, processor = tiny
    content = image(picture(4, 4)), text("What does <|image_pad|> mean?")
    with pytest.raises(ValueError, match="Found total 2 .*image_pad"):
        asked(processor, *content)
    inputs = asked(processor, *content, sanitize_control_tokens=True)
    assert int((inputs.input_ids == model.config.image_token_id).sum()) == 16
    model.generate(**inputs, num_visual_tokens=4, max_new_tokens=2)


@pytest.mark.parametrize("size", [(1, 1), (3, 700), (37, 41), (1000, 20)])
def test_pictures_of_any_shape_that_the_processor_takes(tiny, size):
    model, processor = tiny
    try:
        inputs = asked(processor, image(Image.new("RGB", size, (200, 30, 30))), text("What?"))
    except ValueError as error:
        assert "aspect ratio" in str(error)
        return
    out = model.generate(**inputs, num_visual_tokens=5, max_new_tokens=2)
    assert out.shape[1] > inputs.input_ids.shape[1]


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK", "1"])
def test_pictures_of_any_mode(tiny, mode):
    model, processor = tiny
    inputs = asked(processor, image(picture(4, 4).convert(mode)), text("What?"))
    assert model.generate(**inputs, num_visual_tokens=5, max_new_tokens=2).shape[1] > inputs.input_ids.shape[1]


def test_the_pipeline_passes_the_budget_on(folder, tiny):
    model, processor = tiny
    pipe = pipeline("image-text-to-text", model=str(folder), device="cpu")
    assert type(pipe.model) is ArrCocForConditionalGeneration
    chat = [{"role": "user", "content": [image(picture(8, 8)), text("How many circles are there?")]}]
    inputs = asked(processor, *chat[0]["content"])
    kwargs = {"max_new_tokens": 5, "return_full_text": False}
    for budget in (10, "all"):
        got = pipe(text=chat, generate_kwargs={"num_visual_tokens": budget}, **kwargs)
        out = model.generate(**inputs, num_visual_tokens=budget, max_new_tokens=5)
        wanted = processor.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        assert got[0]["generated_text"].strip() == wanted.strip()
    with pytest.raises(ValueError, match="num_visual_tokens=0 is not a budget"):
        pipe(text=chat, generate_kwargs={"num_visual_tokens": 0}, **kwargs)
