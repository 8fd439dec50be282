"""Every method through one interface, and each rival's defining property on a case done by hand."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benching import sample, small_model, tiny_processor
from PIL import Image

from arr_coc import ArrCocConfig
from arr_coc.attending import tokens_per_cell
from arr_coc.checkpoints.make_tiny import TINY
from arr_coc.patches import to_patches
from benchmarks.flops import (
    choosing_flops,
    language_flops,
    lens_flops,
    method_flops,
    prefill_flops,
    retina_flops,
    tower_flops,
)
from benchmarks.methods import (
    METHODS,
    cdpruner,
    divprune,
    downscale,
    fastv,
    named,
    ours,
    prepare,
    prumerge,
    simple,
    visionzip,
)
from benchmarks.methods.interface import Clock, LastTowerLayer, Run, top
from benchmarks.methods.pixelprune import surprise


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


@pytest.fixture(scope="module")
def small():
    return small_model()


@pytest.fixture(scope="module")
def batch(processor):
    return prepare(processor, [sample(0), sample(1, 5, 4), sample(2)])


class TestEveryMethod:
    @pytest.mark.parametrize("name", METHODS)
    def test_it_answers_within_its_budget_and_leaves_nothing_behind(self, small, processor, batch, name):
        before = small.config.to_dict()
        out = METHODS[name].on(small, processor, batch, 0.25, max_new_tokens=3)
        assert len(out.answers) == len(out.kept) == 3
        for kept, (h, w) in zip(out.kept, batch.grids, strict=True):
            share = 1.0 if not METHODS[name].spends else 0.25
            most = round(share * h * w)
            if name.endswith("_latency"):
                assert len(kept) >= 0.8 * most
            else:
                assert 0.6 * most <= len(kept) <= most, name
            if not name.startswith("downscale") and not name.endswith("_latency"):
                assert tokens_per_cell(kept, h, w).sum() <= most + 1e-6
        assert small.config.to_dict() == before
        assert all(seconds >= 0 for seconds in out.seconds.values()) and "preprocess" in out.seconds
        hooks = [m for m in small.modules() if m._forward_hooks or m._forward_pre_hooks]
        assert not hooks

    @pytest.mark.parametrize("name", [n for n in METHODS if n not in ("downscale_latency",)])
    def test_a_batch_equals_its_singles(self, small, processor, name):
        samples = [sample(0), sample(1, 5, 4)]
        together = METHODS[name].run(small, processor, samples, 0.3, max_new_tokens=4)
        for i, one in enumerate(samples):
            alone = METHODS[name].run(small, processor, [one], 0.3, max_new_tokens=4)
            assert together.answers[i] == alone.answers[0]
            assert torch.equal(together.kept[i], alone.kept[0])

    @pytest.mark.parametrize("name", [n for n in METHODS if n != "pixelprune"])
    def test_with_all_tokens_it_is_stock(self, small, processor, batch, name):
        stock = METHODS["stock"].on(small, processor, batch, 1.0, max_new_tokens=4).answers
        assert METHODS[name].on(small, processor, batch, 1.0, max_new_tokens=4).answers == stock

    def test_what_is_shared_by_methods_and_budgets_changes_nothing(self, processor):
        model = small_model()
        torch.manual_seed(1)
        torch.nn.init.normal_(model.relevance.lens.out.weight, std=0.1)  # or the retina would move nothing
        samples, asked = [sample(0), sample(1, 5, 4)], {}
        batch = prepare(processor, samples)
        for name in [method.name for method in ours.METHODS]:
            for share in (0.2, 0.4):
                shared = METHODS[name].on(model, processor, batch, share, max_new_tokens=3)
                alone = METHODS[name].on(model, processor, prepare(processor, samples), share, max_new_tokens=3)
                assert shared.answers == alone.answers
                for one, other in zip(shared.kept, alone.kept, strict=True):
                    assert torch.equal(one, other), (name, share)
                assert shared.seconds.keys() == alone.seconds.keys()
                asked[name] = shared.maps["participatory"][0]
        for name in ("arr_coc_glance", "arr_coc_texture", "no_retina", "untrained"):
            assert not torch.allclose(asked[name], asked["arr_coc"], atol=1e-3), name

    def test_an_unknown_name_lists_what_exists(self):
        with pytest.raises(ValueError, match="unknown method nonsense: there are stock, downscale"):
            named("stock,nonsense")
        assert [m.name for m in named("stock,arr_coc,stock")] == ["stock", "arr_coc"]
        assert len(named("all")) == len(METHODS) and all(m.source and m.drops for m in named("all"))


class TestSimple:
    @pytest.mark.parametrize(
        ("h", "w", "budget"), [(16, 16, 13), (16, 16, 51), (5, 9, 7), (3, 40, 60), (2, 2, 4), (7, 1, 3)]
    )
    def test_uniform_spends_the_budget_on_distinct_cells_with_even_gaps(self, h, w, budget):
        cells = simple.uniform_cells(h, w, budget)
        assert len(cells) == budget == len(cells.unique(dim=0))
        per_row = torch.bincount(cells[:, 1], minlength=h)
        assert per_row[per_row > 0].max() - per_row[per_row > 0].min() <= 1
        for y in cells[:, 1].unique():
            gaps = cells[cells[:, 1] == y, 2].diff()
            assert not len(gaps) or gaps.max() - gaps.min() <= 1

    def test_uniform_of_a_square_is_a_lattice(self):
        assert simple.uniform_cells(4, 4, 4)[:, 1:].tolist() == [[1, 1], [1, 3], [3, 1], [3, 3]]

    def test_central_cells_are_central(self):
        assert simple.central_cells(5, 5, 5)[:, 1:].tolist() == [[1, 2], [2, 1], [2, 2], [2, 3], [3, 2]]

    def test_random_cells_follow_the_seed_alone(self):
        a, b, c = (simple.random_cells(8, 8, 20, seed) for seed in (1, 1, 2))
        assert torch.equal(a, b) and not torch.equal(a, c) and len(a.unique(dim=0)) == 20

    def test_blind_takes_the_detailed_cells(self, small, processor):
        pixels = np.full((128, 128, 3), 120, np.uint8)
        pixels[32:64, 96:128] = np.indices((32, 32)).sum(0)[..., None] % 2 * 255
        one = {"id": "a", "image": Image.fromarray(pixels), "question": "what is it?"}
        kept = METHODS["blind"].run(small, processor, [one], 1 / 16, 1).kept[0]
        assert kept.tolist() == [[1, 1, 3]]

    def test_the_oracle_keeps_the_evidence(self, small, processor):
        one = sample(0) | {"boxes": [(64, 32, 128, 96)]}  # cells (1..2, 2..3)
        kept = METHODS["oracle_topk"].run(small, processor, [one], 6 / 48, 1).kept[0].tolist()
        assert all([1, y, x] in kept for y in (1, 2) for x in (2, 3))


class TestDownscale:
    @pytest.mark.parametrize(
        ("grid", "budget", "shape"),
        [((16, 16), 13, (3, 4)), ((16, 16), 26, (5, 5)), ((16, 16), 51, (7, 7)), ((16, 16), 256, (16, 16))],
    )
    def test_the_shape_of_most_tokens_that_is_hardly_stretched(self, grid, budget, shape):
        assert sorted(downscale.shape_for(*grid, budget)) == sorted(shape)

    @pytest.mark.parametrize("budget", range(1, 60, 7))
    def test_never_above_the_budget(self, budget):
        for grid in ((16, 16), (4, 30), (9, 7)):
            rows, columns = downscale.shape_for(*grid, budget)
            assert 1 <= rows * columns <= budget and rows <= grid[0] and columns <= grid[1]

    def test_the_pixels_are_area_means(self, small, processor):
        seen = []
        hook = small.model.visual.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        one = sample(0, 4, 4)
        METHODS["downscale"].run(small, processor, [one], 0.25, 1)
        hook.remove()
        image = torch.tensor(np.asarray(one["image"])).permute(2, 0, 1).float()
        wanted = to_patches(F.avg_pool2d(image, 2).round() / 127.5 - 1)
        assert torch.allclose(seen[0], wanted, atol=0.01)

    def test_equal_latency_costs_no_more_and_the_next_token_would(self):
        config = ArrCocConfig.from_pretrained(TINY.parents[1])
        tokens = downscale.equal_latency(config, 16, 16, 51)
        ours = method_flops(config, "before the tower", 256, 51, 32, glance=64)
        assert prefill_flops(config, tokens, 32) <= ours < prefill_flops(config, tokens + 1, 32)


class TestDivPrune:
    def test_greedy_max_min_on_five_points(self):
        angles = torch.tensor([0.0, 0.1, 1.0, 2.0, 2.2])
        points = torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor([[1.0], [2], [3], [1], [5]])
        # Nearest neighbours are 0.1, 0.1, 0.9, 0.2, 0.2 rad away: 2 goes first. Farthest from it is 4 (1.2), not 0
        # (1.0); then 0, at 1.0 from 2; then 3, at 0.2 from 4, before 1, at 0.1 from 0.
        assert divprune.max_min_diverse(points, 4).tolist() == [2, 4, 0, 3]

    def test_each_step_is_the_brute_force_max_min(self):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
        chosen = divprune.max_min_diverse(x, 6).tolist()
        apart = 1 - F.normalize(x, dim=1) @ F.normalize(x, dim=1).T
        for step in range(1, 6):
            rest = [i for i in range(12) if i not in chosen[:step]]
            assert chosen[step] == max(rest, key=lambda i: float(apart[i, chosen[:step]].min()))


class TestCDPruner:
    def kernel(self, seed=0):
        g = torch.Generator().manual_seed(seed)
        return cdpruner.conditional_kernel(torch.randn(7, 9, generator=g), torch.rand(7, generator=g))

    @pytest.mark.parametrize("seed", range(3))
    def test_each_step_has_the_greatest_determinant_by_brute_force(self, seed):
        kernel = self.kernel(seed).double()
        chosen = cdpruner.greedy_map(kernel, 4).tolist()
        for step in range(4):
            rest = [i for i in range(7) if i not in chosen[:step]]
            minors = {i: float(torch.det(kernel[[*chosen[:step], i]][:, [*chosen[:step], i]])) for i in rest}
            assert chosen[step] == max(minors, key=minors.get)

    def test_pairs_are_close_to_the_best_pair(self):
        kernel = self.kernel()
        minor = {p: float(torch.det(kernel[list(p)][:, list(p)])) for p in itertools.combinations(range(7), 2)}
        assert minor[tuple(sorted(cdpruner.greedy_map(kernel, 2).tolist()))] >= 0.5 * max(minor.values())

    def test_the_question_conditions_the_choice(self):
        features = torch.eye(4)
        assert cdpruner.relevance(features, torch.tensor([[0.0, 0, 1, 0]])).argmax() == 2
        kernel = cdpruner.conditional_kernel(features, torch.tensor([0.1, 0.9, 0.2, 0.8]))
        assert cdpruner.greedy_map(kernel, 2).tolist() == [1, 3]

    def test_a_duplicate_is_worth_nothing(self):
        features = torch.tensor([[1.0, 0], [1, 0], [0, 1]])
        kernel = cdpruner.conditional_kernel(features, torch.tensor([1.0, 0.99, 0.3]))
        assert cdpruner.greedy_map(kernel, 2).tolist() == [0, 2]


class TestVisionZip:
    def test_dominant_by_attention_and_the_rest_merged_by_keys(self):
        received = torch.tensor([0.05, 0.30, 0.01, 0.02, 0.40, 0.03, 0.19])
        keys = torch.tensor([[1.0, 0], [0, 0], [0, 1], [1, 0.1], [0, 0], [0.1, 1], [0, 0]])
        # Of 7 tokens 6 are asked for: 5 dominant (1 contextual by 10/64): 4, 1, 6, 0, 5; others: 2 and 3.
        cells, mix = visionzip.dominant_and_contextual(received, keys, 6)
        assert cells.tolist() == [0, 1, 2, 4, 5, 6]
        assert mix[2].tolist() == [0, 0, 0.5, 0.5, 0, 0, 0] and mix[0].argmax() == 0
        assert torch.allclose(mix.sum(1), torch.ones(6))

    def test_merged_tokens_join_their_nearest_target(self):
        n, k = 20, 13  # 2 contextual, 11 dominant
        received = torch.arange(n, 0, -1).float()
        angle = torch.zeros(n)
        angle[11:] = torch.tensor([0.0, 0.1, 0.2, 0.1, 1.5, 1.4, 1.6, 1.5, 1.3])
        cells, mix = visionzip.dominant_and_contextual(received, torch.stack([angle.cos(), angle.sin()], 1), k)
        assert cells.tolist() == [*range(11), 11, 15]  # targets evenly spaced among the nine others: first and fifth
        assert mix[11].nonzero()[:, 0].tolist() == [11, 12, 13, 14] and mix[12].nonzero()[:, 0].tolist() == [
            15,
            16,
            17,
            18,
            19,
        ]

    @pytest.mark.parametrize("k", [1, 3, 19, 20])
    def test_every_budget_is_met(self, k):
        cells, mix = visionzip.dominant_and_contextual(torch.rand(20), torch.randn(20, 4), k)
        assert len(cells) == k == len(cells.unique()) and mix.shape == (k, 20)


class TestPruMerge:
    def test_outliers_by_the_interquartile_range(self):
        received = torch.tensor([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 5.0, 1.0])
        assert prumerge.outliers(received).nonzero()[:, 0].tolist() == [6]

    def test_attended_and_even_ones_are_kept_and_the_pruned_added_by_their_attention(self):
        received = torch.tensor([1.0, 2.0, 1.0, 9.0, 1.0, 2.0]) / 16
        keys = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1], [0, 1], [1, 0]])
        cells, mix = prumerge.prune_and_merge(received, keys, 3, neighbours=1)
        assert cells.tolist() == [0, 2, 3]  # the outlier, and two evenly spaced: 0 and 2
        assert torch.allclose(mix[0] * 18 / 16, torch.tensor([1, 2 / 16, 0, 0, 0, 0]))  # with 1, by its 2 of 16
        assert torch.allclose(mix[2] * 17 / 16, torch.tensor([0, 0, 0, 1, 1 / 16, 0]))  # with 4, by its 1

    def test_a_kept_token_stays_the_most_of_what_it_becomes(self):
        received = torch.rand(64).softmax(0)
        for k in (8, 32):
            cells, mix = prumerge.prune_and_merge(received, torch.randn(64, 8), k)
            assert mix[torch.arange(k), cells].min() > 0.5


class TestPixelRedundancy:
    def test_what_a_neighbour_foretells_is_no_surprise(self):
        image = torch.zeros(3, 96, 96)
        image[:, :, 64:] = 0.5  # a column of another colour: its top cell is new, the others are foretold from above
        image[:, 32:64, 32:64] = 1.0
        wanted = [[torch.inf, 0, 0.5], [0, 1, 0], [0, 0, 0]]
        assert surprise(image, 32).tolist() == wanted


class TestFastV:
    def test_attention_and_ranking_by_hand(self):
        query = torch.tensor([[[1.0, 0], [0, 2.0]]])  # [1, heads 2, 2]
        key = torch.tensor([[[[0.0, 0], [1, 0], [0, 0], [0, 0]], [[0, 0], [0, 0], [0, 0.5], [0, 0]]]])
        real = torch.tensor([[True, True, True, False]])
        e = float(torch.e)
        wanted = [(1 / (2 + e) + 1 / (2 + e)) / 2, (e / (2 + e) + 1 / (2 + e)) / 2, (1 / (2 + e) + e / (2 + e)) / 2, 0]
        got = fastv.attention_of_last(query, key, real)
        assert torch.allclose(got[0], torch.tensor(wanted))
        is_image = torch.tensor([[True, True, False, False]])
        assert fastv.keep_best(got, is_image, real, [1]).tolist() == [[False, True, True, False]]

    def test_it_ranks_by_the_weights_of_an_eager_second_layer(self, small, processor, batch):
        kept = METHODS["fastv"].on(small, processor, batch, 0.25, 1).kept
        inputs = batch.inputs
        small.set_attn_implementation("eager")
        with torch.no_grad():
            weights = small(**inputs, num_visual_tokens="all", output_attentions=True).attentions[fastv.RANKED_BY]
        small.set_attn_implementation("sdpa")
        for i, (h, w) in enumerate(batch.grids):
            at = (inputs["input_ids"][i] == small.config.image_token_id).nonzero()[:, 0]
            best = top(weights[i, :, -1, at].mean(0), round(h * w / 4))
            assert (kept[i][:, 1] * w + kept[i][:, 2]).tolist() == best.tolist()

    def test_dropping_equals_masking_in_the_later_layers(self, small, processor, batch):
        """Logits against stock's with the dropped columns masked from the third layer on."""
        inputs, budgets = batch.inputs, [12, 5, 12]
        with torch.no_grad(), Clock(small) as clock:
            seen, _ = batch.seen(small, clock)
            logits, *_, keep, drop_after = fastv.prefill(small, inputs, seen, budgets)

            def hide(_, args, kwargs):
                mask = fastv.causal(keep, kwargs["position_embeddings"][0])
                return args, kwargs | {"attention_mask": mask}

            late = small.model.language_model.layers[drop_after + 1 :]
            hooks = [layer.register_forward_pre_hook(hide, with_kwargs=True) for layer in late]
            wanted = small(**inputs, num_visual_tokens="all", logits_to_keep=1).logits[:, -1]
            for hook in hooks:
                hook.remove()
        assert torch.allclose(logits, wanted, atol=1e-4)


