"""The results dataset: four configs, one schema each, as Parquet files that `datasets` wrote."""

from pathlib import Path

from datasets import Dataset, Features, Value, disable_progress_bars, enable_progress_bars

from . import whole

_TEXT, _INT, _REAL, _BOOL = Value("string"), Value("int64"), Value("float64"), Value("bool")
_KEY = {"run_id": _TEXT, "model": _TEXT, "method": _TEXT, "task": _TEXT, "split": _TEXT}
STAGES = ("preprocess", "choose", "tower", "prefill", "decode")

SCHEMAS = {
    # A row for each method, task and budget of a run: what it is, what it was run on, what only all samples can tell.
    "runs": Features(
        _KEY
        | {"budget": _REAL, "drops": _TEXT, "source": _TEXT, "code": _TEXT, "git": _TEXT, "weights": _TEXT}
        | {"seed": _INT, "batch": _INT, "dtype": _TEXT, "device": _TEXT, "machine": _TEXT, "versions": _TEXT}
        | {"date": _TEXT, "n": _INT, "accuracy": _REAL}
        | {"p_against_stock": _REAL, "p_against_downscale": _REAL}
        | {"n_downscale_wrong": _INT, "accuracy_downscale_wrong": _REAL}
        | {"seconds_mean": _REAL, "pointing_game": _REAL, "calibration_error": _REAL, "distinctiveness": _REAL}
    ),
    # A row for each answer.
    "samples": Features(
        _KEY
        | {"sample_id": _TEXT, "question_type": _TEXT, "stratum": _TEXT, "budget": _REAL, "question": _TEXT}
        | {"answer": _TEXT, "prediction": _TEXT, "score": _REAL, "correct": _BOOL}
        | {"visual_tokens": _INT, "native_tokens": _INT, "seconds": _REAL}
        | {f"seconds_{stage}": _REAL for stage in STAGES}
        | {"peak_bytes": _INT, "kv_bytes": _INT, "evidence_boxes": _INT, "evidence_cells": _INT}
        | {"evidence_recall": _REAL, "box_mass": _REAL, "iou": _REAL, "pointing_hit": _REAL, "seed": _INT}
    ),
    # `question_type` is a type, `*` for all of them, or `stratum:dense` and the like.
    "summary": Features(
        _KEY
        | {"question_type": _TEXT, "budget": _REAL, "n": _INT}
        | {"accuracy": _REAL, "accuracy_low": _REAL, "accuracy_high": _REAL}
        | {"visual_tokens_mean": _REAL, "visual_tokens_p95": _REAL}
        | {"evidence_recall": _REAL, "box_mass": _REAL, "iou": _REAL}
    ),
    # `stage` is `*` for the whole prefill, `model` for the FLOP model's ratio, or a stage of it. Joules, where the
    # device tells, are those of the prefill and the few tokens timed after it.
    "speed": Features(
        {"run_id": _TEXT, "shape": _TEXT, "device": _TEXT, "dtype": _TEXT, "batch": _INT}
        | {"native_tokens": _INT, "budget_tokens": _INT, "method": _TEXT, "stage": _TEXT}
        | {"seconds_median": _REAL, "ratio_to_stock": _REAL, "peak_bytes": _INT, "kv_bytes": _INT}
        | {"joules_median": _REAL, "rounds": _INT}
    ),
}


def write(config: str, rows: list[dict], path: Path):
    """Rows to one Parquet file, whole or not at all."""
    features = SCHEMAS[config]
    columns = {name: [row.get(name) for row in rows] for name in features}
    disable_progress_bars()
    whole.write(path, Dataset.from_dict(columns, features=features).to_parquet)
    enable_progress_bars()


class Unreadable(ValueError):
    """A file that cannot be used; the message names it and the mend."""


def files(folder: Path, allow_empty: bool = False) -> dict[str, list[Path]]:
    """Each config's Parquet files under `folder/<config>/`, checked to be whole and of the config's columns.

    Raises:
        Unreadable: for a truncated or foreign file, and unless `allow_empty` where there is no file. None is skipped.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = {config: sorted(folder.glob(f"{config}/*.parquet")) for config in SCHEMAS}
    if not allow_empty and not any(found.values()):
        raise Unreadable(f"{folder} holds no rows: run `python -m benchmarks run` and `... collect`, or give --data.")
    for config, paths in found.items():
        for path in paths:
            try:
                names = pq.read_schema(path).names
            except (pa.ArrowInvalid, OSError) as error:
                raise Unreadable(
                    f"{path} cannot be read, it is truncated or no Parquet file ({error}): restore or remove it."
                ) from error
            if names != list(SCHEMAS[config]):
                odd = set(names) ^ set(SCHEMAS[config])
                raise Unreadable(
                    f"{path} is not of config {config} (columns {sorted(odd)}): write it again or remove it."
                )
    return found
