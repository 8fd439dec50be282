"""Three ways of knowing: ranges, hand-computed cases, what is silent until trained, what a question changes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arr_coc.knowing import TURNS, Affinity, Lens, Retina, Silent, perspectival, places, propositional, to_grid
from arr_coc.texture import channel_names, detail, texture


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_propositional_is_the_mean_of_what_is_lost():
    lost = torch.tensor([[[0.2, 0.0]], [[0.6, 0.0]]])
    torch.testing.assert_close(propositional(lost), torch.tensor([[0.4, 0.0]]))


def test_propositional_finds_the_detail_and_perspectival_what_stands_out():
    image = torch.full((3, 160, 160), 0.5)
    image[:, 32:64, 64:96] = (torch.arange(32) % 2).float()  # fine stripes of the same mean
    image[0, 96:128, 96:128] = 1.0  # a plain reddish cell
    assert propositional(detail(image)).flatten().argmax() == 1 * 5 + 2
    assert perspectival(texture(image)).flatten().argmax() == 3 * 5 + 3


def test_perspectival_by_hand():
    array = torch.zeros(13, 1, 2)
    names = channel_names()
    array[names.index("saliency")] = torch.tensor([[0.5, 0.0]])
    array[names.index("eccentricity")] = torch.tensor([[0.0, 1.0]])
    torch.testing.assert_close(perspectival(array), torch.tensor([[0.8 * 0.5 + 0.2, 0.0]]))
    torch.testing.assert_close(perspectival(array, foveal=0), torch.tensor([[0.5, 0.0]]))


def fresh(module):
    torch.manual_seed(0)
    module.eval()
    for m in module.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
    return module


class TestAffinity:
    def test_by_hand(self):
        """One head, one question token, three cells: softmax [1, 2, 4] / 7 against an even look of 1 / 3."""
        affinity = fresh(Affinity(1))
        got = affinity(torch.tensor([[[math.log(2)]]]), torch.zeros(1, 1, 1), torch.tensor([[[0.0], [1.0], [2.0]]]))
        torch.testing.assert_close(got, torch.tensor([3 / 7, 6 / 7, 12 / 7]).log(), rtol=0, atol=1e-5)

    def test_a_question_that_looks_as_a_neutral_token_does_asks_for_nothing(self):
        query = random(4, 1, 8)
        got = fresh(Affinity(4))(query.expand(4, 3, 8), query, random(4, 10, 8, seed=1))
        torch.testing.assert_close(got, torch.zeros(10), rtol=0, atol=1e-5)

    def test_a_sink_cancels_out(self):
        """What draws question and neutral token alike leaves the difference between any two cells as it was."""
        query, neutral, key = random(1, 1, 8), random(1, 1, 8, seed=1), random(1, 6, 8, seed=2)
        query[..., 0] = neutral[..., 0] = 1
        sink = key.clone()
        sink[0, 2, 0] += 3.0
        drawn = [(query @ k.mT).softmax(-1)[0, 0] for k in (key, sink)]
        assert drawn[1][2] > 3 * drawn[0][2]
        plain, with_sink = (fresh(Affinity(1))(query, neutral, k) for k in (key, sink))
        torch.testing.assert_close(with_sink.diff(), plain.diff(), rtol=0, atol=1e-3)

    def test_it_follows_the_cells_and_is_a_plain_mean_over_heads(self):
        query, neutral, key = random(2, 3, 8), random(2, 1, 8, seed=1), random(2, 6, 8, seed=2)
        affinity = fresh(Affinity(2))
        got, order = affinity(query, neutral, key), torch.randperm(6)
        torch.testing.assert_close(affinity(query, neutral, key[:, order]), got[order])
        torch.testing.assert_close(affinity(query.flip(0), neutral.flip(0), key.flip(0)), got)
        asked = (query @ key.mT).softmax(-1).mean((0, 1))
        drawn = (neutral @ key.mT).softmax(-1).mean((0, 1))
        torch.testing.assert_close(got, (asked / drawn).log(), rtol=0, atol=1e-3)

    def test_learned_head_weights_choose_heads_and_the_temperature_scales(self):
        query, neutral, key = random(2, 3, 8), random(2, 1, 8, seed=1), random(2, 6, 8, seed=2)
        affinity = fresh(Affinity(2))
        affinity.head_logits.data = torch.tensor([50.0, -50.0])
        affinity.temperature.data.fill_(2.0)
        alone = fresh(Affinity(1))(query[:1], neutral[:1], key[:1])
        torch.testing.assert_close(affinity(query, neutral, key), 2 * alone)

    @pytest.mark.parametrize(("recency", "token"), [(50.0, -1), (-50.0, 0)])
    def test_learned_recency_reads_the_questions_last_token_or_its_first(self, recency, token):
        query, neutral, key = random(2, 3, 8), random(2, 1, 8, seed=1), random(2, 6, 8, seed=2)
        affinity = fresh(Affinity(2))
        affinity.recency.data.fill_(recency)
        alone = fresh(Affinity(2))(query[:, token, None], neutral, key)
        torch.testing.assert_close(affinity(query, neutral, key), alone)

    def test_it_computes_in_float32_whatever_it_is_given(self):
        args = random(2, 3, 8), random(2, 1, 8, seed=1), random(2, 6, 8, seed=2)
        half = [x.bfloat16() for x in args]
        affinity = fresh(Affinity(2))
        assert torch.equal(affinity(*half), affinity(*(x.float() for x in half)))


class TestRetina:
    @pytest.mark.parametrize("cell", [16, 28, 32])
    @pytest.mark.parametrize("grid", [(1, 1), (3, 5), (9, 4)])
    def test_it_says_something_of_each_cell_whatever_a_cells_size(self, cell, grid):
        retina = fresh(Retina(6))
        seen = retina(random(2, 3, cell * grid[0], cell * grid[1]).sigmoid(), grid)
        assert seen.shape == (2, 6, *grid) and seen.isfinite().all()
        assert seen[0].flatten(1).unique(dim=1).shape[1] == grid[0] * grid[1]

    def test_a_cell_depends_on_what_is_within_64_px_alone(self):
        retina, pixels = fresh(Retina(6)), random(1, 3, 320, 320).sigmoid()
        changed = pixels.clone()
        changed[..., 160:192, 160:192] = 0
        moved = (retina(pixels, (10, 10)) != retina(changed, (10, 10))).any(1)[0]
        assert moved[5, 5] and not moved[:3].any() and not moved[8:].any() and not moved[:, :3].any()

    def test_it_sees_what_is_a_few_pixels_large(self):
        retina, pixels = fresh(Retina(6)), torch.full((1, 3, 64, 64), 0.5)
        dot = pixels.clone()
        dot[..., 10:13, 10:13] = 1
        assert (retina(pixels, (2, 2)) - retina(dot, (2, 2)))[0, :, 0, 0].abs().max() > 1e-3

    def test_it_computes_in_float32_whatever_it_is_given(self):
        retina, pixels = fresh(Retina(6)), random(1, 3, 64, 64).sigmoid().bfloat16()
        assert torch.equal(retina(pixels, (2, 2)), retina(pixels.float(), (2, 2)))

    def test_a_batch_equals_its_singles_in_training_too_but_while_cells_are_learned(self):
        retina, pixels = fresh(Retina(6)).train(), random(2, 3, 64, 64).sigmoid()
        singles = torch.cat([retina(one[None], (2, 2)) for one in pixels])
        torch.testing.assert_close(retina(pixels, (2, 2)), singles)
        assert torch.equal(retina.norms[0].running_mean, torch.zeros(32))
        retina.gathers = True
        assert not torch.allclose(retina.train()(pixels, (2, 2)), singles)
        assert retina.norms[0].running_mean.any()


class TestLens:
    ARGS = {"grid": (3, 5), "words": random(4, 16), "texture": random(13, 3, 5), "retina": random(8, 3, 5)}
    ARGS["glance"] = random(4, 16, seed=1), random(6, 16), 2

    def lens(self, trained=True):
        lens = fresh(Lens(13, 16, 8))
        if trained:
            torch.nn.init.normal_(lens.out.weight)
        return lens

    def test_it_is_silent_until_trained(self):
        assert torch.equal(self.lens(trained=False)(**self.ARGS), torch.zeros(3, 5))

    @pytest.mark.parametrize(
        "left_out", [(), ("texture",), ("retina",), ("glance",), ("texture", "retina"), ("texture", "retina", "glance")]
    )
    def test_it_reads_whichever_it_is_given(self, left_out):
        args = self.ARGS | dict.fromkeys(left_out)
        lens = self.lens()
        got = lens(**args)
        assert got.shape == (3, 5) and got.std() > 0
        asked, states, scale = self.ARGS["glance"]
        other = {
            "words": [random(4, 16, seed=9)],
            "texture": [random(13, 3, 5, seed=9)],
            "retina": [random(8, 3, 5, seed=9)],
            "glance": [(random(4, 16, seed=9), states, scale), (asked, random(6, 16, seed=9), scale)],
        }
        for name in other.keys() - set(left_out):
            for value in other[name]:
                assert not torch.allclose(got, lens(**args | {name: value})), name

    def test_it_tells_places_apart(self):
        same = {"texture": torch.ones(13, 3, 5), "retina": torch.ones(8, 3, 5)}
        same["glance"] = random(4, 16, seed=1), torch.ones(6, 16), 2
        assert self.lens()(**self.ARGS | same).flatten().unique().numel() == 15


def test_products_of_places_tell_how_far_apart_cells_stand():
    h, w = 4, 6
    places.cache_clear()
    with torch.inference_mode():  # what an answer made, a training step must be able to use
        at = places(h, w, torch.device("cpu"))
    assert not at.is_inference()
    assert at.shape == (h * w, 2 + 4 * len(TURNS)) and at.abs().max() <= 1
    assert at[:, :2].reshape(h, w, 2)[0, -1].tolist() == [-1, 1]
    products = (at[:, 2:] @ at[:, 2:].T).reshape(h, w, h, w)
    torch.testing.assert_close(products[1:, 2:, 1:, 2:], products[:-1, :-2, :-1, :-2])
    assert torch.equal(products.reshape(h * w, h * w).argmax(1), torch.arange(h * w))  # nothing is as near as itself


def test_a_silent_layer_starts_at_zero():
    layer = Silent(3, 2)
    assert not layer.weight.any() and not layer.bias.any()


class TestToGrid:
    @given(h=st.integers(1, 9), w=st.integers(1, 9), scale=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
    def test_it_stays_within_the_coarse_values_and_keeps_a_constant(self, h, w, scale, seed):
        n = -(-h // scale) * -(-w // scale)
        coarse = random(n, seed=seed)
        got = to_grid(coarse, scale, h, w)
        assert got.shape == (h, w)
        assert coarse.min() - 1e-5 <= got.min() <= got.max() <= coarse.max() + 1e-5
        torch.testing.assert_close(to_grid(torch.full((n,), 0.3), scale, h, w), torch.full((h, w), 0.3))
        if scale == 1:
            assert torch.equal(got, coarse.reshape(h, w))
        many = to_grid(torch.stack([coarse, 2 * coarse]), scale, h, w)
        assert torch.equal(many[0], got) and many.shape == (2, h, w)

    @pytest.mark.parametrize("scale", [2, 4])
    def test_a_coarse_value_lies_at_the_centre_of_its_cells(self, scale):
        ramp = torch.arange(4.0).repeat(4)  # rises by 1 a coarse column
        for cut in (0, 1):  # the last coarse column may reach beyond the image
            w = 4 * scale - cut
            wanted = ((torch.arange(w) + 0.5) / scale - 0.5).clamp(0, 3)
            torch.testing.assert_close(to_grid(ramp, scale, 4 * scale, w), wanted.expand(4 * scale, -1))
