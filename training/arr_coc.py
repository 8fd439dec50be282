"""Train where to look: ARR-COC's learned parts, on a frozen base or with a LoRA on it.

    python train.py arr-coc --model checkpoints/tiny --out runs/arr_coc                     # rendered scenes
    python train.py arr-coc --model ORG/arr-coc-vis --dataset my_vqa --out runs/arr_coc     # rows of your own

Each row is an image, a question, its answer, and where it has them the boxes of the evidence. The curriculum:

0. *cells* (rendered scenes): the retina learns what stands in each cell, no question is asked;
1. *grounded*: relevance learns the evidence boxes, no token is spent;
2. (*video*: relevance carried from frame to frame. Not there yet.)
3. *answers*: end to end. A budget is drawn for every image, its tokens are chosen and realized, and the answer's loss
   comes back through the hard choice; evidence stays in the loss, and hard rows count twice. With --distil the answer
   is taught by what the same model says with all its tokens, too (Hinton et al. 2015).

Two ways of passing a gradient through the choice: `straight-through` gates each realized token by its gain without
changing it (Bengio et al. 2013); `perturbed` compares two noisy choices and makes the better one likelier (the score
function of a Plackett-Luce choice, Williams 1992).
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor, Qwen3VLConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from arr_coc import ArrCocConfig, ArrCocForConditionalGeneration
from benchmarks.scenes import QUESTION_TYPES

from .averaging import RunningMean
from .base import begin_log, elapsed
from .relevance import CHOICES, Learner
from .rows import STAGES, Collate, DatasetRows, Row, SceneRows, scene_rows


class ArrCocTrainer(Trainer):
    """`Trainer` of a `Learner`. What it says of a run goes to whatever `--report-to` names."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)

    def log(self, logs: dict, *args, **kwargs):
        if "loss" in logs:
            logs |= self.accelerator.unwrap_model(self.model).report()
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        """The state to resume from: what is trained, alone. The frozen base lies where it was."""
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            learned = {name: p.detach().cpu() for name, p in self.model.named_parameters() if p.requires_grad}
            torch.save(learned, folder / "pytorch_model.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        learned = torch.load(Path(resume_from_checkpoint) / "pytorch_model.bin", weights_only=True)
        wanted = {name for name, p in self.model.named_parameters() if p.requires_grad}
        if wanted != learned.keys():
            raise ValueError(f"{resume_from_checkpoint} is of another run: {sorted(wanted ^ learned.keys())[:3]} ...")
        self.model.load_state_dict(learned, strict=False)


class Pictures(TrainerCallback):
    """Relevance of fixed rows, drawn as training goes: into `out/pictures`, TensorBoard and Weights & Biases."""

    def __init__(self, rows: list[Row], processor, out: Path, every: int):
        self.rows, self.processor, self.out, self.every = rows, processor, out / "pictures", every

    def on_train_begin(self, args, state, control, **_):
        self.board = None
        if "tensorboard" in args.report_to and state.is_world_process_zero:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.out))

    def on_step_end(self, args, state, control, model=None, **_):
        if (
            self.every
            and (state.global_step % self.every == 0 or state.global_step == 1)
            and state.is_world_process_zero
        ):
            sheet = self.draw(model.core, state.global_step)
            if self.board:
                self.board.add_image("relevance", np.asarray(sheet), state.global_step, dataformats="HWC")
                self.board.flush()
            if "wandb" in args.report_to:
                import wandb

                wandb.log({"relevance": wandb.Image(sheet)}, commit=False)

    @torch.no_grad()
    def draw(self, core: ArrCocForConditionalGeneration, step: int):
        from PIL import Image

        from arr_coc.visualizing import relevance_overlay

        self.out.mkdir(parents=True, exist_ok=True)
        tiles = []
        for row in self.rows:
            image = row.image if isinstance(row.image, Image.Image) else Image.fromarray(row.image)
            inputs = chat_inputs(self.processor, image, row.question).to(core.device)
            perception = core.perceive(**inputs, num_visual_tokens=0.2)
            tiles.append(relevance_overlay(image, perception.relevance[0].float().cpu()).resize((256, 256)))
        sheet = Image.new("RGB", (256 * len(tiles), 256))
        for i, tile in enumerate(tiles):
            sheet.paste(tile, (256 * i, 0))
        sheet.save(self.out / f"{step:07d}.jpg", quality=85)
        return sheet


