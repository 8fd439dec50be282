"""The contracts of DESIGN.md that hold for a whole model: stock's equal, exact budgets, true places, no surprises."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    IM_START,
    IMAGE,
    NEWLINE,
    NEXT_TURN,
    USER,
    VISION_END,
    VISION_START,
    as_stock,
    make_inputs,
    make_model,
    random_image,
)
from hypothesis import given
from hypothesis import strategies as st

from arr_coc.attending import flat, resolve_budget
from arr_coc.modeling_arr_coc import _Prompt
from arr_coc.patches import from_patches, to_patches
from arr_coc.realizing import gather_patches

# One image; two of different sizes around text; none; an image of one cell, with an earlier turn.
SAMPLES = [
    [(6, 5, 0), [5, 6, 7]],
    [[8, 9], (4, 7, 1), (3, 3, 2), [11, 12]],
    [[13, 14, 15]],
    [(1, 1, 3), [16], NEXT_TURN, (8, 2, 4), [17, 18]],
]
SIZES = [(6, 5), (4, 7), (3, 3), (1, 1), (8, 2)]
IMAGES = [[0], [1, 2], [], [3, 4]]  # of each sample
BUDGETS = [9, 0.3, "all", "auto", 5]
BACKENDS = [("sdpa", torch.float32), ("eager", torch.float32), ("sdpa", torch.bfloat16), ("eager", torch.bfloat16)]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}  # logits have a standard deviation of about 2


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(SAMPLES)


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda p: f"{p[0]}-{p[1]}".replace("torch.", ""))
def backend(request):
    return make_model(attn_implementation=request.param[0], dtype=request.param[1])


def seen_by_the_language_model(model, run):
    """The keyword arguments of the language model's first call during `run()`, the glance's own layers left out."""
    calls = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        run()
    hook.remove()
    return calls[0]


def seen_by_the_tower(model, run):
    """The patches of the tower's last call during `run()`."""
    calls = []
    hook = model.model.visual.register_forward_pre_hook(lambda module, args: calls.append(args[0]))
    with torch.no_grad():
        run()
    hook.remove()
    return calls[-1]


def close(got, wanted, dtype):
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=TOLERANCE[dtype])


class TestAllIsStock:
    """Contract 1."""

    @torch.no_grad()
    def test_logits_and_answers_are_equal_bit_for_bit(self, backend, inputs):
        stock = as_stock(backend)
        wanted = stock(**inputs).logits
        assert wanted.isfinite().all() and wanted.std() > 0.5
        assert torch.equal(backend(**inputs, num_visual_tokens="all").logits, wanted)
        answer = stock.generate(**inputs, max_new_tokens=6)
        assert torch.equal(backend.generate(**inputs, num_visual_tokens="all", max_new_tokens=6), answer)
        assert torch.equal(backend.generate(**inputs, num_visual_tokens=["all"] * 5, max_new_tokens=6), answer)

    @torch.no_grad()
    def test_as_the_configs_default_too_and_choosing_nothing_runs_nothing(self, inputs, monkeypatch):
        model = make_model(num_visual_tokens="all")
        monkeypatch.setattr(model, "perceive", None)
        assert torch.equal(model(**inputs).logits, as_stock(model)(**inputs).logits)

    @torch.no_grad()
    def test_a_budget_of_every_cell_is_stock_by_the_other_path(self, backend, inputs):
        stock = as_stock(backend)
        real = inputs["attention_mask"].bool()
        got = backend(**inputs, num_visual_tokens=1000).logits
        close(got[real], stock(**inputs).logits[real], backend.dtype)
        if backend.dtype == torch.float32:
            answer = stock.generate(**inputs, max_new_tokens=6)
            assert torch.equal(backend.generate(**inputs, num_visual_tokens=1000, max_new_tokens=6), answer)

    def test_a_budget_of_every_cell_gives_stocks_position_ids(self, model, inputs):
        got = seen_by_the_language_model(model, lambda: model(**inputs, num_visual_tokens=1.0))["position_ids"]
        wanted, _ = model.model.get_rope_index(
            inputs["input_ids"],
            inputs["mm_token_type_ids"],
            inputs["image_grid_thw"],
            attention_mask=inputs["attention_mask"],
        )
        real = inputs["attention_mask"].bool()
        assert got.dtype == torch.int64 and torch.equal(got[1:, real], wanted[:, real])


