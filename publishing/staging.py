"""Three folders, each complete, minimal and the same byte for byte whenever it is made from the same sources."""

import ast
import fnmatch
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from arr_coc.modeling_arr_coc import AUTO_MAP

from .files import (
    ADD_ON,
    ALLOWED,
    CODE,
    EXAMPLE,
    PICTURES,
    PROCESSOR,
    ROOT,
    SPACE_DATA,
    WEIGHTS,
    Refused,
    digest,
    download,
    hashes,
    links,
    write_json,
)  # fmt: skip
from .layouts import copy_small, fresh, merge, read_config, split


def stage(out: Path, org: str, tag: str, source: Path, layout: str, base: str | None, base_revision: str | None, kinds):
    """Folders under `out`, and `out/stage.json`, which says what they hold. Each replaces an older one as a whole."""
    record_path = out / "stage.json"
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    for kind in kinds:
        if (out / kind).exists() and kind not in record.get("folders", {}):
            raise Refused(f"{out / kind} exists and was not made by `stage`: move it away, or give another --out.")
    if (record.get("org", org), record.get("tag", tag)) != (org, tag):
        record = {}
    record |= {"org": org, "tag": tag}
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".stage-") as scratch:
        for kind in kinds:
            folder = Path(scratch) / kind
            folder.mkdir()
            if kind == "model":
                _stage_model(folder, source, layout, base, base_revision)
                record["layout"] = layout
            else:
                {"space": _stage_space, "dataset": _stage_dataset}[kind](folder)
            _copy(ROOT / "LICENSE", folder / "LICENSE")
            for path in folder.rglob("*"):
                if path.suffix in (".md", ".py", ".txt"):
                    text = path.read_text(encoding="utf-8")
                    text = text.replace("ORG/", f"{org}/")
                    if path.suffix == ".md":
                        text = re.sub(r"\bv1\.0\b", tag, text)
                    path.write_text(text, encoding="utf-8")
        for kind in kinds:
            shutil.rmtree(out / kind, ignore_errors=True)
            os.replace(Path(scratch) / kind, out / kind)
            files = hashes(out / kind)
            record.setdefault("folders", {})[kind] = {"digest": digest(files), "files": files}
            size = sum((out / kind / name).stat().st_size for name in files)
            print(f"staged {out / kind}: {len(files)} files, {size / 2**20:.1f} MiB, {digest(files)}", flush=True)
    write_json(record_path, record)


def _stage_model(folder: Path, source: Path, layout: str, base: str | None, base_revision: str | None):
    from transformers.dynamic_module_utils import get_relative_import_files

    config = read_config(source)
    by_reference = config.get("base_model_name_or_path") is not None
    if by_reference:
        base, base_revision = base or config["base_model_name_or_path"], config["base_model_revision"]
    if by_reference and not (source / ADD_ON).is_file():
        fresh(source / "config.json", folder / ADD_ON)
    elif by_reference:
        _copy(source / ADD_ON, folder / ADD_ON)
    if by_reference:
        _copy(source / "config.json", folder / "config.json")
        copy_small(source, folder, download(base, base_revision, PROCESSOR))
        if layout == "merged":
            whole = folder.with_name("merged")
            merge(folder, whole, download(base, base_revision, (*WEIGHTS, "generation_config.json")))
            shutil.rmtree(folder)
            os.replace(whole, folder)
    elif layout == "merged":
        for name in sorted(p.name for p in source.iterdir()):
            if any(fnmatch.fnmatch(name, pattern) for pattern in (*WEIGHTS, "config.json")):
                _copy(source / name, folder / name)
        copy_small(source, folder)
    else:
        if base is None:
            raise Refused(f"{source} is merged: for --layout reference name --base, and --base-revision unless local.")
        split(source, folder, base, base_revision)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "preprocessor_config.json")):
        raise Refused(f"{base or source} holds no processor ({', '.join(PROCESSOR[:2])}, ...): name a complete --base.")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"auto_map": AUTO_MAP})
    _name_processor(folder)
    entry = ROOT / CODE[0]
    for path in sorted({entry, *map(Path, get_relative_import_files(str(entry)))}):
        _copy(path, folder / path.name)
    _copy(ROOT / EXAMPLE, folder / EXAMPLE)
    _copy_card(ROOT / "model_card.md", folder)
    card, named = folder / "README.md", config.get("base_model_name_or_path")
    text = card.read_text(encoding="utf-8")
    if named is None:
        text = re.sub(r"(?m)^base_model_relation: .*$", "base_model_relation: finetune", text)
    elif not Path(named).is_dir():
        text = re.sub(r"(?m)^base_model: .*$", f"base_model: {named}", text)
    card.write_text(text, encoding="utf-8")


