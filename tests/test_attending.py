"""The allocators: what every allocation must be, and how close the quadtree comes to the best one there is."""

import statistics
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arr_coc.attending import (
    SCALES,
    WORTH,
    Shaping,
    attend,
    flat,
    flat_scale,
    in_raster_order,
    resolve_budget,
    token_gain,
    tokens_per_cell,
)

SIDES = st.integers(1, 13)
SEEDS = st.integers(0, 10**6)


def maps(h, w, seed, kind="rough"):
    """Gain `[h, w]` and detail `[2, h, w]`: noise, a few peaks, steps full of ties, or smooth plain hills."""
    g = torch.Generator().manual_seed(seed)
    gain, detail = torch.rand(h, w, generator=g), torch.rand(2, h, w, generator=g).sort(0).values
    if kind == "peaks":
        gain = (gain > 0.9).float() * torch.rand(h, w, generator=g)
    if kind == "steps":
        gain, detail = (gain * 4).floor() / 4, (detail * 3).floor() / 3
    if kind == "hills":
        small = torch.rand(1, 1, 3, 3, generator=g)
        gain, detail = torch.nn.functional.interpolate(small, size=(h, w), mode="bilinear")[0, 0], detail * 0.2
    return gain, detail


KINDS = st.sampled_from(["rough", "peaks", "steps", "hills"])
ALLOCATORS = pytest.mark.parametrize("allocator", ["topk", "lod"])


def covered(allocation, h, w):
    """How many tokens cover each cell, cell by cell."""
    count = torch.zeros(h, w, dtype=torch.int64)
    for s, y, x in allocation.tolist():
        count[y : y + s, x : x + s] += 1
    return count


def shares_of_the_most(gain):
    """Gain as `lod` reads it."""
    return (gain.double() / gain.max().clamp(min=1e-9)).clamp(min=1e-3)


def worth(gain, detail, allocation):
    """What the docstring of `WORTH` says an allocation is worth, token by token."""
    gain, detail = shares_of_the_most(gain), detail.double().clamp(min=1e-3)
    shown = {1: gain, 2: gain * (1 - WORTH[2] * detail[0]), 4: gain * (1 - WORTH[4] * detail[1])}
    return sum(float(shown[s][y : y + s, x : x + s].sum()) for s, y, x in allocation.tolist())


def optimum(gain, detail, budget):
    """The most that `budget` tokens can be worth, by trying every tree (knapsack over 4x4 regions and 2x2 blocks)."""

    def merge(a, b):  # best worth for each number of tokens over two disjoint places
        out = [-1.0] * (len(a) + len(b) - 1)
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                out[i + j] = max(out[i + j], x + y)
        return out

    h, w = gain.shape
    best = [0.0]
    for y in range(0, h, 4):
        for x in range(0, w, 4):
            region = [0.0]
            for v in range(y, min(y + 4, h), 2):
                for u in range(x, min(x + 4, w), 2):
                    cells = shares_of_the_most(gain)[v : min(v + 2, h, y + 4), u : min(u + 2, w, x + 4)]
                    leaves = sorted(cells.flatten().tolist(), reverse=True)
                    block = [sum(leaves[:n]) for n in range(len(leaves) + 1)]
                    block[1] = max(block[1], worth(gain, detail, torch.tensor([[2, v, u]])))
                    region = merge(region, block)
            region[1] = max(region[1], worth(gain, detail, torch.tensor([[4, y, x]])))
            best = merge(best, region)
    return max(best[: budget + 1])


@ALLOCATORS
@given(h=SIDES, w=SIDES, seed=SEEDS, kind=KINDS, share=st.floats(0, 1.2))
def test_an_allocation_is_disjoint_aligned_inside_in_order_and_spends_its_budget(allocator, h, w, seed, kind, share):
    budget = max(1, round(share * h * w))
    allocation = attend(*maps(h, w, seed, kind), budget, allocator)
    assert allocation.dtype == torch.int64 and allocation.shape == (len(allocation), 3)
    s, y, x = allocation.T
    assert set(s.tolist()) <= ({1} if allocator == "topk" else set(SCALES))
    assert bool(((y % s == 0) & (x % s == 0) & (y >= 0) & (y < h) & (x >= 0) & (x < w)).all())
    assert covered(allocation, h, w).amax() == 1
    most = min(budget, h * w)
    assert len(allocation) == most if allocator == "topk" else most - 2 <= len(allocation) <= most
    centres = [(min(y + s, h) + y, min(x + s, w) + x) for s, y, x in allocation.tolist()]
    assert centres == sorted(set(centres))


