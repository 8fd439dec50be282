"""Finished runs into the results dataset: one Parquet file a run and config, checked before and after."""

import shutil
from functools import partial
from pathlib import Path

from . import schema, whole


def main(args) -> int:
    """Copy the runs' Parquet into the dataset.

    Raises:
        schema.Unreadable: for a truncated or foreign file, or two folders that hold the same run, of which one would
            replace the other.
    """
    targets: dict[Path, Path] = {}
    for run in map(Path, args.runs):
        for config, paths in schema.files(run).items():
            for path in paths:
                target = Path(args.data) / config / path.name
                if target in targets:
                    raise schema.Unreadable(
                        f"{path} and {targets[target]} are of the same weights and code, and one would replace the "
                        "other: give `run` the same --out, and it adds to what is there."
                    )
                targets[target] = path
    for target, path in targets.items():
        whole.write(target, partial(shutil.copyfile, path))
        print(target)
    schema.files(Path(args.data))
    return 0
