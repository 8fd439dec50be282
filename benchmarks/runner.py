"""Methods x budgets x tasks: every answer a row, none lost and none twice.

- Rows go to `rows-<process>.jsonl` in the run's folder, batch by batch, each flushed to the disk: a crash or a kill
  loses at most one batch. Started again with the same folder, a run goes on where it stopped, with more questions,
  methods or processes if they are asked for.
- `run.json` holds what decides an answer: sources, weights, dtype. Rows of another code are refused.
- All methods see a batch before the next batch is made, so that a run stopped early is still a fair comparison.
- `accelerate launch --multi_gpu --num_processes 2 -m benchmarks run --questions 500 ...` shares the batches out, on
  CPUs too (`--device cpu`).
"""

import hashlib
import json
import os
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

import torch
from tqdm.auto import tqdm

from . import metrics, schema, tasks, whole
from .methods import METHODS, Method, prepare
from .tasks import Task

ROOT = Path(__file__).resolve().parents[1]
# What decides an answer or a measure.
SOURCES = ("*_arr_coc.py", "texture.py", "knowing.py", "balancing.py", "attending.py", "realizing.py", "patches.py")
SOURCES += (
    "benchmarks/methods/*.py",
    "benchmarks/scene*.py",
    "benchmarks/metrics.py",
    "benchmarks/tasks.py",
    "benchmarks/assets/*.npz",
)
NOT_SOURCES = ("scenes_report.py", "scenes_dataset.py")


class Refused(ValueError):
    """A run that cannot be made; the message says why and what to do."""


def digest(paths: Iterable[Path]) -> str:
    """The first 16 digits of the SHA-256 of files, names and bytes."""
    sha = hashlib.sha256()
    for path in sorted(paths):
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:16]


def code_digest() -> str:
    return digest(p for pattern in SOURCES for p in ROOT.glob(pattern) if p.name not in NOT_SOURCES)


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """What a CPU calls itself, with its family and model: clouds shorten the name, and ratios differ between models."""
    lines = info.read_text().splitlines() if info.exists() else []
    said = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    number = "/".join(said[k] for k in ("cpu family", "model") if k in said)
    return f"{said.get('model name') or platform.processor() or platform.machine()} {number}".strip()


