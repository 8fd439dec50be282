"""What choosing costs and what it saves, side by side in one run: prefill seconds, peak memory and KV bytes.

    python -m benchmarks.speed                          # Qwen3-VL-2B's exact shapes, random weights, 1024 x 1024 px
    python -m benchmarks.speed --model checkpoints/tiny --size 512 --budget 51

Methods take turns, so that a machine's drift meets all of them alike; medians over the rounds are printed, and every
method's time is that of a whole prefill with its choosing in it. Time is true with random weights, accuracy is not
asked here. Absolute seconds mean little on a shared machine: read the ratios.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import threading
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm

from arr_coc import ArrCocConfig, ArrCocForConditionalGeneration

ROOT = Path(__file__).resolve().parents[1]

# name -> (changes of the config, budget: None is the one asked for)
METHODS = {
    "stock": ({}, "all"),
    "after the tower": ({"participatory": "texture", "realize": "after", "allocator": "topk"}, None),
    "before, texture": ({"participatory": "texture"}, None),
    "before, both": ({"participatory": "both"}, None),
}


def random_model(config: ArrCocConfig, dtype: torch.dtype, device: str) -> ArrCocForConditionalGeneration:
    """A model of these shapes with random weights."""
    config.base_model_name_or_path = config.base_model_revision = None
    config.participatory = "both"
    torch.manual_seed(0)
    with torch.device(device):
        return ArrCocForConditionalGeneration._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def random_inputs(config: ArrCocConfig, size: int, batch: int, device: str, words: int = 16) -> dict[str, torch.Tensor]:
    """`batch` prompts of one textured square image and a question of `words` tokens, as a processor would make them."""
    from arr_coc.texture import to_patches

    generator = torch.Generator().manual_seed(0)
    vision = config.vision_config
    grid = size // config.cell
    coarse = torch.rand(3, grid, grid, generator=generator).repeat_interleave(config.cell, 1)
    image = coarse.repeat_interleave(config.cell, 2) + 0.3 * torch.randn(3, size, size, generator=generator)
    rows = to_patches(
        (image.clamp(0, 1) - 0.5) / 0.5,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
    )
    ends = (config.image_token_id, config.turn_end_token_id, config.vision_start_token_id, config.vision_end_token_id)
    question = torch.randint(5, min(ends), (words,), generator=generator).tolist()
    prompt = [*config.user_turn_token_ids, config.vision_start_token_id, *[config.image_token_id] * grid**2]
    prompt += [config.vision_end_token_id, *question, config.turn_end_token_id, config.user_turn_token_ids[0], 5, 6]
    ids = torch.tensor([prompt] * batch, device=device)
    side = size // vision.patch_size
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "pixel_values": rows.repeat(batch, 1).to(device),
        "image_grid_thw": torch.tensor([[1, side, side]] * batch, device=device),
    }


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


def _wait(device: str):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def measure(model, inputs: dict, budget, rounds: int, device: str, methods=METHODS) -> list[dict]:
    """A row for each method and stage: `method, stage, seconds_median, ratio_to_stock, visual_tokens,
    peak_bytes, kv_bytes`; stage `*` is the whole prefill.
    """
    seconds = {name: {} for name in methods}
    facts = {}
    original = {k: getattr(model.config, k) for k in ("participatory", "realize", "allocator")}
    for turn in tqdm(range(rounds + 1), desc="rounds", unit="round"):
        for name, (changes, fixed) in methods.items():
            for key, value in (original | changes).items():
                setattr(model.config, key, value)
            spend = fixed or budget
            _wait(device)
            with PeakMemory(device) as memory:
                start = time.perf_counter()
                stages = {}
                perception = None
                if spend != "all":
                    perception = model.perceive(**inputs, num_visual_tokens=spend)
                    _wait(device)
                    stages = dict(perception.seconds) | {"choosing": time.perf_counter() - start}
                out = model(**inputs, num_visual_tokens=spend, perception=perception, logits_to_keep=1, use_cache=True)
                _wait(device)
                stages["*"] = time.perf_counter() - start
            if turn:  # the first round warms up
                for stage, value in stages.items():
                    seconds[name].setdefault(stage, []).append(value)
                peak = max(memory.bytes, facts.get(name, {}).get("peak_bytes", 0))
                layers = out.past_key_values.layers
                kv = sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))
                used = [len(a) for a in perception.allocation] if perception else [model.config.cell and _cells(inputs)]
                facts[name] = {"visual_tokens": used[0], "peak_bytes": peak, "kv_bytes": kv}
            del out
    for key, value in original.items():
        setattr(model.config, key, value)
    stock = statistics.median(seconds["stock"]["*"])
    return [
        {
            "method": name,
            "stage": stage,
            "seconds_median": (m := statistics.median(values)),
            "ratio_to_stock": m / stock,
        }
        | facts[name]
        for name, stages in seconds.items()
        for stage, values in stages.items()
    ]


def _cells(inputs: dict) -> int:
    return int(inputs["image_grid_thw"][0].prod()) // 4


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=str(ROOT), help="a folder with a config.json (default: Qwen3-VL-2B's shapes)"
    )
    parser.add_argument("--size", type=int, default=1024, help="pixels on a side of the square image (default 1024)")
    parser.add_argument("--budget", default="200", help="visual tokens, or a share such as 0.2 (default 200)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after one that warms up (default 5)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--out", help="write the rows to this JSON file too")
    args = parser.parse_args(argv)
    config = ArrCocConfig.from_pretrained(args.model)
    budget = float(args.budget) if "." in args.budget else int(args.budget)
    model = random_model(config, getattr(torch, args.dtype), args.device)
    inputs = random_inputs(model.config, args.size, args.batch, args.device)
    rows = measure(model, inputs, budget, args.rounds, args.device)
    print(f"{args.size} x {args.size} px, batch {args.batch}, {args.dtype} on {args.device}, medians of {args.rounds}")
    print(f"{'method':<18}{'stage':<12}{'tokens':>7}{'seconds':>10}{'of stock':>10}{'peak MB':>10}{'KV MB':>8}")
    for r in rows:
        whole = f"{r['peak_bytes'] / 1e6:>10.0f}{r['kv_bytes'] / 1e6:>8.1f}" if r["stage"] == "*" else ""
        stage = "prefill" if r["stage"] == "*" else r["stage"]
        print(
            f"{r['method']:<18}{stage:<12}{r['visual_tokens']:>7}{r['seconds_median']:>10.4f}"
            f"{r['ratio_to_stock']:>10.4f}{whole}"
        )
    if args.out:
        part = Path(args.out + ".part")
        part.write_text(json.dumps({"args": vars(args), "torch": torch.__version__, "rows": rows}, indent=1))
        part.replace(args.out)


if __name__ == "__main__":
    main()
