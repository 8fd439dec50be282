"""Three repositories: staged by allow-list, checked alone, pushed in steps that may fail, read back by revision."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import as_stock
from hub_double import HubDouble
from huggingface_hub import HfApi, constants
from loopback import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen3VLForConditionalGeneration

from arr_coc import ArrCocConfig, ArrCocForConditionalGeneration, publish
from arr_coc.publishing import checking, layouts, pushing, staging
from arr_coc.publishing.files import ADD_ON, Refused, digest, hashes, read_record

TINY = ROOT / "checkpoints" / "tiny"
PROCESSOR = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
             "chat_template.jinja", "generation_config.json")  # fmt: skip
CODE = {f"{name}.py" for name in ("attending", "balancing", "configuration_arr_coc", "knowing", "modeling_arr_coc",
                                  "patches", "realizing", "texture")}  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"


APP = """import argparse, http.server, os
from arr_coc import knowing
from benchmarks import sql
assert all("space" in path for path in (__file__, knowing.__file__, sql.__file__))
p = argparse.ArgumentParser()
p.add_argument("--model")
p.add_argument("--data")
assert os.path.isdir(p.parse_args().model) and os.path.isdir(p.parse_args().data)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(os.environ["GRADIO_SERVER_PORT"])), H).serve_forever()
"""  # stands in for the app


def small_config(**fields) -> ArrCocConfig:
    """The embedded model's tokens and classes, a fraction of its sizes."""
    told = json.loads((TINY / "config.json").read_text())
    text = told["text_config"] | {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
        "rope_parameters": told["text_config"]["rope_parameters"] | {"mrope_section": [4, 2, 2]},
    }  # fmt: skip
    vision = told["vision_config"] | {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1], "out_hidden_size": 48, "initializer_range": 0.3,
    }  # fmt: skip
    ours = ArrCocConfig.__dataclass_fields__.keys() - {"turn_end_token_id"}
    tokens = {k: v for k, v in told.items() if k.endswith("_token_id") and k in ours}
    tokenizer = AutoProcessor.from_pretrained(TINY).tokenizer
    return ArrCocConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, glance_tokens=16,
        user_turn_token_ids=tokenizer("<|im_start|>user\n")["input_ids"],
        turn_end_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), **tokens, **fields,
    )  # fmt: skip


