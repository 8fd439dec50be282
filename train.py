"""Train ARR-COC's models: `base` makes the small Qwen3-VL of checkpoints/tiny, `arr-coc` teaches where to look.

python train.py base --help        # growing pictures, several questions each, loss on the answers
python train.py arr-coc --help     # cells, evidence, then answers through the hard choice
python train.py evaluate --model checkpoints/tiny --split normal --n 2000
"""

import argparse
import os
from pathlib import Path

from arr_coc.checkpoints.make_tiny import TINY
from benchmarks.scenes import QUESTION_TYPES, SPLITS
from training import arr_coc, base
from training.plan import Stage


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)

    p = commands.add_parser(
        "base",
        help="train the small Qwen3-VL from scratch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""Train the small Qwen3-VL of checkpoints/tiny: the whole model, all visual tokens.

A run is a list of stages, small pictures first; a stage is SIZE:BATCH:WEIGHT. How long it lasts is said once:
  --pictures 2000000     exact: every step's pictures are fixed, and a resumed run equals an unbroken one
  --seconds 1500         what a loaned machine has left: stages change by the clock
  neither                the stages' weights are numbers of pictures
The learning rate warms up, stays, and falls to zero over the last 40 %, whichever way the run is measured.

  python train.py base --out out/try --stage 128:64:20000                        # a few minutes on a CPU
  python train.py base --out out/big --seconds 1500 --pause-after 560            # a part of a long run ...
  python train.py base --out out/big --seconds 1500 --pause-after 560 --resume   # ... and the next part
  accelerate launch --multi_gpu --num_processes 2 train.py base --device cpu --out out/two --stage 128:32:2000

OUT gets model.safetensors (bfloat16, every --save-every seconds) with config and processor, so that it loads as any
Qwen3-VL and `arr-coc --model OUT` goes on from it; and log.jsonl, curves.png and training.json;
the state to resume from lies in OUT/state, or elsewhere with --state.""",
    )
    p.set_defaults(run=base.train)
    p.add_argument("--out", type=Path, required=True, help="folder for weights, log, curves and training record")
    p.add_argument("--files", type=Path, default=TINY, help="folder of the processor's and tokenizer's files")
    p.add_argument("--init", type=Path, help="start from this folder's weights instead of fresh ones")
    p.add_argument("--resume", action="store_true", help="go on from the last state; seeds are not repeated")
    p.add_argument("--state", type=Path, help="folder of the state to resume from (default OUT/state; 90 MB)")
    stages = f"default with a GPU: {' '.join(base.CUDA_STAGES)}; without: {' '.join(base.CPU_STAGES)}"
    p.add_argument("--stage", type=Stage.parse, action="append", metavar="SIZE:BATCH:WEIGHT[:tower]", help=stages)
    p.add_argument("--pictures", type=int, default=0, help="length of the whole run in pictures")
    p.add_argument("--seconds", type=float, default=0, help="length of the whole run in seconds of training")
    p.add_argument("--pause-after", type=float, default=0, help="save and leave after this many seconds; then --resume")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--warmup", type=int, default=6400, help="pictures over which the learning rate rises")
    p.add_argument("--questions", type=int, default=6, help="questions a picture")
    p.add_argument("--favour", nargs="+", default=(), choices=QUESTION_TYPES, metavar="TYPE", help=(
        f"every second picture is asked these types alone; of {', '.join(QUESTION_TYPES)}"))  # fmt: skip
    p.add_argument("--probe", type=float, default=0.5, help="weight of the training-only probe's loss")
    p.add_argument("--gaze", type=float, default=0.5, help="weight of the training-only loss on where heads look")
    p.add_argument("--few", type=float, default=0, help="share of batches whose questions each see few, chosen tokens")
    p.add_argument("--average", type=float, default=0, metavar="SHARE", help=(
        "save a running mean of the weights that keeps SHARE of itself at each step (0.995: about 200 steps')"))
    p.add_argument("--shrink", type=float, default=0, help="share of batches shown at half their size")
    p.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 1), help="processes that render")
    p.add_argument("--compile", action="store_true", help="torch.compile each layer (1.3 times as fast)")
    p.add_argument("--log-every", type=float, default=10, metavar="SECONDS")
    p.add_argument("--eval-every", type=float, default=60, metavar="SECONDS", help="0: at the end only")
    p.add_argument("--eval-scenes", type=int, default=128, help="scenes of the quick evaluation; 0: none")
    p.add_argument("--save-every", type=float, default=120, metavar="SECONDS")
    p.add_argument("--seed", type=int, default=0, help="of weights and scenes, 0 to 63")

    c = commands.add_parser("curves", help="draw log.jsonl again, where a run's machine had no matplotlib")
    c.set_defaults(run=lambda args: base.plot_curves(args.out / "log.jsonl", args.out / "curves.png"))
    c.add_argument("--out", type=Path, required=True, help="folder of a run")

    m = commands.add_parser("soup", help="the mean of several checkpoints' weights", description=base.soup.__doc__)
    m.set_defaults(run=base.soup)
    m.add_argument("models", type=Path, nargs="+", help="folders with a model.safetensors of the same shapes")
    m.add_argument("--shares", type=float, nargs="+", help="one for each model, 1 in all (default: alike)")
    m.add_argument("--out", type=Path, required=True)

    a = commands.add_parser(
        "arr-coc",
        help="train where to look, on a frozen base or with a LoRA",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=arr_coc.__doc__,
    )
    a.set_defaults(run=arr_coc.train)
    arr_coc.add_arguments(a)

    e = commands.add_parser("evaluate", help="accuracy of a checkpoint on a fixed test split")
    e.set_defaults(run=base.evaluate)
    e.add_argument("--model", type=Path, default=TINY)
    e.add_argument("--files", type=Path, default=TINY, help="folder of the processor's and tokenizer's files")
    e.add_argument("--split", default="normal", choices=SPLITS)
    e.add_argument("--n", type=int, default=2000, help="questions")
    e.add_argument("--size", type=int, default=512, help="side of the pictures, pixels")
    e.add_argument("--batch", type=int, default=32)
    e.add_argument("--max-new-tokens", type=int, default=8)
    e.add_argument("--json", type=Path, help="write the figures, and up to 200 wrong answers, here")
    for each in (p, e):
        each.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
        each.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast to bfloat16")
    return top


def main():
    args = parser().parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
