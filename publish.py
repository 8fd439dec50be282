"""Stage, check and push ARR-COC's three repositories on the Hub: the model, the Space and the results dataset.

    python publish.py stage --org ORG                   # out/hub/{model,dataset,space}: complete, minimal, reproducible
    python publish.py check                             # each folder alone, offline: loads, answers, starts, validates
    python publish.py push --dry-run                    # what would change on the Hub
    python publish.py push                              # create, upload, pin to each other by commit, tag
    python publish.py verify --org ORG --tag v1.0       # download what users get, and check that

    python publish.py fresh                             # arr_coc.safetensors from config.json alone, without a base
    python publish.py merge ADD_ON OUT                  # base and add-on in one folder, which stock's class loads too
    python publish.py split MERGED OUT --base-revision COMMIT       # and back: the add-on alone

Only what stands in the allow-lists of publishing/files.py is ever copied. In the sources, `ORG/` stands for the
organisation, forty zeros for the model's commit and forty ones for the dataset's; stage and push fill them in. The
Hub's token is the standard login's (`hf auth login`, HF_TOKEN, or a trusted publisher in CI); it is never shown here.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from arr_coc.publishing import checking, layouts, staging
from arr_coc.publishing.files import (
    ADD_ON,
    REPOSITORIES,
    ROOT,
    WEIGHTS,
    Refused,
    digest,
    download,
    first_line,
    hashes,
    read_record,
)

OUT = Path("out/hub")


def _stage(args) -> int:
    staging.stage(args.out, args.org, args.tag, args.source, args.layout, args.base, args.base_revision, args.only)
    return 0


def _check(args) -> int:
    kinds = args.only or [kind for kind in REPOSITORIES if (args.out / kind).is_dir()]
    if not kinds:
        raise Refused(f"{args.out} holds nothing that was staged: run `python publish.py stage` first.")
    return _report({kind: args.out / kind for kind in kinds}, args.base, not args.files_only)


def _report(folders: dict[str, Path], base: str | None, run: bool = True) -> int:
    """Prints the findings of each folder -> 0 if none failed."""
    failed = 0
    for kind, folder in folders.items():
        for passed, text in checking.check(folder, kind, base, folders, run):
            print(f"{ {True: 'ok  ', False: 'FAIL', None: 'skip'}[passed] } {kind}: {text}", flush=True)
            failed += passed is False
    return int(failed > 0)


def _push(args) -> int:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    from arr_coc.publishing.pushing import push

    record = read_record(args.out)
    for kind, staged in record["folders"].items():
        if digest(hashes(args.out / kind)) != staged["digest"]:
            raise Refused(f"{args.out / kind} has changed since it was staged: stage again, then check.")
        bad = [text for passed, text in checking.check(args.out / kind, kind, run=False) if passed is False]
        if bad:
            raise Refused(f"{args.out / kind} may not be published: {'; '.join(bad)}.")
    step = ["the first question to the Hub"]

    def say(text: str):
        step[0] = text
        print(text, flush=True)

    try:
        push(args.out, record, args.dry_run, args.private, say)
    except OfflineModeIsEnabled as error:
        raise Refused("HF_HUB_OFFLINE is set: unset it to push.") from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError, LocalTokenNotFoundError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        mend = "Run the same command again: it goes on where it stopped."
        if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
            mend = f"Log in with a token that may write to {record['org']} (`hf auth login`), then run it again."
        why = f"{type(error).__name__}: {first_line(error)}"
        print(f"error: the push stopped after '{step[0]}' ({why}). {mend}", file=sys.stderr)
        return 1
    return 0


def _verify(args) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        for kind in args.only or REPOSITORIES:
            repo = f"{args.org}/{REPOSITORIES[kind]}"
            got = download(repo, args.tag, None, repo_type=kind)
            print(f"{kind}: {repo} at {args.tag} is {got.name}", flush=True)
            folders[kind] = Path(scratch) / kind
            staging.copy_out(got, folders[kind])
        failed = _report(folders, args.base)
        for kind, folder in folders.items():
            for name in checking.unpinned(folder):
                print(f"FAIL {kind}: {name} is not pinned to a commit")
                failed = 1
        return failed


def _fresh(args) -> int:
    layouts.fresh(args.config, args.out or args.config.parent / ADD_ON)
    return 0


def _merge(args) -> int:
    base = download(args.base, args.base_revision, (*WEIGHTS, "*.json")) if args.base else None
    layouts.merge(args.add_on, args.out, base)
    return 0


def _split(args) -> int:
    layouts.split(args.merged, args.out, args.base, args.base_revision)
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="publish.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run, text: str, out: bool = True):
        p = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        p.set_defaults(run=run)
        if out:
            p.add_argument("--out", type=Path, default=OUT, help=f"the staged folders' place (default {OUT})")
            p.add_argument("--only", nargs="+", choices=REPOSITORIES, help="these alone (default: all that there are)")
        return p

    default = json.loads((ROOT / "config.json").read_text())
    base, commit = default["base_model_name_or_path"], default["base_model_revision"]

    p = command("stage", _stage, "make the three folders, from allow-lists")
    p.set_defaults(only=list(REPOSITORIES))
    p.add_argument("--org", required=True, help="the organisation or user on the Hub")
    p.add_argument("--tag", default="v1.0", help="the version (default v1.0)")
    p.add_argument("--layout", choices=("reference", "merged"), default="reference",
                   help="the add-on alone, its base pinned by commit (default), or base and add-on in one")  # fmt: skip
    p.add_argument("--source", type=Path, default=ROOT,
                   help="a checkpoint in either layout (default: the root's config.json, a fresh add-on)")  # fmt: skip
    p.add_argument("--base", help="a local copy of the base or, with a merged source, the base's Hub id")
    p.add_argument("--base-revision", help="with a merged source, the base's commit")

    p = command("check", _check, "try each staged folder alone and offline")
    p.add_argument("--base", help="a local copy of the base (default: what lies in the Hub's cache)")
    p.add_argument("--files-only", action="store_true", help="read the files, but load and start nothing")

    p = command("push", _push, "publish what was staged; safe to run again after a failure at any step")
    p.add_argument("--dry-run", action="store_true", help="print what would change, and change nothing")
    p.add_argument("--private", action="store_true", help="new repositories are private")

    p = command("verify", _verify, "download what was pushed, by its tag, and check it", out=False)
    p.add_argument("--org", required=True, help="the organisation or user on the Hub")
    p.add_argument("--tag", default="v1.0", help="the version (default v1.0)")
    p.add_argument("--only", nargs="+", choices=REPOSITORIES, help="these repositories alone")
    p.add_argument("--base", help="a local copy of the base (default: what lies in the Hub's cache)")

    p = command("fresh", _fresh, "write the untrained add-on: the same bytes on every machine", out=False)
    p.add_argument("--config", type=Path, default=ROOT / "config.json", help="of the model (default: the root's)")
    p.add_argument("--out", type=Path, help=f"the file (default: {ADD_ON} beside the config)")

    p = command("merge", _merge, "an add-on and its base's weights into one folder", out=False)
    p.add_argument("add_on", type=Path, help="a folder with config.json and " + ADD_ON)
    p.add_argument("out", type=Path, help="the folder to write")
    p.add_argument("--base", help="a local copy of the base (default: the pinned commit, from the Hub)")
    p.set_defaults(base_revision=None)

    p = command("split", _split, "the add-on out of a merged folder", out=False)
    p.add_argument("merged", type=Path, help="a folder in the merged layout")
    p.add_argument("out", type=Path, help="the folder to write")
    p.add_argument("--base", default=base, help=f"the base's Hub id, or a folder (default {base})")
    p.add_argument("--base-revision", default=None, help=f"its commit (default, for that base: {commit[:12]}...)")
    return top


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    default = json.loads((ROOT / "config.json").read_text())
    if args.command == "split" and args.base == default["base_model_name_or_path"] and not args.base_revision:
        args.base_revision = default["base_model_revision"]
    try:
        return args.run(args)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