SIDES = st.integers(1, 9)
ONE_BUDGET = st.one_of(st.integers(1, 90), st.floats(0.01, 1), st.sampled_from(["auto", "all"]))


@pytest.fixture(scope="module", params=["lod", "topk"])
def cheap(request):
    return make_model(participatory="texture", allocator=request.param, min_visual_tokens=4, max_visual_tokens=20)


class TestBudgets:
    """Contract 2."""

    @given(images=st.lists(st.tuples(SIDES, SIDES, st.integers(0, 9), ONE_BUDGET), min_size=1, max_size=3))
    def test_never_above_and_at_most_two_below(self, cheap, images):
        inputs = make_inputs([[i[:3] for i in images] + [[5]]])
        budgets = [i[3] for i in images]
        with torch.no_grad():
            p = cheap.perceive(**inputs, num_visual_tokens=budgets)
        for (h, w, _, budget), spend, allocation, gain in zip(images, p.budget, p.allocation, p.gain, strict=True):
            cells, n = h * w, len(allocation)
            if isinstance(budget, int):
                assert spend == budget
            elif isinstance(budget, float):
                assert spend == max(1, round(budget * cells))
            elif budget == "all":
                assert n == cells
            else:
                assert 4 <= spend <= 20 and spend == resolve_budget("auto", gain, 0.9, 4, 20)
            assert min(spend, cells) - 2 <= n <= spend
            if cheap.config.allocator == "topk" or spend >= cells:
                assert n == min(spend, cells)

    def test_as_many_reach_the_language_model_and_the_tower(self, model, inputs):
        with torch.no_grad():
            p = model.perceive(**inputs, num_visual_tokens=BUDGETS)
        kwargs = seen_by_the_language_model(model, lambda: model(**inputs, perception=p))
        spent = [sum(len(p.allocation[i]) for i in images) for images in IMAGES]
        assert kwargs["visual_pos_masks"].sum(1).tolist() == spent
        assert len(seen_by_the_tower(model, lambda: model(**inputs, perception=p))) == 4 * sum(spent)

    @torch.no_grad()
    def test_one_budget_is_for_each_image_and_the_config_gives_the_default(self, model, inputs):
        p = model.perceive(**inputs, num_visual_tokens=7)
        assert p.budget == [7] * 5 and [len(a) for a in p.allocation] == pytest.approx([7, 7, 7, 1, 7], abs=2)
        assert model.perceive(**inputs).budget == [200] * 5
        assert make_model(num_visual_tokens=0.5).perceive(**inputs).budget == [15, 14, 4, 1, 8]

    @torch.no_grad()
    def test_auto_spends_less_where_relevance_is_gathered(self, model):
        p = model.perceive(**make_inputs([[(8, 8, 0), [5]]]))
        peak = torch.zeros(8, 8)
        peak[2, 3:6] = 1
        gathered, spread = (
            resolve_budget("auto", model.relevance.shaping(x), 0.9, 1, 64) for x in (peak, torch.ones(8, 8))
        )
        assert gathered < spread and p.relevance[0].amax() == 1


