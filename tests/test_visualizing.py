"""Pictures: their sizes, what they say exactly, and what they refuse."""

import numpy as np
import pytest
import torch
from PIL import Image

from arr_coc import sheets, visualizing
from arr_coc.visualizing import (
    heat,
    homunculus,
    relevance_overlay,
    score_maps,
    summary,
    tension_bars,
    what_the_model_sees,
)

RNG = np.random.default_rng(0)
MAPS = {
    "propositional": RNG.random((2, 3)),
    "perspectival": torch.eye(2, 3).bfloat16(),
    "participatory": [[0.5] * 3] * 2,
}
TENSIONS = {"compress↔particularize": 0.7, "exploit↔explore": torch.tensor(0.2), "focus↔diversify": 0.5}
ALL_FINE = [(1, y, x) for y in range(2) for x in range(3)]


def photo(width=96, height=64):
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels(image):
    return np.asarray(image).astype(float)


class TestHeat:
    def test_lighter_with_every_step(self):
        luma = heat(np.linspace(0, 1, 101)) @ (0.299, 0.587, 0.114)
        assert (np.diff(luma) > 0).all() and luma[0] < 30 and luma[-1] > 200

    def test_cardinality(self):
        assert heat(RNG.random((4, 5))).shape == (4, 5, 3)


class TestRelevanceOverlay:
    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "1"])
    def test_cardinality(self, mode):
        picture = relevance_overlay(photo(90, 50).convert(mode), torch.rand(3, 5).bfloat16())
        assert picture.size == (90, 50) and picture.mode == "RGB"

    def test_flat_by_hand(self):
        grey = Image.new("RGB", (8, 8), (100, 100, 100))
        picture = pixels(relevance_overlay(grey, np.ones((2, 2)), alpha=0.5))
        assert np.allclose(picture, 50 + heat(1.0) / 2, atol=1)
        assert np.allclose(pixels(relevance_overlay(grey, np.ones((2, 2)), alpha=0)), 100, atol=1)

    def test_what_is_relevant_glows(self):
        picture = pixels(relevance_overlay(Image.new("RGB", (64, 64), (120,) * 3), [[0, 1], [0, 0]]))
        assert picture[8, 56].sum() > picture[56, 8].sum() + 200


class TestWhatTheModelSees:
    def test_every_cell_at_scale_1_is_the_image(self):
        image = photo()
        assert np.array_equal(what_the_model_sees(image, ALL_FINE, (2, 3)), image)
        other = photo(70, 50)
        resized = other.resize((96, 64), Image.Resampling.BICUBIC)
        assert np.array_equal(what_the_model_sees(other, torch.tensor(ALL_FINE), (2, 3)), resized)

    def test_scale_2_by_hand(self):
        """Vertical one-pixel stripes of 0 and 200 become flat 100 where they are shown at scale 2."""
        stripes = np.zeros((64, 128, 3), np.uint8)
        stripes[:, ::2] = 200
        picture = pixels(what_the_model_sees(Image.fromarray(stripes), [(2, 0, 0), (1, 0, 2)], (2, 4)))
        assert (picture[:, :64] == 100).all()
        assert (picture[:32, 64:96] == stripes[:32, 64:96]).all()

    def test_what_no_token_covers_is_faint(self):
        image = photo()
        picture = pixels(what_the_model_sees(image, [(1, 0, 0)], (2, 3)))
        assert np.array_equal(picture[:32, :32], pixels(image)[:32, :32])
        hidden = picture[32:, 32:]
        assert hidden.min() > 150 and hidden.std() < pixels(image).std() / 3
        assert (hidden == hidden[..., :1]).mean() < 1.01 and len(np.unique(hidden)) > 2

    def test_finer_lies_on_coarser_in_any_order(self):
        image = photo()
        one = what_the_model_sees(image, [(1, 0, 1), (2, 0, 0)], (2, 3))
        assert np.array_equal(one, what_the_model_sees(image, [(2, 0, 0), (1, 0, 1)], (2, 3)))
        assert np.array_equal(pixels(one)[:32, 32:64], pixels(image)[:32, 32:64])

    def test_a_token_may_reach_beyond_the_grid(self):
        assert what_the_model_sees(photo(), [(4, 0, 0)], (2, 3)).size == (96, 64)


