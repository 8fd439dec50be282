"""Train the small Qwen3-VL of checkpoints/tiny from scratch, on rendered scenes, and ask it the test questions.

Plain Hugging Face `Trainer`: accelerate launch, mixed precision and resuming work as usual. The data is in batches.py,
the model and its losses in learning.py, the length of a run in plan.py.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import transformers
from accelerate.utils import broadcast
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoProcessor, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from arr_coc.checkpoints.make_tiny import tiny_config
from benchmarks import scenes, whole
from benchmarks.metrics import wilson

from .averaging import RunningMean
from .batches import Scenes
from .learning import Learner, quicken, save_weights, small_model, write_weights
from .plan import Plan, Stage

# SIZE:BATCH:WEIGHT of the stages unless --stage says otherwise, with a GPU and without
CUDA_STAGES = ("128:512:1", "256:256:2", "512:128:7")
CPU_STAGES = ("128:64:2", "256:32:3", "512:16:5")


class BaseTrainer(Trainer):
    """`Trainer` with its own endless loader, a rate that follows `Plan`, and losses kept on the device until logged."""

    def __init__(self, learner: Learner, *args, plan: Plan, workers: int, **kwargs):
        super().__init__(learner, *args, **kwargs)
        self.plan, self.workers = plan, workers
        self.losses: list[Tensor] = []  # [4] a step: loss, answers, probe, gaze
        self.waited = 0.0  # seconds spent waiting for the workers

    def get_train_dataloader(self) -> DataLoader:
        # Not through accelerate: each process renders its own seeds, so nothing needs sharding or dispatching.
        more = {"prefetch_factor": 2, "persistent_workers": True} if self.workers else {}
        pin = self.args.device.type == "cuda"
        return DataLoader(self.train_dataset, batch_size=None, num_workers=self.workers, pin_memory=pin, **more)

    def get_batch_samples(self, *args, **kwargs):
        start = time.monotonic()
        samples = super().get_batch_samples(*args, **kwargs)
        self.waited += time.monotonic() - start
        return samples

    def _prepare_input(self, data):
        if isinstance(data, dict):
            return {key: self._prepare_input(value) for key, value in data.items()}
        return data.to(self.args.device, non_blocking=True) if isinstance(data, Tensor) else data

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.plan.rate)
        return self.lr_scheduler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.batch_pictures, self.batch_size_px = inputs["images"].shape[:2]
        out = model(**inputs)
        self.losses.append(torch.stack([out["loss"].detach(), out["answers"], out["probe"], out["gaze"]]))
        return out["loss"]

    def save_model(self, output_dir=None, _internal_call=False):
        """The state to resume from: weights in full precision, the probe, and how far the plan has come."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), folder / "pytorch_model.bin")
        clock = {"pictures": self.plan.done_pictures, "seconds": self.plan.done_seconds}
        (folder / "clock.json").write_text(json.dumps(clock))


def elapsed(begin: float, args: TrainingArguments) -> float:
    """Seconds since `begin` (`time.monotonic()`), the first process's: all must agree on what the clock says."""
    seconds = torch.tensor(time.monotonic() - begin)
    return float(broadcast(seconds.to(args.device)) if args.world_size > 1 else seconds)