def facts(model: str, device: str, dtype: str) -> dict:
    """What a run's rows stand on. The first three decide answers and must never differ within a run."""
    import datasets
    import transformers

    folder = Path(model)
    weights = digest([*folder.glob("*.safetensors"), folder / "config.json"]) if folder.is_dir() else model
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    chip = torch.cuda.get_device_name() if device.startswith("cuda") else cpu_name()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "datasets": datasets.__version__}
    return {
        "code": code_digest(),
        "weights": weights,
        "dtype": dtype,
        "model": folder.name if folder.is_dir() else model,
        "git": git.stdout.strip() or "none",
        "device": device.split(":")[0],
        "chip": chip,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {chip}",
        "versions": json.dumps(versions, sort_keys=True),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def open_run(out: Path, said: dict, alike: tuple[str, ...] = ("code", "weights", "dtype")) -> dict:
    """The run's facts: new ones, or those of the run that is continued.

    Raises:
        Refused: where the folder holds rows of which a fact that must be `alike` is another.
    """
    path = out / "run.json"
    if not path.exists():
        said = {"run_id": f"{said['model']}-{said['weights'][:8]}-{said['code'][:8]}"} | said
        whole.write_text(path, json.dumps(said, indent=1) + "\n")
        return said
    known = json.loads(path.read_text())
    for name in alike:
        if known.get(name) != said[name]:
            raise Refused(
                f"{out} holds rows of {name} {known.get(name)}, this is {said[name]}: rows that do not compare are "
                "never mixed. Give another --out, or check the old state out."
            )
    return known


# ------------------------------------------------------------------------------------------------ rows


def read_rows(path: Path) -> Iterator[dict]:
    """The whole lines of a JSONL file. What a kill left of a last line, or another process has yet to write, is no row.

    Raises:
        Refused: for a line that is whole but no row.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise Refused(f"{path}, line {number} is damaged ({error}): remove that line.") from error


def mend(path: Path):
    """Cuts off what a kill left of a last line."""
    if path.exists():
        whole = path.read_bytes().rfind(b"\n") + 1
        if whole < path.stat().st_size:
            os.truncate(path, whole)


def rows_of(out: Path) -> list[dict]:
    return [row for path in sorted(out.glob("rows-*.jsonl")) for row in read_rows(path)]


def key(row: dict) -> tuple:
    return row["task"], row["method"], row["budget"], row["sample_id"]


def kv_bytes(config, drops: str, native: int, kept: int, text: int, width: int) -> int:
    """Bytes of the cache after a prefill, `width` bytes a number."""
    t = config.text_config
    layers = t.num_hidden_layers
    early = max(2, len(config.vision_config.deepstack_visual_indexes)) if drops == "in the language model" else 0
    tokens = early * (native + text) + (layers - early) * (kept + text)
    return 2 * tokens * t.num_key_value_heads * t.head_dim * width


@torch.no_grad()
def answer(model, processor, method: Method, share: float, task: Task, samples: list[dict], batch=None) -> list[dict]:
    """One method's rows on some samples."""
    batch = batch or prepare(processor, samples, model.device)
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    out = method.on(model, processor, batch, share, task.max_new_tokens)
    peak = torch.cuda.max_memory_allocated() - held if cuda else None
    stages = {stage: out.seconds.get(stage, 0.0) / len(samples) for stage in schema.STAGES}
    text = int(batch.inputs["attention_mask"].sum(1).float().mean()) - int(
        sum(h * w for h, w in batch.grids) / len(batch.grids)
    )
    width = next(model.parameters()).element_size()
    rows = []
    for i, (sample, grid) in enumerate(zip(samples, batch.grids, strict=True)):
        size, boxes = sample["image"].size[::-1], sample["boxes"]
        heat = out.maps["relevance"][i].cpu() if "relevance" in out.maps else None
        evidence = metrics.evidence_cells(boxes, grid, size)
        score = task.score(out.answers[i], sample)
        row = {
            "task": task.name,
            "split": task.split,
            "method": method.name,
            "budget": share,
            "sample_id": sample["id"],
            "question_type": sample["type"],
            "stratum": sample["stratum"],
            "question": sample["question"],
            "answer": sample["answers"][0],
            "prediction": out.answers[i],
            "score": score,
            "correct": score >= 0.5,
            "visual_tokens": len(out.kept[i]),
            "native_tokens": grid[0] * grid[1],
            "seconds": sum(stages.values()),
            "peak_bytes": peak,
            "kv_bytes": kv_bytes(model.config, method.drops, grid[0] * grid[1], len(out.kept[i]), text, width),
            "evidence_boxes": len(boxes),
            "evidence_cells": int(evidence.sum()),
            "seed": sample["seed"],
        }
        row |= {f"seconds_{stage}": value for stage, value in stages.items()}
        row |= metrics.placement(out.kept[i], grid, boxes, size, heat)
        if "participatory" in out.maps and evidence.any():
            counts = metrics.reliability(out.maps["participatory"][i].cpu(), evidence)
            row["reliability"] = [[round(x, 3) for x in line] for line in counts.tolist()]
        rows.append(row)
    return rows


def plan(methods: list[Method], budgets: list[float]) -> list[tuple[Method, float]]:
    """Every method at every budget; those that spend all tokens once."""
    return [(m, b) for m in methods for b in (budgets if m.spends else [1.0])]


def run(
    model,
    processor,
    todo: list[Task],
    methods: list[Method],
    budgets: list[float],
    n: int,
    out: Path,
    said: dict,
    batch_size: int = 16,
    process: int = 0,
    processes: int = 1,
) -> Path:
    """Answers what is not answered yet; returns the folder. `said` is from `facts`."""
    open_run(out, said)
    done, pairs = {key(row) for row in rows_of(out)}, plan(methods, budgets)
    own = out / f"rows-{process}.jsonl"
    mend(own)
    with open(own, "a", encoding="utf-8") as file:
        for task in todo:
            bar = tqdm(total=n * len(pairs), desc=task.name, unit="answer", position=process, mininterval=5)
            rows = iter(task.rows(n))
            number = -1
            while samples := list(islice(rows, batch_size)):
                number += 1
                if number % processes != process:
                    bar.update(len(samples) * len(pairs))
                    continue
                batch = None
                for method, share in pairs:
                    new = [s for s in samples if (task.name, method.name, share, s["id"]) not in done]
                    bar.update(len(samples) - len(new))
                    if not new:
                        continue
                    whole = len(new) == len(samples)
                    batch = batch or (prepare(processor, samples, model.device) if whole else None)
                    made = answer(model, processor, method, share, task, new, batch if whole else None)
                    file.write("".join(json.dumps(row) + "\n" for row in made))
                    file.flush()
                    os.fsync(file.fileno())
                    bar.update(len(new))
            bar.close()
    return out


# ------------------------------------------------------------------------------------------------ what rows say


def summarise(rows: list[dict]) -> list[dict]:
    """`summary`: a row for each method, task and budget, over all questions, each type and each stratum."""
    groups = defaultdict(list)
    for row in rows:
        at = (row["method"], row["task"], row["split"], row["budget"])
        for name in ("*", row["question_type"], f"stratum:{row['stratum']}"):
            if name not in ("stratum:*",):
                groups[(*at, name)].append(row)
    out = []
    for (method, task, split, budget, name), group in groups.items():
        low, high = metrics.wilson(sum(r["score"] for r in group), len(group))
        tokens = [r["visual_tokens"] for r in group]
        row = {"method": method, "task": task, "split": split, "question_type": name, "budget": budget, "n": len(group)}
        row |= {"accuracy": _mean(r["score"] for r in group), "accuracy_low": low, "accuracy_high": high}
        row |= {"visual_tokens_mean": _mean(tokens), "visual_tokens_p95": metrics.percentile(tokens, 0.95)}
        out.append(row | {k: _mean(r[k] for r in group) for k in ("evidence_recall", "box_mass", "iou")})
    return sorted(out, key=lambda r: (r["task"], r["budget"], r["method"], r["question_type"]))


def describe(rows: list[dict], said: dict, probed: list[dict]) -> list[dict]:
    """`runs`: paired tests, the samples that downscaling gets wrong, latency, pointing, calibration, the probe."""
    apart = {("arr_coc", p["split"], p["budget"]): p["distance"] for p in probed}
    groups = defaultdict(dict)
    for row in rows:
        groups[row["task"], row["split"], row["method"], row["budget"]][row["sample_id"]] = row
    out = []
    for (task, split, method, budget), group in groups.items():
        stock = groups.get((task, split, "stock", 1.0), {})
        small = groups.get((task, split, "downscale", budget), {})
        wrong = [group[i] for i in group if i in small and not small[i]["correct"]]
        counts = [r["reliability"] for r in group.values() if r.get("reliability")]
        row = {"task": task, "split": split, "method": method, "budget": budget, "n": len(group)}
        row |= {"drops": METHODS[method].drops, "source": METHODS[method].source}
        row |= {"accuracy": _mean(r["score"] for r in group.values())}
        row |= {"p_against_stock": _paired(group, stock), "p_against_downscale": _paired(group, small)}
        row |= {"n_downscale_wrong": len(wrong), "accuracy_downscale_wrong": _mean(r["score"] for r in wrong)}
        row |= {"seconds_mean": _mean(r["seconds"] for r in group.values())}
        row |= {"pointing_game": _mean(r["pointing_hit"] for r in group.values())}
        error = metrics.calibration_error(torch.tensor(counts).double().sum(0)) if counts else None
        row["distinctiveness"] = apart.get((method, split, budget)) if task.startswith("scenes") else None
        out.append(said | row | {"calibration_error": error})
    return sorted(out, key=lambda r: (r["task"], r["budget"], r["method"]))


def _paired(group: dict, other: dict) -> float | None:
    both = [i for i in group if i in other]
    if not both or group is other:
        return None
    return metrics.mcnemar([group[i]["correct"] for i in both], [other[i]["correct"] for i in both])["p"]


def _mean(values: Iterable) -> float | None:
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


def finish(out: Path, batch_size: int = 16) -> dict[str, Path]:
    """The rows of a run as Parquet: `<out>/<config>/<run_id>.parquet` for `runs`, `samples` and `summary`."""
    said = json.loads((out / "run.json").read_text()) | {"batch": batch_size, "seed": 0}
    rows = list({key(row): row for row in rows_of(out)}.values())
    if not rows:
        raise Refused(f"{out} holds no rows yet: run `python -m benchmarks run --out {out}` first.")
    rows.sort(key=lambda r: (r["task"], r["budget"], r["method"], r["sample_id"]))
    name, probed = {"run_id": said["run_id"], "model": said["model"]}, out / "probe.json"
    tables = {
        "samples": [name | row for row in rows],
        "summary": [name | row for row in summarise(rows)],
        "runs": describe(rows, said, json.loads(probed.read_text()) if probed.exists() else []),
    }
    paths = {}
    for config, table in tables.items():
        paths[config] = out / config / f"{said['run_id']}.parquet"
        schema.write(config, table, paths[config])
    return paths


def load(model: str, device: str, dtype: str):
    """A checkpoint of either layout, ready to answer, and its processor."""
    from transformers import AutoProcessor

    from arr_coc import ArrCocForConditionalGeneration

    try:
        loaded = ArrCocForConditionalGeneration.from_pretrained(model, dtype=getattr(torch, dtype))
        return loaded.to(device).eval(), AutoProcessor.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise Refused(f"--model {model} cannot be loaded: {error}") from error


def main(args) -> int:
    """`python -m benchmarks run`."""
    from accelerate import PartialState

    from .methods import named

    todo, methods = tasks.named(args.tasks), named(args.methods)
    state = PartialState(cpu=args.device == "cpu" or not torch.accelerator.is_available())
    if state.num_processes != int(os.environ.get("WORLD_SIZE", 1)):  # each would answer everything
        raise Refused(
            f"{os.environ['WORLD_SIZE']} processes were started, which do not find each other: add --device cpu."
        )
    device = str(state.device) if args.device is None else args.device
    if args.threads:
        torch.set_num_threads(args.threads)
    model, processor = load(args.model, device, args.dtype)
    said = facts(args.model, device, args.dtype)
    out = Path(args.out)
    with state.main_process_first():
        open_run(out, said)
    start = time.perf_counter()
    run(
        model,
        processor,
        todo,
        methods,
        args.budgets,
        args.n,
        out,
        said,
        args.batch,
        state.process_index,
        state.num_processes,
    )
    state.wait_for_everyone()
    if state.is_main_process:
        paths = finish(out, args.batch)
        print(f"{time.perf_counter() - start:.0f} s; rows in {', '.join(map(str, paths.values()))}")
        _table(out)
    return 0


def _table(out: Path):
    """Accuracy by method and budget, one table a task."""
    said = [r for r in summarise(rows_of(out)) if r["question_type"] == "*"]
    for task in dict.fromkeys(r["task"] for r in said):
        cells = {(r["method"], r["budget"]): r for r in said if r["task"] == task}
        budgets = sorted({b for _, b in cells})
        print(f"\n{task:<20}" + "".join(f"{b:>16.0%}" for b in budgets))
        for method in dict.fromkeys(m for m, _ in cells):
            shown = [
                f"{r['accuracy']:>7.3f} n={r['n']:<6}" if (r := cells.get((method, b))) else " " * 16 for b in budgets
            ]
            print(f"{method:<20}" + "".join(f"{s:>16}" for s in shown))