@given(h=SIDES, w=SIDES, seed=SEEDS, share=st.floats(0, 1))
def test_topk_is_the_k_greatest(h, w, seed, share):
    gain, detail = maps(h, w, seed)
    k = max(1, round(share * h * w))
    _, y, x = attend(gain, detail, k, "topk").T
    assert sorted(gain[y, x].tolist()) == sorted(gain.flatten().tolist())[-k:]


@given(seed=SEEDS, k=st.integers(1, 35), cell=st.integers(0, 35), more=st.floats(0, 1))
def test_raising_a_cells_gain_never_loses_it_from_topk(seed, k, cell, more):
    gain, detail = maps(6, 6, seed, "steps")
    y, x = divmod(cell, 6)
    before = [1, y, x] in attend(gain, detail, k, "topk").tolist()
    gain[y, x] += more
    assert not before or [1, y, x] in attend(gain, detail, k, "topk").tolist()


@pytest.mark.parametrize("k", [1, 5, 12])
def test_topk_breaks_ties_by_position(k):
    gain = torch.full((5, 7), 0.5)
    assert torch.equal(attend(gain, torch.zeros(2, 5, 7), k, "topk"), flat(5, 7, 1)[:k])


def test_lod_breaks_ties_by_position():
    gain = torch.zeros(8, 12)
    for y, x in [(5, 9), (1, 10), (6, 2), (2, 3)]:
        gain[y, x] = 1
    order = [[1, 2, 3], [1, 1, 10], [1, 6, 2], [1, 5, 9]]  # by 4x4 region
    for k in range(1, 5):
        got = attend(gain, torch.ones(2, 8, 12), k, "lod").tolist()
        assert sorted(got) == sorted(order[:k])


@pytest.mark.parametrize("seed", range(12))
def test_of_two_regions_worth_the_same_the_first_is_chosen(seed):
    """The second holds the first's cells in another order, so that sums over them round differently."""
    gain, detail = maps(4, 4, seed, "hills")
    gain, detail = torch.cat([gain, gain.flip(0, 1)], 1), torch.cat([detail, detail.flip(1, 2)], 2)
    assert attend(gain, detail, 1).tolist() == [[4, 0, 0]]


@ALLOCATORS
@given(h=SIDES, w=SIDES, seed=SEEDS, share=st.floats(0, 1))
def test_rounding_noise_breaks_no_tie(allocator, h, w, seed, share):
    gain, detail = (x.double() for x in maps(h, w, seed, "steps"))
    budget = max(1, round(share * h * w))
    g = torch.Generator().manual_seed(seed + 1)
    noisy = (x * (1 + 1e-9 * torch.randn(x.shape, generator=g, dtype=torch.float64)) for x in (gain, detail))
    assert torch.equal(attend(gain, detail, budget, allocator), attend(*noisy, budget, allocator))


@ALLOCATORS
@given(h=SIDES, w=SIDES, seed=SEEDS, kind=KINDS, share=st.floats(0, 1), power=st.integers(-40, 10))
def test_only_the_ratios_of_gain_count(allocator, h, w, seed, kind, share, power):
    """A shaping whose every gain is small (training knows only its shares) spends as one whose greatest is 1."""
    gain, detail = maps(h, w, seed, kind)
    budget = max(1, round(share * h * w))
    assert torch.equal(attend(gain, detail, budget, allocator), attend(gain * 2.0**power, detail, budget, allocator))


