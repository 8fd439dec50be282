"""What users get: the card's snippet against a Hub on loopback, by tag and by commit, in processes of their own."""

import os
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
    pytest.mark.skipif(not OLAH.exists(), reason="olah is not installed: `make olah`"),
]
BASE, OURS = "org/base", "org/arr-coc-vis"


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


def start(hub, home, code, **env):
    home.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = kept | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": ""} | env
    code = "import sys; sys.modules['arr_coc'] = None\n" + code
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=env, cwd=home, text=True,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def run(hub, home, code, **env) -> tuple[int, str, str]:
    process = start(hub, home, code, **env)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def found(result) -> float:
    code, out, err = result
    assert code == 0, err[-3000:]
    assert "Do you wish" not in out + err  # the card's snippet asks nothing
    (line,) = (line for line in out.splitlines() if line.startswith("FOUND"))
    return float(line.split()[1])


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


def test_offline_the_second_time(hub, tmp_path):
    first = found(run(hub, tmp_path, hub.snippet + TOLD))
    assert found(run(hub, tmp_path, hub.snippet + TOLD, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")) == first


def test_spaces_and_other_alphabets_in_the_caches_path(hub, tmp_path):
    assert found(run(hub, tmp_path / "mein Ordner – кеш 缓存", hub.snippet + TOLD)) == pytest.approx(
        hub.wanted, rel=1e-9
    )


def test_two_processes_at_once_on_one_empty_cache(hub, tmp_path):
    both = [start(hub, tmp_path, hub.snippet + TOLD) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=300)
        assert found((process.returncode, out, err)) == pytest.approx(hub.wanted, rel=1e-9)


def test_what_is_broken_on_disk_is_named(hub, tmp_path):
    """Truncated and tampered files in a cache that was filled before."""
    found(run(hub, tmp_path, hub.snippet + TOLD))
    add_on = next((tmp_path / "hub" / "models--org--arr-coc-vis" / "snapshots").glob(f"*/{ADD_ON}"))
    shard = sorted((tmp_path / "hub" / "models--org--base" / "snapshots").glob("*/model-*.safetensors"))[1]
    for path in (add_on, shard):
        whole = path.read_bytes()
        tampered = [whole[:-1] + bytes([whole[-1] ^ 1])] if path == add_on else []  # shards are not hashed at each load
        for broken in (whole[:-100], whole[:4], b"\xff" * 8 + whole[8:], *tampered):
            path.resolve().write_bytes(broken)
            code, _, err = run(hub, tmp_path, hub.snippet, HF_HUB_OFFLINE="1")
            assert code and path.name in err[-3000:], err[-1500:]
        path.resolve().write_bytes(whole)
    assert found(run(hub, tmp_path, hub.snippet + TOLD, HF_HUB_OFFLINE="1")) == pytest.approx(hub.wanted, rel=1e-9)


def test_a_connection_that_breaks_is_taken_up_again(hub, tmp_path):
    hub.proxy.log.clear()
    hub.proxy.cut = 100_000
    assert found(run(hub, tmp_path, hub.snippet + TOLD)) == pytest.approx(hub.wanted, rel=1e-9)
    asked = [path for method, path, _ in hub.proxy.log if method == "GET" and "/resolve/" in path]
    assert hub.proxy.cut is None and len(asked) > len(set(asked))


def test_a_process_that_was_killed_while_downloading_can_be_started_again(hub, tmp_path):
    process = start(hub, tmp_path, hub.snippet + TOLD)
    cache, until = tmp_path / "hub" / "models--org--base" / "blobs", time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None and not (cache.is_dir() and any(cache.iterdir())):
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert found(run(hub, tmp_path, hub.snippet + TOLD)) == pytest.approx(hub.wanted, rel=1e-9)


def test_a_cache_that_cannot_be_written_says_so(hub, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "hub").write_text("a file where the cache should be")
    code, _, err = run(hub, home, hub.snippet)
    last = err.strip().splitlines()[-1]
    assert code and str(home / "hub") in last and "Error" in last


def test_verify_checks_what_users_get(hub, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "arr_coc.publish", "verify", "--org", "org", "--only", "model"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = kept | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    base = tmp_path / "base"
    base.mkdir()
    hub.base.git("worktree", "add", "--force", str(base / "x"), hub.base_commit)
    done = subprocess.run([*command, "--base", str(base / "x")], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "ok   model: loads" in done.stdout, done.stdout + done.stderr[-2000:]
    done = subprocess.run([*command, "--tag", "v3"], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "v3 cannot be downloaded" in done.stderr and "Traceback" not in done.stderr
