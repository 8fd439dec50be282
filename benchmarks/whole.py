"""Files that appear whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path


def write(path: Path, make: Callable[[Path], object]):
    """`make(part)` writes beside `path`, and then `part` takes its name: a reader sees the old file or the new one.

    Missing folders are made. Whatever stops `make`, what it had written is removed, and `path` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        make(part)
        part.chmod(0o644)  # safetensors writes files that only their owner may read
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str):
    write(path, lambda part: part.write_text(text, encoding="utf-8"))