def small_model(seed: int = 0, **fields) -> ArrCocForConditionalGeneration:
    torch.manual_seed(seed)
    model = ArrCocForConditionalGeneration._from_config(small_config(**fields), dtype=torch.float32)
    with torch.no_grad():
        for p in model.relevance.parameters():  # as if trained
            p.add_(0.1 * torch.randn(p.shape))
    return model.eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`base` (stock, in two shards, with processor), `reference` and `merged`, of one model."""
    folder = tmp_path_factory.mktemp("made")
    model = small_model()
    as_stock(model).save_pretrained(folder / "base", max_shard_size="300KB")
    for name in PROCESSOR:
        shutil.copy(TINY / name, folder / "base")
    small_model(base_model_name_or_path=str(folder / "base")).save_pretrained(folder / "reference")
    model.save_pretrained(folder / "merged")
    for name in PROCESSOR:
        shutil.copy(TINY / name, folder / "merged")
    return folder


@pytest.fixture(scope="module")
def inputs(made):
    from PIL import Image

    picture = Image.radial_gradient("L").resize((192, 160)).convert("RGB")
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "what is it?"}]
    return AutoProcessor.from_pretrained(made / "base").apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip


def run(*args, **env) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "ignore", "-m", "arr_coc.publish", *map(str, args)],
                          capture_output=True, text=True, env=os.environ | env)  # fmt: skip


def logits(model, inputs, budget=8):
    with torch.no_grad():
        return model(**inputs, num_visual_tokens=budget).logits


class TestFresh:
    def test_the_same_bytes_in_any_process(self, made, tmp_path):
        for i, seed in enumerate((1, 2)):
            torch.manual_seed(seed)
            layouts.fresh(made / "reference" / "config.json", tmp_path / f"{i}.safetensors")
        done = run("fresh", "--config", made / "reference" / "config.json", "--out", tmp_path / "2.safetensors")
        assert done.returncode == 0, done.stderr
        assert len({(tmp_path / f"{i}.safetensors").read_bytes() for i in range(3)}) == 1

    def test_it_is_the_untrained_method(self, made, inputs, tmp_path):
        """Whatever values the silent layers get, the outcome is that of freshly initialised parts."""
        shutil.copytree(made / "reference", tmp_path / "x")
        layouts.fresh(tmp_path / "x" / "config.json", tmp_path / "x" / ADD_ON)
        ours = ArrCocForConditionalGeneration.from_pretrained(tmp_path / "x")
        ids = {k: getattr(ours.config, k) for k in ("user_turn_token_ids", "turn_end_token_id", "glance_tokens")}
        fresh = ArrCocForConditionalGeneration.from_pretrained(made / "base", **ids)
        assert torch.equal(logits(ours, inputs), logits(fresh, inputs))
        for name, p in ours.relevance.named_parameters():
            assert p.isfinite().all(), name
            if name.endswith("weight") and not any(part in name for part in ("out.", "decide", "norms.")):
                assert 0.2 < p.std() / 0.3 < 1.2 and abs(p.mean()) < 0.1, name
        for norm in ours.relevance.retina.norms:
            assert (norm.weight == 1).all() and not norm.bias.any()
            assert (norm.running_var == 1).all() and not norm.running_mean.any()

    def test_the_roots_fits_its_config(self, tmp_path):
        layouts.fresh(ROOT / "config.json", tmp_path / ADD_ON)
        from arr_coc.modeling_arr_coc import Relevance

        own = Relevance(ArrCocConfig.from_pretrained(ROOT)).state_dict()
        assert {k: v.shape for k, v in load_file(tmp_path / ADD_ON).items()} == {k: v.shape for k, v in own.items()}
        assert (tmp_path / ADD_ON).stat().st_size < 8 * 2**20


class TestDownloads:
    """The Hub's cache calls a file by its hash: what does not have it is not what was published."""

    @pytest.fixture(params=["sha256", "git"])
    def cache(self, made, tmp_path, request):
        """`org/base`, `org/reference` and `org/merged` as they lie there after a download."""
        for name in ("base", "reference", "merged"):
            snapshot = tmp_path / f"models--org--{name}" / "snapshots" / COMMIT
            snapshot.mkdir(parents=True)
            for path in (made / name).glob("*.*"):
                content = path.read_bytes()
                if path.name == "config.json" and name == "reference":
                    instead = {"base_model_name_or_path": "org/base", "base_model_revision": COMMIT}
                    content = json.dumps(json.loads(content) | instead).encode()
                found = hashlib.sha256() if request.param == "sha256" else hashlib.sha1(b"blob %d\0" % len(content))
                found.update(content)
                blob = tmp_path / snapshot / "../../blobs" / found.hexdigest()
                blob.parent.mkdir(exist_ok=True)
                blob.write_bytes(content)
                (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
        return tmp_path

    @staticmethod
    def load(name, cache):
        return ArrCocForConditionalGeneration.from_pretrained(f"org/{name}", revision=COMMIT, cache_dir=cache)

    @pytest.mark.parametrize(
        "name, file",
        [
            ("reference", ADD_ON),
            ("base", "model-00003-of-*"),
            ("base", "model.safetensors.index.json"),
            ("merged", "model.safetensors"),
        ],
    )
    def test_weights_that_were_changed_after_their_download_are_refused(self, cache, name, file):
        loaded = "reference" if name == "base" else name
        self.load(loaded, cache)
        (path,) = (cache / f"models--org--{name}").glob(f"snapshots/*/{file}")
        blob, content = path.resolve(), path.read_bytes()
        at = content.rindex(b"model-00001") + 10 if path.suffix == ".json" else len(content) - 1
        blob.write_bytes(content[:at] + bytes([content[at] ^ 2]) + content[at + 1 :])  # no byte more or less
        with pytest.raises(ValueError) as error:
            self.load(loaded, cache)
        assert str(error.value).startswith(f"{path} is not what was downloaded")
        for words in (f"should be {blob.name}", f"Delete {blob}", "force_download=True"):
            assert words in str(error.value)
        blob.write_bytes(content)
        self.load(loaded, cache)

    def test_blobs_that_repositories_share_are_known_by_the_repositorys_link(self, cache):
        """Newer versions of huggingface_hub keep them once, called by another hash."""
        for path in list(cache.glob("models--org--*/snapshots/*/*.safetensors")):
            blob = path.resolve()
            shared = cache / "blobs" / "ab" / hashlib.sha256(path.name.encode()).hexdigest()
            shared.parent.mkdir(parents=True, exist_ok=True)
            blob.rename(shared)
            blob.symlink_to(os.path.relpath(shared, blob.parent))
        self.load("reference", cache)
        shared = (cache / "models--org--reference" / "snapshots" / COMMIT / ADD_ON).resolve()
        shared.write_bytes(shared.read_bytes()[:-1] + b"x")
        with pytest.raises(ValueError, match=f"{ADD_ON} is not what was downloaded.*Delete {shared}"):
            self.load("reference", cache)

    def test_where_a_system_knows_no_links_nothing_is_compared(self, cache):
        for path in list(cache.glob("models--org--*/snapshots/*/*.*")):
            path.resolve().rename(path)
        self.load("reference", cache)
        self.load("merged", cache)

    def test_a_truncated_index_is_named(self, made, tmp_path):
        shutil.copytree(made / "base", tmp_path / "base")
        index = tmp_path / "base" / "model.safetensors.index.json"
        index.write_text(index.read_text()[:-100])
        with pytest.raises(ValueError, match=f"{index.name} cannot be read .*: delete it"):
            ArrCocForConditionalGeneration.from_pretrained(tmp_path / "base", config=small_config())

    @pytest.mark.parametrize("layout", ["reference", "merged"])
    @pytest.mark.parametrize("keep", [5, 100_000])
    def test_a_truncated_shard_is_named(self, made, tmp_path, layout, keep):
        for name in ("base", layout):
            shutil.copytree(made / name, tmp_path / name)
        config = json.loads((tmp_path / layout / "config.json").read_text())
        if layout == "reference":
            config["base_model_name_or_path"] = str(tmp_path / "base")
            (tmp_path / layout / "config.json").write_text(json.dumps(config))
        shard = sorted((tmp_path / ("base" if layout == "reference" else layout)).glob("model*.safetensors"))[-1]
        shard.write_bytes(shard.read_bytes()[:keep])
        with pytest.raises(ValueError, match=f"{shard.name} cannot be read .*: delete it"):
            AutoModelForImageTextToText.from_pretrained(tmp_path / layout)

    def test_a_truncated_shard_in_the_cache_is_named(self, made, tmp_path):
        """Of the base, only its weights lie there."""
        ours, base = (tmp_path / f"models--org--{name}" / "snapshots" / COMMIT for name in ("arr", "base"))
        shutil.copytree(made / "reference", ours)
        shutil.copytree(made / "base", base, ignore=shutil.ignore_patterns("config.json"))
        config = json.loads((ours / "config.json").read_text())
        instead = {"base_model_name_or_path": "org/base", "base_model_revision": COMMIT}
        (ours / "config.json").write_text(json.dumps(config | instead))
        shard = sorted(base.glob("model-*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(ValueError, match=f"{shard.name} cannot be read .*: delete it"):
            ArrCocForConditionalGeneration.from_pretrained("org/arr", revision=COMMIT, cache_dir=tmp_path)


class TestLayouts:
    def test_merged_it_loads_in_both_classes(self, made, inputs, tmp_path):
        layouts.merge(made / "reference", tmp_path)
        ours, info = ArrCocForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        whole = ArrCocForConditionalGeneration.from_pretrained(made / "merged")
        assert torch.equal(logits(ours, inputs), logits(whole, inputs))
        stock = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
        base = Qwen3VLForConditionalGeneration.from_pretrained(made / "base")
        wanted = base.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert torch.equal(stock.generate(**inputs, max_new_tokens=6, do_sample=False), wanted)
        assert torch.equal(ours.generate(**inputs, max_new_tokens=6, do_sample=False, num_visual_tokens="all"), wanted)

    def test_there_and_back(self, made, tmp_path):
        layouts.merge(made / "reference", tmp_path / "merged")
        layouts.split(tmp_path / "merged", tmp_path / "split", str(made / "base"), None)
        assert (tmp_path / "split" / ADD_ON).read_bytes() == (made / "reference" / ADD_ON).read_bytes()
        given = json.loads((made / "reference" / "config.json").read_text())
        assert json.loads((tmp_path / "split" / "config.json").read_text()) == given | {"base_model_revision": None}

    def test_a_saved_merged_folder_splits_too(self, made, tmp_path):
        layouts.split(made / "merged", tmp_path, str(made / "base"), None)
        assert (tmp_path / ADD_ON).read_bytes() == (made / "reference" / ADD_ON).read_bytes()

    def test_another_base_is_refused(self, made, tmp_path):
        as_stock(small_model(seed=1)).save_pretrained(tmp_path / "other")
        with pytest.raises(Refused, match="differ in .* weights beyond the add-on"):
            layouts.split(made / "merged", tmp_path / "x", str(tmp_path / "other"), None)

    def test_what_is_not_of_its_layout_is_refused(self, made, tmp_path):
        with pytest.raises(Refused, match="is merged already"):
            layouts.merge(made / "merged", tmp_path)
        with pytest.raises(Refused, match="is an add-on already"):
            layouts.split(made / "reference", tmp_path, str(made / "base"), None)
        with pytest.raises(Refused, match="of a qwen3_vl model"):
            layouts.merge(made / "base", tmp_path)
        with pytest.raises(Refused, match="is not a commit"):
            layouts.split(made / "merged", tmp_path, "org/base", "main")

    @pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "noise"])
    def test_a_damaged_shard_is_named(self, made, tmp_path, damage):
        shutil.copytree(made / "base", tmp_path / "base")
        shard = sorted((tmp_path / "base").glob("model-*.safetensors"))[1]
        content = shard.read_bytes()
        shard.write_bytes({"truncated": content[:-9], "longer": content + b"x", "noise": b"\xff" * 99}.get(damage, b""))
        if damage == "missing":
            shard.unlink()
        with pytest.raises(Refused, match=shard.name):
            layouts.merge(made / "reference", tmp_path / "x", tmp_path / "base")


@pytest.fixture
def staged(made, tmp_path, dataset_and_space):
    """A stage of all three kinds -> its folder."""
    out = tmp_path / "hub"
    staging.stage(out, "acme", "v1.0", made / "reference", "reference", None, None, ["model", "dataset", "space"])
    return out


@pytest.fixture(scope="module")
def small_root(tmp_path_factory):
    """A copy of what is staged from this repository, with a small dataset and a stand-in for the app."""
    root = tmp_path_factory.mktemp("root")
    pictures = ("examples/astronaut.jpg", "docs/demo.jpg")
    for name in (*CODE, "__init__.py", "LICENSE", "model_card.md", "config.json", *pictures):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    card = (root / "model_card.md").read_text().split("## Results")  # its plots need rows
    (root / "model_card.md").write_text(card[0] + "## How" + card[1].split("## How", 1)[1])
    from datasets import Dataset

    data = root / "benchmarks" / "dataset"
    (data / "queries").mkdir(parents=True)
    Dataset.from_dict({"method": ["stock", "arr_coc"], "accuracy": [0.5, 0.75]}).to_parquet(
        data / "summary" / "a.parquet"
    )
    (data / "queries" / "best.sql").write_text("SELECT method FROM summary ORDER BY accuracy DESC")
    (data / "notes.txt").write_text("not for the Hub")
    (data / "README.md").write_text(
        "---\nlicense: apache-2.0\npretty_name: Results\nconfigs:\n- config_name: summary\n  data_files: "
        "[{split: test, path: summary/*.parquet}]\n---\n# ORG/arr-coc-results of model " + "0" * 40 + "\n"
    )
    (root / "benchmarks" / "__init__.py").write_text("")
    (root / "benchmarks" / "sql.py").write_text("A = 1\n")
    (root / "benchmarks" / "unused.py").write_text("A = 1\n")
    (root / "examples" / "examples.json").write_text("[]")
    (root / "app.py").write_text(APP)
    (root / "space").mkdir()
    (root / "space" / "app.css").write_text("")
    (root / "space" / "requirements.txt").write_text("torch==2.11.0\n")
    (root / "space" / "README.md").write_text(
        "---\ntitle: ARR-COC\nlicense: apache-2.0\nsdk: gradio\nsdk_version: 6.31.0\npython_version: '3.12.12'\n"
        "app_file: app.py\nmodels: [ORG/arr-coc-vis]\nsuggested_hardware: zero-a10g\npreload_from_hub:\n"
        f"- ORG/arr-coc-vis {ADD_ON} {'0' * 40}\n---\nhi\n"
    )
    return root


@pytest.fixture
def dataset_and_space(small_root, monkeypatch):
    monkeypatch.setattr(staging, "ROOT", small_root)


class TestStage:
    def test_just_what_is_allowed(self, staged):
        names = {kind: set(hashes(staged / kind)) for kind in ("model", "dataset", "space")}
        common = {"README.md", "LICENSE"}
        processor = set(PROCESSOR) | {"config.json", ADD_ON, "examples/astronaut.jpg", "docs/demo.jpg"}
        assert names["model"] == common | CODE | processor
        assert names["dataset"] == common | {"summary/a.parquet", "queries/best.sql"}
        package = {f"arr_coc/{name}" for name in (*CODE, "__init__.py")}
        data = {"space/app.css", "examples/examples.json", "examples/astronaut.jpg"}
        data.add("benchmarks/dataset/queries/best.sql")
        code = {"app.py", "benchmarks/__init__.py", "benchmarks/sql.py"}
        assert names["space"] == common | {"requirements.txt"} | package | data | code

    def test_the_organisation_and_version_stand_everywhere(self, made, tmp_path, dataset_and_space):
        staging.stage(tmp_path / "o", "acme", "v2.1", made / "reference", "reference", None, None, ["model", "space"])
        card = (tmp_path / "o" / "model" / "README.md").read_text()
        assert 'repo, revision = "acme/arr-coc-vis", "v2.1"' in card and "ORG/" not in card and '"v1.0"' not in card
        assert f"- acme/arr-coc-vis {ADD_ON} {'0' * 40}" in (tmp_path / "o" / "space" / "README.md").read_text()

    def test_again_it_is_the_same_byte_for_byte(self, staged, made, tmp_path, monkeypatch):
        first = json.loads((staged / "stage.json").read_text())
        for path in made.rglob("*"):
            os.utime(path, (0, 0))
        monkeypatch.chdir(tmp_path)
        again = Path("again")
        staging.stage(again, "acme", "v1.0", made / "reference", "reference", None, None, ["space", "dataset", "model"])
        second = json.loads((again / "stage.json").read_text())
        assert {k: v["digest"] for k, v in first["folders"].items()} == {
            k: v["digest"] for k, v in second["folders"].items()
        }

    def test_staged_anew_nothing_old_remains(self, staged, made):
        (staged / "model" / "old.py").write_text("")
        staging.stage(staged, "acme", "v1.0", made / "reference", "reference", None, None, ["model"])
        assert not (staged / "model" / "old.py").exists() and (staged / "space" / "app.py").exists()

    def test_a_folder_of_somebody_elses_is_left_alone(self, made, tmp_path):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "thesis.txt").write_text("years")
        with pytest.raises(Refused, match="was not made by `stage`"):
            staging.stage(tmp_path, "acme", "v1.0", made / "reference", "reference", None, None, ["model"])
        assert (tmp_path / "model" / "thesis.txt").exists()

    @pytest.mark.parametrize(
        "source, layout, weights",
        [
            ("reference", "merged", 5),
            ("merged", "merged", 1),
            ("merged", "reference", 0),
            ("reference", "reference", 0),
        ],
    )
    def test_either_layout_from_either(self, made, inputs, tmp_path, dataset_and_space, source, layout, weights):
        base = str(made / "base") if (source, layout) == ("merged", "reference") else None
        staging.stage(tmp_path, "acme", "v1.0", made / source, layout, base, None, ["model"])
        assert len(list((tmp_path / "model").glob("model*.safetensors"))) == weights
        assert (tmp_path / "model" / ADD_ON).exists() == (layout == "reference")
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
        wanted = ArrCocForConditionalGeneration.from_pretrained(made / "merged")
        assert torch.equal(logits(model, inputs), logits(wanted, inputs))
        card = (tmp_path / "model" / "README.md").read_text()
        assert f"base_model_relation: {'adapter' if layout == 'reference' else 'finetune'}\n" in card

    def test_what_is_missing_is_named(self, made, tmp_path, small_root, monkeypatch):
        root = shutil.copytree(small_root, tmp_path / "root")
        monkeypatch.setattr(staging, "ROOT", root)
        for name, kind in (("LICENSE", "dataset"), ("space/requirements.txt", "space"), ("app.py", "space"),
                           ("model_card.md", "model"), ("benchmarks/dataset/README.md", "dataset")):  # fmt: skip
            (root / name).rename(root / "aside")
            with pytest.raises(Refused, match="is missing"):
                staging.stage(tmp_path / "o", "acme", "v1.0", made / "reference", "reference", None, None, [kind])
            (root / "aside").rename(root / name)
        assert not (tmp_path / "o" / "model").exists()

    def test_a_base_that_cannot_be_reached_is_named(self, tmp_path):
        done = run("stage", "--org", "acme", "--out", tmp_path, "--only", "model", HF_HUB_CACHE=str(tmp_path / "c"))
        assert done.returncode == 2 and "Qwen/Qwen3-VL-2B-Instruct at 8964" in done.stderr
        assert "go online" in done.stderr and "Traceback" not in done.stderr

    def test_the_roots_own_model_can_be_staged(self, made, tmp_path):
        """Config, fresh add-on, code and card as they are; the processor's files stand in for the base's."""
        staging.stage(tmp_path, "acme", "v1.0", ROOT, "reference", str(made / "base"), None, ["model"])
        findings = checking.check(tmp_path / "model", "model")
        assert [text for passed, text in findings if passed is False] == []
        assert any(passed is None and "no answer was tried" in text for passed, text in findings)


