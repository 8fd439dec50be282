"""Opponent processing: hand-computed cases, what each tension does alone, and neutral starts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arr_coc.balancing import TENSIONS, WEIGHTS, Policy, balance, distance_to_strong

SIDES = st.integers(1, 9)


def random_maps(h, w, seed=0):
    return tuple(torch.rand(3, h, w, generator=torch.Generator().manual_seed(seed)))


def over_its_maximum(x):
    return x / x.max()


def one_term(k, tensions):
    """Relevance by the k-th balanced term alone, its tension given as the share of the second opponent."""
    return torch.nn.functional.one_hot(torch.tensor(k), 3).float(), torch.tensor(tensions)


class TestBalance:
    def test_by_hand(self):
        propositional, perspectival, participatory = (torch.tensor([x]) for x in ([0.8, 0.0], [0.5, 0.5], [0.2, 0.4]))
        weights, tensions = torch.tensor([0.4, 0.3, 0.3]), torch.tensor([0.5, 0.5, 0.5])
        # raw = [0.5, 0.3], so cell 0 is the strong one and cell 1 stands 1 of a diagonal of sqrt(5) away
        t1, t2 = torch.tensor([[0.5, 0.2]]), torch.tensor([[0.5, 0.5]])
        t3 = torch.tensor([[0.5, 0.3 + 0.5 * 0.3 / 5**0.5]])
        wanted = over_its_maximum(0.4 * t1 + 0.3 * t2 + 0.3 * t3)
        torch.testing.assert_close(balance((propositional, perspectival, participatory), weights, tensions), wanted)

    @pytest.mark.parametrize("share, pole", [(0.0, 0), (1.0, 2)])
    def test_compress_and_particularize(self, share, pole):
        maps = random_maps(4, 5)
        torch.testing.assert_close(balance(maps, *one_term(0, [share, 0.5, 0.5])), over_its_maximum(maps[pole]))

    @pytest.mark.parametrize("share", [0.0, 1.0])
    def test_exploit_and_explore(self, share):
        maps = random_maps(4, 5)
        pole = 1 - maps[1] if share else maps[1]
        torch.testing.assert_close(balance(maps, *one_term(1, [0.5, share, 0.5])), over_its_maximum(pole))

    @pytest.mark.parametrize("share", [0.0, 1.0])
    def test_focus_and_diversify(self, share):
        maps = random_maps(4, 5)
        raw = torch.stack(maps).mean(0)
        wanted = over_its_maximum(raw + share * 0.3 * distance_to_strong(raw))
        torch.testing.assert_close(balance(maps, *one_term(2, [0.5, 0.5, share])), wanted)

    @given(h=SIDES, w=SIDES, seed=st.integers(0, 99), weight=st.floats(0.1, 9), tension=st.floats(0, 1))
    def test_relevance_lies_between_0_and_a_maximum_of_1(self, h, w, seed, weight, tension):
        weights, tensions = torch.tensor([weight, 1.0, 1.0]), torch.tensor([tension, 0.5, 1 - tension])
        relevance = balance(random_maps(h, w, seed), weights, tensions)
        assert relevance.shape == (h, w) and relevance.min() >= 0
        torch.testing.assert_close(relevance.max(), torch.tensor(1.0))
        torch.testing.assert_close(balance(random_maps(h, w, seed), 7 * weights, tensions), relevance)

    def test_maps_that_say_nothing_leave_finite_relevance(self):
        relevance = balance((torch.zeros(3, 4),) * 3, *one_term(0, [0.5] * 3))
        assert relevance.isfinite().all()

    def test_gradients_reach_maps_weights_and_tensions(self):
        numbers = [torch.tensor(x, dtype=torch.float64) for x in (WEIGHTS, [0.4, 0.5, 0.6])]
        inputs = [x.double().requires_grad_() for x in (*random_maps(3, 3), *numbers)]
        assert torch.autograd.gradcheck(lambda a, b, c, w, t: balance((a, b, c), w, t), inputs)


class TestDistance:
    @given(h=SIDES, w=SIDES, seed=st.integers(0, 999))
    def test_it_is_that_to_the_nearest_of_the_strongest_tenth(self, h, w, seed):
        raw = random_maps(h, w, seed)[0]
        strong = torch.argsort(raw.flatten(), descending=True)[: max(1, round(0.1 * h * w))].tolist()
        got = distance_to_strong(raw)
        for y in range(h):
            for x in range(w):
                nearest = min(((y - s // w) ** 2 + (x - s % w) ** 2) ** 0.5 for s in strong)
                flat = raw.numel() == 1
                assert got[y, x] == pytest.approx(0 if flat else nearest / (h * h + w * w) ** 0.5, abs=1e-5)

    def test_a_flat_map_has_no_strong_cell(self):
        assert not distance_to_strong(torch.full((4, 6), 0.3) + 1e-9 * torch.rand(4, 6)).any()

    def test_of_equal_cells_the_first_is_strong_whatever_the_noise(self):
        raw = torch.zeros(4, 5, dtype=torch.float64)
        raw[[0, 1, 2, 3], [4, 0, 3, 1]] = 0.7  # four equal peaks, of which two are a tenth
        noisy = raw + 1e-9 * torch.rand(4, 5)
        assert (distance_to_strong(noisy) == 0).nonzero().tolist() == [[0, 4], [1, 0]]


class TestPolicy:
    @pytest.mark.parametrize("normalisation", ["softmax", "sigmoid"])
    def test_it_starts_neutral_whatever_is_asked_and_seen(self, normalisation):
        policy = Policy(16, 8, normalisation)
        for seed in range(3):
            weights, tensions = policy(torch.randn(16), random_maps(3, 4, seed))
            torch.testing.assert_close(weights, torch.tensor(WEIGHTS))
            assert tensions.tolist() == [0.5] * 3 and len(TENSIONS) == 3

    @pytest.mark.parametrize("normalisation", ["softmax", "sigmoid"])
    def test_trained_it_follows_question_and_maps_within_range(self, normalisation):
        torch.manual_seed(0)
        policy = Policy(16, 8, normalisation)
        torch.nn.init.normal_(policy.decide.weight, std=3.0)
        question = torch.randn(16)
        weights, tensions = policy(question, random_maps(3, 4))
        assert weights.min() > 0 and 0 < tensions.min() <= tensions.max() < 1
        assert (normalisation == "softmax") == (weights.sum().item() == pytest.approx(1, abs=1e-5))
        for other in (policy(torch.randn(16), random_maps(3, 4)), policy(question, random_maps(3, 4, 5))):
            assert not torch.allclose(other[0], weights) and not torch.allclose(other[1], tensions)

    def test_it_reads_mean_maximum_and_deviation_not_places(self):
        torch.manual_seed(0)
        policy = Policy(16, 8)
        torch.nn.init.normal_(policy.decide.weight)
        question, maps = torch.randn(16), random_maps(3, 4)
        moved = tuple(m.flatten()[torch.randperm(12)].reshape(4, 3) for m in maps)
        torch.testing.assert_close(policy(question, moved), policy(question, maps))
