"""Pixels to channels: the patch layout against the image processor, the channels against hand-computed cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arr_coc.patches import from_patches, to_patches, to_pixels
from arr_coc.texture import CHANNELS, GROUPS, channel_names, detail, texture

ALL = tuple(GROUPS)
RANGES = {channel.name: (channel.low, channel.high) for channel in CHANNELS}


def noise(height, width, seed=0, dtype=torch.float32):
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def channel(pixels, name, groups=(), **others):
    return texture(pixels, 32, groups, **others)[channel_names(groups).index(name)]


class TestPatches:
    @settings(deadline=None, max_examples=30)
    @given(
        h=st.integers(1, 4),
        w=st.integers(1, 4),
        patch=st.sampled_from([2, 7, 16]),
        frames=st.integers(1, 3),
        merge=st.integers(1, 3),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    )
    def test_round_trip(self, h, w, patch, frames, merge, dtype):
        layout = {"patch_size": patch, "temporal_patch_size": frames, "merge_size": merge}
        pixels = noise(h * merge * patch, w * merge * patch).to(dtype)
        patches = to_patches(pixels, **layout)
        assert patches.shape == (h * w * merge**2, 3 * frames * patch**2) and patches.dtype == dtype
        again = from_patches(patches, (h * merge, w * merge), **layout)
        if frames == 3:  # a mean of three equal numbers may round
            torch.testing.assert_close(again, pixels, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
        else:
            assert torch.equal(again, pixels)
            assert torch.equal(to_patches(again, **layout), patches)

    @pytest.mark.parametrize("size", [(64, 96), (32, 32), (160, 64)])
    def test_layout_is_the_image_processor_s(self, size):
        from PIL import Image
        from transformers import Qwen2VLImageProcessor

        processor = Qwen2VLImageProcessor(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_resize=False)
        pixels = (noise(*size) * 255).round().byte()
        batch = processor(Image.fromarray(pixels.permute(1, 2, 0).numpy()), return_tensors="pt")
        patches, (grid,) = batch["pixel_values"], batch["image_grid_thw"]
        again = to_pixels(patches, grid)
        assert again.shape == (1, 3, *size)
        torch.testing.assert_close(again[0], pixels / 255, atol=1e-6, rtol=0)
        torch.testing.assert_close(to_patches(again[0] * 2 - 1), patches, atol=1e-6, rtol=0)

    def test_dtype(self):
        pixels = noise(32, 64)
        again = to_pixels((to_patches(pixels) * 2 - 1).bfloat16(), (1, 2, 4))
        assert again.dtype == torch.float32
        torch.testing.assert_close(again[0], pixels, atol=2**-8, rtol=0)

    @pytest.mark.parametrize("frames", [1, 2])
    def test_the_rows_stay_as_they_were(self, frames):
        layout = {"patch_size": 16, "temporal_patch_size": frames, "merge_size": 1}
        patches = to_patches(noise(16, 16), **layout)  # a single patch: laid out, it is the same memory
        before = patches.clone()
        from_patches(patches, (1, 1), **layout)
        to_pixels(patches, (1, 1, 1), **layout)
        assert torch.equal(patches, before)

    def test_frames_stay_apart(self):
        clip = torch.stack([noise(32, 64, seed) for seed in (1, 2)])
        patches = torch.cat([to_patches(frame) * 2 - 1 for frame in clip])
        torch.testing.assert_close(to_pixels(patches, (2, 2, 4)), clip)

    def test_gradcheck(self):
        layout = {"patch_size": 2, "merge_size": 2}
        pixels = noise(4, 8, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: to_patches(x, **layout), pixels)
        patches = to_patches(pixels, **layout).detach().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: from_patches(x, (2, 4), **layout), patches)

    @pytest.mark.parametrize(
        ("call", "says"),
        [
            (lambda: to_patches(noise(32, 40)), "multiples of 32"),
            (lambda: to_patches(noise(32, 32)[None]), r"\[C, H, W\]"),
            (lambda: from_patches(torch.zeros(4, 1536), (2, 4)), r"pass \[8"),
            (lambda: from_patches(torch.zeros(4, 1000), (2, 2)), r"channels \* 2 \* 16 \* 16"),
            (lambda: from_patches(torch.zeros(3, 1536), (1, 3)), "multiples of 2"),
            (lambda: to_pixels(torch.zeros(4, 1536), (1, 4, 4)), "16 rows"),
            (lambda: to_pixels(torch.zeros(4, 512), (1, 2, 2)), "convert the image to RGB"),
            (lambda: to_pixels(torch.full((4, 1536), torch.nan), (1, 2, 2)), "pixel_values hold NaN"),
            (lambda: to_pixels(torch.full((4, 1536), torch.inf), (1, 2, 2)), "pixel_values hold NaN"),
        ],
    )
    def test_exception(self, call, says):
        with pytest.raises(ValueError, match=says):
            call()


class TestTexture:
    @pytest.mark.parametrize("groups", [(), *[(g,) for g in ALL], ALL])
    def test_cardinality(self, groups):
        names = channel_names(groups)
        assert texture(noise(64, 96), 32, groups).shape == (len(names), 2, 3)
        assert len(set(names)) == len(names) == 13 + sum(len(GROUPS[g]) for g in groups)

    def test_there_are_thirteen_or_forty(self):
        assert len(channel_names()) == 13 and len(channel_names(ALL)) == 40 == len(CHANNELS)
        assert len(GROUPS["semantic"]) == 16

    @pytest.mark.parametrize("cell", [8, 16, 24, 28, 32, 64])
    def test_any_cell(self, cell):
        assert texture(noise(2 * cell, 3 * cell), cell, ALL).isfinite().all()

    @settings(deadline=None, max_examples=20)
    @given(h=st.integers(1, 3), w=st.integers(1, 3), seed=st.integers(0, 99), steps=st.sampled_from([1, 2, 255]))
    def test_ranges(self, h, w, seed, steps):
        pixels, before = ((noise(32 * h, 32 * w, seed + i) * steps).round() / steps for i in range(2))
        pixels[:, ::4] = pixels[:, ::4].round()
        for name, values in zip(channel_names(ALL), texture(pixels, 32, ALL, previous=before), strict=True):
            low, high = RANGES[name]
            assert low - 1e-5 <= values.min() and values.max() <= high + 1e-5, name

    def test_flat_image_by_hand(self):
        array = dict(zip(channel_names(ALL), texture(torch.full((3, 64, 64), 0.5), 32, ALL), strict=True))
        for name, values in array.items():
            expected = {
                "red": 0.5,
                "green": 0.5,
                "blue": 0.5,
                "luminance": 0.5,
                "lightness": 0.5339,
                "colour_name": 0.1,
            }
            if name not in ("x", "y", "eccentricity"):
                torch.testing.assert_close(values, torch.full((2, 2), expected.get(name, 0.0)), atol=2e-4, rtol=0)
        assert array["x"].tolist() == [[0.25, 0.75]] * 2 and array["y"].tolist() == [[0.25] * 2, [0.75] * 2]
        torch.testing.assert_close(array["eccentricity"], torch.full((2, 2), 0.5))

    def test_step_edge_by_hand(self):
        """Black left of the middle of the second of three cells, white right of it."""
        pixels = torch.zeros(3, 32, 96)
        pixels[:, :, 48:] = 1
        array = dict(zip(channel_names(ALL), texture(pixels, 32, ALL)[:, 0], strict=True))
        close = {
            "red": [0, 0.5, 1],
            "lightness": [0, 0.5, 1],
            "edge_x": [0, 1, 0],
            "edge_y": [0, 0, 0],
            "edges": [0, 0.0625 / 0.1625, 0],  # two of 16 columns at 1/2
            "variance": [0, 1, 0],
            "strokes": [0, 0, 0],  # an edge is no stroke
            "colour_name": [0, 0.1, 0.2],  # black, grey, white
        }
        for name, expected in close.items():
            torch.testing.assert_close(array[name], torch.tensor(expected).float(), atol=1e-4, rtol=0, msg=name)
        assert array["saliency"][1] > 0.3 and array["faint_edges"][1] > 0

    def test_transposed_image_swaps_the_axes(self):
        pixels = noise(64, 96)
        one, other = texture(pixels), texture(pixels.mT).mT
        names = list(channel_names())
        for a, b in (("edge_x", "edge_y"), ("x", "y")):
            i, j = names.index(a), names.index(b)
            other[[i, j]] = other[[j, i]]
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)

    def test_colour_axes(self):
        green, red, blue, yellow = (torch.tensor(c).float() for c in ([0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 1, 0]))
        pixels = torch.cat([c[:, None, None].expand(3, 32, 32) for c in (green, red, blue, yellow)], 2)
        lab = channel(pixels, "red_green")[0], channel(pixels, "blue_yellow", ("opponency",))[0]
        assert lab[0][0] < -0.5 < 0.5 < lab[0][1] and lab[1][2] < -0.5 < 0.5 < lab[1][3]

    def test_what_pops_out_is_salient(self):
        pixels = torch.full((3, 224, 224), 0.5)
        pixels[0, 96:128, 96:128] = 1
        for name in ("saliency", "surround_fine", "surround_coarse", "colour_contrast"):
            values = channel(pixels, name, ("surround", "cluster"))
            assert values.argmax() == 24 and values[3, 3] > values[0, 0] + 0.2, name

    def test_faint_text_counts_as_bold_text_does(self):
        bold = torch.ones(3, 32, 32)
        bold[:, ::6, 4:28] = 0
        faint = 0.9 + 0.1 * bold
        for name, ratio in (("faint_edges", 0.8), ("strokes", 0.05)):
            groups = ("edges", "text")
            assert channel(faint, name, groups) > ratio * channel(bold, name, groups) > 0, name

    def test_motion_is_where_pixels_changed(self):
        before = noise(64, 64)
        now = before.clone()
        now[:, :32, :32] = 1 - now[:, :32, :32]
        moved = channel(now, "motion", ("previous",), previous=before)
        assert moved[0, 0] > 0.5 and moved.flatten()[1:].tolist() == [0, 0, 0]
        assert not channel(now, "motion", ("previous",)).any()

    def test_given_channels_pass_through(self):
        relevance, semantic = noise(2, 3)[0], noise(16, 6).view(-1, 2, 3)[:16]
        groups = ("previous", "semantic")
        array = texture(noise(64, 96), 32, groups, previous_relevance=relevance, semantic=semantic.bfloat16())
        assert torch.equal(array[14], relevance) and torch.equal(array[15:], semantic.bfloat16().float())

    def test_deterministic_and_blind_to_dtype(self):
        pixels = noise(64, 64).bfloat16()
        assert torch.equal(texture(pixels, 32, ALL), texture(pixels.float(), 32, ALL))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(texture(pixels, 32, ALL), texture(pixels.float(), 32, ALL))
        assert texture(pixels).dtype == torch.float32

    def test_another_image_beside_changes_nothing_far_away(self):
        """Every filter reaches 7 cells at most (`surround_coarse`), so cells further from the seam stay as they are."""
        here, there = noise(64, 12 * 32), noise(64, 8 * 32, 1) ** 4
        names = channel_names(ALL)
        local = [i for i, n in enumerate(names) if n not in ("x", "eccentricity", "colour_contrast")]
        alone, beside = texture(here, 32, ALL)[local], texture(torch.cat([here, there], 2), 32, ALL)[local]
        torch.testing.assert_close(beside[:, :, :5], alone[:, :, :5], atol=1e-5, rtol=0)
        torch.testing.assert_close(detail(torch.cat([here, there], 2))[:, :, :11], detail(here)[:, :, :11])

    def test_gradcheck(self):
        pixels = noise(8, 8, dtype=torch.float64) * 0.8 + 0.1
        smooth = [channel_names().index(n) for n in ("red", "lightness", "red_green", "edges", "luminance")]
        assert torch.autograd.gradcheck(lambda x: texture(x, 8)[smooth], pixels.requires_grad_(), atol=1e-4)

    def test_gradients_are_finite_on_a_flat_image(self):
        pixels = torch.full((3, 64, 64), 0.5, requires_grad=True)
        (texture(pixels, 32, ALL).sum() + detail(pixels).sum()).backward()
        assert pixels.grad.isfinite().all()

    @pytest.mark.parametrize(
        ("call", "says"),
        [
            (lambda: texture(noise(32, 33)), "multiples of 32"),
            (lambda: texture(noise(32, 32)[:1]), r"\[3, H, W\]"),
            (lambda: texture(torch.zeros(3, 0, 32)), "resize or pad"),
            (lambda: texture(noise(32, 32) * 255), r"scale them to \[0, 1\]"),
            (lambda: texture(noise(32, 32).log() * torch.inf), "pixels hold NaN"),
            (lambda: texture(noise(32, 32), 32, ("edgy",)), "choose from edges, local"),
            (lambda: texture(noise(32, 32), 32, "edges"), "choose from edges, local"),
            (lambda: texture(noise(32, 32), 32, ALL, previous=noise(32, 64)), "previous is .* same size"),
            (lambda: texture(noise(32, 32), 32, ALL, previous_relevance=torch.ones(2, 2)), r"pass \[1, 1\]"),
            (lambda: texture(noise(32, 32), 32, ALL, semantic=torch.ones(3, 1, 1)), r"pass \[16, 1, 1\]"),
            (lambda: detail(noise(32, 32), 32, (4, 2)), "growing order"),
            (lambda: detail(noise(32, 32), 32, (1, 2)), "from 2 on"),
            (lambda: detail(noise(48, 32)), "multiples of 32"),
        ],
    )
    def test_exception(self, call, says):
        with pytest.raises(ValueError, match=says):
            call()


class TestDetail:
    @settings(deadline=None, max_examples=20)
    @given(
        h=st.integers(1, 3),
        w=st.integers(1, 3),
        seed=st.integers(0, 99),
        scales=st.sampled_from([(2, 4), (2, 3, 8), (5,)]),
    )
    def test_range_and_monotone(self, h, w, seed, scales):
        lost = detail(noise(32 * h, 32 * w, seed), 32, scales)
        assert lost.shape == (len(scales), h, w)
        assert lost.min() >= 0 and lost.max() < 1 and (lost.diff(dim=0) >= 0).all()

    def test_never_falls_where_the_residual_would(self):
        """Four-pixel stripes on a four-pixel raster survive scale 4 better than scale 3."""
        stripes = ((torch.arange(96) + 8) % 12 < 4).float().expand(3, 96, 96)
        three, four = detail(stripes, 96, (3, 4))
        assert detail(stripes, 96, (4,)) < three == four

    def test_flat_and_coarse_lose_nothing(self):
        assert detail(torch.full((3, 32, 64), 0.3)).max() < 1e-6
        ramp = torch.linspace(0, 1, 64).expand(3, 64, 64)
        assert detail(ramp).max() < 0.15  # bilinear enlargement gives a ramp back, but for the border

    def test_checkerboard_by_hand(self):
        """A one-pixel checkerboard becomes flat grey at scale 2: every pixel is off by one half."""
        pixels = torch.zeros(3, 32, 64)
        pixels[:, ::2, :32:2] = pixels[:, 1::2, 1:32:2] = 1
        pixels[:, :, 32:] = 0.5
        lost = detail(pixels)
        torch.testing.assert_close(lost, torch.tensor([[[0.5 / 0.53, 0.0]]] * 2), atol=1e-4, rtol=0)

    def test_colour_counts_as_grey_does(self):
        """Red and green of equal luma, in one-pixel columns."""
        pixels = torch.zeros(3, 32, 32)
        pixels[0, :, ::2], pixels[1, :, 1::2] = 0.587, 0.299
        assert detail(pixels).min() > 0.6

    def test_nine_pixel_text_is_lost(self):
        from PIL import Image, ImageDraw, ImageFont

        page = Image.new("L", (128, 64), 255)
        for y in range(2, 60, 12):
            ImageDraw.Draw(page).text((4, y), "the quick brown fox jumps over", 0, ImageFont.load_default(9))
        pixels = torch.tensor(list(page.tobytes())).view(1, 64, 128).expand(3, -1, -1) / 255
        assert detail(pixels)[0].min() > 0.4

    def test_gradcheck(self):
        pixels = noise(8, 8, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: detail(x, 8), pixels, atol=1e-4)