def failures(folder, kind="model", **kwargs) -> str:
    return "; ".join(text for passed, text in checking.check(folder, kind, **kwargs) if passed is False)


class TestCheck:
    def test_all_is_well(self, staged):
        for kind in ("model", "dataset", "space"):
            findings = checking.check(
                staged / kind, kind, beside={"model": staged / "model", "dataset": staged / "dataset"}
            )
            assert all(passed for passed, _ in findings), findings
            told = {"model": "answers", "dataset": "1 named queries", "space": "the app starts"}[kind]
            assert told in findings[-1][1]

    @pytest.mark.parametrize(
        "name, content, words",
        [
            ("notes.txt", b"hello", "not on the allow-list"),
            ("knowing.py", b"TOKEN = 'hf_" + b"a" * 34 + b"'", "looks like a secret"),
            ("config.json", b"-----BEGIN RSA PRIVATE KEY-----", "looks like a secret"),
            ("texture.py", b"PATH = '/home/somebody/models'", "path of somebody's machine"),
            ("pytorch_model.bin", b"PK", "pickle"),
            ("tokenizer.json", b"\x80\x04K\x01.", "pickle"),
            ("chat_template.jinja", b"x" * (17 * 2**20), "MiB, more than 16"),
            ("LICENSE", b"mine", "not Apache-2.0"),
            ("balancing.py", b"def f(:", "not Python"),
            (ADD_ON, b"\x10", "damaged"),
            ("model.safetensors", b"\x10", "merged layout, but config.json names a base"),
        ],
    )
    def test_what_may_not_be_published(self, staged, name, content, words):
        (staged / "model" / name).write_bytes(content)
        found = failures(staged / "model", run=False)
        assert words in found and name in found

    @pytest.mark.parametrize("name", ["README.md", "LICENSE", ADD_ON, "modeling_arr_coc.py"])
    def test_what_is_missing(self, staged, name):
        (staged / "model" / name).unlink()
        assert f"{name}" in failures(staged / "model", run=False)

    @pytest.mark.parametrize(
        "old, new, words",
        [
            ("license: apache-2.0", "license: mit", "must have license: apache-2.0"),
            ("library_name: transformers\n", "", "must have library_name"),
            ("pipeline_tag: image-text-to-text", "pipeline_tag: [", "front matter is not valid"),
            ("# ARR-COC", "# ARR-COC\n![x](gone.png)", "links gone.png, which is not here"),
            ("from huggingface_hub import", "from huggingface_hub importing", "is not Python"),
            ("## Use it", "<!-- begin results:x -->\n## Use it", "opens results:x and never closes it"),
        ],
    )
    def test_cards(self, staged, old, new, words):
        card = staged / "model" / "README.md"
        assert old in card.read_text()
        card.write_text(card.read_text().replace(old, new, 1))
        assert words in failures(staged / "model", run=False)

    def test_a_model_that_does_not_run(self, staged):
        code = staged / "model" / "knowing.py"
        code.write_text(code.read_text() + "\nraise RuntimeError('oh')\n")
        assert "does not load and answer: RuntimeError: oh" in failures(staged / "model")

    def test_data_that_does_not_answer(self, staged):
        (staged / "dataset" / "queries" / "best.sql").write_text("SELECT nothing FROM summary")
        assert "queries/best.sql" in failures(staged / "dataset", "dataset")
        path = staged / "dataset" / "summary" / "a.parquet"
        path.write_bytes(path.read_bytes()[:-20])
        assert "does not answer" in failures(staged / "dataset", "dataset")

    def test_an_app_that_does_not_start(self, staged):
        (staged / "space" / "app.py").write_text("raise SystemExit('no port')")
        assert "the app does not start: no port" in failures(
            staged / "space", "space", beside={"model": staged / "model", "dataset": staged / "dataset"}
        )

    @pytest.mark.slow  # five processes that import everything
    def test_from_the_command_line(self, staged):
        done = run("check", "--out", staged, "--only", "model")
        assert done.returncode == 0 and "ok   model: loads" in done.stdout, done.stdout + done.stderr
        (staged / "model" / "x.pkl").write_bytes(b"")
        done = run("check", "--out", staged, "--files-only")
        assert done.returncode == 1 and "FAIL model: x.pkl" in done.stdout
        done = run("check", "--out", staged / "nowhere")
        assert done.returncode == 2 and "stage" in done.stderr


