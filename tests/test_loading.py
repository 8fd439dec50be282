"""Both layouts, by every way in: base by reference with a small add-on, and merged."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TOKENS, as_stock, make_inputs, make_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, Qwen3VLForConditionalGeneration

from arr_coc import ArrCocConfig, ArrCocForConditionalGeneration
from arr_coc.modeling_arr_coc import ADD_ON

ROOT = Path(__file__).parent.parent
COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"
LAYOUTS = pytest.mark.parametrize("layout", ["merged", "reference"])
STAGED = [f"{name}.py" for name in ("configuration_arr_coc", "modeling_arr_coc", "patches", "texture", "knowing",
                                    "balancing", "attending", "realizing")]  # fmt: skip


def trained(**fields):
    """A model none of whose learned parameters is as it started."""
    model = make_model(**fields)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.relevance.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with `base` (stock), `merged` and `reference`, and the model that was saved."""
    folder = tmp_path_factory.mktemp("saved")
    model = trained()
    as_stock(model).save_pretrained(folder / "base")
    model.save_pretrained(folder / "merged")
    by_reference = trained(base_model_name_or_path=str(folder / "base"))
    by_reference.save_pretrained(folder / "reference")
    return folder, model


@pytest.fixture(scope="module")
def inputs():
    return make_inputs([[(5, 4, 0), [5, 6]], [[7]]])


def same_weights(a, b):
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def same_logits(a, b, inputs):
    with torch.no_grad():
        return torch.equal(a(**inputs, num_visual_tokens=6).logits, b(**inputs, num_visual_tokens=6).logits)


@LAYOUTS
class TestWaysIn:
    @pytest.mark.parametrize("auto", [AutoModel, AutoModelForImageTextToText, ArrCocForConditionalGeneration])
    def test_every_class_gives_the_model_as_it_was(self, saved, inputs, layout, auto):
        folder, model = saved
        got = auto.from_pretrained(folder / layout)
        assert type(got) is ArrCocForConditionalGeneration and not got.training
        assert same_weights(got, model) and same_logits(got, model, inputs)
        assert got.name_or_path == got.config.name_or_path == str(folder / layout)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", torch.float16])
    def test_in_another_dtype_what_is_learned_stays_float32(self, saved, layout, dtype):
        folder, model = saved
        got = AutoModel.from_pretrained(folder / layout, dtype=dtype)
        assert got.dtype == (torch.bfloat16 if dtype == "bfloat16" else dtype)
        for name, value in got.relevance.state_dict().items():
            assert value.dtype == torch.float32 and torch.equal(value, model.relevance.state_dict()[name]), name
        assert {p.dtype for n, p in got.named_parameters() if "relevance" not in n} == {got.dtype}

    @pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
    def test_device_map(self, saved, inputs, layout, device_map):
        folder, model = saved
        got = AutoModel.from_pretrained(folder / layout, device_map=device_map)
        assert same_weights(got.to("cpu"), model)
        if device_map != "auto" or not torch.cuda.is_available():
            assert same_logits(got, model, inputs)

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_attn_implementation(self, saved, layout, attention):
        got = AutoModel.from_pretrained(saved[0] / layout, attn_implementation=attention)
        configs = (got.config, got.model.visual.config, got.model.language_model.config)
        assert [c._attn_implementation for c in configs] == [attention] * 3

    def test_fields_of_the_config_may_be_overridden(self, saved, layout):
        got = AutoModel.from_pretrained(saved[0] / layout, num_visual_tokens=0.5, allocator="topk")
        assert got.config.num_visual_tokens == 0.5 and got.config.allocator == "topk"

    def test_a_config_may_be_given(self, saved, layout):
        folder, model = saved
        config = AutoConfig.from_pretrained(folder / layout, num_visual_tokens=17)
        got = ArrCocForConditionalGeneration.from_pretrained(folder / layout, config=config)
        assert got.config.num_visual_tokens == 17 and same_weights(got, model)

    def test_loading_info_says_that_all_is_there(self, saved, layout):
        got, info = ArrCocForConditionalGeneration.from_pretrained(saved[0] / layout, output_loading_info=True)
        assert type(got) is ArrCocForConditionalGeneration
        assert {k: len(v) for k, v in info.items()} == dict.fromkeys(
            ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"), 0
        )

    def test_saved_again_it_is_the_same(self, saved, inputs, layout, tmp_path):
        folder, model = saved
        AutoModel.from_pretrained(folder / layout).save_pretrained(tmp_path)
        again = AutoModel.from_pretrained(tmp_path)
        assert same_weights(again, model) and same_logits(again, model, inputs)
        assert sorted(os.listdir(tmp_path)) == sorted(os.listdir(folder / layout))

    def test_what_is_saved_carries_its_code(self, saved, layout):
        config = json.loads((saved[0] / layout / "config.json").read_text())
        model = "modeling_arr_coc.ArrCocForConditionalGeneration"
        assert config["auto_map"] == {
            "AutoConfig": "configuration_arr_coc.ArrCocConfig",
            "AutoModel": model,
            "AutoModelForImageTextToText": model,
        }
        assert config["model_type"] == "arr_coc" and config["architectures"] == ["ArrCocForConditionalGeneration"]
        assert set(STAGED) <= set(os.listdir(saved[0] / layout))


