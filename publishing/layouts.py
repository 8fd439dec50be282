"""The add-on, and the two layouts of a checkpoint: by reference and merged. Weights are moved tensor for tensor."""

import hashlib
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

from benchmarks import whole

from .files import ADD_ON, PROCESSOR, WEIGHTS, Refused, download, write_json


def fresh(config_path: Path, target: Path):
    """Writes the add-on as it is before any training: with it ARR-COC is a method that needs none.

    The layers that must differ from each other get values on an exact binary grid, drawn by SHAKE-256 from their names:
    the same bytes on every machine, device and version, and no generator's state is touched.
    """
    import torch
    from safetensors.torch import save_file

    from arr_coc import ArrCocConfig
    from arr_coc.modeling_arr_coc import Relevance

    config = ArrCocConfig.from_pretrained(config_path)
    relevance = Relevance(config)
    step = 2.0 ** (round(math.log2(config.text_config.initializer_range * math.sqrt(3))) - 7)
    for name, module in relevance.named_modules():
        if type(module) in (torch.nn.Linear, torch.nn.Conv2d):
            shape = module.weight.shape
            drawn = hashlib.shake_256(f"{name}.weight".encode()).digest(shape.numel())
            drawn = torch.frombuffer(bytearray(drawn), dtype=torch.int8).reshape(shape)
            module.weight.data = (drawn.float() + 0.5) * step
            module.bias.data.zero_()
        elif list(module.parameters(recurse=False)):
            module.reset_parameters()
    whole.write(target, lambda part: save_file(relevance.state_dict(), part, metadata={"format": "pt"}))


def merge(source: Path, target: Path, base: Path | None = None):
    """An add-on folder and its base's weights -> one folder in the merged layout, tensor for tensor, byte for byte.

    Args:
        base: a local copy of the base, in the place of the pinned commit.
    """
    config = read_config(source)
    if config.get("base_model_name_or_path") is None:
        raise Refused(f"{source} names no base model: it is merged already.")
    base = base or download(config["base_model_name_or_path"], config["base_model_revision"], WEIGHTS)
    shards = shard_files(base)
    target.mkdir(parents=True, exist_ok=True)
    total, where, size = len(shards) + 1, {}, 0
    names = [f"model-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)]
    for name, shard in zip(names, shards, strict=False):
        print(f"merge: {shard.name} -> {name}", flush=True)
        whole.write(target / name, partial(shutil.copyfile, shard))
    from safetensors.torch import load_file, save_file

    own = {f"relevance.{k}": v for k, v in load_file(source / ADD_ON).items()}
    whole.write(target / names[-1], lambda part: save_file(own, part, metadata={"format": "pt"}))
    for name in names:
        for key, (start, end) in tensors_of(target / name).items():
            where[key], size = name, size + end - start
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    write_json(target / "model.safetensors.index.json", index)
    write_json(target / "config.json", {k: v for k, v in config.items() if not k.startswith("base_model_")})
    copy_small(source, target, base)


def split(source: Path, target: Path, base: str, revision: str | None):
    """A merged folder -> the add-on alone, over a base whose weights are shown to be those that were merged."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = read_config(source)
    if config.get("base_model_name_or_path") is not None:
        raise Refused(f"{source} names a base model: it is an add-on already.")
    if not Path(base).is_dir() and not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise Refused(f"--base-revision {revision} is not a commit: pin {base} by 40 hexadecimal digits.")
    theirs = {key: shard for shard in shard_files(download(base, revision, WEIGHTS)) for key in tensors_of(shard)}
    own, different = {}, []
    for shard in shard_files(source):
        with safe_open(shard, "pt") as file:
            for key in file.keys():  # noqa: SIM118, it is no dict
                if key.startswith("relevance."):
                    own[key.removeprefix("relevance.")] = file.get_tensor(key)
                elif key in theirs:
                    with safe_open(theirs.pop(key), "pt") as other:
                        mine, other = file.get_tensor(key), other.get_tensor(key)
                        if mine.dtype != other.dtype or not torch.equal(mine, other):
                            different.append(key)
                elif key != "lm_head.weight":  # tied: some versions save it, some do not
                    different.append(key)
    different += [key for key in theirs if key != "lm_head.weight"]
    if different:
        raise Refused(
            f"{source} and {base} differ in {len(different)} weights beyond the add-on ({different[0]}, ...): they "
            "would be lost. Name the base that was merged, or publish with --layout merged."
        )
    if not own:
        raise Refused(f"{source} holds no weights of ARR-COC (relevance.*): nothing to split off.")
    target.mkdir(parents=True, exist_ok=True)
    whole.write(target / ADD_ON, lambda part: save_file(own, part, metadata={"format": "pt"}))
    write_json(target / "config.json", config | {"base_model_name_or_path": base, "base_model_revision": revision})
    copy_small(source, target)


def copy_small(source: Path, target: Path, base: Path | None = None):
    for name in ("generation_config.json", *PROCESSOR):
        for folder in (source, base):
            if folder and (folder / name).is_file():
                whole.write(target / name, partial(shutil.copyfile, folder / name))
                break


def read_config(folder: Path) -> dict:
    path = folder / "config.json"
    if not path.is_file():
        raise Refused(f"{folder} holds no config.json: name a checkpoint's folder.")
    config = json.loads(path.read_text())
    if config.get("model_type") != "arr_coc":
        raise Refused(
            f"{path} is of a {config.get('model_type')} model, not of arr_coc: give it its add-on first "
            "(`python train.py arr-coc`)."
        )
    return config


def shard_files(folder: Path) -> list[Path]:
    """A folder's weight files, in order; each of them whole."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        shards = [folder / "model.safetensors"]
    elif index.is_file():
        shards = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        raise Refused(f"{folder} holds no model.safetensors and no index of shards: its weights are missing.")
    for shard in shards:
        if not shard.is_file():
            raise Refused(f"{shard} is missing, though the index names it: download it again.")
        tensors_of(shard)
    return shards


def tensors_of(path: Path) -> dict[str, tuple[int, int]]:
    """The tensors of a safetensors file and their places, after checking that the file is as long as it says."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, 2**27):
                raise ValueError("its header is longer than the file")
            tensors = json.loads(file.read(length))
        tensors = {k: tuple(v["data_offsets"]) for k, v in tensors.items() if k != "__metadata__"}
        if size != 8 + length + max((end for _, end in tensors.values()), default=0):
            raise ValueError("it is cut short or too long")
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path} is damaged ({error}): download or save it again.") from error
    return tensors