@pytest.fixture
def light(tmp_path):
    """What a stage leaves behind, with a few bytes in each file: a push does not care."""
    zeros, ones, out = "0" * 40, "1" * 40, tmp_path / "hub"
    card = f'---\nlicense: mit\n---\nrevision="{zeros}"\n'
    for name, content in {
        "model/README.md": card, f"model/{ADD_ON}": "weights", "model/knowing.py": "pass\n",
        "dataset/README.md": card, "dataset/summary/a.parquet": "rows", "dataset/queries/best.sql": "SELECT 1",
        "space/README.md": card + f"- acme/arr-coc-vis {ADD_ON} {zeros}\n{ones}\n", "space/app.py": "pass\n",
    }.items():  # fmt: skip
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content)
    record(out)
    return out


def record(out: Path, tag: str = "v1.0"):
    folders = {k: {"files": hashes(out / k), "digest": digest(hashes(out / k))} for k in ("model", "dataset", "space")}
    (out / "stage.json").write_text(json.dumps({"org": "acme", "tag": tag, "folders": folders}))


REPOS = {"model": "acme/arr-coc-vis", "dataset": "acme/arr-coc-results", "space": "acme/arr-coc"}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with HubDouble() as hub:
        yield hub


def push(hub, staged, **kwargs):
    said = []
    api = HfApi(endpoint=hub.endpoint, token="hf_test")
    pins = pushing.push(staged, read_record(staged), say=said.append, api=api, **kwargs)
    return pins, "\n".join(said)


