"""Bad input: one clear ValueError that names the input and the mend, before the tower or the language model has run."""

import numpy as np
import pytest
import torch
from conftest import IM_START, IMAGE, NEXT_TURN, counted, make_inputs, make_model
from transformers.cache_utils import DynamicCache

from arr_coc.configuration_arr_coc import check_budget

CALLS = pytest.mark.parametrize("call", ["perceive", "forward", "generate"])


@pytest.fixture
def inputs():
    return make_inputs([[(3, 4, 0), [5, 6]], [(4, 2, 1), [7], (2, 2, 2), [8]]])


def refused(model, call, inputs, message, **kwargs):
    """Calls the model as a user would, and sees it refuse before it works."""
    run = model if call == "forward" else getattr(model, call)
    with counted(model) as runs, pytest.raises(ValueError, match=message):
        run(**inputs, **({"num_visual_tokens": 3} | kwargs if "perception" not in kwargs else kwargs))
    assert runs == {"tower": 0, "layers": 0}


NOT_BUDGETS = [0, -1, 1.5, -0.2, 0.0, "many", "200", True, False, float("nan"), float("inf"), {}, 1j, np.float32(2)]


class TestBudgets:
    @pytest.mark.parametrize("budget", NOT_BUDGETS, ids=repr)
    def test_what_is_no_budget(self, budget):
        with pytest.raises(
            ValueError, match=r"num_visual_tokens=.* positive whole number.*\(0, 1\].*\"auto\" or \"all\""
        ):
            check_budget(budget)

    @pytest.mark.parametrize(
        "budget, meant",
        [(1, 1), (np.int64(7), 7), (1.0, 1.0), (np.float64(0.5), 0.5), ("auto", "auto"), ("all", "all")],
    )
    def test_what_is_one(self, budget, meant):
        assert check_budget(budget) == meant and type(check_budget(budget)) is type(meant)

    @CALLS
    @pytest.mark.parametrize("budget", [0, 1.5, "many", True, float("nan")], ids=repr)
    def test_refused_by_every_call(self, model, inputs, call, budget):
        refused(model, call, inputs, f"num_visual_tokens={budget!r} is not a budget", num_visual_tokens=budget)

    @CALLS
    @pytest.mark.parametrize("budgets", [[], [3], [3, 4], (3, 4, 5, 6)], ids=repr)
    def test_a_list_needs_one_for_each_image(self, model, inputs, call, budgets):
        message = f"num_visual_tokens has {len(budgets)} budgets for 3 images.*one for each"
        refused(model, call, inputs, message, num_visual_tokens=budgets)

    @CALLS
    def test_a_list_is_checked_to_its_end(self, model, inputs, call):
        refused(model, call, inputs, r"num_visual_tokens\[2\]=0 is not a budget", num_visual_tokens=[3, "all", 0])

    @pytest.mark.parametrize("call", ["perceive", "generate"])
    @pytest.mark.parametrize("budget, message", [(0, "=0 is not a budget"), ([5], "1 budgets for 0 images")])
    def test_refused_beside_text_alone_too(self, model, call, budget, message):
        refused(model, call, make_inputs([[[5, 6]]]), message, num_visual_tokens=budget)

    @pytest.mark.parametrize("budget", [0, "many", 1.5, True])
    def test_one_put_into_the_config_later_is_refused_when_used(self, inputs, budget):
        model = make_model()
        model.config.__dict__["num_visual_tokens"] = budget
        refused(model, "generate", inputs, "is not a budget", num_visual_tokens=None)