def chat_inputs(processor, image, question: str):
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]
    return processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def config_field(text: str) -> tuple[str, object]:
    """`FIELD=VALUE` as typed, the value as JSON where it is JSON."""
    name, found, value = text.partition("=")
    if not found or name not in ArrCocConfig.__dataclass_fields__:
        raise argparse.ArgumentTypeError(f"{text} is not FIELD=VALUE with a field of ArrCocConfig")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def add_arguments(p: argparse.ArgumentParser):
    p.add_argument("--model", default="checkpoints/tiny", help="a folder or a Hub id of ARR-COC, either layout")
    p.add_argument("--revision", default="main")
    p.add_argument("--learned", help="a folder or a Hub id of ARR-COC whose learned parts to begin with, where they "
                   "fit: after its base was trained on, say")  # fmt: skip
    p.add_argument("--out", type=Path, required=True, help="where checkpoints, pictures and the trained model go")
    p.add_argument("--dataset", help="a `datasets` folder or Hub id with image, question, answer (and boxes) columns; "
                   "without it scenes are rendered")  # fmt: skip
    p.add_argument("--dataset-split", default="train")
    p.add_argument("--stage", choices=STAGES, default="answers", help="0 cells, 1 grounded, 3 answers (default)")
    p.add_argument("--choice", choices=CHOICES, default="straight-through", help="the gradient through the choice")
    p.add_argument("--noise", type=float, default=0.3, help="perturbed: the noise's share (default 0.3)")
    p.add_argument("--ground", type=float, default=1.0, help="weight of the evidence's loss (default 1)")
    p.add_argument("--name", type=float, default=0.5, help="weight of naming what stands in each cell, where rows say "
                   "it (default 0.5)")  # fmt: skip
    p.add_argument("--unglanced", type=float, default=0.25, help="share of the steps that choose without a glance, so "
                   'that participatory="texture" learns, too (default 0.25)')  # fmt: skip
    p.add_argument("--distil", type=float, default=0.0, help="weight of the loss against all tokens (default 0)")
    p.add_argument("--hard-weight", type=float, default=2.0, help="loss weight of hard rows (default 2)")
    p.add_argument("--budgets", type=float, nargs=2, default=(0.04, 0.5), metavar=("LOW", "HIGH"),
                   help="shares of the cells between which budgets are drawn (default 0.04 0.5)")  # fmt: skip
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--seconds", type=float, default=0, help="end by the clock, if that comes before the steps do")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", type=config_field,
                   help="a field of ArrCocConfig, where --model is a stock checkpoint: --set lens_dim=96")  # fmt: skip
    p.add_argument("--pictures", type=int, default=4, help="images a step and process (default 4)")
    p.add_argument("--questions", type=int, default=4, help="questions an image, where scenes are rendered (default 4)")
    p.add_argument("--size", type=int, default=512, help="pixels on a side, where scenes are rendered (default 512)")
    p.add_argument("--favour", nargs="+", default=(), choices=QUESTION_TYPES, metavar="TYPE", help=(
        "every second rendered scene is asked these types alone"))  # fmt: skip
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--weight-decay", type=float, default=0.01)
    p.add_argument("--average", type=float, default=0.0, metavar="SHARE", help="save a running mean of what is learned "
                   "that keeps SHARE of itself at each step (0.99: about 100 steps')")  # fmt: skip
    p.add_argument("--warmup", type=float, default=0.05, help="share of the steps (default 0.05)")
    p.add_argument(
        "--lora", type=int, default=0, help="rank of a LoRA on the language model's attention (default none)"
    )
    p.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 1))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--first-scene", type=int, default=1 << 36, help="seed of the first scene; keep apart from the base's"
    )
    p.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--log-every", type=int, default=20)
    p.add_argument("--picture-every", type=int, default=200, help="steps between relevance pictures; 0 for none")
    p.add_argument("--save-every", type=int, default=500)
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUT")
    p.add_argument(
        "--report-to", default="none", help="tensorboard, wandb, ... (default none; log.jsonl is always written)"
    )
    p.add_argument("--device", default=None, help="cpu to keep off a GPU")


def adopt(folder: str, processor, **fields) -> ArrCocForConditionalGeneration:
    """A stock Qwen3-VL checkpoint with fresh ARR-COC parts, merged; a user's turn opens as the tokenizer says."""
    stock = Qwen3VLConfig.from_pretrained(folder)
    tokenizer = processor.tokenizer
    kept = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings")
    config = ArrCocConfig(
        text_config=stock.text_config.to_dict(),
        vision_config=stock.vision_config.to_dict(),
        user_turn_token_ids=tokenizer("<|im_start|>user\n")["input_ids"],
        turn_end_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        image_mean=list(processor.image_processor.image_mean),
        image_std=list(processor.image_processor.image_std),
        **{name: getattr(stock, name) for name in kept},
        **fields,
    )
    return ArrCocForConditionalGeneration.from_pretrained(folder, config=config, dtype=torch.float32)


def begin_with(relevance: nn.Module, learned: dict[str, Tensor]) -> list[str]:
    """Gives learned parts another model's values where their shapes agree. Returns the names that start afresh.

    Raises:
        ValueError: where nothing agrees.
    """
    own = relevance.state_dict()
    fits = {name: value for name, value in learned.items() if name in own and value.shape == own[name].shape}
    if not fits:
        raise ValueError("none of the learned parts fits: give the --set that --learned was trained with.")
    relevance.load_state_dict(fits, strict=False)
    return sorted(own.keys() - fits.keys())