class TestBatches:
    """Contract 4."""

    @torch.no_grad()
    def test_a_batch_equals_its_singles(self, backend, inputs):
        whole = backend.perceive(**inputs, num_visual_tokens=BUDGETS)
        logits = backend(**inputs, perception=whole).logits
        answers = backend.generate(**inputs, perception=whole, max_new_tokens=5)[:, -5:]
        for row, images in enumerate(IMAGES):
            single = make_inputs([SAMPLES[row]])
            budgets = [BUDGETS[i] for i in images]
            alone = backend.perceive(**single, num_visual_tokens=budgets)
            for j, i in enumerate(images):
                assert alone.grid[j] == whole.grid[i] == SIZES[i] and alone.budget[j] == whole.budget[i]
                close(alone.relevance[j], whole.relevance[i], backend.dtype)
                if backend.dtype == torch.float32:
                    assert torch.equal(alone.allocation[j], whole.allocation[i])
            # In bf16 the same tokens are spent: rounding in the glance may turn a near tie.
            for j, i in enumerate(images):
                alone.allocation[j] = whole.allocation[i]
            wanted = backend(**single, perception=alone).logits[0]
            close(logits[row, -len(wanted) :], wanted, backend.dtype)
            if backend.dtype == torch.float32:
                answer = backend.generate(**single, perception=alone, max_new_tokens=5)[0, -5:]
                assert torch.equal(answers[row], answer)

    @torch.no_grad()
    def test_left_and_right_padding_perceive_alike(self, model, inputs):
        left, right = (
            model.perceive(**make_inputs(SAMPLES, padding), num_visual_tokens=6) for padding in ("left", "right")
        )
        for a, b in zip(left.allocation, right.allocation, strict=True):
            assert torch.equal(a, b)

    @torch.no_grad()
    def test_an_image_is_perceived_alike_whatever_stands_beside_it(self, model):
        """Its neighbours in the prompt, other prompts' questions and the answer do not matter; its question does."""
        alone = model.perceive(**make_inputs([[(6, 5, 0), [5, 6]]]), num_visual_tokens=8)
        beside = model.perceive(**make_inputs([[(9, 9, 1), [7]], [(2, 2, 3), (6, 5, 0), [5, 6]]]), num_visual_tokens=8)
        assert torch.equal(alone.allocation[0], beside.allocation[2])
        torch.testing.assert_close(alone.relevance[0], beside.relevance[2], rtol=0, atol=1e-5)


class TestPlaces:
    """Contract 5, through the model; the parts are in test_realizing.py."""

    @torch.no_grad()
    def test_tokens_keep_their_places_and_text_continues_as_in_stock(self, model):
        inputs = make_inputs([[[5, 6], (8, 8, 0), [7, 8]]])
        p = model.perceive(**inputs, num_visual_tokens=20)
        p.allocation[0] = torch.tensor([[4, 0, 0], [1, 2, 7], [2, 4, 4], [1, 7, 0]])
        ids = seen_by_the_language_model(model, lambda: model(**inputs, perception=p))["position_ids"][:, 0]
        first = 3 + 2 + 1  # the turn's opening, two words, vision start
        at = ids[1:, first : first + 4] - first
        assert at.tolist() == [[0, 0, 0, 0], [1.5, 2, 4.5, 7], [1.5, 7, 4.5, 0]]
        stock, _ = model.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        )
        assert torch.equal(ids[1:, first + 4 :], stock[:, 0, first + 64 :].float())
        assert ids[0].tolist() == list(range(ids.shape[1]))

    @torch.no_grad()
    def test_generation_continues_where_stock_would(self, model):
        inputs = make_inputs([[(4, 4, 0), [7]], [[8]]])
        calls = []
        hook = model.model.language_model.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append(kwargs["position_ids"]), with_kwargs=True
        )
        model.generate(**inputs, num_visual_tokens=3, max_new_tokens=3)
        pruned = calls.copy()
        calls.clear()
        model.generate(**inputs, num_visual_tokens="all", max_new_tokens=3)
        hook.remove()
        assert len(pruned) == len(calls) == 3
        for mine, stocks in zip(pruned[1:], calls[1:], strict=True):
            assert torch.equal(mine[1:].float(), stocks[1:].float())

    @torch.no_grad()
    def test_the_place_rule_of_the_config_is_used(self):
        model, inputs = make_model(place="corner"), make_inputs([[(4, 4, 0)]])
        p = model.perceive(**inputs)
        p.allocation[0] = torch.tensor([[4, 0, 0]])
        ids = seen_by_the_language_model(model, lambda: model(**inputs, perception=p))["position_ids"]
        assert ids[1:, 0, 4].tolist() == [4, 4, 4]