class Report(TrainerCallback):
    """Keeps the plan's clock; logs, evaluates, saves and stops by it. One row of log.jsonl is one JSON object."""

    def __init__(self, trainer: BaseTrainer, mean: RunningMean, out: Path, args: argparse.Namespace):
        self.trainer, self.mean, self.out, self.args, self.plan = trainer, mean, out, args, trainer.plan
        self.pictures0, self.seconds0 = self.plan.done_pictures, self.plan.done_seconds
        self.rows: list[dict] = []
        self.validation: dict[int, list] = {}  # for each size, batches and their questions
        self.tenth: dict[int, list] = {}  # likewise, through a tenth of the tokens
        self.last_answers: dict[str, float] = {}

    def on_train_begin(self, args, state, control, **_):
        self.begin = time.monotonic()
        self.logged = self.evaluated = self.saved = self.seconds0
        self.logged_pictures, self.pictures = self.pictures0, self.pictures0
        self.bar = tqdm(total=100.0, unit="%", disable=not state.is_world_process_zero, bar_format=(
            "{l_bar}{bar}| [{elapsed}<{remaining}{postfix}]"), mininterval=5)  # fmt: skip

    def on_step_end(self, args, state, control, **_):
        seconds = self.seconds0 + elapsed(self.begin, args)
        self.pictures += self.trainer.batch_pictures * self.plan.world
        self.plan.advance(self.pictures, seconds)
        over = self.plan.progress >= 1 or state.global_step >= self.plan.total_steps
        pause = self.args.pause_after and seconds - self.seconds0 >= self.args.pause_after
        control.should_training_stop = control.should_training_stop or over or bool(pause)
        last = control.should_training_stop
        if last or seconds - self.logged >= self.args.log_every:
            self.log(state, seconds)
        if last or (self.args.eval_every and seconds - self.evaluated >= self.args.eval_every):
            self.evaluate(state, seconds)
        if last or seconds - self.saved >= self.args.save_every:
            control.should_save = True
            self.saved = seconds
            if state.is_world_process_zero:
                save_weights(self.mean.best, self.out)
                record = describe(self.args, self.plan, self.mean.best, self.rows)
                whole.write_text(self.out / "training.json", json.dumps(record, indent=1) + "\n")

    def write(self, row: dict):
        self.rows.append(row)
        with open(self.out / "log.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def log(self, state, seconds: float):
        loss, answers, probe, gaze = torch.stack(self.trainer.losses).unbind(1)
        self.trainer.losses.clear()
        if not loss.mean().isfinite():
            raise FloatingPointError(f"The loss is {loss.mean()} at step {state.global_step}: lower --lr.")
        answers, gaze = (  # none while the tower learns alone
            round(float(x.nanmean()), 4) if x.isfinite().any() else None for x in (answers, gaze)
        )
        span = max(seconds - self.logged, 1e-9)
        row = {
            "step": state.global_step, "pictures": self.pictures, "seconds": round(seconds, 1),
            "progress": round(self.plan.progress, 4), "size": self.trainer.batch_size_px,
            "batch": self.trainer.batch_pictures, "lr": self.plan.rate() * self.args.lr,
            "loss": round(float(loss.mean()), 4), "answers": answers, "probe": round(float(probe.mean()), 4),
            "gaze": gaze,
            "pictures_per_second": round((self.pictures - self.logged_pictures) / span, 1),
            "waiting": round(self.trainer.waited / span, 3),  # share of the time spent waiting for the workers
        }  # fmt: skip
        if torch.cuda.is_available():
            row["gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self.logged, self.logged_pictures, self.trainer.waited = seconds, self.pictures, 0.0
        if state.is_world_process_zero:
            self.write(row)
            self.bar.set_postfix(self.last_answers | {k: row[k] for k in ("loss", "answers", "probe", "gaze", "size")})
            self.bar.update(100 * self.plan.progress - self.bar.n)

    def answered(self, batches: list[tuple[dict, list]], size: int) -> dict[str, float]:
        """The share of right answers by question type, and of all. Batches come with their questions, in order."""
        right, learner = defaultdict(list), self.trainer.model
        decode = self.trainer.train_dataset.talk.tokenizer.decode
        for batch, questions in batches:
            with torch.no_grad(), self.trainer.compute_loss_context_manager():
                out = learner(**self.trainer._prepare_inputs(batch), return_logits=True)
            said = out["logits"].argmax(-1).cpu()
            for i, q in enumerate(questions):
                answer = decode(said[batch["answer_question"] == i], skip_special_tokens=True)
                right[q.type].append(scenes.is_correct(answer, q.type, q.answer, q.boxes, size))
        row = {kind: round(float(np.mean(hits)), 4) for kind, hits in sorted(right.items())}
        return row | {"all": round(float(np.mean(sum(right.values(), []))), 4)}

    def evaluate(self, state, seconds: float):
        """Exact answers by question type on fixed scenes, each token given the true ones before it (no generation)."""
        self.evaluated = seconds
        if not state.is_world_process_zero or not self.args.eval_scenes:
            return
        size = self.plan.stage(state.global_step - 1).size  # not the last batch's: it may have been shrunk
        data = self.trainer.train_dataset
        if size not in self.validation:
            made = [data.scene(seed, "valid", size) for seed in range(self.args.eval_scenes)]
            groups = [made[i : i + 64] for i in range(0, len(made), 64)]
            self.validation[size] = [(data.collate(g), [q for s in g for q in s.questions]) for g in groups]
            if data.few:  # the same questions, each through a tenth of the tokens, its evidence first
                few = [data.collate(g, share=0.1, dice=np.random.default_rng(0), known=1) for g in groups]
                self.tenth[size] = [(batch, each) for batch, (_, each) in zip(few, self.validation[size], strict=True)]
        self.trainer.model.eval()
        with self.mean.in_place():
            row = self.answered(self.validation[size], size)
            if data.few:
                row["a tenth of the tokens"] = self.answered(self.tenth[size], size)["all"]
        self.trainer.model.train()
        self.last_answers = {"right": row["all"]}
        self.write({"step": state.global_step, "seconds": round(seconds, 1), "eval_size": size, "accuracy": row})

    def on_train_end(self, args, state, control, **_):
        self.bar.close()


def begin_log(log: Path, step: int):
    """Leaves the rows up to `step`: what a killed run logged after its last state is done, and logged, again."""
    rows = log.read_text().splitlines(keepends=True) if log.exists() else []
    whole.write_text(log, "".join(row for row in rows if json.loads(row)["step"] <= step))


def plot_curves(log: Path, png: Path):
    """log.jsonl -> a picture of losses and accuracies over pictures seen. Silent where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [r for r in rows if "loss" in r]
    evals = [r for r in rows if "accuracy" in r]
    clock = np.array(sorted((r["seconds"], r["pictures"]) for r in losses)).T  # an evaluation knows only its second
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for name in ("answers", "probe", "gaze"):
        left.plot([r["pictures"] for r in losses], np.array([r.get(name) for r in losses], float), label=name)
    left.set(xlabel="pictures", ylabel="loss", yscale="log")
    left.legend()
    for name in sorted({name for r in evals for name in r["accuracy"]}):
        points = [(np.interp(r["seconds"], *clock), r["accuracy"][name]) for r in evals if name in r["accuracy"]]
        look = {"lw": 3} if name == "all" else {"color": "black", "ls": "--"} if "tenth" in name else {"lw": 1}
        right.plot(*zip(*points, strict=True), label=name, marker="o", ms=3, **look)
    right.set(xlabel="pictures", ylabel="right answers (teacher-forced)", ylim=(0, 1))
    if evals:
        right.legend(fontsize=7)
    figure.savefig(png, dpi=110)
    plt.close(figure)


def command_line() -> str:
    return shlex.join(["python", "train.py", *sys.argv[1:]])


def describe(args: argparse.Namespace, plan: Plan, model: nn.Module, rows: list[dict]) -> dict:
    """The training record that the checkpoint's card quotes: the exact command, what ran it, how it ended."""
    cuda = torch.cuda.is_available() and args.device != "cpu"
    return {
        "command": command_line(),
        "seed": args.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stages": [vars(stage) for stage in plan.stages],
        "pictures": plan.done_pictures,
        "seconds": round(plan.done_seconds, 1),
        "finished": plan.progress >= 1,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "processes": plan.world,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "last": [row for row in rows if "loss" in row][-1:],
        "accuracy": [row for row in rows if "accuracy" in row][-1:],
    }


def train(args: argparse.Namespace):
    """Train the small Qwen3-VL from scratch (or from `--init`, or go on with `--resume`)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are the parallelism
    torch.set_float32_matmul_precision("high")
    transformers.set_seed(args.seed)
    on_cpu = args.device == "cpu" or not torch.cuda.is_available()
    state = args.state or args.out / "state"
    settings = TrainingArguments(
        output_dir=str(state), use_cpu=on_cpu, bf16=args.bf16, max_steps=1, per_device_train_batch_size=1,
        learning_rate=args.lr, adam_beta1=0.9, adam_beta2=0.98, weight_decay=0.05, max_grad_norm=1.0,
        optim="adamw_torch_fused", save_strategy="no", save_total_limit=1, logging_strategy="no", report_to="none",
        disable_tqdm=True, logging_nan_inf_filter=False, ignore_data_skip=True, remove_unused_columns=False,
        ddp_find_unused_parameters=any(stage.tower_only for stage in args.stage or ()), seed=args.seed,
        data_seed=args.seed, log_level="error",
    )  # fmt: skip
    plan = Plan(
        args.stage or [Stage.parse(s) for s in (CPU_STAGES if on_cpu else CUDA_STAGES)],
        pictures=args.pictures, seconds=args.seconds, world=settings.world_size, warmup=args.warmup,
    )  # fmt: skip
    settings.max_steps = plan.total_steps
    args.out.mkdir(parents=True, exist_ok=True)
    processor = AutoProcessor.from_pretrained(args.files)
    model = small_model(processor, args.init)
    checkpoint = get_last_checkpoint(state) if args.resume and state.is_dir() else None
    start = 0
    if args.resume and checkpoint:
        clock = json.loads((Path(checkpoint) / "clock.json").read_text())
        plan.advance(clock["pictures"], clock["seconds"])
        start = int(checkpoint.rpartition("-")[2])
    elif args.resume:
        print(f"Nothing to resume in {state}: starting afresh.")
    data = Scenes(
        plan, processor, seed=args.seed, questions=args.questions, start=start, rank=settings.process_index,
        shrink=args.shrink, few=args.few, favour=args.favour,
    )  # fmt: skip
    learner = Learner(quicken(model, on_cpu), processor.tokenizer, args.probe, args.gaze)
    mean = RunningMean(learner.model, args.average)
    trainer = BaseTrainer(learner, settings, train_dataset=data, plan=plan, workers=args.workers, callbacks=[mean])
    if args.compile:
        for block in [*model.model.visual.blocks, *model.model.language_model.layers]:
            block.compile()
    if settings.process_index == 0:
        begin_log(args.out / "log.jsonl", start)
        processor.save_pretrained(args.out)  # with them OUT is a checkpoint of Qwen3-VL's own layout
        shutil.copy(args.files / "generation_config.json", args.out)
        tiny_config(processor.tokenizer).save_pretrained(args.out)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Report(trainer, mean, args.out, args))
    trainer.train(resume_from_checkpoint=checkpoint)
    if settings.process_index == 0:
        plot_curves(args.out / "log.jsonl", args.out / "curves.png")
        print((args.out / "training.json").read_text())


def soup(args: argparse.Namespace):
    """The mean of several checkpoints' weights, each with its share: what their runs' noise did cancels out
    (Wortsman et al. 2022, *Model soups*). All else in OUT is the first folder's, ARR-COC's learned parts included, but
    for the record of its training: OUT's own says what it was made of."""
    shares = args.shares or [1 / len(args.models)] * len(args.models)
    if len(shares) != len(args.models) or abs(sum(shares) - 1) > 1e-6:
        raise SystemExit(f"--shares {shares}: give one for each of the {len(args.models)} models, 1 in all.")
    if args.out.resolve() in [folder.resolve() for folder in args.models]:
        raise SystemExit(f"--out {args.out} is one of the models, and would be lost: give another folder.")
    weights = [load_file(folder / "model.safetensors") for folder in args.models]
    mean = dict(weights[0])
    for name, value in mean.items():
        if name.startswith("relevance."):
            continue
        for folder, other in zip(args.models, weights, strict=True):
            if name not in other or other[name].shape != value.shape:
                raise SystemExit(f"{folder} does not fit {args.models[0]}: {name} is missing, or of another shape.")
        mixed = sum(share * other[name].float() for share, other in zip(shares, weights, strict=True))
        mean[name] = mixed.to(value.dtype)
    own = ["state", "model.safetensors", "training.json", "log.jsonl", "curves.png"]
    shutil.copytree(args.models[0], args.out, ignore=lambda *_: own, dirs_exist_ok=True)
    write_weights(mean, args.out)
    whole.write_text(args.out / "training.json", json.dumps({"command": command_line()}, indent=1) + "\n")


def evaluate(args: argparse.Namespace):
    """Greedy answers of the stock class to the fixed questions of a split: accuracy by type and by stratum."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    processor = AutoProcessor.from_pretrained(args.files)
    processor.tokenizer.padding_side = "left"
    model = small_model(processor, args.model).eval().to(device)
    autocast = torch.autocast(device.type, torch.bfloat16) if args.bf16 else nullcontext()
    ends = [processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id]
    hits, wrong = defaultdict(list), []

    def answer(rows: list[dict]):
        turns = [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": r["question"]}]}] for r in rows
        ]
        text = [processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
        inputs = processor(text=text, images=[r["image"] for r in rows], padding=True, return_tensors="pt").to(device)
        with torch.inference_mode(), autocast:
            out = model.generate(
                **inputs, max_new_tokens=args.max_new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[1]
            )
        said = processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for row, prediction in zip(rows, said, strict=True):
            right = scenes.is_correct(prediction, row["type"], row["answer"], row["boxes"], args.size)
            for key in ("all", row["type"], row["stratum"]):
                hits[key].append(right)
            if not right:
                wrong.append({key: row[key] for key in ("id", "question", "answer")} | {"prediction": prediction})

    rows = []
    for row in tqdm(scenes.evaluation_set(args.split, args.n, args.size), total=args.n, mininterval=10):
        rows.append(row)
        if len(rows) == args.batch:
            answer(rows)
            rows = []
    if rows:
        answer(rows)
    result = {"model": str(args.model), "split": args.split, "size": args.size, "groups": {}}
    for key, group in hits.items():
        low, high = wilson(sum(group), len(group))
        result["groups"][key] = {"n": len(group), "accuracy": sum(group) / len(group), "low": low, "high": high}
        print(f"{args.split:8} {key:12} n={len(group):5}  {sum(group) / len(group):.3f}  [{low:.3f}, {high:.3f}]")
    if args.json:
        args.json.write_text(json.dumps(result | {"wrong": wrong[:200]}, indent=1) + "\n")