def _name_processor(folder: Path):
    """Without its class's name AutoProcessor would ask whether to run the code here, to find that it is stock's."""
    files = [folder / name for name in ("processor_config.json", "preprocessor_config.json")]
    files = [path for path in files if path.is_file()]
    if files and not any("processor_class" in json.loads(path.read_text()) for path in files):
        write_json(files[-1], json.loads(files[-1].read_text()) | {"processor_class": "Qwen3VLProcessor"})


def _stage_space(folder: Path):
    """`app.py` at the root as here, and beside it the packages that it imports, as far as it does."""
    _copy_card(ROOT / "space" / "README.md", folder)
    _copy(ROOT / "space" / "requirements.txt", folder / "requirements.txt")
    for target, path in closure("arr_coc.app").items():
        _copy(path, folder / ("app.py" if path == ROOT / "app.py" else target))
    for pattern in SPACE_DATA:
        found = sorted(ROOT.glob(pattern))
        if not found:
            raise Refused(f"{pattern} is missing: the Space needs it.")
        for path in found:
            _copy(path, folder / path.relative_to(ROOT))


def _stage_dataset(folder: Path):
    source = ROOT / "benchmarks" / "dataset"
    if not source.is_dir():
        raise Refused("benchmarks/dataset is missing: make it with `python -m benchmarks run` and `... collect`.")
    _copy_card(source / "README.md", folder)
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in ALLOWED["dataset"][2:]):
            _copy(path, folder / name)


def closure(entry: str) -> dict[str, Path]:
    """A module and all of this repository's that it imports: path in the packages -> file here."""
    found, todo = {}, [entry]
    while todo:
        name = todo.pop()
        where, path = _module(name)
        if path is None or where in found:
            continue
        found[where] = path
        todo += [name.rpartition(".")[0]] if "." in name else []
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parts = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*parts, *([node.module] if node.module else [])])
                todo += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    if not found:
        raise Refused(f"{entry} is missing: it is to be staged.")
    return dict(sorted(found.items()))


def _module(name: str) -> tuple[str, Path | None]:
    """A dotted name -> its path in the packages, and its file; None where it is not this repository's."""
    top, _, rest = name.partition(".")
    home = {"arr_coc": ROOT, "benchmarks": ROOT / "benchmarks"}.get(top)
    if home is None:
        return name, None
    inner = rest.replace(".", "/")
    for tail in (f"{inner}.py", f"{inner}/__init__.py".lstrip("/")):
        if tail != ".py" and (home / tail).is_file():
            return f"{top}/{tail}", home / tail
    return name, None


def _copy_card(card: Path, folder: Path):
    """A card and the pictures that it shows, which keep their places beside it."""
    _copy(card, folder / "README.md")
    for link in links(card.read_text(encoding="utf-8")):
        if any(fnmatch.fnmatch(link, pattern) for pattern in PICTURES):
            _copy(card.parent / link, folder / link)


def _copy(source: Path, target: Path):
    if not source.is_file():
        name = source.relative_to(ROOT) if ROOT in source.parents else source
        raise Refused(f"{name} is missing: it is to be staged.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def copy_out(snapshot: Path, folder: Path):
    """A download, whose files are links into a cache, as plain files."""
    for path in sorted(snapshot.rglob("*")):
        if path.is_file():
            _copy(path, folder / path.relative_to(snapshot))
