"""Each staged or downloaded folder, alone and offline: it holds what it may and must, and it does what it is for.

A finding is `(passed, text)`; `passed` is None where something could not be tried here, and the text says why.
"""

import ast
import fnmatch
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path

from .files import ADD_ON, ALLOWED, CODE, MEGABYTES, PLACEHOLDERS, WEIGHTS, Refused, hashes, links, write_json
from .layouts import shard_files, tensors_of

SECRETS = re.compile(
    rb"hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{32,}"
    rb"|xox[baprs]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY|https?://[^\s/@:\"']+:[^\s/@\"']+@"
)
MACHINE_PATHS = re.compile(rb"(?<![\w.:/])/(?:home|Users|root|work)/[\w.-]+")
PICKLES = (".bin", ".ckpt", ".dill", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth")
MUST = {
    "model": {
        "license": "apache-2.0", "library_name": "transformers", "pipeline_tag": "image-text-to-text", "language": None,
        "base_model": None, "base_model_relation": None,
    },
    "dataset": {"license": "apache-2.0", "pretty_name": None, "configs": None},
    "space": {
        "license": "apache-2.0", "title": None, "sdk": "gradio", "sdk_version": None, "python_version": None,
        "app_file": "app.py", "models": None, "suggested_hardware": None,
    },
}  # fmt: skip

Finding = tuple[bool | None, str]

# Children run with these: nothing but the folder itself may serve, not this checkout and not the network.
ALONE = """
import json, socket, sys
sys.modules["arr_coc"] = sys.modules["benchmarks"] = None
def refuse(*_, **__): raise OSError("this check runs offline")
socket.socket.connect = socket.create_connection = refuse
def tell(**found):
    with open("found.json", "w") as file:
        json.dump(found, file)
"""

MODEL = (
    ALONE
    + """
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
folder, base = sys.argv[1], sys.argv[2]
instead = {"base_model_name_or_path": base, "base_model_revision": None} if base else {}
config = AutoConfig.from_pretrained(folder, trust_remote_code=True, **instead)
model = AutoModelForImageTextToText.from_pretrained(folder, config=config, trust_remote_code=True, dtype="auto")
assert type(model).__module__.startswith("transformers_modules"), type(model)
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
picture = Image.radial_gradient("L").resize((320, 256)).convert("RGB")
messages = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what is it?"}]}]
inputs = processor.apply_chat_template(
    messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt")
out = model.generate(**inputs, max_new_tokens=8, do_sample=False, num_visual_tokens=20)
perception = model.perceive(**inputs, num_visual_tokens=20)
answer = processor.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
new = out.shape[1] - inputs["input_ids"].shape[1]
tell(answer=answer, tokens=len(perception.allocation[0]), new=new)
"""
)

# Where the base is not at hand: all but its weights.
SHAPES = (
    ALONE
    + """
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
folder = sys.argv[1]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
with torch.device("meta"):
    model = AutoModelForImageTextToText.from_config(config, trust_remote_code=True)
own, given = model.relevance.state_dict(), load_file(folder + "/arr_coc.safetensors")
fits = {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in given.items()}
assert fits, "the add-on does not fit the config"
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
assert hasattr(processor, "apply_chat_template"), f"no processor, only its {type(processor).__name__}"
tell(weights=len(own))
"""
)

DATASET = (
    ALONE
    + """
import pathlib
import duckdb
from datasets import load_dataset
from huggingface_hub import DatasetCard
folder = pathlib.Path(sys.argv[1])
rows = {}
for config in DatasetCard.load(folder / "README.md").data.to_dict()["configs"]:
    data = load_dataset(str(folder), config["config_name"], cache_dir=sys.argv[2])
    rows[config["config_name"]] = sum(map(len, data.values()))
con = duckdb.connect()
for name in rows:
    con.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{folder}/{name}/*.parquet')")
answers = {}
for path in sorted((folder / "queries").glob("*.sql")):
    try:
        answers[path.stem] = len(con.execute(path.read_text()).fetchall())
    except duckdb.Error as error:
        raise SystemExit(f"queries/{path.name}: {str(error).splitlines()[0]}")
tell(rows=rows, answers=answers)
"""
)


def check(
    folder: Path, kind: str, base: str | None = None, beside: dict[str, Path] | None = None, run: bool = True
) -> list[Finding]:
    """All findings about one folder.

    Args:
        base: a local copy of the add-on's base, else it must lie in the Hub's cache.
        beside: the model's and the dataset's folders, which the Space's app is started against.
        run: also load, query or start what the folder holds; else its files are only read.
    """
    if not folder.is_dir():
        raise Refused(f"{folder} is not there: run `python publish.py stage` first, or name the folder.")
    found = [*_files(folder, kind), *_card(folder, kind)]
    if kind == "model":
        found += _weights(folder)
    if not run or any(passed is False for passed, _ in found):
        return found
    does = {"model": _answers, "dataset": _queries, "space": _starts}[kind]
    return [*found, *does(folder, base, beside or {})]


def _files(folder: Path, kind: str) -> list[Finding]:
    problems = []
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or p.is_file()]
    names = sorted(n for n in names if not {".cache", "__pycache__"} & set(n.split("/")) and n != ".gitattributes")
    for name in names:
        path = folder / name
        if path.is_symlink() and not path.resolve().is_file():
            problems.append(f"{name} is a link to nothing")
            continue
        if not any(fnmatch.fnmatch(name, pattern) for pattern in ALLOWED[kind]):
            problems.append(f"{name} is not on the allow-list of a {kind}")
        if path.suffix in PICKLES or _is_pickle(path):
            problems.append(f"{name} may hold a pickle, which runs code when it is loaded: use safetensors")
        most = MEGABYTES.get(path.name, MEGABYTES.get(path.suffix, 16))
        if path.stat().st_size > most * 2**20:
            problems.append(f"{name} has {path.stat().st_size / 2**20:.0f} MiB, more than {most}")
        if path.suffix not in (".safetensors", ".parquet"):
            content = path.read_bytes()
            if SECRETS.search(content):
                problems.append(f"{name} holds what looks like a secret: take it out and revoke it")
            if match := MACHINE_PATHS.search(content):
                problems.append(f"{name} names a path of somebody's machine ({match[0].decode()})")
        if path.suffix == ".py":
            try:
                ast.parse(path.read_text(encoding="utf-8"))
            except SyntaxError as error:
                problems.append(f"{name} is not Python: {error}")
    licence = folder / "LICENSE"
    if not licence.is_file() or "Apache License" not in licence.read_text(encoding="utf-8"):
        problems.append("LICENSE is missing, or is not Apache-2.0")
    return _as_findings(
        problems, f"{len(names)} files, all allowed; no secret, no pickle, none too large; licence present"
    )