class Clock(TrainerCallback):
    """Ends a run by the clock; the learning rate follows whichever of steps and seconds is further on."""

    def __init__(self, steps: int, seconds: float, warmup: float):
        self.steps, self.seconds, self.warmup, self.spent = steps, seconds, warmup, 0.0

    def rate(self, step: int) -> float:
        progress = min(1.0, max(step / self.steps, self.spent / self.seconds if self.seconds else 0.0))
        return min(1.0, (step + 1) / max(1, self.warmup * self.steps)) * (1 + math.cos(math.pi * progress)) / 2

    def on_train_begin(self, args, state, control, **_):
        self.begin = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        self.spent = elapsed(self.begin, args)
        if self.seconds and self.spent > self.seconds:
            control.should_training_stop = True


class JsonLog(TrainerCallback):
    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args, state, control, **_):
        if state.is_world_process_zero:
            begin_log(self.path, state.global_step)

    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero:
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": state.global_step} | logs) + "\n")


def train(args: argparse.Namespace):
    """Run one stage of the curriculum and save the model, in the layout it came in, to `args.out / "model"`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    processor = AutoProcessor.from_pretrained(args.model, revision=args.revision)
    if AutoConfig.from_pretrained(args.model, revision=args.revision).model_type == ArrCocConfig.model_type:
        model = ArrCocForConditionalGeneration.from_pretrained(args.model, revision=args.revision, dtype=torch.float32)
    else:
        model = adopt(args.model, processor, **dict(args.set))
    if args.learned:
        other = ArrCocForConditionalGeneration.from_pretrained(args.learned)
        afresh = begin_with(model.relevance, other.relevance.state_dict())
        print(f"begins with the learned parts of {args.learned}; afresh: {', '.join(afresh) or 'nothing'}")
    model.requires_grad_(False)
    model.relevance.requires_grad_(True)
    model.relevance.retina.gathers = args.stage == "cells"
    tuned = None
    if args.lora:
        from peft import LoraConfig, get_peft_model

        target = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)"
        tuned = get_peft_model(model, LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules=target))
        model.relevance.requires_grad_(True)
    if args.stage == "cells" and (args.dataset or model.config.participatory == "glance"):
        raise ValueError(
            "--stage cells needs rendered scenes, which say what stands in each cell, and a model that has a use for "
            'its retina: leave --dataset out, and set participatory to "both" or "texture".'
        )
    args.out.mkdir(parents=True, exist_ok=True)
    settings = TrainingArguments(
        output_dir=str(args.out / "state"), max_steps=args.steps, per_device_train_batch_size=args.pictures,
        learning_rate=args.lr, weight_decay=args.weight_decay, max_grad_norm=1.0,
        bf16=args.bf16, use_cpu=args.device == "cpu" or not torch.cuda.is_available(),
        logging_steps=args.log_every, save_steps=args.save_every, save_total_limit=1, seed=args.seed,
        remove_unused_columns=False, dataloader_num_workers=args.workers, report_to=args.report_to,
        dataloader_prefetch_factor=2 if args.workers else None, dataloader_persistent_workers=bool(args.workers),
        ddp_find_unused_parameters=True, ignore_data_skip=not args.dataset,
        accelerator_config={"dispatch_batches": False, "split_batches": False},
    )  # fmt: skip
    rank, world = settings.process_index, settings.world_size
    state = args.out / "state"
    checkpoint = get_last_checkpoint(state) if args.resume and state.is_dir() else None
    if args.resume and not checkpoint:
        print(f"Nothing to resume in {state}: starting afresh.")
    if args.dataset:
        data, fixed = DatasetRows(args.dataset, args.dataset_split), None
        fixed = [data[i][0] for i in range(min(4, len(data)))]
    else:
        done = int(checkpoint.rpartition("-")[2]) * args.pictures if checkpoint else 0
        data = SceneRows(
            args.first_scene, args.questions, args.size, rank=rank, world=world, favour=args.favour, start=done
        )  # fmt: skip
        fixed = [scene_rows(seed, "valid", args.size, 1)[0] for seed in range(4)]
    clock = Clock(args.steps, args.seconds, args.warmup)
    learner = Learner(
        tuned or model, args.stage, args.choice, tuple(args.budgets), args.noise, args.ground, args.name, args.distil,
        args.unglanced, args.seed + rank,
    )  # fmt: skip
    learned = [p for p in learner.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=args.lr, weight_decay=args.weight_decay)
    mean = RunningMean(model.relevance, args.average)
    trainer = ArrCocTrainer(
        learner, settings, optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, clock.rate)),
        train_dataset=data, data_collator=Collate(processor, model.config, args.hard_weight, args.stage),
        callbacks=[
            clock, mean, JsonLog(args.out / "log.jsonl"), Pictures(fixed, processor, args.out, args.picture_every)
        ],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    if not trainer.is_world_process_zero():
        return
    if tuned is not None:
        model = tuned.merge_and_unload()
    model.relevance.load_state_dict(mean.best.state_dict())
    model.save_pretrained(args.out / "model")
    processor.save_pretrained(args.out / "model")
    print(f"saved {args.out / 'model'}")