class TestLayouts:
    def test_a_reference_holds_the_add_on_alone(self, saved):
        folder, model = saved
        files = os.listdir(folder / "reference")
        assert [f for f in files if f.endswith((".safetensors", ".bin", ".part"))] == [ADD_ON]
        assert not any(f.startswith("adapter_config") for f in files)
        assert (folder / "reference" / ADD_ON).stat().st_size < 8 * 2**20
        weights = load_file(folder / "reference" / ADD_ON)
        assert weights.keys() == model.relevance.state_dict().keys()
        assert {w.dtype for w in weights.values()} == {torch.float32}

    def test_a_merged_folder_is_one_safetensors(self, saved):
        files = os.listdir(saved[0] / "merged")
        assert [f for f in files if f.endswith((".safetensors", ".bin"))] == ["model.safetensors"]

    def test_stocks_class_loads_a_merged_folder_and_is_stock(self, saved, inputs):
        folder, model = saved
        stock, info = Qwen3VLForConditionalGeneration.from_pretrained(folder / "merged", output_loading_info=True)
        assert type(stock) is Qwen3VLForConditionalGeneration and not hasattr(stock, "relevance")
        assert not info["missing_keys"] and all(k.startswith("relevance.") for k in info["unexpected_keys"])
        with torch.no_grad():
            assert torch.equal(stock(**inputs).logits, model(**inputs, num_visual_tokens="all").logits)
            wanted = as_stock(model).generate(**inputs, max_new_tokens=4)
            assert torch.equal(stock.generate(**inputs, max_new_tokens=4), wanted)

    def test_a_stock_folder_loads_with_fresh_parts(self, saved, inputs):
        """What is missing is set to its start, not left as uninitialised memory."""
        folder, model = saved
        ids = {k: TOKENS[k] for k in ("user_turn_token_ids", "turn_end_token_id")}
        got = ArrCocForConditionalGeneration.from_pretrained(folder / "base", **ids)
        own = got.relevance
        assert not own.affinity.head_logits.any() and own.affinity.temperature == 1
        assert not any(p.any() for layer in (own.lens.out, own.policy.decide) for p in layer.parameters())
        assert own.shaping.steepness.item() == 6 and own.shaping.offset.item() == pytest.approx(0.6)
        for name, p in own.named_parameters():
            assert p.isfinite().all() and p.abs().max() < 50, name
            if name.endswith("weight") and not any(part in name for part in ("out.", "decide", "norms.")):
                assert p.std() > 0, name
        for norm in own.retina.norms:
            assert (norm.weight == 1).all() and not norm.bias.any()
            assert (norm.running_var == 1).all() and not norm.running_mean.any() and norm.num_batches_tracked == 0
        with torch.no_grad():
            p = got.perceive(**inputs, num_visual_tokens=6)
        assert p.tensions[0].tolist() == [0.5] * 3

    def test_a_reference_becomes_merged_when_its_base_is_forgotten(self, saved, inputs, tmp_path):
        folder, model = saved
        got = AutoModel.from_pretrained(folder / "reference")
        got.config.base_model_name_or_path = got.config.base_model_revision = None
        got.save_pretrained(tmp_path)
        assert "model.safetensors" in os.listdir(tmp_path) and ADD_ON not in os.listdir(tmp_path)
        assert same_weights(AutoModel.from_pretrained(tmp_path), model)

    def test_a_state_dict_of_the_callers_is_what_is_saved(self, saved, tmp_path):
        """As Trainer does under some accelerators."""
        folder, model = saved
        got = AutoModel.from_pretrained(folder / "reference")
        state = {k: v + 1 for k, v in got.state_dict().items()}
        got.save_pretrained(tmp_path, state_dict=state)
        again = AutoModel.from_pretrained(tmp_path)
        for name, value in again.relevance.state_dict().items():
            assert torch.equal(value, model.relevance.state_dict()[name] + 1)

    @LAYOUTS
    def test_only_the_main_process_writes(self, saved, layout, tmp_path):
        got = AutoModel.from_pretrained(saved[0] / layout)
        got.save_pretrained(tmp_path / "new", is_main_process=False)
        assert not list((tmp_path / "new").glob("*.safetensors"))

    def test_an_interrupted_save_leaves_the_old_add_on_whole(self, saved, tmp_path, monkeypatch):
        shutil.copytree(saved[0] / "reference", tmp_path / "here")
        got = AutoModel.from_pretrained(tmp_path / "here")
        before = (tmp_path / "here" / ADD_ON).read_bytes()

        def half(weights, path, **kwargs):
            Path(path).write_bytes(before[:1000])
            raise KeyboardInterrupt

        monkeypatch.setattr("arr_coc.modeling_arr_coc.save_file", half)
        for target in ("here", "new"):
            with pytest.raises(KeyboardInterrupt):
                got.save_pretrained(tmp_path / target)
        assert (tmp_path / "here" / ADD_ON).read_bytes() == before
        assert not (tmp_path / "new" / ADD_ON).exists()