def _is_pickle(path: Path) -> bool:
    with open(path, "rb") as file:
        start = file.read(2)
        file.seek(-1, os.SEEK_END) if path.stat().st_size else None
        end = file.read(1)
    if start[:1] == b"\x80" and start[1:] <= b"\x05" and end == b".":
        return True
    if start != b"PK":
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(".pkl") for name in archive.namelist())


def _card(folder: Path, kind: str) -> list[Finding]:
    from huggingface_hub import DatasetCard, ModelCard, SpaceCard

    path = folder / "README.md"
    if not path.is_file():
        return [(False, "README.md, the card, is missing")]
    text, problems = path.read_text(encoding="utf-8"), []
    try:
        data = {"model": ModelCard, "dataset": DatasetCard, "space": SpaceCard}[kind](text).data.to_dict()
    except Exception as error:  # whatever YAML and the card's classes may say
        return [(False, f"README.md's front matter is not valid: {error}")]
    for key, wanted in MUST[kind].items():
        if kind == "model" and key == "base_model" and "base_model_name_or_path" not in _json(folder / "config.json"):
            continue
        if key not in data or (wanted is not None and data[key] != wanted):
            problems.append(f"README.md's front matter must have {key}: {wanted or '...'}")
    problems += [f"README.md links {link}, which is not here" for link in links(text) if not (folder / link).exists()]
    for number, block in enumerate(python_blocks(text), 1):
        try:
            ast.parse(block)
        except SyntaxError as error:
            problems.append(f"README.md's Python block {number} is not Python: {error}")
    for name in re.findall(r"<!-- begin results:(\w+)", text):
        if f"<!-- end results:{name}" not in text:
            problems.append(f"README.md opens results:{name} and never closes it")
    if kind == "dataset":
        for config in data.get("configs") or []:
            files = config["data_files"]
            for pattern in (
                [files] if isinstance(files, str) else [f["path"] if isinstance(f, dict) else f for f in files]
            ):
                if not list(folder.glob(pattern)):
                    problems.append(f"README.md's config {config['config_name']} names {pattern}, which is not here")
    if kind == "space":
        for line in data.get("preload_from_hub") or []:
            if not re.search(r" [0-9a-f]{40}$", line):
                problems.append(f"README.md's preload_from_hub: {line!r} does not end in a commit")
    return _as_findings(problems, "card: metadata valid, links and code blocks whole")


def _weights(folder: Path) -> list[Finding]:
    config, problems = _json(folder / "config.json"), []
    if (
        config.get("model_type") != "arr_coc"
        or not {"AutoConfig", "AutoModelForImageTextToText"} <= config.get("auto_map", {}).keys()
    ):
        problems.append("config.json must be of model_type arr_coc, with an auto_map to the code beside it")
    problems += [f"{name} is missing: the Hub's loader needs it" for name in CODE if not (folder / name).is_file()]
    reference = config.get("base_model_name_or_path")
    try:
        if reference is None:
            shard_files(folder)
        elif not (folder / ADD_ON).is_file():
            problems.append(f"{ADD_ON} is missing, though config.json names a base")
        else:
            tensors_of(folder / ADD_ON)
    except Refused as error:
        problems.append(str(error))
    both = [n for n in hashes(folder) if reference and any(fnmatch.fnmatch(n, p) for p in WEIGHTS)]
    problems += [f"{name} is of the merged layout, but config.json names a base" for name in both]
    layout = f"by reference to {reference}@{config.get('base_model_revision')}" if reference else "merged"
    return _as_findings(problems, f"weights: {layout}; files whole")