class TestDownscaling:
    """Contract 6, through the model; that flat relevance chooses so is in test_attending.py."""

    @pytest.mark.parametrize("scale", [2, 4])
    def test_one_scale_throughout_is_the_shrunk_image_for_the_tower(self, model, scale):
        inputs = make_inputs([[(8, 4, 0), [5]]])
        with torch.no_grad():
            p = model.perceive(**inputs)
        p.allocation[0] = flat(8, 4, scale)
        patches = seen_by_the_tower(model, lambda: model(**inputs, perception=p))
        image = from_patches(inputs["pixel_values"], (16, 8))
        shrunk = F.interpolate(image[None], scale_factor=1 / scale, mode="area")[0]
        torch.testing.assert_close(patches, to_patches(shrunk), rtol=0, atol=1e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("budget, scale", [(16, 2), (4, 4)])
    def test_a_blank_image_asked_nothing_is_shrunk(self, budget, scale, monkeypatch):
        model = make_model()
        monkeypatch.setattr("arr_coc.modeling_arr_coc.perspectival", lambda texture: torch.full((8, 8), 0.5))
        inputs = make_inputs([[(8, 8, 0)]])
        inputs["pixel_values"] = torch.zeros_like(inputs["pixel_values"])
        p = model.perceive(**inputs, num_visual_tokens=budget)
        assert p.relevance[0].amin() == 1  # flat: nothing to tell cells apart
        assert torch.equal(p.allocation[0], flat(8, 8, scale))


class TestAfter:
    """Contract 7."""

    @torch.no_grad()
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_choosing_cells_after_the_tower_is_masking_the_others(self, attention):
        model = make_model(realize="after", allocator="topk", attn_implementation=attention)
        inputs = make_inputs([[[5], (6, 5, 0), [6, 7], (4, 4, 1), [8, 9]]])
        p = model.perceive(**inputs, num_visual_tokens=[7, 3])
        got = model(**inputs, perception=p).logits[0]

        keep = inputs["input_ids"][0] != IMAGE
        image_columns = (~keep).nonzero()[:, 0]
        chosen = [
            y * w + x + start
            for a, w, start in zip(p.allocation, (5, 4), (0, 30), strict=True)
            for _, y, x in a.tolist()
        ]
        keep[image_columns[chosen]] = True
        assert int(keep.sum()) == len(got) == len(keep) - 46 + 10
        causal = torch.ones(len(keep), len(keep)).tril().bool() & (keep[None] | torch.eye(len(keep)).bool())
        mask = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)[None, None]
        positions, _ = model.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        )
        full = inputs | {"attention_mask": mask, "position_ids": positions}
        wanted = as_stock(model)(**full).logits[0, keep]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
        assert (got - as_stock(model)(**inputs).logits[0, keep]).abs().max() > 0.1  # the mask does matter

    @torch.no_grad()
    def test_the_choice_is_the_same_before_and_after_and_all_is_the_same_logits(self, inputs):
        before, after = make_model(realize="before"), make_model(realize="after")
        a, b = (m.perceive(**inputs, num_visual_tokens=6) for m in (before, after))
        assert all(torch.equal(x, y) for x, y in zip(a.allocation, b.allocation, strict=True))
        real = inputs["attention_mask"].bool()
        close(
            after(**inputs, num_visual_tokens=1.0).logits[real],
            before(**inputs, num_visual_tokens=1.0).logits[real],
            torch.float32,
        )


def trained(**fields):
    """As if trained: nothing is silent."""
    model = make_model(**fields)
    with torch.no_grad():
        for p in model.relevance.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


def allocations(model, inputs, **kwargs):
    with torch.no_grad():
        return model.perceive(**inputs, num_visual_tokens=8, **kwargs).allocation


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class TestDeterminism:
    """Contract 8. What holds by construction is asserted to the last token; the glance in bf16 is not among it."""

    def test_on_every_run(self, model, inputs):
        assert same(allocations(model, inputs), allocations(model, inputs))

    def test_in_eager_and_sdpa(self, model, inputs):
        assert same(allocations(model, inputs), allocations(make_model(attn_implementation="eager"), inputs))

    def test_in_every_dtype_where_only_texture_is_asked(self, inputs):
        wanted = allocations(make_model(participatory="texture"), inputs)
        for dtype in (torch.bfloat16, torch.float16):
            assert same(allocations(make_model(participatory="texture", dtype=dtype), inputs), wanted)
            assert same(allocations(make_model(participatory="texture").to(dtype), inputs), wanted)

    def test_in_bf16_the_glance_moves_few_tokens(self, model, inputs):
        big = make_inputs([[(12, 12, 5), [5, 6, 7]]])
        with torch.no_grad():
            full, half = (
                m.perceive(**big, num_visual_tokens=36).allocation[0] for m in (model, make_model(dtype=torch.bfloat16))
            )
        shared = {tuple(t) for t in full.tolist()} & {tuple(t) for t in half.tolist()}
        assert len(shared) >= 0.9 * len(full)

    def test_under_autocast_where_only_texture_is_asked(self, inputs):
        model = trained(participatory="texture")
        with torch.no_grad():
            wanted = model.perceive(**inputs, num_visual_tokens=8)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = model.perceive(**inputs, num_visual_tokens=8)
        assert same(got.gain, wanted.gain) and same(got.allocation, wanted.allocation)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    @pytest.mark.parametrize("participatory", ["texture", "both"])
    def test_on_every_device(self, inputs, participatory):
        model = make_model(participatory=participatory)
        wanted = allocations(model, inputs)
        moved = {k: v.cuda() for k, v in inputs.items()}
        assert same(allocations(model.cuda(), moved), wanted)
        out = model.generate(**moved, num_visual_tokens=8, max_new_tokens=4)
        assert torch.equal(out[:, :-4], moved["input_ids"])

    def test_casting_the_model_leaves_what_is_learned_as_it_is(self):
        model = make_model()
        before = {k: v.clone() for k, v in model.relevance.state_dict().items()}
        for cast in (lambda: model.to(torch.bfloat16), lambda: model.half(), lambda: model.double()):
            cast()
            for name, value in model.relevance.state_dict().items():
                assert value.dtype == torch.float32 and torch.equal(value, before[name]), name


