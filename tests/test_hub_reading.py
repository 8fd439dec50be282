"""What users get: the card's snippet against a Hub on loopback, by tag and by commit, in processes of their own."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from loopback import OLAH, ROOT, Repository, serve
from test_publish import PROCESSOR, TINY, as_stock, small_model

from arr_coc.publishing import checking, staging
from arr_coc.publishing.files import ADD_ON, PLACEHOLDERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OLAH.exists(), reason="olah is not installed: `make test-slow`"),
]
BASE, OURS = "org/base", "org/arr-coc-vis"
SHARDS = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]  # of the base


class Hub:
    """Two repositories, their commits, the snippet of the published card, and the answer that it must give."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder, hub = tmp_path_factory.mktemp("hub"), Hub()
    model = small_model()
    as_stock(model).save_pretrained(folder / "base", max_shard_size="300KB")
    for name in PROCESSOR:
        shutil.copy(TINY / name, folder / "base")
    hub.base = Repository(folder / "mirrors", BASE)
    hub.base_commit = hub.base.commit(folder / "base")
    model.config.base_model_name_or_path, model.config.base_model_revision = BASE, hub.base_commit
    model.save_pretrained(folder / "source")
    staging.stage(folder / "out", "org", "v1.0", folder / "source", "reference", str(folder / "base"), None, ["model"])
    hub.staged = folder / "out" / "model"
    hub.ours = Repository(folder / "mirrors", OURS)
    hub.commit = hub.ours.commit(hub.staged)
    card = hub.staged / "README.md"
    card.write_text(card.read_text().replace(PLACEHOLDERS["model"], hub.commit))
    hub.ours.commit(hub.staged, tag="v1.0")
    hub.base_folder = shutil.copytree(folder / "base", folder / "pinned")
    # Since then, both have moved: other weights in one, other code, config and add-on in the other.
    as_stock(small_model(seed=7)).save_pretrained(folder / "base", max_shard_size="300KB")
    hub.base.commit(folder / "base")
    shutil.copytree(hub.staged, folder / "moved")
    (folder / "moved" / "modeling_arr_coc.py").write_text("raise RuntimeError('code of main')\n")
    (folder / "moved" / "config.json").write_text("{}")
    (folder / "moved" / ADD_ON).write_bytes(b"")
    hub.ours.commit(folder / "moved")
    (hub.snippet,) = checking.python_blocks(hub.ours.git("show", "v1.0:README.md"))
    hub.snippet = hub.snippet.replace("max_new_tokens=64", "max_new_tokens=6, do_sample=False")
    hub.wanted = fingerprint(model)
    with serve(folder / "mirrors", folder) as hub.proxy:
        hub.endpoint = hub.proxy.endpoint
        yield hub


def fingerprint(model) -> float:
    return sum(p.double().abs().sum().item() for p in model.parameters())


TOLD = "\nprint('FOUND', sum(p.double().abs().sum().item() for p in model.parameters()), len(out[0]))\n"


