"""What is published, by allow-list, and what every step does with files: whole, counted, named when damaged."""

import hashlib
import json
import os
import re
from pathlib import Path

from benchmarks.whole import write_text

ROOT = Path(__file__).resolve().parent.parent
ADD_ON = "arr_coc.safetensors"
REPOSITORIES = {"model": "arr-coc-vis", "dataset": "arr-coc-results", "space": "arr-coc"}  # in the order of pushing
PLACEHOLDERS = {"model": "0" * 40, "dataset": "1" * 40}
CODE = ("modeling_arr_coc.py", "configuration_arr_coc.py")  # and the siblings that they import
PROCESSOR = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
PICTURES = ("*.png", "*.jpg", "*.jpeg", "*.webp", "*.svg")
EXAMPLE = "examples/astronaut.jpg"  # what the model card's snippet asks about
SPACE_DATA = ("space/app.css", "examples/*.jpg", "examples/examples.json", "benchmarks/dataset/queries/*.sql")
ALLOWED = {
    "model": (
        "README.md", "LICENSE", "config.json", "generation_config.json", "*.py", ADD_ON,
        *WEIGHTS, *PROCESSOR, *PICTURES,
    ),
    "dataset": ("README.md", "LICENSE", "*/*.parquet", "queries/*.sql", *PICTURES),
    "space": ("README.md", "LICENSE", "requirements.txt", "*.py", *SPACE_DATA, *PICTURES),
}  # fmt: skip
MEGABYTES = {".safetensors": 5120, ".parquet": 512, "tokenizer.json": 32}  # the most that a file may have; others 16


class Refused(ValueError):
    """What was asked for cannot be done; the message names the input and the mend."""


def download(where: str | os.PathLike, revision: str | None, patterns, repo_type: str | None = None) -> Path:
    """A folder as it is, or a repository's files at a revision."""
    if repo_type is None and Path(where).is_dir():
        return Path(where)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(where), revision=revision, allow_patterns=patterns, repo_type=repo_type))
    except Exception as error:
        raise Refused(
            f"{where} at {revision} cannot be downloaded ({type(error).__name__}: {first_line(error)}): go online and "
            "check name, revision and access, or give a local copy."
        ) from error


def write_json(target: Path, value):
    write_text(target, json.dumps(value, indent=2, sort_keys=True) + "\n")


def hashes(folder: Path) -> dict[str, str]:
    """Each file's SHA-256, by its path in the folder. Caches that tools leave are no part of it."""
    found = [p for p in folder.rglob("*") if p.is_file() and not {"__pycache__", ".cache"} & set(p.parts)]
    return {p.relative_to(folder).as_posix(): sha256(p) for p in sorted(found) if p.name != ".gitattributes"}


def sha256(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()


def digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def links(text: str) -> list[str]:
    """Targets of a Markdown text's relative links and pictures."""
    found = re.findall(r"\]\(([^)\s#]+)[^)]*\)|<img[^>]* src=\"([^\"]+)\"", text)
    return [link for pair in found for link in pair if link and not re.match(r"[a-z]+:|#|/", link)]


def read_record(out: Path) -> dict:
    """What `stage` wrote down about its folders."""
    path = out / "stage.json"
    if not path.is_file():
        raise Refused(f"{path} is missing: run `python publish.py stage` first, or give its --out.")
    return json.loads(path.read_text())