class TestHomunculus:
    def test_density_by_hand(self):
        density = visualizing._density(np.array([(2, 0, 0), (1, 0, 2), (4, 1, 2)]), (2, 3))
        assert density.tolist() == [[0.25, 0.25, 1], [0.25, 0.25, 0.0625]]

    def test_even_density_warps_nothing(self):
        ramp = Image.fromarray(np.linspace(0, 255, 560).astype(np.uint8)[None].repeat(560, 0)).convert("RGB")
        warped = pixels(visualizing._warp(ramp, np.ones((4, 4))))
        away = np.abs(warped - pixels(ramp))[..., 0]
        assert np.median(away) <= 1  # but for the cells' lines

    def test_places_with_tokens_grow(self):
        """The left half is dark and holds all tokens: it takes more than half of the picture."""
        half = np.full((128, 128, 3), 255, np.uint8)
        half[:, :64] = 0
        tokens = np.array([(1, y, x) for y in range(4) for x in range(2)])
        warped = pixels(visualizing._warp(Image.fromarray(half), visualizing._density(tokens, (4, 4))))
        assert 0.6 < (warped < 128).mean() < 0.95

    @pytest.mark.parametrize("tokens", [ALL_FINE, [], [(4, 0, 0)], np.zeros((0, 3))])
    def test_smoke(self, tokens):
        picture = homunculus(photo(), tokens, (2, 3))
        assert picture.mode == "RGB" and picture.width > picture.height

    def test_one_cell(self):
        assert homunculus(photo(32, 32), [(1, 0, 0)], (1, 1)).mode == "RGB"


class TestTensionBars:
    def test_the_knob_moves_right(self):
        accent = np.array(visualizing.SCALE_COLOURS[1])

        def knob(v):
            return np.nonzero((pixels(tension_bars({"a↔b": v})) == accent).all(-1))[1].mean()

        places = [knob(v) for v in (0, 0.25, 0.5, 0.75, 1)]
        assert places == sorted(places) and np.allclose(np.add(places, places[::-1]), 2 * places[2], atol=2)

    def test_cardinality(self):
        one, three = tension_bars({"a↔b": 0.5}), tension_bars(TENSIONS)
        assert one.width == three.width and three.height - one.height == 2 * (one.height - 8)


class TestSheets:
    def test_a_panel_for_every_map(self):
        widths = [score_maps(photo(), dict(list(MAPS.items())[:n])).width for n in (1, 2, 3)]
        assert widths[1] - widths[0] == widths[2] - widths[1] > 500

    @pytest.mark.parametrize("size", [(96, 64), (2000, 40), (30, 900)])
    def test_summary(self, size):
        answers = {"stock": "a long answer " * 40, "ARR-COC": "", "ünïcode": "看\nα"}
        sheet = summary(
            photo(*size), "what? " * 30, answers, MAPS["propositional"], MAPS, ALL_FINE, (2, 3), TENSIONS, "é"
        )
        assert sheet.mode == "RGB" and sheet.width > 1600
        assert pixels(sheet)[[0, -1]].min() > 240  # nothing runs out of the page

    def test_summary_of_nothing(self):
        assert summary(photo(), "", {}, np.zeros((2, 3)), {}, [], (2, 3), {}).mode == "RGB"

    def test_deterministic_and_leaves_the_image_alone(self):
        image = photo()
        before = image.tobytes()
        call = (image, "q", {"a": "b"}, MAPS["propositional"], MAPS, ALL_FINE, (2, 3), TENSIONS)
        assert summary(*call).tobytes() == summary(*call).tobytes() and image.tobytes() == before

    @pytest.mark.parametrize("width", [30, 100, 400])
    def test_wrapped_lines_fit_and_lose_nothing(self, width):
        text, font = "the quick  brown " + "x" * 90 + " jumps\nover\n\nit", sheets.font_for(24)
        lines = sheets.wrap(text, font, width)
        assert "".join("".join(lines).split()) == "".join(text.split())
        assert all(font.getlength(line) <= width for line in lines) and "" in lines


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: relevance_overlay("a.png", [[0.5]]), "pass a PIL image"),
        (lambda: relevance_overlay(photo(), [0.5]), r"relevance is \[1\]: pass \[h, w\]"),
        (lambda: relevance_overlay(photo(), [[1.5]]), r"numbers in \[0, 1\]"),
        (lambda: relevance_overlay(photo(), [[np.nan]]), r"numbers in \[0, 1\]"),
        (lambda: score_maps(photo(), {}), "maps is empty: pass"),
        (lambda: score_maps(photo(), {"glance": [[-1.0]]}), r"glance is \[1, 1\]: pass"),
        (lambda: what_the_model_sees(photo(), [(1, 2, 0)], (2, 3)), r"allocation holds \[1.0, 2.0, 0.0\]: pass whole"),
        (lambda: what_the_model_sees(photo(), [(0, 0, 0)], (2, 3)), "allocation holds"),
        (lambda: what_the_model_sees(photo(), [(1, 0.5, 0)], (2, 3)), "allocation holds"),
        (lambda: homunculus(photo(), [(1, 0)], (2, 3)), r"allocation is \[1, 2\] .* pass \(N, 3\)"),
        (lambda: homunculus(photo(), [(1, 0, 0)], (0, 3)), "grid 0x3"),
        (lambda: tension_bars({"compress": 0.5}), "pass 'left↔right'"),
        (lambda: tension_bars({"a↔b": float("nan")}), r"value in \[0, 1\]"),
        (lambda: tension_bars({}), "tensions is empty: pass"),
    ],
)
def test_exception(call, says):
    with pytest.raises(ValueError, match=says):
        call()