def start(hub, home, code, prefix=(), **env):
    home.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = kept | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": ""} | env
    code = "import sys; sys.modules['arr_coc'] = None\n" + code
    return subprocess.Popen([*prefix, sys.executable, "-W", "ignore", "-c", code], env=env, cwd=home, text=True,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def run(hub, home, code, prefix=(), **env) -> tuple[int, str, str]:
    process = start(hub, home, code, prefix, **env)
    out, err = process.communicate(timeout=900)  # on a busy machine too
    return process.returncode, out, err


def found(result) -> float:
    code, out, err = result
    assert code == 0, err[-3000:]
    assert "Do you wish" not in out + err  # the card's snippet asks nothing
    (line,) = (line for line in out.splitlines() if line.startswith("FOUND"))
    return float(line.split()[1])


@pytest.fixture(scope="module")
def filled(hub, tmp_path_factory):
    """A cache after a first load: never change it."""
    home = tmp_path_factory.mktemp("filled")
    found(run(hub, home, hub.snippet + TOLD))
    return home


def test_the_cards_snippet_by_tag_whatever_main_has_become(hub, tmp_path):
    assert found(run(hub, tmp_path, hub.snippet + TOLD)) == pytest.approx(hub.wanted, rel=1e-9)


def test_by_commit(hub, tmp_path):
    snippet = hub.snippet.replace('"v1.0"', f'"{hub.commit}"')
    assert found(run(hub, tmp_path, snippet + TOLD)) == pytest.approx(hub.wanted, rel=1e-9)
    snapshots = list((tmp_path / "hub" / "models--org--base" / "snapshots").iterdir())
    assert [path.name for path in snapshots] == [hub.base_commit]  # no byte of the base's main was ever asked for
    assert [p.name for p in (tmp_path / "hub" / "models--org--arr-coc-vis" / "snapshots").iterdir()] == [hub.commit]


def test_without_trust_the_error_says_what_to_do(hub, tmp_path):
    code, _, err = run(hub, tmp_path, hub.snippet.replace("trust_remote_code=True", "trust_remote_code=False"))
    assert code and "trust_remote_code=True" in err.splitlines()[-1] + err.splitlines()[-2]


def test_a_revision_that_does_not_exist_is_named(hub, tmp_path):
    code, _, err = run(hub, tmp_path, hub.snippet.replace('"v1.0"', '"v9.9"'))
    assert code and "v9.9" in err[-1500:]


def test_offline_the_second_time(hub, filled):
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert found(run(hub, filled, hub.snippet + TOLD, **offline)) == pytest.approx(hub.wanted, rel=1e-9)


def test_spaces_and_other_alphabets_in_the_caches_path(hub, tmp_path):
    assert found(run(hub, tmp_path / "mein Ordner – кеш 缓存", hub.snippet + TOLD)) == pytest.approx(
        hub.wanted, rel=1e-9
    )


def test_two_processes_at_once_on_one_empty_cache(hub, tmp_path):
    both = [start(hub, tmp_path, hub.snippet + TOLD) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=900)
        assert found((process.returncode, out, err)) == pytest.approx(hub.wanted, rel=1e-9)


@pytest.mark.parametrize("damage", ["truncated", "one bit"])
@pytest.mark.parametrize("which", ["add-on", "shard"])
def test_what_is_broken_on_disk_is_named(hub, filled, tmp_path, which, damage):
    """And what the error says mends it."""
    shutil.copytree(filled, tmp_path, symlinks=True, dirs_exist_ok=True)
    name = {"add-on": f"arr-coc-vis/snapshots/*/{ADD_ON}", "shard": f"base/snapshots/*/{SHARDS[1]}"}[which]
    (path,) = (tmp_path / "hub").glob(f"models--org--{name}")
    whole = path.read_bytes()
    path.resolve().write_bytes(whole[:-100] if damage == "truncated" else whole[:-1] + bytes([whole[-1] ^ 1]))
    code, _, err = run(hub, tmp_path, hub.snippet, HF_HUB_OFFLINE="1")
    assert code and f"{path} is not what was downloaded" in err[-1500:], err[-1500:]
    if damage == "one bit":
        again = hub.snippet.replace("dtype=", "force_download=True, dtype=")
        assert found(run(hub, tmp_path, again + TOLD)) == pytest.approx(hub.wanted, rel=1e-9)
    else:
        (named,) = re.findall("Delete (.+) and load again", err)
        os.remove(named)
        assert found(run(hub, tmp_path, hub.snippet + TOLD)) == pytest.approx(hub.wanted, rel=1e-9)
    assert path.read_bytes() == whole


# The Hub's library keeps what arrived in steps of 10 MB, more than these files have.
SMALL_STEPS = "from huggingface_hub import constants\nconstants.DOWNLOAD_CHUNK_SIZE = 2**14\n"


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub, tmp_path):
    hub.proxy.forget()
    hub.proxy.cut = 100_000
    try:
        assert found(run(hub, tmp_path, SMALL_STEPS + hub.snippet + TOLD)) == pytest.approx(hub.wanted, rel=1e-9)
    finally:
        hub.proxy.cut = None
    broken = {path.rpartition("/")[2].partition("?")[0]: path for path in hub.proxy.broken}
    assert broken.keys() == {ADD_ON, *SHARDS}
    for name, path in broken.items():
        _, again = (asked for method, where, asked in hub.proxy.log if method == "GET" and where == path)
        skipped = int(again.removeprefix("bytes=").removesuffix("-"))
        assert 100_000 - 2**14 <= skipped <= 100_000  # all but the last, unfinished step
        (file,) = (tmp_path / "hub").glob(f"models--org--*/snapshots/*/**/{name}")
        assert hub.proxy.sent[path] == file.stat().st_size + 100_000 - skipped