class TestAddOnsThatDoNotFit:
    @pytest.fixture
    def folder(self, saved, tmp_path):
        shutil.copytree(saved[0] / "reference", tmp_path / "add-on")
        return tmp_path / "add-on"

    def refused(self, folder, *words):
        with pytest.raises(ValueError) as error:
            AutoModel.from_pretrained(folder)
        for word in (ADD_ON, *words):
            assert word in str(error.value)

    def rewrite(self, folder, change):
        weights = load_file(folder / ADD_ON)
        change(weights)
        save_file(weights, folder / ADD_ON)

    def test_missing_file(self, folder):
        (folder / ADD_ON).unlink()
        self.refused(folder, str(folder), "names a base model")

    @pytest.mark.parametrize("keep", [0, 7, 5000])
    def test_truncated(self, folder, keep):
        (folder / ADD_ON).write_bytes((folder / ADD_ON).read_bytes()[:keep])
        self.refused(folder, "cannot be read", "download or save it again")

    def test_missing_key(self, folder):
        self.rewrite(folder, lambda w: w.pop("shaping.offset"))
        self.refused(folder, "missing shaping.offset", "does not fit")

    def test_unexpected_key(self, folder):
        self.rewrite(folder, lambda w: w.update(surprise=torch.ones(1)))
        self.refused(folder, "unexpected surprise")

    def test_other_shape(self, folder):
        self.rewrite(folder, lambda w: w.update({"lens.out.weight": torch.ones(1, 3)}))
        self.refused(folder, "lens.out.weight is [1, 3], not [1, 128]")

    def test_all_that_is_wrong_is_said_at_once(self, folder):
        self.rewrite(folder, lambda w: (w.update(surprise=torch.ones(1)), w.pop("shaping.offset")))
        self.refused(folder, "missing shaping.offset; unexpected surprise")

    def test_another_base(self, folder, tmp_path):
        """Of another width, as the 4B beside the 2B."""
        other = make_model(text={"hidden_size": 64}, vision={"out_hidden_size": 64})
        as_stock(other).save_pretrained(tmp_path / "other")
        config = other.config
        config.base_model_name_or_path = str(tmp_path / "other")
        config.save_pretrained(folder)
        self.refused(folder, "lens.cell.weight is [128, 48], not [128, 64]")

    def test_a_base_that_is_not_there(self, folder, tmp_path):
        config = json.loads((folder / "config.json").read_text())
        config["base_model_name_or_path"] = str(tmp_path / "gone")
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(Exception, match="gone.*pin|is not a commit"):
            AutoModel.from_pretrained(folder)

    def test_a_base_that_is_no_commit(self, folder):
        config = json.loads((folder / "config.json").read_text())
        config |= {"base_model_name_or_path": "org/base", "base_model_revision": "main"}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(Exception, match="base_model_revision='main' is not a commit"):
            AutoModel.from_pretrained(folder)

    def test_a_merged_folder_of_other_shapes(self, saved, tmp_path):
        shutil.copytree(saved[0] / "merged", tmp_path / "merged")
        weights = load_file(tmp_path / "merged" / "model.safetensors")
        weights["relevance.lens.out.weight"] = torch.ones(1, 3)
        save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises((RuntimeError, ValueError), match="lens.out.weight|size mismatch|mismatched"):
            AutoModel.from_pretrained(tmp_path / "merged")


