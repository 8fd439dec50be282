"""What choosing costs and what it saves, side by side in one run: seconds by stage, peak memory, KV bytes.

    python -m benchmarks speed                          # Qwen3-VL-2B's exact shapes, random weights, 1024 x 1024 px
    python -m benchmarks speed --size 512,1024,2048 --budgets 0.05,0.1,0.2,0.5 --batch 1,8 --out runs/speed
    python -m benchmarks speed --model checkpoints/tiny --size 512 --budgets 51

- The methods of `benchmarks.methods` as they are, rivals included, on one model; *floor* is K tokens and no choosing.
- Methods take turns, so that a machine's drift meets all of them alike; a round that warms up, then medians. Peak
  memory is watched in the first round alone on a CPU: to watch it slows what is timed.
- A prefill (stage `*`) is wall time from the processor's tensors to the first logits, its choosing in it. Preprocessing
  and the time of a further token stand beside it. Stage `model` is what the FLOP model of `flops.py` foretells.
- Each measurement is written as it is made: with `--out` a run that was stopped goes on where it was, on
  the same device alone.

Time is true with random weights, accuracy is not asked here. Absolute seconds mean little on a shared machine: read the
ratios.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm.auto import tqdm
from transformers import BatchFeature
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from arr_coc import ArrCocConfig, ArrCocForConditionalGeneration
from arr_coc.attending import flat_scale

from . import schema
from .flops import method_flops
from .methods import METHODS, prepare
from .methods.interface import Batch, Clock, Run
from .runner import facts, kv_bytes, mend, open_run, read_rows

ROOT = Path(__file__).resolve().parents[1]
FLOOR = "floor"
DEFAULT = "stock,floor,downscale,arr_coc_texture,arr_coc_glance,arr_coc,arr_coc_after,pixelprune,fastv,visionzip,"
DEFAULT += "divprune,cdpruner,prumerge_plus"
STEPS = 4  # decoded tokens that are timed


def random_model(config: ArrCocConfig, dtype: torch.dtype, device: str) -> ArrCocForConditionalGeneration:
    """A model of these shapes with random weights."""
    config.base_model_name_or_path = config.base_model_revision = None
    config.participatory = "both"
    torch.manual_seed(0)
    with torch.device(device):
        model = ArrCocForConditionalGeneration._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = [config.turn_end_token_id]
    return model


def textured_image(size: int, seed: int = 0) -> Image.Image:
    """`size x size` px: cells of random colours under noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.random((-(-size // 32), -(-size // 32), 3)).repeat(32, 0).repeat(32, 1)[:size, :size]
    noisy = coarse + 0.3 * rng.standard_normal((size, size, 3), dtype=np.float32)
    return Image.fromarray((noisy.clip(0, 1) * 255).astype(np.uint8))


class RandomProcessor:
    """Makes what a processor makes of images and questions, with random words: no tokenizer is needed."""

    def __init__(self, config: ArrCocConfig, words: int = 16):
        self.config, self.words, vision = config, words, config.vision_config
        self.image_processor = Qwen2VLImageProcessor(
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            image_mean=list(config.image_mean),
            image_std=list(config.image_std),
            size={"shortest_edge": config.cell**2, "longest_edge": 2**26},
        )

    def apply_chat_template(self, turn, **_) -> str:
        return ""

    def __call__(self, text, images, **_) -> BatchFeature:
        config, rows = self.config, []
        out = dict(self.image_processor(images, return_tensors="pt"))
        ends = (
            config.image_token_id,
            config.turn_end_token_id,
            config.vision_start_token_id,
            config.vision_end_token_id,
        )
        words = torch.randint(5, min(ends), (self.words,), generator=torch.Generator().manual_seed(0)).tolist()
        for _, h, w in out["image_grid_thw"].tolist():
            cells = h * w // config.vision_config.spatial_merge_size**2
            row = [*config.user_turn_token_ids, config.vision_start_token_id, *[config.image_token_id] * cells]
            row += [config.vision_end_token_id, *words, config.turn_end_token_id, config.user_turn_token_ids[0], 5, 6]
            rows.append(row)
        ids = torch.tensor(rows)
        out |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return BatchFeature(out | {"mm_token_type_ids": (ids == config.image_token_id).int()})

    def batch_decode(self, ids, **_) -> list[str]:
        return [""] * len(ids)


class Prefill(Run):
    """In the place of answering: one prefill by `forward`, then a few tokens."""

    def generate(self, model, inputs: dict, **how) -> list[str]:
        out = model(**inputs, **how, logits_to_keep=1, use_cache=True)
        cache, count = out.past_key_values, len(inputs["input_ids"])
        with self.clock.stage("decode"):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            for _ in range(STEPS):
                length = cache.get_seq_length()
                at = torch.full((4, count, 1), length, device=token.device)
                mask = torch.ones(count, length + 1, dtype=torch.long, device=token.device)
                out = model(
                    input_ids=token,
                    attention_mask=mask,
                    position_ids=at,
                    past_key_values=cache,
                    num_visual_tokens="all",
                )
                token = out.logits[:, -1].argmax(-1, keepdim=True)
        return [""] * count


class PeakMemory:
    """Most bytes held above those held on entry: the accelerator's own count, or the process's resident set."""

    def __init__(self, device: str):
        self.cuda = torch.device(device).type == "cuda"

    def __enter__(self):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return self
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or what an earlier method freed would hide what this one takes
        self.start = self.most = _resident()
        self.running = True
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self):
        while self.running:
            self.most = max(self.most, _resident())
            time.sleep(0.002)

    def __exit__(self, *_):
        if self.cuda:
            self.bytes = torch.cuda.max_memory_allocated() - self.start
            return
        self.running = False
        self.thread.join()
        self.bytes = max(self.most, _resident()) - self.start


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def energy_meter(device: str, zones: Path = Path("/sys/class/powercap")) -> Callable[[], float] | None:
    """A function that says how many joules the device has used, by its own counter; None where it does not tell.

    NVML's counter of a GPU (with `pip install nvidia-ml-py`), or RAPL's of all CPU packages (most systems let only root
    read it). RAPL's wraps around once in some minutes of full load, NVML's moves every 20 to 100 ms: medians help.
    """
    if torch.device(device).type == "cuda":
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        except pynvml.NVMLError:
            return None
        return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
    counters = [zone / "energy_uj" for zone in sorted(zones.glob("intel-rapl:*")) if zone.name.count(":") == 1]
    if not counters or not all(os.access(counter, os.R_OK) for counter in counters):
        return None
    return lambda: sum(int(counter.read_text()) for counter in counters) / 1e6


def method_of(name: str):
    """A method by its name; *floor* is evenly spread tokens, which cost nothing to choose."""
    if name != FLOOR and name not in METHODS:
        raise ValueError(f"unknown method {name}: there are {', '.join([FLOOR, *METHODS])}.")
    return METHODS["uniform" if name == FLOOR else name]


@torch.no_grad()
def once(
    model,
    processor,
    batch: Batch,
    name: str,
    tokens: int,
    joules: Callable[[], float] | None = None,
    watch: bool = True,
) -> dict:
    """One prefill: seconds by stage (`*` is all of it), joules where told, the tokens kept, and the peak of memory.

    To `watch` memory costs time on a CPU (a thread that looks, memory given back first, which must then be mapped
    again page by page); without it `peak_bytes` is None.
    """
    method, device = method_of(name), str(model.device)
    batch = replace(batch, _seen={})  # nothing is shared between methods here
    with PeakMemory(device) if watch else nullcontext() as memory, Clock(model) as clock:
        start, energy = clock.now(), joules() if joules else 0.0
        out = method.answer(model, batch, [tokens] * len(batch.samples), Prefill(processor, clock, 1 + STEPS))
        whole, energy = clock.now() - start, joules() - energy if joules else None
    stages = {k.removeprefix("choose/"): v for k, v in (clock.seconds | out.seconds).items()}
    decode = stages.pop("decode", 0.0)
    own = stages.pop("preprocess", None)  # a method that resizes does so before its prefill
    stages |= {"preprocess": batch.seconds if own is None else own, "decode": decode / STEPS}
    stages["*"] = whole - decode - (own or 0.0)
    energy = energy if energy and energy > 0 else None  # the counter stood still, or wrapped around
    peak = memory.bytes if watch else None
    return {"stages": stages, "peak_bytes": peak, "joules": energy, "tokens": len(out.kept[0])}


def medians(rows: list[dict], config, shape: str, device: str, dtype: torch.dtype, run_id: str) -> list[dict]:
    """Measurements to the rows of `speed`: time and energy of the counted rounds, memory wherever it was watched."""
    seen, facts = defaultdict(list), {}
    for r in rows:
        at = (r["size"], r["batch"], r["budget"], r["method"])
        if r["peak_bytes"] is not None:
            seen[at, "peak"].append(r["peak_bytes"])
        if not r["round"]:
            continue
        facts[at] = r
        for stage, seconds in r["stages"].items():
            seen[at, stage].append(seconds)
        if r.get("joules") is not None:
            seen[at, "joules"].append(r["joules"])
    out = []
    text, cells = 16 + 8, {size: (size // config.cell) ** 2 for size in {r["size"] for r in rows}}
    base = {"run_id": run_id, "shape": shape, "device": device, "dtype": str(dtype).removeprefix("torch.")}
    for at, said in facts.items():
        size, batch, budget, name = at
        stock = statistics.median(seen[(size, batch, budget, "stock"), "*"])
        method, native = method_of(name), cells[size]
        kept = native if not method.spends else said["tokens"]
        width = torch.empty((), dtype=dtype).element_size()
        row = base | {"batch": batch, "native_tokens": native, "budget_tokens": budget, "method": name}
        row |= {"rounds": len(seen[at, "*"])}
        row |= {"peak_bytes": int(max(seen[at, "peak"]))}
        row |= {"joules_median": statistics.median(seen[at, "joules"]) if (at, "joules") in seen else None}
        row |= {"kv_bytes": batch * kv_bytes(config, method.drops, native, kept, said["text"], width)}
        s = flat_scale(size // config.cell, size // config.cell, config.glance_tokens)
        looks = None if not name.startswith("arr_coc") else (-(-size // config.cell // s)) ** 2
        looks = 0 if name == "arr_coc_texture" else looks
        flops = [method_flops(config, m, native, k, text, g) for m, k, g in (
            (method.drops, kept, looks), ("nowhere", native, None))]  # fmt: skip
        out.append(row | {"stage": "model", "seconds_median": None, "ratio_to_stock": flops[0] / flops[1]})
        for stage in ("*", *sorted(k for (a, k) in seen if a == at and k not in ("*", "peak", "joules"))):
            seconds = statistics.median(seen[at, stage])
            out.append(row | {"stage": stage, "seconds_median": seconds, "ratio_to_stock": seconds / stock})
    return out


def parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list:
        return [float(t) if "." in t else int(t) for t in text.split(",")]

    p = argparse.ArgumentParser(
        prog="python -m benchmarks speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default=str(ROOT), help="a folder with a config.json (default: Qwen3-VL-2B's shapes)")
    p.add_argument("--size", type=numbers, default=[1024], help="pixels on a side of the square images (default 1024)")
    p.add_argument(
        "--budgets", "--budget", type=numbers, default=[200], help="tokens, or shares such as 0.2 (default 200)"
    )
    p.add_argument("--batch", type=numbers, default=[1])
    p.add_argument("--methods", default=DEFAULT, help=f"names; {FLOOR} is K tokens and no choosing")
    p.add_argument("--rounds", type=int, default=10, help="counted rounds after one that warms up (default 10)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    p.add_argument("--compile", action="store_true", help="torch.compile the tower and the language model")
    p.add_argument("--threads", type=int)
    p.add_argument("--out", help="a folder: measurements as they are made, and speed/<run>.parquet")
    return p


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    names = list(dict.fromkeys(["stock", *args.methods.split(",")]))
    for name in names:
        method_of(name)
    config = ArrCocConfig.from_pretrained(args.model)
    shape = "Qwen3-VL-2B" if config.text_config.hidden_size == 2048 else Path(args.model).name
    shape += ", compiled" if args.compile else ""
    log = Path(args.out) / "measured.jsonl" if args.out else None
    said = facts(args.model, args.device, args.dtype)
    device = said["chip"] + ("" if args.device.startswith("cuda") else f", {torch.get_num_threads()} threads")
    said |= {"model": shape.split(",")[0], "weights": shape.replace(", ", "-"), "chip": device}
    if args.out:
        said = open_run(Path(args.out), said, ("code", "weights", "dtype", "chip"))
    dtype = getattr(torch, args.dtype)
    model = random_model(config, dtype, args.device)
    if args.compile:
        model.model.visual.compile(dynamic=True)
        model.model.language_model.compile(dynamic=True)
    rows = measure_all(model, RandomProcessor(model.config), args, names, log)
    name = re.sub(r"\W+", "-", f"{shape} {device} {args.dtype}")
    run_id = f"speed-{name}-{said['date']}-{said['code'][:8]}"  # `timed` takes a device's last
    table = medians(rows, model.config, shape, device, dtype, run_id)
    if args.out:
        schema.write("speed", table, Path(args.out) / "speed" / f"{run_id}.parquet")
    show(table)
    return 0


def measure_all(model, processor, args, names: list[str], log: Path | None) -> list[dict]:
    """All sizes, batches and budgets, `rounds` times each; what `log` holds already is not measured again."""
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        mend(log)
    rows = list(read_rows(log)) if log and log.exists() else []
    joules = energy_meter(str(model.device))
    done = {(r["size"], r["batch"], r["budget"], r["method"], r["round"]) for r in rows}
    for size in args.size:
        image = textured_image(size)
        for count in args.batch:
            samples = [{"id": str(i), "image": image, "question": ""} for i in range(count)]
            batch = None
            for share in args.budgets:
                cells = (size // model.config.cell) ** 2
                tokens = max(1, round(share * cells)) if isinstance(share, float) else min(share, cells)
                label = f"{size} px, batch {count}, {tokens} of {cells}"
                for turn in tqdm(range(args.rounds + 1), desc=label, unit="round"):
                    for name in names:
                        if (size, count, tokens, name, turn) in done:
                            continue
                        if batch is None or turn == 0:
                            batch = prepare(processor, samples, model.device)
                        row = {"size": size, "batch": count, "budget": tokens, "method": name, "round": turn}
                        # An accelerator counts for itself; its first round may hold more, to tune and to compile.
                        watch = turn > 0 if model.device.type == "cuda" else turn == 0
                        row |= once(model, processor, batch, name, tokens, joules, watch)
                        row["text"] = batch.inputs["input_ids"].shape[1] - cells
                        rows.append(row)
                        if log:
                            with open(log, "a", encoding="utf-8") as file:
                                file.write(json.dumps(row) + "\n")
    return rows


def show(table: list[dict]):
    """Whole prefills, best last stages beside them."""
    groups = defaultdict(dict)
    for r in table:
        groups[r["native_tokens"], r["batch"], r["budget_tokens"], r["method"]][r["stage"]] = r
    head = ("tokens", "batch", "method", "seconds", "of stock", "by FLOPs", "peak MB", "KV MB", "joules")
    print("{:<13}{:>6} {:<18}{:>10}{:>10}{:>10}{:>9}{:>8}{:>8}  stages, s".format(*head))
    for (native, batch, budget, name), by in groups.items():
        whole, model = by["*"], by["model"]
        stages = "  ".join(
            f"{k} {r['seconds_median']:.4f}"
            for k, r in by.items()
            if k not in ("*", "model") and r["seconds_median"] > 5e-5
        )
        print(
            f"{f'{native} > {budget}':<13}{batch:>6} {name:<18}{whole['seconds_median']:>10.4f}"
            f"{whole['ratio_to_stock']:>10.3f}{model['ratio_to_stock']:>10.3f}{whole['peak_bytes'] / 1e6:>9.0f}"
            f"{whole['kv_bytes'] / 1e6:>8.1f}{whole['joules_median'] or '-':>8.6}  {stages}"
        )


if __name__ == "__main__":
    main()
