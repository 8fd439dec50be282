"""The suite's core against every transformers that the card claims, and against ZeroGPU's torch: `make compat`.

    python tests/compat.py                       # all of them, one after the other
    python tests/compat.py 5.20.0 zerogpu        # these alone
    python tests/compat.py --keep 5.20.0         # and leave its environment under .venv/compat, to look into

Each gets an environment with the other version in front of this one's packages, so that only what differs is installed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {
    "5.20.0": ["--no-deps", "transformers==5.20.0"],
    "5.21.1": ["--no-deps", "transformers==5.21.1"],
    "5.22.2": ["--no-deps", "transformers==5.22.2"],
    "5.23.0": ["--no-deps", "transformers==5.23.0"],
    "zerogpu": ["torch==2.11.0", "torchvision==0.26.0"],  # as space/requirements.txt; about 5 GB
    "oldest": ["torch==2.11.0", "torchvision==0.26.0", "transformers==5.20.0"],
}
CORE = ("attending", "bad_input", "balancing", "configuration", "contracts", "generate", "knowing", "loading",
        "realizing", "texture")  # fmt: skip


def environment(name: str) -> Path:
    """Makes `.venv/compat/NAME` -> its Python. What is installed in it comes before this environment's packages."""
    folder = ROOT / ".venv" / "compat" / name
    python = folder / "bin" / "python"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-warn-conflicts"]
    done = subprocess.run([*map(str, install), *VERSIONS[name]], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "WARNING" not in line]
        raise SystemExit(f"error: {name} cannot be installed: {' '.join(errors)[-500:]}")
    ours = sysconfig.get_paths()["purelib"]
    (theirs,) = folder.glob("lib/python*/site-packages")
    (theirs / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return python


def run(name: str, python: Path) -> bool:
    """Prints one line -> whether all passed."""
    ask = (
        "import torch, torchvision, transformers as t; print(t.__version__, torch.__version__, torchvision.__version__)"
    )
    told = subprocess.run([python, "-W", "ignore", "-c", ask], capture_output=True, text=True, cwd="/", check=True)
    transformers, torch, torchvision = told.stdout.split()
    for wanted in VERSIONS[name]:
        package, _, version = wanted.partition("==")
        assert (
            not version
            or {"transformers": transformers, "torch": torch, "torchvision": torchvision}[package].split("+")[0]
            == version
        ), f"{name} would have been tested with {told.stdout}"
    began = time.monotonic()
    tests = [str(ROOT / "tests" / f"test_{part}.py") for part in CORE]
    done = subprocess.run([python, "-m", "pytest", "-p", "no:cacheprovider", *tests], capture_output=True,
                          text=True, cwd=ROOT, env=os.environ | {"PYTHONWARNINGS": "ignore"})  # fmt: skip
    (ROOT / ".venv" / "compat" / f"{name}.txt").write_text(done.stdout + done.stderr)
    counted = " ".join(re.findall(r"\d+ (?:passed|failed|errors?|skipped)", done.stdout)) or f"exit {done.returncode}"
    verdict = "ok  " if done.returncode == 0 else "FAIL"
    print(f"{verdict} transformers {transformers}, torch {torch}, torchvision {torchvision}: {counted}, "
          f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    if done.returncode:
        for line in done.stdout.splitlines():
            if line.startswith(("FAILED", "ERROR")):
                print(f"     {line[:200]}", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(VERSIONS)} (default: all)")
    parser.add_argument("--keep", action="store_true", help="leave the environments (else removed after each)")
    args = parser.parse_args()
    if unknown := set(args.names) - VERSIONS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(VERSIONS)}")
    good = True
    for name in args.names or VERSIONS:
        good &= run(name, environment(name))
        if not args.keep:
            shutil.rmtree(ROOT / ".venv" / "compat" / name)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