class TestFootprint:
    """Contract 10, and what a perception leaves behind."""

    def test_importing_patches_nothing_and_downloads_nothing(self):
        code = """
import socket, torch
def no(*a, **k): raise RuntimeError("network")
socket.socket.connect = socket.create_connection = no
from transformers import modeling_utils, AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl import modeling_qwen3_vl as m
def snapshot():
    classes = [c for c in vars(m).values() if isinstance(c, type)]
    return (
        {c.__name__ + "." + k: id(v) for c in classes for k, v in vars(c).items() if callable(v)},
        {k: id(v) for k, v in vars(m).items()},
        dict(ALL_ATTENTION_FUNCTIONS._global_mapping), dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
        {k: id(v) for k, v in vars(torch.nn.init).items()}, {k: id(v) for k, v in vars(torch.nn.functional).items()},
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.random.initial_seed(), torch.get_num_threads(),
    )
before = snapshot()
import arr_coc
assert snapshot() == before
import sys; sys.path.insert(0, "tests")
torch.set_num_threads(before[-1])
from conftest import make_model, make_inputs
torch.set_num_threads(before[-1])
model = make_model()
x = make_inputs([[(4, 4, 0), [5]]])
torch.manual_seed(before[-2])
state = torch.random.get_rng_state()
with torch.no_grad():
    model.perceive(**x, num_visual_tokens=5)
model.generate(**x, num_visual_tokens=5, max_new_tokens=2)
assert torch.equal(state, torch.random.get_rng_state())
assert model.config._attn_implementation == "sdpa"
assert model.model.visual.config._attn_implementation == "sdpa"
assert snapshot() == before
"""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=os.path.dirname(os.path.dirname(__file__)),
            capture_output=True,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr[-2000:]

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_no_state_is_left_on_the_model(self, inputs, attention):
        model = make_model(attn_implementation=attention)

        def state():
            return {
                f"{name}.{key}": value if isinstance(value, (int, float, str, bool, type(None))) else id(value)
                for name, module in model.named_modules()
                for key, value in vars(module).items()
            } | {"config": model.config.to_json_string(use_diff=False), "generation": str(model.generation_config)}

        model.model.rope_deltas = None
        before = state()
        p = model.perceive(**inputs, num_visual_tokens=5)
        model(**inputs, perception=p)
        model.generate(**inputs, perception=p, max_new_tokens=3)
        model.generate(**inputs, num_visual_tokens=5, max_new_tokens=3, num_beams=2)
        assert state() == before
        assert model.config._attn_implementation == attention

    def test_the_callers_tensors_are_left_as_they_are(self, model, inputs):
        before = {k: v.clone() for k, v in inputs.items()}
        p = model.perceive(**inputs, num_visual_tokens=5)
        kept = [a.clone() for a in p.allocation]
        model.generate(**inputs, perception=p, max_new_tokens=2)
        model(**inputs, perception=p)
        assert all(torch.equal(inputs[k], v) for k, v in before.items()) and same(p.allocation, kept)

    def test_the_cache_holds_the_short_prompt(self, model, inputs):
        with torch.no_grad():
            p = model.perceive(**inputs, num_visual_tokens=5)
        out = model.generate(**inputs, perception=p, max_new_tokens=4, return_dict_in_generate=True)
        lengths = inputs["attention_mask"].sum(1)
        for row, images in enumerate(IMAGES):
            for i in images:
                lengths[row] -= SIZES[i][0] * SIZES[i][1] - len(p.allocation[i])
        assert out.past_key_values.get_seq_length() == int(lengths.max()) + 3
        assert out.sequences.shape[1] == inputs["input_ids"].shape[1] + 4


