"""From staged folders to the Hub, in steps that may each be repeated: a push that broke off is run again.

1. the model's files, without its card: their commit is what everything else is pinned to
2. the dataset, 3. the Space, 4. the model's card, each naming the commits before it
5. the tags, which never move

Each step brings a repository's `main` to what was staged and commits nothing where nothing differs. It commits on top
of the commit that it compared with, so that of two pushes at once one starts over.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from .files import PLACEHOLDERS, REPOSITORIES, Refused, digest

CARD = "README.md"
KEPT = (".gitattributes",)  # the Hub's own
TRIES = 5

Files = dict[str, bytes | Path]  # path in the repository -> content, or the file that holds it


def push(out: Path, record: dict, dry_run: bool = False, private: bool = False, say: Callable = print, api=None):
    """Publishes what `stage` recorded under `out`.

    Raises:
        Refused: what was staged has changed since, or the tag already names something else.
    """
    api = api or HfApi()
    org, tag = record["org"], record["tag"]
    kinds = [kind for kind in REPOSITORIES if kind in record["folders"]]
    if "model" not in kinds:
        raise Refused("the model is not staged, and all else is pinned to it: `python publish.py stage` first.")
    repos = {kind: f"{org}/{REPOSITORIES[kind]}" for kind in kinds}
    staged = {kind: {name: out / kind / name for name in record["folders"][kind]["files"]} for kind in kinds}
    for kind in kinds:
        plain = {name: path for name, path in staged[kind].items() if not _has_placeholder(path)}
        at_tag = _remote(api, repos[kind], kind, tag)
        if at_tag is not None and _differ({n: p for n, p in plain.items()}, at_tag, keep=staged[kind]):
            raise Refused(
                f"{tag} of {repos[kind]} is published with other files, and a tag never moves: stage this as a new "
                "version, with another --tag."
            )
    if dry_run:
        return _rehearse(api, repos, staged, tag, say)
    for kind, repo in repos.items():
        say(f"{kind}: {repo}")
        api.create_repo(repo, repo_type=kind, exist_ok=True, private=private or None,
                        space_sdk="gradio" if kind == "space" else None)  # fmt: skip
    files = {name: path for name, path in staged["model"].items() if name != CARD}
    mark = f"files {digest({n: h for n, h in record['folders']['model']['files'].items() if n != CARD})}"
    pins = {"model": _published(api, repos["model"], mark, files)}
    if pins["model"] is None:
        pins["model"] = _sync(api, repos["model"], "model", files, f"ARR-COC {tag}: {mark}", (CARD,), force=True)
    say(f"model: files at {pins['model']}")
    commits = {}
    for kind in [*(k for k in kinds if k != "model"), "model"]:
        pinned = _pin(staged[kind], pins)
        commits[kind] = _sync(api, repos[kind], kind, pinned, f"ARR-COC {tag}, of the model's {pins['model'][:12]}")
        if kind == "dataset":
            pins["dataset"] = commits[kind]
        say(f"{kind}: main is {commits[kind]}")
    for kind in kinds:
        refs = {ref.name: ref.target_commit for ref in api.list_repo_refs(repos[kind], repo_type=kind).tags}
        if tag not in refs:
            api.create_tag(repos[kind], tag=tag, revision=commits[kind], repo_type=kind, exist_ok=True)
        elif _differ(_pin(staged[kind], pins), _remote(api, repos[kind], kind, tag)):
            raise Refused(f"{tag} of {repos[kind]} was given to other files meanwhile: see who else publishes.")
        say(f"{kind}: {tag} is {refs.get(tag, commits[kind])}")
    return pins


def _rehearse(api: HfApi, repos: dict, staged: dict, tag: str, say: Callable):
    """Says what a push would change. Nothing is written, and no token is needed for what is public."""
    for kind, repo in repos.items():
        there = _remote(api, repo, kind, "main")
        say(f"{kind}: {repo} {'would be created' if there is None else 'exists'}")
        changes = _differ(staged[kind], there or {})
        for verb, name in changes:
            pinned = name in staged[kind] and _has_placeholder(staged[kind][name])
            say(f"  {verb} {name}" + (" (with the commits that a push fills in)" if pinned else ""))
        if not changes:
            say("  nothing to change")
        say(f"  tag {tag}: {'exists' if _remote(api, repo, kind, tag) is not None else 'would be made'}")


def _sync(api: HfApi, repo: str, kind: str, files: Files, message: str, keep: tuple = (), force: bool = False) -> str:
    """Makes `main` hold exactly `files` beside what it keeps -> the commit at which it does.

    Args:
        force: commit even where nothing differs (the message is to be found again).
    """
    for _ in range(TRIES):
        head = api.repo_info(repo, repo_type=kind).sha
        changes = _differ(files, _remote(api, repo, kind, head) or {}, keep)
        if not changes:
            return head
        operations = [
            CommitOperationDelete(name) if verb == "delete" else CommitOperationAdd(name, files[name])
            for verb, name in changes
        ]
        try:
            return api.create_commit(repo, operations, commit_message=message, repo_type=kind, parent_commit=head).oid
        except HfHubHTTPError as error:
            if error.response.status_code not in (409, 412):  # somebody committed in between: compare again
                raise
    raise Refused(f"main of {repo} changed {TRIES} times during this push: see who else publishes, then run it again.")


def _published(api: HfApi, repo: str, mark: str, files: Files) -> str | None:
    """The commit that published just these files, if there is one."""
    for commit in api.list_repo_commits(repo):
        if mark in commit.title and not _differ(files, _remote(api, repo, "model", commit.commit_id) or {}, (CARD,)):
            return commit.commit_id
    return None


def _remote(api: HfApi, repo: str, kind: str, revision: str) -> dict[str, RepoFile] | None:
    """A repository's files at a revision; None where either does not exist."""
    try:
        tree = list(api.list_repo_tree(repo, recursive=True, revision=revision, repo_type=kind))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None
    return {f.path: f for f in tree if isinstance(f, RepoFile) and f.path not in KEPT}


def _differ(files: Files, remote: dict[str, RepoFile], keep=()) -> list[tuple[str, str]]:
    """What makes `remote` into `files`: `("add" | "change" | "delete", path)`, in the paths' order."""
    changes = [("delete", name) for name in remote if name not in files and name not in keep]
    for name, content in files.items():
        if name not in remote:
            changes.append(("add", name))
        elif not _same(content, remote[name]):
            changes.append(("change", name))
    return sorted(changes, key=lambda change: change[1])


def _same(content: bytes | Path, remote: RepoFile) -> bool:
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    if size != remote.size:
        return False
    known = hashlib.sha256() if remote.lfs else hashlib.sha1(b"blob %d\0" % size)  # git's name of a blob
    if isinstance(content, bytes):
        known.update(content)
    else:
        with open(content, "rb") as file:
            while block := file.read(2**20):
                known.update(block)
    return known.hexdigest() == (remote.lfs.sha256 if remote.lfs else remote.blob_id)


def _has_placeholder(path: Path) -> bool:
    return path.suffix in (".md", ".py", ".txt") and any(m.encode() in path.read_bytes() for m in PLACEHOLDERS.values())


def _pin(files: Files, pins: dict[str, str]) -> Files:
    """The same files with the commits that are known so far in the place of their placeholders."""
    pinned = dict(files)
    for name, path in files.items():
        if _has_placeholder(path):
            content = path.read_bytes()
            for kind, commit in pins.items():
                content = content.replace(PLACEHOLDERS[kind].encode(), commit.encode())
            pinned[name] = content
    return pinned