class TestImagesAndPlaceholders:
    @CALLS
    @pytest.mark.parametrize("drop", [slice(0, 1), slice(2, 3)])
    def test_an_image_is_missing(self, model, inputs, call, drop):
        grid = inputs["image_grid_thw"]
        kept = torch.tensor([i not in range(3)[drop] for i in range(3)])
        rows = torch.repeat_interleave(kept, grid.prod(-1))
        inputs |= {"image_grid_thw": grid[kept], "pixel_values": inputs["pixel_values"][rows]}
        refused(model, call, inputs, "24 image placeholders for 2 images with (12|20) cells.*every image.*no other")

    @CALLS
    def test_an_image_is_left_over(self, model, inputs, call):
        more = make_inputs([[(1, 1, 9)]])
        inputs |= {k: torch.cat([inputs[k], more[k]]) for k in ("pixel_values", "image_grid_thw")}
        refused(model, call, inputs, "24 image placeholders for 4 images with 25 cells")

    @CALLS
    def test_images_in_another_order(self, model, inputs, call):
        pixels = inputs["pixel_values"].split(inputs["image_grid_thw"].prod(-1).tolist())
        inputs |= {"pixel_values": torch.cat(pixels[::-1]), "image_grid_thw": inputs["image_grid_thw"].flip(0)}
        refused(model, call, inputs, "in the images' order")

    @CALLS
    def test_a_placeholder_typed_into_the_question(self, model, call):
        inputs = make_inputs([[(3, 4, 0), [5, IMAGE, 6]]])
        refused(model, call, inputs, "13 image placeholders for 1 images with 12 cells.*sanitize_control_tokens=True")

    @CALLS
    def test_a_typed_placeholder_that_makes_the_sum_right(self, model, call):
        inputs = make_inputs([[(3, 4, 0), [5, IMAGE, 6]]])
        ids = inputs["input_ids"]
        ids[0, (ids[0] == IMAGE).nonzero()[0]] = 5  # one of the image's own is gone
        refused(model, call, inputs, "one run for each image.*typed into a question")

    @CALLS
    def test_pixels_without_their_grid(self, model, inputs, call):
        inputs.pop("image_grid_thw")
        refused(model, call, inputs, "pixel_values came without image_grid_thw: pass both")

    @pytest.mark.parametrize("call", ["perceive", "generate"])  # in `forward` a decoding step looks like this
    def test_a_grid_without_its_pixels(self, model, inputs, call):
        inputs.pop("pixel_values")
        refused(model, call, inputs, "image_grid_thw came without pixel_values: pass both")

    @CALLS
    def test_pixels_of_another_size(self, model, inputs, call):
        inputs["pixel_values"] = inputs["pixel_values"][:-4]
        refused(model, call, inputs, "pixel_values has 92 rows, image_grid_thw asks for 96")

    @CALLS
    @pytest.mark.parametrize("grid", [[2, 6, 4], [1, 3, 16], [1, 48, 1], [1, 0, 8]])
    def test_a_grid_that_is_no_still_image(self, model, inputs, call, grid):
        inputs["image_grid_thw"] = torch.tensor([grid, *inputs["image_grid_thw"][1:].tolist()])
        refused(model, call, inputs, "image_grid_thw holds .*a still image's is")

    @CALLS
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_pixels_that_are_no_numbers(self, model, inputs, call, value):
        inputs["pixel_values"][-1, 7] = value  # in the last image of three
        refused(model, call, inputs, "pixel_values hold NaN or infinite values: repair")

    @pytest.mark.parametrize("call", ["forward", "generate"])
    def test_pixels_that_are_no_numbers_though_nothing_is_chosen(self, model, inputs, call):
        with torch.no_grad():
            p = model.perceive(**inputs, num_visual_tokens=3)
        inputs["pixel_values"][0, 0] = torch.nan
        for given in ({"num_visual_tokens": "all"}, {"perception": p}):
            refused(model, call, inputs, "pixel_values hold NaN or infinite values: repair", **given)


class TestPerceptions:
    @pytest.mark.parametrize("call", ["forward", "generate"])
    def test_beside_a_budget(self, model, inputs, call):
        with torch.no_grad():
            p = model.perceive(**inputs, num_visual_tokens=3)
        message = "num_visual_tokens came beside a perception.*pass one of them"
        refused(model, call, inputs, message, perception=p, num_visual_tokens=5)

    @pytest.mark.parametrize("call", ["forward", "generate"])
    @pytest.mark.parametrize("other", [[[(3, 4, 0), [5]]], [[(3, 4, 0), (4, 2, 1), (2, 3, 2)]], [[[5]]]], ids=str)
    def test_of_other_images(self, model, inputs, call, other):
        with torch.no_grad():
            p = model.perceive(**make_inputs(other), num_visual_tokens=3)
        refused(model, call, inputs, "perception is of images with grids .*`perceive` returned for these", perception=p)

    @pytest.mark.parametrize("call", ["forward", "generate"])
    @pytest.mark.parametrize("rows", [[[1, 3, 0]], [[1, 0, 4]], [[1, -1, 0]], [[0, 0, 0]], [[1, 0, 0]] * 13, []])
    def test_that_was_changed_to_what_is_no_allocation(self, model, inputs, call, rows):
        with torch.no_grad():
            p = model.perceive(**inputs, num_visual_tokens=3)
        p.allocation[0] = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
        message = r"perception.allocation does not fit an image of 3x4 cells.*\(scale, y, x\)"
        refused(model, call, inputs, message, perception=p)


class TestCaches:
    @pytest.mark.parametrize("budget", [3, "auto", 1.0])
    def test_a_cache_that_holds_tokens(self, model, inputs, budget):
        cache = DynamicCache(config=model.config.text_config)
        model.generate(**make_inputs([[[5]], [[6]]]), past_key_values=cache, max_new_tokens=1)
        message = 'past_key_values already holds tokens.*num_visual_tokens="all"'
        refused(model, "generate", inputs, message, num_visual_tokens=budget, past_key_values=cache)

    def test_a_cache_of_chosen_tokens_asked_on_without_pixels(self, model):
        """Its length is not the prompt's: the words after it would be taken for others."""
        inputs, cache = make_inputs([[(6, 6, 0), [5, 6]]]), DynamicCache(config=model.config.text_config)
        out = model.generate(**inputs, num_visual_tokens=6, past_key_values=cache, max_new_tokens=2)
        again = {"input_ids": torch.cat([out, torch.tensor([NEXT_TURN + [7]])], 1)}
        refused(model, "generate", again, "past_key_values already holds tokens", past_key_values=cache)


def test_a_prompt_that_is_no_chat_is_asked_as_a_whole(model):
    """Not refused: a base model's plain prompt has no turns, so all of its text is the question."""
    inputs = make_inputs([[(3, 4, 0), [5, 6]]])
    plain = inputs["input_ids"].clone()
    plain[plain == IM_START] = 7
    with torch.no_grad():
        p = model.perceive(**inputs | {"input_ids": plain}, num_visual_tokens=3)
    assert p.participatory[0].std() > 0 and len(p.allocation[0]) >= 1