class TestFollowsTheQuestion:
    """Fresh weights are a method: the glance finds what is asked for before anything is trained."""

    @torch.no_grad()
    @pytest.mark.parametrize("allocator, least", [("topk", 6), ("lod", 2)])
    def test_another_question_is_another_choice_and_the_same_question_the_same(self, allocator, least):
        model = make_model(allocator=allocator)
        questions = [[5, 6, 7], [30, 31], [40], [9, 80], [60, 2, 3, 61], [71, 72]]
        runs = [
            [model.perceive(**make_inputs([[(8, 8, 0), q]]), num_visual_tokens=12) for q in questions] for _ in range(2)
        ]
        for one, again in zip(*runs, strict=True):
            assert torch.equal(one.participatory[0], again.participatory[0]) and same(one.allocation, again.allocation)
        maps = torch.stack([p.participatory[0] for p in runs[0]])
        assert maps.std(0).max() > 0.03 and 0 < maps.min() and maps.max() < 1
        assert len({str(p.allocation[0].tolist()) for p in runs[0]}) >= least

    @torch.no_grad()
    @pytest.mark.parametrize("participatory", ["both", "texture", "glance"])
    def test_without_a_question_nothing_is_asked_for(self, participatory):
        p = trained(participatory=participatory).perceive(**make_inputs([[(5, 6, 0)]]), num_visual_tokens=6)
        assert p.participatory[0].unique().tolist() == [0.5]
        assert len(p.allocation[0]) >= 4

    @torch.no_grad()
    def test_the_question_is_that_of_the_last_turn(self, model):
        later = model.perceive(**make_inputs([[(6, 6, 0), [5, 6], NEXT_TURN, [30, 31]]]), num_visual_tokens=6)
        wanted = model.perceive(**make_inputs([[(6, 6, 0), [30, 31]]]), num_visual_tokens=6)
        assert same(later.allocation, wanted.allocation)
        torch.testing.assert_close(later.relevance[0], wanted.relevance[0], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("groups", [(), ("edges", "text", "semantic")])
def test_a_perception_is_all_that_the_stages_said(groups):
    model = make_model(texture_groups=groups)
    inputs = make_inputs(SAMPLES)
    p = model.perceive(**inputs, num_visual_tokens=6)
    assert p.grid == SIZES and set(p.seconds) == {"texture", "glance", "knowing", "balancing", "attending"}
    for i, (h, w) in enumerate(SIZES):
        assert p.texture[i].shape == (model.config.num_texture_channels, h, w) and p.detail[i].shape == (2, h, w)
        for name in ("propositional", "perspectival", "participatory", "relevance", "gain"):
            value = getattr(p, name)[i]
            assert value.shape == (h, w) and value.dtype == torch.float32, name
            assert 0 <= float(value.min()) <= float(value.max()) <= 1, name
        assert p.relevance[i].amax() == 1
        torch.testing.assert_close(p.weights[i], torch.tensor([0.4, 0.3, 0.3]))
        assert p.tensions[i].tolist() == [0.5] * 3


@torch.no_grad()
def test_what_is_known_of_the_images_serves_another_question(model, monkeypatch):
    first, second = (make_inputs([[(6, 5, 0), (3, 4, 1), q], [(2, 2, 2)]]) for q in ([5, 6], [30, 31]))
    known = model.perceive(**first, num_visual_tokens=6)
    wanted = model.perceive(**second, num_visual_tokens=6)
    monkeypatch.setattr("arr_coc.modeling_arr_coc.texture", None)
    monkeypatch.setattr(model.model, "get_image_features", None)  # the glance's tower
    got = model.perceive(**second, num_visual_tokens=6, known=known)
    assert same(got.allocation, wanted.allocation) and same(got.relevance, wanted.relevance)
    with pytest.raises(ValueError, match="known is of images with grids .* `perceive` returned"):
        model.perceive(**make_inputs([[(6, 5, 0)]]), known=known)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pixels_of_another_dtype_are_accepted_as_in_stock(model, dtype):
    inputs = make_inputs([[(5, 4, 0), [5]]])
    other = inputs | {"pixel_values": inputs["pixel_values"].to(dtype)}
    got = model(**other, num_visual_tokens=6)
    wanted = model(**inputs, perception=model.perceive(**other, num_visual_tokens=6))
    close(got.logits, wanted.logits, torch.bfloat16)


@torch.no_grad()
def test_another_normalisation_of_the_pixels_is_undone():
    """What is perceived is the picture, not the processor's numbers."""
    inputs = make_inputs([[(5, 5, 0), [5]]])
    wanted = make_model(participatory="texture").perceive(**inputs, num_visual_tokens=6)
    mean, std = torch.tensor([0.48, 0.45, 0.40]), torch.tensor([0.27, 0.26, 0.28])
    image = random_image(5, 5, 0) / 255
    other = inputs | {"pixel_values": to_patches((image - mean[:, None, None]) / std[:, None, None])}
    model = make_model(participatory="texture", image_mean=mean.tolist(), image_std=std.tolist())
    got = model.perceive(**other, num_visual_tokens=6)
    torch.testing.assert_close(got.texture[0], wanted.texture[0], rtol=0, atol=1e-4)
    assert same(got.allocation, wanted.allocation)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"glance_layers": 4, "glance_readout_layers": 3}, {"glance_layers": 1}])