@pytest.mark.parametrize("h, w, least", [(4, 4, 1), (4, 8, 8), (7, 6, 8)])
def test_lod_is_near_the_best_tree(h, w, least):
    """On one region always; on several from 8 tokens on (with fewer, one token that stays unspent weighs more)."""
    ratios = []
    for seed in range(40):
        gain, detail = maps(h, w, seed, ("rough", "peaks", "steps", "hills")[seed % 4])
        for budget in range(least, h * w, 3):
            best = optimum(gain, detail, budget)
            ratios.append(worth(gain, detail, attend(gain, detail, budget, "lod")) / best)
    assert max(ratios) <= 1 + 1e-3  # gain is rounded before it is spent
    assert min(ratios) >= 0.94
    assert statistics.mean(ratios) >= 0.99


@given(h=SIDES, w=SIDES, seed=SEEDS, kind=KINDS, share=st.floats(0, 1))
def test_lod_is_never_worth_less_than_topk(h, w, seed, kind, share):
    gain, detail = maps(h, w, seed, kind)
    budget = max(1, round(share * h * w))
    lod, topk = (worth(gain, detail, attend(gain, detail, budget, name)) for name in ("lod", "topk"))
    assert lod >= 0.98 * topk


@given(
    rows=st.integers(1, 4), columns=st.integers(1, 4), gain=st.floats(0, 1), fine=st.floats(0, 1), more=st.floats(0, 1)
)
def test_flat_relevance_with_a_quarter_of_the_tokens_is_the_twofold_image(rows, columns, gain, fine, more):
    h, w = 4 * rows, 4 * columns
    detail = torch.stack([torch.full((h, w), d) for d in (fine, fine + more * (1 - fine))])
    assert torch.equal(attend(torch.full((h, w), gain), detail, h * w // 4), flat(h, w, 2))


@given(rows=st.integers(1, 4), columns=st.integers(1, 4), gain=st.floats(0, 1), detail=st.floats(0, 1))
def test_flat_relevance_with_a_sixteenth_of_the_tokens_is_the_fourfold_image(rows, columns, gain, detail):
    h, w = 4 * rows, 4 * columns
    allocation = attend(torch.full((h, w), gain), torch.full((2, h, w), detail), h * w // 16)
    assert torch.equal(allocation, flat(h, w, 4))


def test_where_nothing_is_lost_coarse_tokens_are_bought_and_where_all_is_lost_fine_ones():
    gain = torch.full((8, 8), 0.5)
    gain[:, :4] = 0.9
    for lost, scales in ((0.0, {4}), (1.0, {1, 2})):
        detail = torch.full((2, 8, 8), lost)
        assert set(attend(gain, detail, 4 if lost == 0 else 20)[:, 0].tolist()) <= scales


def test_the_neighbourhood_holds_chosen_cells_together():
    gain = torch.zeros(5, 5)
    gain[0, 0] = 0.6  # alone
    gain[2:5, 2:5] = 0.5  # together
    detail = torch.zeros(2, 5, 5)
    assert attend(gain, detail, 1, "topk", 0.0).tolist() == [[1, 0, 0]]
    assert attend(gain, detail, 1, "topk", 1.0).tolist() == [[1, 3, 3]]
    corner = torch.zeros(5, 5)
    corner[0, 0], corner[2, 2] = 0.95, 1  # a corner's neighbourhood has 4 cells, not 9 of which 5 are empty
    assert attend(corner, detail, 1, "topk", 1.0).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    "gain, detail, budget, allocator, message",
    [
        (torch.ones(4), torch.ones(2, 4), 1, "lod", r"gain is \[4\]"),
        (torch.ones(4, 4), torch.ones(2, 4, 3), 1, "lod", r"detail \[2, 4, 3\]"),
        (torch.ones(4, 4), torch.ones(2, 4, 4), 0, "lod", "budget is 0"),
        (torch.full((4, 4), torch.nan), torch.ones(2, 4, 4), 3, "lod", "NaN"),
        (torch.ones(4, 4), torch.full((2, 4, 4), torch.inf), 3, "topk", "infinity"),
        (torch.ones(4, 4), torch.ones(2, 4, 4), 3, "magic", "'lod' or 'topk'"),
    ],
)
def test_attend_refuses_what_it_cannot_spend(gain, detail, budget, allocator, message):
    with pytest.raises(ValueError, match=message):
        attend(gain, detail, budget, allocator)


@ALLOCATORS
def test_64_by_64_cells_take_less_than_20_ms(allocator):
    gain, detail = maps(64, 64, 0)
    attend(gain, detail, 400, allocator)
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        attend(gain, detail, 400, allocator)
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 0.02


# ------------------------------------------------------------------------------------------------- helpers


@given(h=SIDES, w=SIDES, scale=st.sampled_from([1, 2, 4, 8]))
def test_flat_covers_every_cell_once_in_raster_order(h, w, scale):
    allocation = flat(h, w, scale)
    assert len(allocation) == -(-h // scale) * -(-w // scale)
    assert bool((covered(allocation, h, w) == 1).all())
    assert torch.equal(allocation, in_raster_order(allocation, h, w))


@given(h=SIDES, w=SIDES, tokens=st.integers(1, 80))
def test_flat_scale_is_the_finest_that_fits(h, w, tokens):
    scale = flat_scale(h, w, tokens)
    assert len(flat(h, w, scale)) <= tokens
    assert scale == 1 or len(flat(h, w, scale // 2)) > tokens


@given(h=SIDES, w=SIDES, seed=SEEDS, share=st.floats(0, 1))
def test_raster_order_is_that_of_the_centres_whatever_the_order_before(h, w, seed, share):
    allocation = attend(*maps(h, w, seed), max(1, round(share * h * w)))
    shuffled = allocation[torch.randperm(len(allocation), generator=torch.Generator().manual_seed(seed))]
    assert torch.equal(in_raster_order(shuffled, h, w), allocation)


@given(h=SIDES, w=SIDES, seed=SEEDS, share=st.floats(0, 1))
def test_tokens_per_cell_counts_each_token_over_what_it_covers(h, w, seed, share):
    allocation = attend(*maps(h, w, seed), max(1, round(share * h * w)))
    wanted = torch.zeros(h, w, dtype=torch.float64)
    for s, y, x in allocation.tolist():
        wanted[y : y + s, x : x + s] = 1 / s**2
    assert torch.equal(tokens_per_cell(allocation, h, w), wanted)


@pytest.mark.parametrize("scale", [None, 1, 2, 4])
@pytest.mark.parametrize("h, w", [(8, 8), (5, 6), (7, 1)])
def test_token_gain_is_the_mean_over_the_cells_covered(h, w, scale):
    gain, detail = maps(h, w, seed=1)
    gain.requires_grad_()
    allocation = flat(h, w, scale) if scale else attend(gain, detail, max(1, h * w // 3))
    got = token_gain(gain, allocation)
    wanted = torch.stack([gain[y : y + s, x : x + s].mean() for s, y, x in allocation.tolist()])
    torch.testing.assert_close(got, wanted)
    got.sum().backward()
    assert torch.equal(gain.grad > 0, covered(allocation, h, w) > 0)


@pytest.mark.parametrize("budget, tokens", [(7, 7), (500, 500), ("all", 48), (0.25, 12), (1.0, 48), (0.001, 1)])
def test_a_budget_is_a_count_or_a_share_of_the_cells(budget, tokens):
    assert resolve_budget(budget, torch.ones(6, 8), 0.9, 4, 20) == tokens


@given(h=SIDES, w=SIDES, seed=SEEDS, coverage=st.floats(0.05, 1))
def test_auto_is_the_fewest_cells_that_hold_the_coverage_within_the_range(h, w, seed, coverage):
    gain, _ = maps(h, w, seed)
    falling = sorted(gain.double().flatten().tolist(), reverse=True)
    needed = next(n for n in range(1, h * w + 1) if sum(falling[:n]) >= coverage * sum(falling) - 1e-9)
    assert abs(resolve_budget("auto", gain, coverage, 1, 1000) - needed) <= (coverage > 0.999)
    assert resolve_budget("auto", gain, coverage, needed + 3, needed + 5) == needed + 3
    assert resolve_budget("auto", gain, coverage, 1, max(1, needed - 1)) == max(1, needed - 1)


def test_shaping_starts_as_stated_and_rises():
    shaping = Shaping()
    shaping.reset_parameters()
    relevance = torch.linspace(0, 1, 11)
    gain = shaping(relevance)
    torch.testing.assert_close(gain, torch.sigmoid(6.0 * (relevance - 0.6)))
    assert bool((gain.diff() > 0).all())