class TestHub:
    """Two repositories in a local cache, as after a download: revisions must not be mixed up."""

    @pytest.fixture(scope="class")
    def cache(self, saved, tmp_path_factory):
        cache, (folder, _) = tmp_path_factory.mktemp("hub"), saved
        for repo, commit, source, refs in (
            ("models--org--base", COMMIT, folder / "base", {}),
            ("models--org--base", OTHER, None, {"main": OTHER}),  # what the base has become since: broken
            ("models--org--arr", OTHER, folder / "reference", {"v1.0": OTHER, "main": OTHER}),
        ):
            snapshot = cache / repo / "snapshots" / commit
            if source:
                shutil.copytree(source, snapshot)
            else:
                snapshot.mkdir(parents=True)
                (snapshot / "config.json").write_text("{}")
            for ref, target in refs.items():
                (cache / repo / "refs").mkdir(exist_ok=True)
                (cache / repo / "refs" / ref).write_text(target)
        path = cache / "models--org--arr" / "snapshots" / OTHER / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"base_model_name_or_path": "org/base", "base_model_revision": COMMIT}))
        return cache

    @pytest.mark.parametrize("revision", [None, "v1.0", OTHER])
    @pytest.mark.parametrize("auto", [AutoModelForImageTextToText, ArrCocForConditionalGeneration])
    def test_the_revision_is_the_add_ons_and_the_base_has_its_own(self, saved, inputs, cache, revision, auto):
        kwargs = {} if revision is None else {"revision": revision}
        got = auto.from_pretrained("org/arr", cache_dir=cache, dtype=torch.float32, **kwargs)
        assert same_weights(got, saved[1]) and same_logits(got, saved[1], inputs)
        assert got.name_or_path == "org/arr" and got.config.base_model_revision == COMMIT

    def test_a_repository_without_an_add_on_is_named(self, cache):
        os.rename(cache / "models--org--arr", cache / "models--org--none")
        try:
            (cache / "models--org--none" / "snapshots" / OTHER / ADD_ON).rename(cache / "aside")
            with pytest.raises(ValueError, match=f"org/none names a base model but holds no {ADD_ON}"):
                AutoModel.from_pretrained("org/none", cache_dir=cache)
        finally:
            (cache / "aside").rename(cache / "models--org--none" / "snapshots" / OTHER / ADD_ON)
            os.rename(cache / "models--org--none", cache / "models--org--arr")


