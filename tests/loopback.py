"""A Hub on loopback to read from: olah, serving git repositories that are made here, by tag, branch and commit."""

import hashlib
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLAH = Path(os.environ.get("OLAH_CLI", ROOT / ".venv" / "olah" / "bin" / "olah-cli"))
LARGE = 50 * 2**20  # from this size on a file is stored as the Hub does, beside git


class Repository:
    """A git repository under `mirrors`, as the Hub's server keeps one.

    Args:
        name: such as `org/model`.
        kind: `models`, `datasets` or `spaces`.
    """

    def __init__(self, mirrors: Path, name: str, kind: str = "models"):
        self.path = mirrors / kind / name
        self.path.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *args: str) -> str:
        who = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "core.autocrlf=false"]
        done = subprocess.run(["git", *who, *args], cwd=self.path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, folder: Path, tag: str | None = None) -> str:
        """Makes `main` hold just what is in a folder -> the commit."""
        for path in self.path.iterdir():
            if path.name != ".git":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            target = self.path / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.stat().st_size < LARGE:
                shutil.copyfile(path, target)
                continue
            with open(path, "rb") as file:
                oid = hashlib.sha256()
                while block := file.read(2**22):
                    oid.update(block)
            oid = oid.hexdigest()
            stored = self.path / ".git" / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
            stored.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, stored)
            size = path.stat().st_size
            target.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", "a version")
        if tag:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD")


@contextmanager
def serve(mirrors: Path, scratch: Path):
    """Serves the repositories under `mirrors`, and yields the address for HF_ENDPOINT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = scratch / "olah.toml"
    config.write_text(f"""[basic]
host = "127.0.0.1"
port = {port}
repos-path = "{scratch / "cache"}"
mirrors-path = ["{mirrors}"]
[accessibility]
offline = true
[[accessibility.proxy]]
repo = "**"
allow = true
[[accessibility.cache]]
repo = "**"
allow = true
""")
    endpoint = f"http://127.0.0.1:{port}"
    with open(scratch / "olah.txt", "w") as log:
        command = [str(OLAH), "--config", str(config), "--log-path", str(scratch / "logs")]
        server = subprocess.Popen(command, cwd=scratch, stdout=log, stderr=log)
        try:
            for _ in range(300):
                if server.poll() is not None:
                    raise RuntimeError((scratch / "olah.txt").read_text()[-2000:])
                try:
                    urllib.request.urlopen(endpoint + "/repos", timeout=5)
                    break
                except urllib.error.HTTPError:
                    break
                except OSError:
                    time.sleep(0.1)
            yield endpoint
        finally:
            server.terminate()
            server.wait()
