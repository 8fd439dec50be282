"""Contract 3: the whole of `generate`, against stock where all is kept, and against stock fed by hand elsewhere."""

import warnings

import pytest
import torch
from conftest import IMAGE, NEXT_TURN, as_stock, counted, make_inputs, make_model
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 10},
    "sampling several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams several": {"num_beams": 4, "num_return_sequences": 2},
    "beams sampled": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "chunked prefill": {"prefill_chunk_size": 5},
    "repetition penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "all end early": {"eos_token_id": list(range(50))},
}
SAMPLES = {
    "one image": [[(4, 5, 0), [5, 6, 7]]],
    "left padded, ragged": [[(4, 5, 0), [5, 6, 7]], [[8], (3, 3, 1), (2, 6, 2), [9, 10]], [[11, 12]]],
    "several turns": [
        [(3, 4, 0), [5], NEXT_TURN, (4, 3, 1), [6, 7], NEXT_TURN, [8]],
        [[9], NEXT_TURN, (5, 5, 2), [10]],
    ],
    "text only": [[[5, 6, 7]], [[8, 9, 10, 11]]],
}


@pytest.fixture(scope="module")
def stock(model):
    return as_stock(model)


def generate(model, inputs, **kwargs):
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(**inputs, **kwargs)


def steps(model, mode):
    """`max_new_tokens` but for beams that end early, and the mode's own arguments."""
    return {"max_new_tokens": 5} | MODES[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("samples", SAMPLES)
def test_with_every_cell_kept_it_is_stocks_answer(model, stock, samples, mode):
    inputs = make_inputs(SAMPLES[samples])
    got = generate(model, inputs, num_visual_tokens=1.0, **steps(model, mode))
    assert torch.equal(got, generate(stock, inputs, **steps(model, mode)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("samples", SAMPLES)
def test_the_prompt_comes_back_as_the_caller_gave_it(model, samples, mode):
    inputs = make_inputs(SAMPLES[samples])
    got = generate(model, inputs, num_visual_tokens=4, **steps(model, mode))
    prompt = inputs["input_ids"].repeat_interleave(MODES[mode].get("num_return_sequences", 1), 0)
    assert torch.equal(got[:, : prompt.shape[1]], prompt)
    assert 1 <= got.shape[1] - prompt.shape[1] <= 5


def by_hand(stock, inputs, allocation, h, w):
    """Stock's own inputs for some cells of one image in one prompt, put together without ARR-COC's code."""
    chosen = [y * w + x for _, y, x in allocation.tolist()]
    rows = torch.tensor([4 * c + i for c in chosen for i in range(4)])
    grid, side = inputs["image_grid_thw"], 8
    taps = get_vision_interpolation_indices_and_weights(grid, side, "bilinear", True, spatial_merge_size=2)
    with torch.no_grad():
        seen = stock.model.visual(
            inputs["pixel_values"][rows],
            grid_thw=grid,
            interp_indices=taps[0][rows],
            interp_weights=taps[1][rows],
            position_ids=get_vision_position_ids(grid, 2)[rows],
            cu_seqlens=torch.tensor([0, len(rows)], dtype=torch.int32),
            max_seqlen=len(rows),
            return_dict=True,
        )
    ids = inputs["input_ids"][0]
    first = int((ids == IMAGE).nonzero()[0])
    columns = torch.tensor([*range(first), *(first + c for c in chosen), *range(first + h * w, len(ids))])
    positions, _ = stock.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], grid)
    return {
        "input_ids": ids[None, columns],
        "attention_mask": torch.ones(1, len(columns), dtype=torch.long),
        "position_ids": torch.cat([torch.arange(len(columns))[None, None], positions[..., columns]]),
        "mm_encoder_outputs": {
            "image": BaseModelOutputWithDeepstackFeatures(
                pooler_output=(seen.pooler_output,), deepstack_features=[(x,) for x in seen.deepstack_features]
            )
        },
    }


@pytest.fixture(scope="module")
def topk():
    return make_model(allocator="topk")


@pytest.mark.parametrize("mode", MODES)
def test_with_few_tokens_it_is_stocks_answer_to_the_same_tokens(topk, stock, mode):
    inputs = make_inputs([[[4], (5, 6, 0), [5, 6, 7]]])
    with torch.no_grad():
        p = topk.perceive(**inputs, num_visual_tokens=7)
    short = by_hand(stock, inputs, p.allocation[0], 5, 6)
    wanted = generate(stock, short, **steps(topk, mode))
    got = generate(topk, inputs, num_visual_tokens=7, **steps(topk, mode))
    assert torch.equal(got[:, inputs["input_ids"].shape[1] :], wanted[:, short["input_ids"].shape[1] :])
    if mode == "greedy":
        full = generate(stock, inputs, **steps(topk, mode))
        assert not torch.equal(got, full)  # dropping 23 of 30 tokens does change this model's answer


@torch.no_grad()
def test_forward_gives_stocks_logits_for_the_same_tokens(topk, stock):
    inputs = make_inputs([[[4], (5, 6, 0), [5, 6, 7]]])
    p = topk.perceive(**inputs, num_visual_tokens=7)
    wanted = stock(**by_hand(stock, inputs, p.allocation[0], 5, 6)).logits
    torch.testing.assert_close(topk(**inputs, perception=p).logits, wanted, rtol=0, atol=1e-5)
    assert torch.equal(topk(**inputs, num_visual_tokens=7).logits, topk(**inputs, perception=p).logits)


def test_a_perception_is_spent_without_perceiving_again(model, monkeypatch):
    inputs = make_inputs(SAMPLES["left padded, ragged"])
    with torch.no_grad():
        p = model.perceive(**inputs, num_visual_tokens=4)
    wanted = generate(model, inputs, num_visual_tokens=4, max_new_tokens=4)
    monkeypatch.setattr(model, "perceive", None)
    with counted(model) as runs:
        assert torch.equal(generate(model, inputs, perception=p, max_new_tokens=4), wanted)
    assert runs == {"tower": 1, "layers": 4}


def test_ids_may_be_given_by_position(model):
    inputs = make_inputs(SAMPLES["one image"])
    wanted = generate(model, inputs, num_visual_tokens=4, max_new_tokens=3)
    ids = inputs.pop("input_ids")
    assert torch.equal(model.generate(ids, **inputs, num_visual_tokens=4, max_new_tokens=3), wanted)
    assert torch.equal(model.generate(inputs=ids, **inputs, num_visual_tokens=4, max_new_tokens=3), wanted)


def test_what_the_processor_returns_beside_is_optional(model):
    """Without a mask or token types the answer is the same."""
    inputs = make_inputs(SAMPLES["one image"])
    wanted = generate(model, inputs, num_visual_tokens=4, max_new_tokens=3)
    bare = {k: v for k, v in inputs.items() if k not in ("attention_mask", "mm_token_type_ids")}
    assert torch.equal(generate(model, bare, num_visual_tokens=4, max_new_tokens=3), wanted)


class Captured(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value.reshape(-1).tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("budget", [4, 1.0, "all"])
def test_a_streamer_gets_the_prompt_and_then_the_answer(model, budget):
    inputs = make_inputs(SAMPLES["one image"])
    streamer = Captured()
    out = generate(model, inputs, num_visual_tokens=budget, max_new_tokens=4, streamer=streamer)
    assert streamer.ended and streamer.values[0] == inputs["input_ids"][0].tolist()
    assert sum(streamer.values, []) == out[0].tolist()


@pytest.mark.parametrize("mode", ["greedy", "sampling several", "beams several"])
def test_the_dictionary_form_holds_the_same_sequences(model, mode):
    inputs = make_inputs(SAMPLES["left padded, ragged"])
    kwargs = steps(model, mode) | {"num_visual_tokens": 4}
    plain = generate(model, inputs, **kwargs)
    out = generate(model, inputs, **kwargs, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(out.sequences, plain)
    assert len(out.scores) == plain.shape[1] - inputs["input_ids"].shape[1]


class TestLengths:
    """`max_length` and `min_length` count the caller's prompt, as in stock, not the shortened one."""

    @pytest.fixture(scope="class")
    def inputs(self):
        return make_inputs([[(4, 5, 0), [5, 6, 7]]])

    @pytest.mark.parametrize("way", ["argument", "config", "model"])
    @pytest.mark.parametrize("more", [1, 4])
    def test_max_length(self, inputs, way, more):
        model, total = make_model(), inputs["input_ids"].shape[1] + more
        kwargs = {"num_visual_tokens": 4, "eos_token_id": None}
        if way == "argument":
            kwargs["max_length"] = total
        elif way == "config":
            kwargs["generation_config"] = GenerationConfig(max_length=total, pad_token_id=0)
        else:
            model.generation_config.max_length = total
        assert generate(model, inputs, **kwargs).shape[1] == total

    def test_max_length_of_20_is_no_special_number(self, model):
        inputs = make_inputs([[(2, 2, 0)]])
        assert inputs["input_ids"].shape[1] == 14
        config = GenerationConfig(max_length=20, pad_token_id=0)
        for kwargs in ({"max_length": 20}, {"generation_config": config}):
            got = generate(model, inputs, num_visual_tokens=2, eos_token_id=None, **kwargs)
            assert got.shape[1] == 20

    def test_max_new_tokens_goes_first_as_in_stock(self, model, stock, inputs):
        kwargs = {"max_length": 500, "max_new_tokens": 3}
        got, wanted = (generate(m, inputs, **kwargs, **k) for m, k in ((model, {"num_visual_tokens": 4}), (stock, {})))
        assert got.shape == wanted.shape

    def test_a_config_of_the_callers_leaves_unset_what_the_models_sets(self, inputs):
        length = inputs["input_ids"].shape[1]
        model, given = make_model(), GenerationConfig(temperature=0.5, do_sample=True, eos_token_id=99)
        model.generation_config.max_length = length + 2
        got = generate(model, inputs, num_visual_tokens=4, generation_config=given)
        assert got.shape[1] == length + 2
        assert model.generation_config.max_length == length + 2 and given.max_new_tokens is None

    def test_without_any_length_it_is_as_long_as_stocks(self, model, stock, inputs):
        got = generate(model, inputs, num_visual_tokens=4, eos_token_id=None)
        assert got.shape == generate(stock, inputs, eos_token_id=None).shape

    @pytest.mark.parametrize("way", ["argument", "config"])
    def test_min_length(self, model, inputs, way):
        length = inputs["input_ids"].shape[1]
        ends = generate(model, inputs, num_visual_tokens=4, max_new_tokens=6)[0, length:].tolist()
        lengths = {"min_length": length + 3, "max_length": length + 6}
        if way == "argument":
            kwargs = lengths | {"eos_token_id": ends}
        else:
            kwargs = {"generation_config": GenerationConfig(**lengths, eos_token_id=ends, pad_token_id=0)}
        stops = generate(model, inputs, num_visual_tokens=4, eos_token_id=ends, max_new_tokens=6)
        assert stops.shape[1] == length + 1
        got = generate(model, inputs, num_visual_tokens=4, **kwargs)
        assert got.shape[1] >= length + 4 and not set(got[0, length : length + 3].tolist()) & set(ends)

    def test_a_max_length_within_the_prompt_is_refused_before_any_work(self, model, inputs):
        with counted(model) as runs, pytest.raises(ValueError, match="max_length=10.*max_new_tokens"):
            generate(model, inputs, num_visual_tokens=4, max_length=10)
        assert runs == {"tower": 0, "layers": 0}


class TestCaches:
    def test_an_empty_cache_of_the_callers_is_filled_with_the_short_prompt(self, model):
        inputs = make_inputs([[(4, 5, 0), [5, 6, 7]]])
        with torch.no_grad():
            p = model.perceive(**inputs, num_visual_tokens=4)
        cache = DynamicCache(config=model.config.text_config)
        got = generate(model, inputs, perception=p, past_key_values=cache, max_new_tokens=3)
        assert torch.equal(got, generate(model, inputs, perception=p, max_new_tokens=3))
        assert cache.get_seq_length() == inputs["input_ids"].shape[1] - 20 + len(p.allocation[0]) + 2

    def test_a_filled_cache_continues_as_in_stock_where_all_was_kept(self, model, stock):
        inputs, answers = make_inputs([[(4, 5, 0), [5]]]), []
        for m, kwargs in ((stock, {}), (model, {"num_visual_tokens": "all"})):
            cache = DynamicCache(config=m.config.text_config)
            out = generate(m, inputs, past_key_values=cache, max_new_tokens=2, **kwargs)
            again = {"input_ids": torch.cat([out, torch.tensor([NEXT_TURN + [6]])], 1)}
            answers.append(generate(m, again, past_key_values=cache, max_new_tokens=3, **kwargs))
        assert torch.equal(*answers)