def is_published(hub, staged):
    """All three are as staged, tagged, and pinned to a commit of the model that holds its files."""
    for kind, repo in REPOS.items():
        tagged, local = hub.files(repo, kind, "v1.0"), hashes(staged / kind)
        assert set(tagged) == {*local, ".gitattributes"}
        assert tagged == hub.files(repo, kind)
        assert not any(mark * 40 in content.decode("latin1") for content in tagged.values() for mark in "01")
    (pinned,) = {line.split()[-1] for line in hub.files(REPOS["space"], "space")["README.md"].decode().splitlines()
                 if line.startswith("- acme/arr-coc-vis")}  # fmt: skip
    assert f'revision="{pinned}"' in hub.files(REPOS["model"])["README.md"].decode()
    assert pinned in hub.files(REPOS["dataset"], "dataset")["README.md"].decode()
    at_pin = hub.files(REPOS["model"], revision=pinned)
    now = hub.files(REPOS["model"])
    assert {k: v for k, v in at_pin.items() if k != "README.md"} == {k: v for k, v in now.items() if k != "README.md"}
    assert at_pin[ADD_ON] == (staged / "model" / ADD_ON).read_bytes()


CALLS = ("create", "validate", "tree", "refs", "commits", "preupload", "batch", "upload", "commit", "tag", "info")


