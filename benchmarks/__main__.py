"""The benchmark's commands.

python -m benchmarks run --model checkpoints/tiny --tasks scenes --methods main --budgets 0.05,0.1,0.2 --n 500 --out runs/main
python -m benchmarks collect runs/main                   # its rows into benchmarks/dataset
python -m benchmarks probe --model checkpoints/tiny      # do different questions look at different places?
python -m benchmarks speed --size 1024 --budgets 0.05,0.1,0.2,0.5 --batch 1,8 --out runs/speed
python -m benchmarks sql "SELECT method, accuracy FROM summary WHERE question_type = '*'"
python -m benchmarks sql --query accuracy_by_tokens --format markdown
python -m benchmarks report                              # the cards' tables and plots from the rows
python -m benchmarks list                                # methods, tasks and named queries
"""  # noqa: E501

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = HERE / "dataset"


def budgets(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 < value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: budgets are shares of an image's tokens, in (0, 1]")
    return values


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)

    p = commands.add_parser("run", help="answer tasks by methods; resumable")
    p.add_argument("--model", default="checkpoints/tiny", help="a folder or a Hub id of ARR-COC, either layout")
    p.add_argument("--tasks", default="scenes", help="names, or `scenes` for normal, hard and heldout")
    p.add_argument("--methods", default="main", help="names, `main`, `ablations` or `all`")
    p.add_argument("--budgets", type=budgets, default=[0.05, 0.1, 0.2, 0.35, 0.5], help="shares of the native tokens")
    p.add_argument("--questions", "--n", dest="n", type=int, default=500, help="questions of each task (default 500)")
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--out", required=True, help="the run's folder; the same again goes on where it stopped")
    p.add_argument("--device", help="cpu, cuda, ... (default: what accelerate finds)")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    p.add_argument("--threads", type=int, help="CPU threads of each process")

    p = commands.add_parser("collect", help="a finished run's rows into the dataset's folder")
    p.add_argument("runs", nargs="+", help="folders that `run` or `speed` wrote")
    p.add_argument("--data", default=str(DATA))

    p = commands.add_parser("probe", help="several questions on one image: how far allocations stand apart")
    p.add_argument("--model", default="checkpoints/tiny")
    p.add_argument("--splits", default="normal,hard,heldout")
    p.add_argument("--images", type=int, default=100)
    p.add_argument("--budgets", type=budgets, default=[0.05, 0.1, 0.2, 0.35, 0.5])
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", help="a run's folder: `probe.json` there, which `run` puts beside its rows")

    p = commands.add_parser("speed", help="seconds, memory and KV bytes, methods side by side", add_help=False)
    p.add_argument("rest", nargs=argparse.REMAINDER)

    p = commands.add_parser("sql", help="DuckDB over the rows")
    p.add_argument("sql", nargs="?", help="a SELECT over runs, samples, summary and speed")
    p.add_argument("--query", help="a named query of benchmarks/dataset/queries")
    p.add_argument("--format", default="table", choices=["table", "csv", "markdown"])
    p.add_argument("--data", default=str(DATA), help="a folder with rows, or a Hub dataset")
    p.add_argument("--revision", help="the Hub dataset's tag or commit")

    p = commands.add_parser("pictures", help="test pictures for the dataset's viewer")
    p.add_argument("--data", default=str(DATA))
    p.add_argument("--n", type=int, default=72, help="pictures of each of the three splits (default 72)")

    p = commands.add_parser("report", help="rewrite the cards' tables and plots from the rows")
    p.add_argument("--data", default=str(DATA))
    p.add_argument("--check", action="store_true", help="change nothing; fail if a card is not what the rows say")

    commands.add_parser("list", help="methods, tasks and named queries")
    return top


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["speed"]:  # its own parser, also reached as `python -m benchmarks.speed`
        from .speed import main as speed

        return _said(lambda: speed(argv[1:]))
    args = parser().parse_args(argv)
    return _said(lambda: command(args))


def _said(run) -> int:
    """Runs, and turns a refusal into its message."""
    try:
        return run()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def command(args) -> int:
    if args.command == "run":
        from .runner import main as run

        return run(args)
    if args.command == "collect":
        from .collect import main as collect

        return collect(args)
    if args.command == "probe":
        from .probe import main as probe

        return probe(args)
    if args.command == "sql":
        from .sql import main as sql

        return sql(args)
    if args.command == "report":
        from .report import main as report

        return report(args)
    if args.command == "pictures":
        from .pictures import main as pictures

        return pictures(args)
    return show()


def show() -> int:
    from .methods import METHODS
    from .tasks import TASKS

    for method in METHODS.values():
        print(f"method  {method.name:<18} drops {method.drops:<22} {method.source}")
    for task in TASKS.values():
        print(f"task    {task.name:<18} {task.split:<28} {task.source}")
    for path in sorted(DATA.glob("queries/*.sql")):
        print(f"query   {path.stem:<28} {path.read_text().splitlines()[0].removeprefix('-- ')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