def test_a_process_that_was_killed_while_downloading_can_be_started_again(hub, tmp_path):
    """Whole files are kept; the one under way begins anew, since huggingface_hub gives up its part (its issue 4196)."""
    hub.proxy.stall = SHARDS[3]
    process, until = start(hub, tmp_path, hub.snippet + TOLD), time.monotonic() + 600
    try:
        kept = set()
        while not kept >= set(SHARDS[:3]) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
            kept = {path.name for path in (tmp_path / "hub").glob("models--org--*/snapshots/*/*")}
    finally:
        process.kill()
        process.wait()
        hub.proxy.stall = None
    assert kept >= {ADD_ON, *SHARDS[:3]} and SHARDS[3] not in kept
    hub.proxy.forget()
    assert found(run(hub, tmp_path, hub.snippet + TOLD)) == pytest.approx(hub.wanted, rel=1e-9)
    fetched = {path.rpartition("/")[2] for method, path, _ in hub.proxy.log if method == "GET" and "/resolve/" in path}
    assert SHARDS[3] in fetched and not fetched & kept


def in_a_mount(*mounts: str) -> list[str]:
    """What starts a command that sees file systems which nobody else does; skips where the machine does not let us."""
    script = "; ".join(["set -e", *mounts, 'exec "$@"'])
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here, to mount a file system of a test's own")
    if done.returncode:
        pytest.skip(f"this machine lets no test mount a file system: {done.stderr.strip()}")
    return command


def last_line(err: str) -> str:
    return err.strip().splitlines()[-1]


def test_a_cache_that_gets_full_is_named_and_with_room_it_goes_on(hub, filled, tmp_path):
    """The add-on has its place, and the base does not: it is by far the larger one at full size."""
    home, cache = tmp_path / "home", tmp_path / "home" / "hub"
    cache.mkdir(parents=True)
    ours = filled / "hub" / "models--org--arr-coc-vis"
    size = sum(path.stat().st_size for path in ours.rglob("*") if path.is_file() and not path.is_symlink())
    prefix = in_a_mount(f"mount -t tmpfs -o size={size + 600_000} none '{cache}'")
    code = (
        "import subprocess\ntry:\n  "
        + hub.snippet.partition("processor = ")[0].strip().replace("\n", "\n  ")
        + "\nexcept OSError as error:\n  print('TOLD', error)\nelse:\n  raise SystemExit('there was room')\n"
        f"subprocess.run(['mount', '-o', 'remount,size=64m', {str(cache)!r}], check=True)\n" + hub.snippet + TOLD
    )
    result = run(hub, home, code, prefix=prefix)
    assert found(result) == pytest.approx(hub.wanted, rel=1e-9)
    (told,) = (line for line in result[1].splitlines() if line.startswith("TOLD"))
    for words in ("org/base", "No space left on device", "make room there", "HF_HOME", str(cache)):
        assert words in told


@pytest.mark.parametrize("lacks", ["base", "arr-coc-vis"])
def test_a_cache_that_cannot_be_written_is_named(hub, filled, tmp_path, lacks):
    """Root may write what is forbidden to others, so the file system itself has to forbid it."""
    shutil.copytree(filled, tmp_path, symlinks=True, dirs_exist_ok=True)
    cache = tmp_path / "hub"
    prefix = in_a_mount(f"mount --bind '{cache}' '{cache}'", f"mount -o remount,ro,bind '{cache}'")
    assert found(run(hub, tmp_path, hub.snippet + TOLD, prefix=prefix)) == pytest.approx(hub.wanted, rel=1e-9)
    shutil.rmtree(cache / f"models--org--{lacks}")
    code, _, err = run(hub, tmp_path, hub.snippet, prefix=prefix)
    assert code and "Read-only file system" in last_line(err) and str(cache) in last_line(err)
    if lacks == "base":  # without our own repository there are only the libraries to say something
        assert "org/base" in last_line(err) and "make it writable" in last_line(err) and "HF_HOME" in last_line(err)


def test_a_cache_whose_place_is_taken_by_a_file_is_named(hub, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "hub").write_text("a file where the cache should be")
    code, _, err = run(hub, home, hub.snippet)
    assert code and str(home / "hub") in last_line(err) and "Error" in last_line(err)


def test_verify_checks_what_users_get(hub, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "arr_coc.publish", "verify", "--org", "org", "--only", "model"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = kept | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([*command, "--base", str(hub.base_folder)], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "ok   model: loads" in done.stdout, done.stdout + done.stderr[-2000:]
    done = subprocess.run([*command, "--tag", "v3"], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "v3 cannot be downloaded" in done.stderr and "Traceback" not in done.stderr
