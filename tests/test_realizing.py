"""Chosen tokens in the tower's and the language model's own terms: the same as stock where everything is chosen."""

import pytest
import torch
import torch.nn.functional as F
from conftest import IMAGE, make_inputs
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from arr_coc.attending import attend, flat
from arr_coc.patches import from_patches, to_patches
from arr_coc.realizing import gather_patches, places, pool_features, shorten, tower_inputs

LAYOUT = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
SIDES = st.integers(1, 9)


def pixels(h, w, seed=0):
    return torch.rand(3, 32 * h, 32 * w, generator=torch.Generator().manual_seed(seed))


def mixed(h, w, share=0.4, seed=0):
    """An allocation with tokens at all scales, where there is room."""
    g = torch.Generator().manual_seed(seed)
    gain = F.interpolate(torch.rand(1, 1, 3, 3, generator=g), size=(h, w), mode="bilinear")[0, 0]
    return attend(gain, torch.rand(2, h, w, generator=g).sort(0).values * 0.5, max(1, round(share * h * w)))


class TestPlaces:
    @given(h=SIDES, w=SIDES)
    def test_at_scale_1_cells_and_patches_are_where_stock_has_them(self, h, w):
        cell, patch = places(flat(h, w, 1), h, w)
        wanted = torch.cartesian_prod(torch.arange(h), torch.arange(w)).float()
        assert torch.equal(cell, wanted.reshape(-1, 2))
        grid = torch.tensor([[1, 2 * h, 2 * w]])
        assert torch.equal(patch.flatten(0, 1), get_vision_position_ids(grid, 2).float())

    @given(h=SIDES, w=SIDES, seed=st.integers(0, 999))
    def test_a_coarse_token_stands_at_the_centre_of_what_it_covers(self, h, w, seed):
        allocation = mixed(h, w, seed=seed)
        cell, patch = places(allocation, h, w)
        for (s, y, x), at, patches in zip(allocation.tolist(), cell.tolist(), patch.tolist(), strict=True):
            last_y, last_x = min(y + s, h) - 1, min(x + s, w) - 1
            assert at == [(y + last_y) / 2, (x + last_x) / 2]
            for i, (v, u) in enumerate(patches):  # of the s x s native patches that patch i of the token shows
                ys = [min(2 * y + (i // 2) * s + k, 2 * h - 1) for k in range(s)]
                xs = [min(2 * x + (i % 2) * s + k, 2 * w - 1) for k in range(s)]
                assert [v, u] == [(ys[0] + ys[-1]) / 2, (xs[0] + xs[-1]) / 2]

    def test_by_hand(self):
        allocation = torch.tensor([[2, 0, 2], [4, 4, 0], [1, 3, 5]])
        cell, patch = places(allocation, 8, 6)
        assert cell.tolist() == [[0.5, 2.5], [5.5, 1.5], [3, 5]]
        assert patch[0].tolist() == [[0.5, 4.5], [0.5, 6.5], [2.5, 4.5], [2.5, 6.5]]
        assert places(allocation, 8, 6, rule="corner")[0].tolist() == [[0, 2], [4, 0], [3, 5]]
        assert places(allocation, 8, 6, rule="corner")[1][0].tolist() == [[0, 4], [0, 6], [2, 4], [2, 6]]


class TestGatherPatches:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_everything_at_scale_1_is_what_the_processor_made(self, dtype):
        rows = to_patches(pixels(5, 7)).to(dtype)
        assert torch.equal(gather_patches(rows, flat(5, 7, 1), 5, 7, **LAYOUT), rows)

    @pytest.mark.parametrize("scale", [2, 4])
    def test_one_scale_throughout_is_the_image_shrunk_by_area(self, scale):
        image = pixels(8, 12)
        got = gather_patches(to_patches(image), flat(8, 12, scale), 8, 12, **LAYOUT)
        shrunk = F.interpolate(image[None], scale_factor=1 / scale, mode="area")[0]
        torch.testing.assert_close(got, to_patches(shrunk), rtol=0, atol=1e-6)

    @given(h=SIDES, w=SIDES, seed=st.integers(0, 999))
    def test_each_token_shows_its_own_cells(self, h, w, seed):
        image = pixels(h, w)
        allocation = mixed(h, w, seed=seed)
        got = gather_patches(to_patches(image), allocation, h, w, **LAYOUT).reshape(len(allocation), 4, -1)
        padded = F.pad(image[None], (0, 96, 0, 96), mode="replicate")[0]
        for (s, y, x), token in zip(allocation.tolist(), got, strict=True):
            region = padded[:, 32 * y : 32 * (y + s), 32 * x : 32 * (x + s)]
            wanted = region.reshape(3, 32, s, 32, s).mean((2, 4))
            torch.testing.assert_close(from_patches(token, (2, 2)), wanted, rtol=0, atol=1e-6)


class TestTowerInputs:
    @given(sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=3), side=st.sampled_from([8, 48]))
    def test_all_cells_give_what_the_tower_computes_itself(self, model, sizes, side):
        grid = torch.tensor([[1, 2 * h, 2 * w] for h, w in sizes])
        got = tower_inputs([flat(h, w, 1) for h, w in sizes], sizes, side)
        visual = model.model.visual
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid, side, visual.interpolation_mode, visual.interpolation_align_corners, spatial_merge_size=2
        )
        # The table's last row may be reached as weight 1 on it or weight 0 beyond it: compare what is read.
        table = torch.eye(side * side)
        read = (table[got["interp_indices"]] * got["interp_weights"][..., None]).sum(1)
        wanted = (table[indices] * weights[..., None]).sum(1)
        torch.testing.assert_close(read, wanted, rtol=0, atol=1e-5)
        assert got["interp_indices"].dtype == indices.dtype and got["interp_weights"].dtype == weights.dtype
        assert torch.equal(got["position_ids"], get_vision_position_ids(grid, 2).float())
        cu_seqlens, _ = get_vision_attention_seqlens(grid, model.config.vision_config)
        assert torch.equal(got["cu_seqlens"], cu_seqlens) and got["cu_seqlens"].dtype == cu_seqlens.dtype
        assert got["max_seqlen"] == int(grid.prod(-1).max())

    @given(h=SIDES, w=SIDES, seed=st.integers(0, 999))
    def test_a_coarse_patch_reads_the_position_table_at_its_centre(self, h, w, seed):
        """On a table that holds its own coordinates, bilinear taps read a patch's place back."""
        allocation, side = mixed(h, w, seed=seed), 24
        got = tower_inputs([allocation], [(h, w)], side)
        table = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
        read = (table[got["interp_indices"]] * got["interp_weights"][..., None]).sum(1)
        size = torch.tensor([2 * h, 2 * w])
        wanted = places(allocation, h, w)[1].flatten(0, 1) / (size - 1) * (side - 1)
        torch.testing.assert_close(read, wanted, rtol=0, atol=1e-4)
        assert torch.equal(got["position_ids"], places(allocation, h, w)[1].flatten(0, 1))
        assert got["cu_seqlens"].tolist() == [0, 4 * len(allocation)] and got["max_seqlen"] == 4 * len(allocation)

    def test_the_tower_cannot_tell_given_inputs_from_its_own(self, model):
        inputs = make_inputs([[(5, 4, 0)], [(3, 6, 1)]])
        patches, grid, sizes = inputs["pixel_values"], inputs["image_grid_thw"], [(5, 4), (3, 6)]
        given_inputs = tower_inputs([flat(h, w, 1) for h, w in sizes], sizes, 8)
        own = model.model.visual(patches, grid_thw=grid).pooler_output
        torch.testing.assert_close(
            model.model.visual(patches, grid_thw=grid, **given_inputs).pooler_output, own, rtol=1e-5, atol=1e-5
        )


def test_pooling_after_the_tower_picks_rows_at_scale_1_and_averages_what_a_coarse_token_covers():
    features = torch.randn(5 * 6, 3, generator=torch.Generator().manual_seed(0))
    picked = torch.tensor([[1, 0, 3], [1, 4, 5]])
    assert torch.equal(pool_features(features, picked, 5, 6), features[[3, 29]])
    grid = features.reshape(5, 6, 3)
    for scale in (1, 2, 4):
        allocation = flat(5, 6, scale)
        wanted = torch.stack([grid[y : y + s, x : x + s].mean((0, 1)) for s, y, x in allocation.tolist()])
        torch.testing.assert_close(pool_features(features, allocation, 5, 6), wanted)


def shortened(model, inputs, allocations, sizes, pad=0):
    positions, _ = model.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        inputs.get("image_grid_thw"),
        attention_mask=inputs["attention_mask"],
    )
    short = shorten(
        inputs["input_ids"],
        inputs["attention_mask"],
        positions,
        inputs["input_ids"] == IMAGE,
        allocations,
        sizes,
        pad=pad,
    )
    return positions, short


