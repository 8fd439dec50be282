"""The configuration: every field documented and checked, and the same after a trip to disk."""

import dataclasses
import json
import re

import pytest
import torch
from conftest import make_config, make_inputs, make_model
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from arr_coc import ArrCocConfig
from arr_coc.texture import GROUPS, channel_names

OWN = [f for f in ArrCocConfig.__dataclass_fields__ if f not in Qwen3VLConfig.__dataclass_fields__]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_every_field_of_its_own_is_documented():
    heads = [line for line in ArrCocConfig.__doc__.splitlines() if re.match(r"    \w+.*\(`", line)]
    named = {name for line in heads for name in re.findall(r"\w+", re.sub(r"\([^)]*\)", " ", line))}
    assert len(OWN) > 20 and set(OWN) - named == set()


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_visual_tokens", 0, "num_visual_tokens=0 is not a budget"),
        ("num_visual_tokens", 1.5, "is not a budget"),
        ("num_visual_tokens", "many", "is not a budget"),
        ("num_visual_tokens", True, "num_visual_tokens"),
        ("num_visual_tokens", [3], "num_visual_tokens"),
        ("min_visual_tokens", 0, "min_visual_tokens=0 .* 0 < min <= max"),
        ("min_visual_tokens", 401, "max_visual_tokens=400 are not a range"),
        ("auto_coverage", 0.0, r"auto_coverage=0.0 must lie in \(0, 1\]"),
        ("auto_coverage", 1.1, "auto_coverage=1.1"),
        ("allocator", "best", "allocator='best' must be one of 'lod', 'topk'"),
        ("realize", "during", "realize='during' must be one of"),
        ("participatory", "eyes", "participatory='eyes' must be one of"),
        ("weights_normalisation", "l2", "weights_normalisation='l2' must be one of"),
        ("place", "middle", "place='middle' must be one of"),
        ("topk_neighbourhood", -0.1, "topk_neighbourhood=-0.1 must not be negative"),
        ("texture_groups", ["taste"], r"texture_groups \['taste'\] are unknown; there are \['cluster'"),
        ("glance_tokens", 0, "glance_tokens=0 must be at least 1"),
        ("glance_layers", 0, "glance_layers=0 must be at least 1, or None"),
        ("glance_readout_layers", 0, "glance_readout_layers=0"),
        ("lens_dim", 0, "lens_dim=0"),
        ("lens_dim", 30, "lens_dim=30 must be a multiple of 4"),
        ("policy_dim", -1, "policy_dim=-1"),
        ("user_turn_token_ids", [], "user_turn_token_ids .* at least one"),
        ("image_mean", [0.5], r"image_mean=\[0.5\] must have 3"),
        ("image_std", [0.5, 0.5, 0.0], "image_std=.* above 0"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field, value, message):
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        ArrCocConfig(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"num_visual_tokens": 0.2},
        {"num_visual_tokens": "auto"},
        {"auto_coverage": 1},
        {"image_std": [1, 1, 1]},
        {"image_mean": [0, 0, 0]},
        {"texture_groups": list(GROUPS)},
        {"min_visual_tokens": 9, "max_visual_tokens": 9},
    ],
)
def test_what_is_meant_is_accepted_and_survives_a_trip_to_disk(fields, tmp_path):
    config = make_config(**fields)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is ArrCocConfig
    for name in OWN:
        value = getattr(again, name)
        assert (list(value) if isinstance(value, (list, tuple)) else value) == (
            list(getattr(config, name)) if isinstance(value, (list, tuple)) else getattr(config, name)
        ), name
    assert again.text_config.to_dict() == config.text_config.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "arr_coc"


class TestBase:
    def test_a_base_on_the_hub_is_pinned_by_its_commit(self):
        config = ArrCocConfig(base_model_name_or_path="Qwen/Qwen3-VL-2B-Instruct", base_model_revision=COMMIT)
        assert config.base_model_revision == COMMIT

    @pytest.mark.parametrize("revision", [None, "main", "v1", COMMIT[1:], COMMIT + "0", COMMIT.upper(), COMMIT + "\n"])
    def test_anything_but_a_commit_is_refused(self, revision):
        with pytest.raises((StrictDataclassError, ValueError), match="base_model_revision=.* is not a commit: pin"):
            ArrCocConfig(base_model_name_or_path="Qwen/Qwen3-VL-2B-Instruct", base_model_revision=revision)

    def test_a_local_base_needs_none(self, tmp_path):
        assert ArrCocConfig(base_model_name_or_path=str(tmp_path)).base_model_revision is None


class TestDerived:
    def test_cell_layers_and_channels(self):
        config = make_config()
        assert config.cell == 32 and config.num_glance_layers == 2 and config.num_texture_channels == 13
        assert make_config(glance_layers=3).num_glance_layers == 3
        assert make_config(text={"num_hidden_layers": 1}).num_glance_layers == 1

    @pytest.mark.parametrize("groups", [[], ["edges", "previous"], list(GROUPS)])
    def test_channels_are_those_of_the_texture(self, groups):
        assert make_config(texture_groups=groups).num_texture_channels == len(channel_names(groups))

    def test_a_glance_deeper_than_the_model_is_refused(self):
        with pytest.raises(ValueError, match="glance_layers=5, but the language model has only 4 layers"):
            make_model(glance_layers=5)

    @torch.no_grad()
    @pytest.mark.parametrize("fields", [{"glance_layers": 1}, {"glance_layers": 4, "glance_readout_layers": 9}])
    def test_any_depth_of_glance_works(self, fields):
        p = make_model(**fields).perceive(**make_inputs([[(5, 4, 0), [5]]]), num_visual_tokens=6)
        assert p.participatory[0].std() > 0


def test_fields_are_typed_and_defaults_are_valid():
    assert all(f.type is not None for f in dataclasses.fields(ArrCocConfig) if f.name in OWN)
    assert ArrCocConfig().num_visual_tokens == 200