def _base_missing(folder: Path, base: str | None) -> str | None:
    """The base that a model's folder names, where its weights are not at hand."""
    config = _json(folder / "config.json")
    named = config.get("base_model_name_or_path")
    if not named or base or Path(named).is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(named, "config.json", revision=config["base_model_revision"])
    return None if isinstance(cached, str) else named


def _answers(folder: Path, base: str | None, _) -> list[Finding]:
    if named := _base_missing(folder, base):
        passed, told = _child(SHAPES, folder)
        if not passed:
            return [(False, f"the model cannot be made: {told}")]
        return [
            (True, f"the code runs, the add-on's {told['weights']} tensors fit the config, the processor loads"),
            (None, f"no answer was tried: {named} is not in the cache; give --base, or see `make rehearse`"),
        ]
    passed, told = _child(MODEL, folder, base or "")
    if not passed:
        return [(False, f"the model does not load and answer: {told}")]
    good = 18 <= told["tokens"] <= 20 and told["new"] > 0
    return [(good, f"loads by AutoModelForImageTextToText and answers {told['answer']!r} from {told['tokens']} tokens")]


def _queries(folder: Path, *_) -> list[Finding]:
    with tempfile.TemporaryDirectory() as scratch:
        passed, told = _child(DATASET, folder, scratch)
    if not passed:
        return [(False, f"the Parquet does not answer: {told}")]
    rows = ", ".join(f"{name} {n}" for name, n in told["rows"].items())
    empty = [name for name, n in told["answers"].items() if not n]
    found = [(bool(told["answers"]), f"{len(told['answers'])} named queries answer; rows: {rows}")]
    return found + [(None, f"query {name} finds no rows") for name in empty]


def _starts(folder: Path, base: str | None, beside: dict[str, Path]) -> list[Finding]:
    """Starts the app in a copy of its folder, against the model's and the dataset's, and asks for its page."""
    if "model" not in beside:
        return [(None, "the app was not started: there is no model's folder to start it against")]
    if named := _base_missing(beside["model"], base):
        return [(None, f"the app was not started: {named} is not in the cache; give --base")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        alone, model = Path(scratch) / "space", beside["model"].resolve()
        shutil.copytree(folder, alone)
        if base:  # the same model, over the copy of its base that is at hand
            model = shutil.copytree(model, Path(scratch) / "model")
            instead = {"base_model_name_or_path": str(Path(base).resolve()), "base_model_revision": None}
            write_json(model / "config.json", _json(model / "config.json") | instead)
        env = _env(scratch) | {
            "GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False",
        }  # fmt: skip
        command = [sys.executable, "app.py", "--model", str(model)]
        if "dataset" in beside:
            command += ["--data", str(beside["dataset"].resolve())]
        with open(Path(scratch) / "log", "w+") as log:
            app = subprocess.Popen(command, cwd=alone, env=env, stdout=log, stderr=log)
            try:
                began = time.monotonic()
                while time.monotonic() - began < 180 and app.poll() is None:
                    try:
                        with urllib.request.urlopen(f"http://127.0.0.1:{port}/config", timeout=5) as page:
                            json.load(page)
                            return [(True, f"the app starts against the model in {time.monotonic() - began:.0f} s")]
                    except (OSError, ValueError):
                        time.sleep(0.5)
            finally:
                app.kill()
                app.wait()
            log.seek(0)
            return [(False, f"the app does not start: {_last(log.read())}")]


def python_blocks(text: str) -> list[str]:
    """A Markdown text's Python code."""
    return re.findall(r"(?ms)^```python\n(.*?)^```", text)


def unpinned(folder: Path) -> list[str]:
    """Files that still hold a placeholder for a commit."""
    texts = [p for p in sorted(folder.rglob("*")) if p.suffix in (".md", ".py", ".txt")]
    return [p.name for p in texts if any(mark in p.read_text(encoding="utf-8") for mark in PLACEHOLDERS.values())]


def _env(scratch: str) -> dict[str, str]:
    """Offline, with modules of its own, and none of the caller's paths to code."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HF_TOKEN", "HF_ENDPOINT")}
    return kept | {
        "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{scratch}/modules", "PYTHONWARNINGS": "ignore",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def _child(code: str, folder: Path, *args) -> tuple[bool, dict | str]:
    """Runs code on a folder in a process of its own -> what it told, or what went wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", code, str(folder.resolve()), *map(str, args)]
        done = subprocess.run(
            command, cwd=scratch, env=_env(scratch), capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            return False, _last(done.stderr)
        return True, _json(Path(scratch) / "found.json")


def _last(text: str) -> str:
    """The line of a traceback that says what happened."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith((" ", "^"))]
    return lines[-1] if lines else "no word of why"


def _json(path: Path) -> dict:
    """What a JSON file holds; nothing where it is missing or none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _as_findings(problems: list[str], otherwise: str) -> list[Finding]:
    return [(False, problem) for problem in problems] or [(True, otherwise)]