def test_the_glance_is_what_stock_sees_of_a_thumbnail(fields):
    """Each image on its own: states against the next layer's input, queries and keys against eager attention."""
    model, inputs = make_model(attn_implementation="eager", **fields), make_inputs(SAMPLES)
    stock, states, depth = as_stock(model), [], model.config.num_glance_layers
    if depth < 4:
        stock.model.language_model.layers[depth].register_forward_pre_hook(lambda _, args: states.append(args[0][0]))
    names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
    prompt = _Prompt(**{name: inputs[name] for name in names}, config=model.config)
    questions = [prompt.question(row) for row in prompt.image_rows]
    assert [q.tolist() for q in questions] == [[5, 6, 7], [8, 9, 11, 12], [8, 9, 11, 12], [17, 18], [17, 18]]
    thumbnails = model.thumbnails(prompt.patches, prompt.grids)
    for i, glance in enumerate(model._glance(prompt, questions, thumbnails)):
        (h, w), scale = prompt.grids[i], 1 if i in (2, 3, 4) else 2  # the config allows 16 tokens
        rows, columns = -(-h // scale), -(-w // scale)
        n = rows * columns
        ids = [IM_START, USER, NEWLINE, VISION_START, *[IMAGE] * n, VISION_END, *questions[i].tolist()]
        ids = torch.tensor([ids])
        out = stock(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == IMAGE).int(),
            pixel_values=gather_patches(prompt.patches[i], flat(h, w, scale), h, w, **model._layout),
            image_grid_thw=torch.tensor([[1, 2 * rows, 2 * columns]]),
            output_attentions=True,
        )
        cells, end, asked = slice(4, 4 + n), slice(4 + n, 5 + n), slice(5 + n, None)
        for given_next in states[i : i + 1]:
            torch.testing.assert_close(glance.cells, given_next[cells], rtol=0, atol=1e-4)
            torch.testing.assert_close(glance.question, given_next[asked], rtol=0, atol=1e-4)
        read = out.attentions[:depth][-model.config.glance_readout_layers :]
        attention = torch.cat([layer[0] for layer in read])  # [layers * heads, l, l]
        for query, tokens in ((glance.query, asked), (glance.neutral, end)):
            wanted = attention[:, tokens, cells]
            got = (query @ glance.key.mT).softmax(-1)
            torch.testing.assert_close(got, wanted / wanted.sum(-1, keepdim=True), rtol=0, atol=1e-4)
    assert len(states) == (5 if depth < 4 else 0)