class TestShorten:
    SAMPLES = [[[5, 6], (4, 6, 0), [7, 8]], [(3, 3, 1), [9], (8, 4, 2), [10, 11, 12]], [[13, 14]]]
    SIZES = [(4, 6), (3, 3), (8, 4)]

    @pytest.mark.parametrize("padding", ["left", "right"])
    def test_keeping_all_changes_nothing(self, model, padding):
        inputs = make_inputs(self.SAMPLES, padding)
        positions, short = shortened(model, inputs, [flat(h, w, 1) for h, w in self.SIZES], self.SIZES)
        real = inputs["attention_mask"].bool()
        assert torch.equal(short["input_ids"], inputs["input_ids"])
        assert torch.equal(short["attention_mask"], inputs["attention_mask"])
        assert short["position_ids"].dtype == torch.int64
        assert torch.equal(short["position_ids"][1:, real], positions[:, real])
        text = torch.cat([torch.arange(n) for n in real.sum(1).tolist()])
        assert torch.equal(short["position_ids"][0, real], text)

    @pytest.mark.parametrize("padding", ["left", "right"])
    def test_text_keeps_its_ids_and_positions_and_images_their_places(self, model, padding):
        inputs = make_inputs(self.SAMPLES, padding)
        allocations = [mixed(h, w, seed=i) for i, (h, w) in enumerate(self.SIZES)]
        assert any(int(a[:, 0].max()) > 1 for a in allocations)
        positions, short = shortened(model, inputs, allocations, self.SIZES)
        image = 0
        for row in range(3):
            real, valid = inputs["attention_mask"][row].bool(), short["attention_mask"][row].bool()
            ids, got = inputs["input_ids"][row, real], short["input_ids"][row, valid]
            assert got[got != IMAGE].tolist() == ids[ids != IMAGE].tolist()
            stock, new = positions[:, row, real], short["position_ids"][:, row, valid]
            assert torch.equal(new[1:, got != IMAGE], stock[:, ids != IMAGE].float())
            assert new[0].tolist() == list(range(len(got)))
            start, at = 0, 0
            while image < 3 and start < int((ids == IMAGE).sum()):
                h, w = self.SIZES[image]
                first = stock[:, ids == IMAGE][:, start].float()  # where stock puts the image's first cell
                n = len(allocations[image])
                here = new[1:, got == IMAGE][:, at : at + n]
                assert torch.equal(here[0], first[0].expand(n))
                assert torch.equal(here[1:], first[1:, None] + places(allocations[image], h, w)[0].T)
                start, at, image = start + h * w, at + n, image + 1
            assert at == int((got == IMAGE).sum())
        assert image == 3

    @pytest.mark.parametrize("padding", ["left", "right"])
    def test_padding_stays_on_its_side_and_kept_says_where_each_token_was(self, model, padding):
        inputs = make_inputs(self.SAMPLES, padding)
        _, short = shortened(model, inputs, [mixed(h, w) for h, w in self.SIZES], self.SIZES, pad=99)
        valid, kept = short["attention_mask"].bool(), short["kept"]
        assert valid.sum(1).max() == valid.shape[1]
        edge = valid if padding == "right" else valid.flip(1)
        assert bool((edge.long().diff(dim=1) <= 0).all())
        assert bool((short["input_ids"][~valid] == 99).all() and (kept[~valid] == -1).all())
        for row in range(3):
            columns = kept[row, valid[row]]
            assert bool((columns.diff() > 0).all())
            assert torch.equal(inputs["input_ids"][row, columns], short["input_ids"][row, valid[row]])

    def test_whole_places_stay_whole_numbers_and_centres_do_not(self, model):
        inputs = make_inputs([[(4, 4, 0), [5]]])
        for scale, dtype in ((1, torch.int64), (2, torch.float32)):
            assert shortened(model, inputs, [flat(4, 4, scale)], [(4, 4)])[1]["position_ids"].dtype == dtype