def test_the_towers_attention_is_that_of_an_eager_tower(small, batch):
    with torch.no_grad(), LastTowerLayer(small.model.visual) as last:
        small.model.get_image_features(batch.inputs["pixel_values"], batch.inputs["image_grid_thw"], return_dict=True)
        sizes = [h * w * 4 for h, w in batch.grids]
        looks = last.attention(sizes, 4, at_once=50)
        layer = last.layer
        qkv = layer.qkv(last.states).unflatten(-1, (3, layer.num_heads, -1)).float()
        first = slice(0, sizes[0])
        from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

        q, k = apply_rotary_pos_emb_vision(qkv[first, 0], qkv[first, 1], *(r[first] for r in last.rotary))
    weights = (torch.einsum("qhd,khd->hqk", q, k) * layer.scaling).softmax(-1)
    received, keys = looks[0]
    assert torch.allclose(received, weights.mean((0, 1)).reshape(-1, 4).sum(1), atol=1e-6)
    assert float(received.sum()) == pytest.approx(1, abs=1e-4) and keys.shape == (sizes[0] // 4, q.shape[-1])


class TestFlops:
    def test_the_cost_of_2b_is_that_of_the_table(self):
        config = ArrCocConfig.from_pretrained(TINY.parents[1])
        for tokens, tower, language in ((256, 0.78, 0.85), (1024, 4.34, 3.13), (4096, 37.2, 13.6)):
            assert tower_flops(config, tokens) / 1e12 == pytest.approx(tower, rel=0.04)
            assert language_flops(config, tokens) / 1e12 == pytest.approx(language, rel=0.16)

    def test_a_choice_counts_the_retina_where_it_is_asked(self, small):
        seen = {}
        for way in ("both", "texture", "glance"):
            config = ArrCocConfig(**small.config.to_dict() | {"participatory": way})
            seen[way] = choosing_flops(config, 64, 5)
        assert seen["both"] == seen["texture"] == seen["glance"] + retina_flops(small.config, 64)

    def test_the_retinas_and_the_lenss_cost_is_what_torch_counts(self, small):
        from torch.utils.flop_counter import FlopCounterMode

        config, relevance = small.config, small.relevance
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            relevance.retina(torch.rand(1, 3, 8 * config.cell, 8 * config.cell), (8, 8))
        assert retina_flops(config, 64) == counted.get_total_flops()
        x = torch.rand(64 + 5, config.lens_dim)
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            for block in relevance.lens.blocks:
                x = block(x)
        assert lens_flops(config, 64, 5) == pytest.approx(counted.get_total_flops(), rel=0.01)

    def test_earlier_is_cheaper(self):
        config = ArrCocConfig.from_pretrained(TINY.parents[1])
        places = ("before the tower", "after the tower", "in the language model", "nowhere")
        costs = [method_flops(config, place, 1024, 200, 32) for place in places]
        assert costs == sorted(costs) and costs[3] / costs[0] == pytest.approx(5.9, abs=0.6)


def test_greedy_answers_stop_at_the_end_of_turn(small, processor):
    run = Run(processor, Clock(small), 4)
    ends = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert run.decode(torch.tensor([[processor.tokenizer.encode("yes")[0], ends]])) == ["yes"]