class TestPush:
    def test_three_repositories_pinned_to_each_other(self, hub, light):
        pins, said = push(hub, light)
        is_published(hub, light)
        assert pins["model"] in said and "hf_test" not in said

    def test_again_it_changes_nothing(self, hub, light):
        first, _ = push(hub, light)
        hub.log.clear()
        second, _ = push(hub, light)
        assert first == second and set(hub.writes()) <= {"create"}

    def test_a_dry_run_writes_nothing_and_says_what_would_be(self, hub, light):
        _, said = push(hub, light, dry_run=True)
        assert not hub.writes() and not hub.repos
        assert "acme/arr-coc-vis would be created" in said and f"add {ADD_ON}" in said and "tag v1.0: would be" in said
        push(hub, light)
        hub.log.clear()
        _, said = push(hub, light, dry_run=True)
        assert not hub.writes() and "exists" in said and "add" not in said

    @pytest.mark.parametrize(
        "fault", ["lost", *(pytest.param(f, marks=pytest.mark.slow) for f in ("401", "503", "cut"))]
    )
    @pytest.mark.parametrize("call", CALLS)
    def test_after_any_failure_the_same_command_goes_on(self, hub, light, call, fault):
        for after in range(4):
            hub.fail(call, fault, times=9, after=after)
            try:
                push(hub, light)
            except Exception as error:
                assert "hf_test" not in str(error)
            hub.mend()
        push(hub, light)
        is_published(hub, light)
        titles = [commit["title"] for commit in hub.repos["model", REPOS["model"]]["commits"]]
        assert len(titles) == len(set(titles)) == 3  # the Hub's first, the files, the card: none twice

    @pytest.mark.parametrize("after", range(4))
    def test_of_two_pushes_at_once_one_starts_over(self, hub, light, after):
        hub.fail("commit", "race", after=after)
        push(hub, light)
        is_published(hub, light)

    def test_others_who_never_stop_are_named(self, hub, light):
        hub.fail("commit", "race", times=99)
        with pytest.raises(Refused, match="main of acme/arr-coc-vis changed 5 times"):
            push(hub, light)

    def test_what_was_there_before_goes(self, hub, light):
        push(hub, light)
        hub.commit("model", REPOS["model"], {"old.bin": b"x", ADD_ON: b"tampered"}, "somebody's")
        push(hub, light)
        is_published(hub, light)

    def test_a_tag_never_moves(self, hub, light):
        push(hub, light)
        before = {kind: hub.repos[kind, repo]["tags"]["v1.0"] for kind, repo in REPOS.items()}
        (light / "model" / ADD_ON).write_text("other weights")
        record(light)
        hub.log.clear()
        with pytest.raises(Refused, match="a tag never moves.*another --tag"):
            push(hub, light)
        assert not hub.writes()
        record(light, "v1.1")
        push(hub, light)
        assert before == {kind: hub.repos[kind, repo]["tags"]["v1.0"] for kind, repo in REPOS.items()}
        assert {"v1.0", "v1.1"} == set(hub.repos["model", REPOS["model"]]["tags"])

    def test_private(self, hub, light):
        push(hub, light, private=True)
        assert {repo["visibility"] for repo in hub.repos.values()} == {"private"}

    @pytest.mark.slow  # five processes that import everything
    def test_from_the_command_line(self, hub, staged, tmp_path):
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
        done = run("push", "--out", staged, **env, HF_TOKEN="")
        assert done.returncode == 1 and "hf auth login" in done.stderr and "Traceback" not in done.stderr
        done = run("push", "--out", staged, **env, HF_TOKEN="hf_secret")
        assert done.returncode == 0, done.stderr
        assert "hf_secret" not in done.stdout + done.stderr
        is_published(hub, staged)
        (staged / "model" / "knowing.py").write_text("")
        done = run("push", "--out", staged, **env, HF_TOKEN="hf_secret")
        assert done.returncode == 2 and "has changed since it was staged" in done.stderr
        done = run("push", "--out", tmp_path / "nowhere")
        assert done.returncode == 2 and "stage.json is missing" in done.stderr

    def test_what_fails_its_check_is_not_pushed(self, hub, staged):
        path = staged / "model" / "knowing.py"
        path.write_text(path.read_text() + "\nKEY = 'hf_" + "b" * 34 + "'\n")
        record(staged)
        assert publish.main(["push", "--out", str(staged)]) == 2
        assert not hub.log


def test_help_teaches(capsys):
    for command in ([], ["stage"], ["check"], ["push"], ["verify"], ["fresh"], ["merge"], ["split"]):
        with pytest.raises(SystemExit) as done:
            publish.main([*command, "--help"])
        assert done.value.code == 0 and len(capsys.readouterr().out) > 200