def test_a_staged_folder_carries_its_own_code(saved, tmp_path):
    """As on the Hub: flat files, `arr_coc` not installed, no network. Who forgets the flag does not get stock."""
    for layout in ("merged", "reference"):
        shutil.copytree(saved[0] / layout, tmp_path / layout, ignore=shutil.ignore_patterns("*.py"))
        for name in STAGED:
            shutil.copy(ROOT / name, tmp_path / layout)
        config = json.loads((tmp_path / layout / "config.json").read_text())
        model = "modeling_arr_coc.ArrCocForConditionalGeneration"
        config["auto_map"] = {"AutoConfig": "configuration_arr_coc.ArrCocConfig", "AutoModel": model}
        config["auto_map"]["AutoModelForImageTextToText"] = model
        (tmp_path / layout / "config.json").write_text(json.dumps(config))
    torch.save(make_inputs([[(5, 4, 0), [5, 6]]]), tmp_path / "inputs.pt")
    code = """
import sys, socket
sys.modules["arr_coc"] = None
def no(*a, **k): raise RuntimeError("network")
socket.socket.connect = socket.create_connection = no
import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText
inputs, answers = torch.load("inputs.pt"), []
try:
    raise SystemExit(f"loaded {type(AutoModel.from_pretrained('merged', trust_remote_code=False))}")
except ValueError as error:
    assert "trust_remote_code" in str(error) or "arr_coc" in str(error), error
for layout, auto in (("merged", AutoModel), ("reference", AutoModelForImageTextToText)):
    config = AutoConfig.from_pretrained(layout, trust_remote_code=True)
    assert type(config).__module__.startswith("transformers_modules"), type(config)
    model = auto.from_pretrained(layout, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules") and type(model).__name__.startswith("ArrCoc")
    answers.append(model.generate(**inputs, num_visual_tokens=6, max_new_tokens=4))
    p = model.perceive(**inputs, num_visual_tokens=6)
    model.save_pretrained(layout + "-again")
    again = auto.from_pretrained(layout + "-again", trust_remote_code=True)
    assert torch.equal(again.generate(**inputs, num_visual_tokens=6, max_new_tokens=4), answers[-1])
assert torch.equal(*answers)
torch.save(answers[0], "answer.pt")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = saved[1].generate(**torch.load(tmp_path / "inputs.pt"), num_visual_tokens=6, max_new_tokens=4)
    assert torch.equal(torch.load(tmp_path / "answer.pt"), wanted)


def test_the_shipped_config_is_qwen3_vl_2bs():
    """Exact shapes of Qwen3-VL-2B-Instruct, for the add-on by reference."""
    config = AutoConfig.from_pretrained(ROOT)
    assert type(config) is ArrCocConfig and config.base_model_name_or_path == "Qwen/Qwen3-VL-2B-Instruct"
    text, vision = config.text_config, config.vision_config
    assert (text.num_hidden_layers, text.hidden_size, text.intermediate_size) == (28, 2048, 6144)
    assert (text.num_attention_heads, text.num_key_value_heads, text.head_dim) == (16, 8, 128)
    assert text.vocab_size == 151936 and config.tie_word_embeddings
    assert text.rope_parameters["mrope_section"] == [24, 20, 20] and text.rope_parameters["rope_theta"] == 5e6
    assert (vision.depth, vision.hidden_size, vision.intermediate_size, vision.num_heads) == (24, 1024, 4096, 16)
    assert (vision.patch_size, vision.num_position_embeddings, vision.out_hidden_size) == (16, 2304, 2048)
    assert list(vision.deepstack_visual_indexes) == [5, 11, 17]
    assert (config.image_token_id, config.video_token_id) == (151655, 151656)
    assert (config.vision_start_token_id, config.vision_end_token_id) == (151652, 151653)
    for name in ("user_turn_token_ids", "turn_end_token_id", "image_mean", "image_std"):
        assert torch.equal(*(torch.tensor(getattr(c, name)) for c in (config, ArrCocConfig()))), name
    assert set(json.loads((ROOT / "config.json").read_text())["auto_map"]) == {
        "AutoConfig", "AutoModel", "AutoModelForImageTextToText"}  # fmt: skip
    with torch.device("meta"):
        model = ArrCocForConditionalGeneration._from_config(config)
    assert (
        sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.relevance.parameters()) == 2127532032
    )
    assert sum(p.numel() * 4 for p in model.relevance.parameters()) < 8 * 2**20
