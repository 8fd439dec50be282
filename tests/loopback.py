"""A Hub on loopback to read from: olah, serving git repositories that are made here, by tag, branch and commit.

olah answers 401 to whatever is missing; the Hub answers 404 and says whether it is the repository, the revision or the
file. A proxy in front of olah puts that right, serves ranges, and can break off a download.
"""

import hashlib
import http.client
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
OLAH = Path(os.environ.get("OLAH_CLI", ROOT / ".venv" / "olah" / "bin" / "olah-cli"))
LARGE = 50 * 2**20  # from this size on files of any kind are stored as the Hub stores weights, beside git


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
            size = path.stat().st_size
            if path.suffix != ".safetensors" and size < LARGE:
                shutil.copyfile(path, target)
                continue
            with open(path, "rb") as file:
                oid = hashlib.sha256()
                while block := file.read(2**22):
                    oid.update(block)
            oid = oid.hexdigest()
            stored = self.path / ".git" / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
            stored.parent.mkdir(parents=True, exist_ok=True)
            if not stored.exists():
                shutil.copyfile(path, stored) if size < LARGE else os.link(path, stored)
            target.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", "a version")
        if tag:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD")


class Proxy(ThreadingHTTPServer):
    """Hands requests on to olah.

    Attributes:
        endpoint: the address for HF_ENDPOINT.
        log: the requests' `(method, path, range)`.
        sent: bytes of each path that were sent.
        cut: bytes of a file after which its download breaks off, once for each file that is larger; `broken` are these.
        stall: a part of the paths whose downloads stop half-way, without an end, until it is None.
    """

    daemon_threads = True

    def __init__(self, upstream: int, mirrors: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.mirrors, self.cut, self.stall = upstream, mirrors, None, None
        self.forget()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def forget(self):
        """What was asked and sent so far."""
        self.log, self.sent, self.broken = [], Counter(), set()

    def missing(self, path: str) -> str:
        """The Hub's name for what a path does not find."""
        parts = unquote(path).split("?")[0].strip("/").split("/")
        parts = parts[1:] if parts[0] == "api" else parts
        kind, parts = (parts[0], parts[1:]) if parts[0] in ("models", "datasets", "spaces") else ("models", parts)
        repo = self.mirrors / kind / "/".join(parts[:2])
        if len(parts) < 2 or not (repo / ".git").is_dir():
            return "RepoNotFound"
        if len(parts) > 3:
            known = subprocess.run(["git", "rev-parse", "--verify", "--quiet", parts[3] + "^{commit}"], cwd=repo,
                                   capture_output=True).returncode == 0  # fmt: skip
            return "EntryNotFound" if known else "RevisionNotFound"
        return "EntryNotFound"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        asked = self.headers.get("range")
        self.server.log.append((self.command, self.path, asked))
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=900)
        sent = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "range", "accept-encoding")}
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        upstream.request(self.command, self.path, body=body or None, headers=sent)
        answer = upstream.getresponse()
        status, headers = answer.status, dict(answer.getheaders())
        headers = {
            k: v for k, v in headers.items() if k.lower() not in ("transfer-encoding", "connection", "server", "date")
        }
        content = None if self.command == "HEAD" or "/resolve/" in self.path else answer.read()
        if status == 401:
            what = self.server.missing(self.path)
            status, content = 404, b"" if self.command == "HEAD" else b"{}"
            headers = {"X-Error-Code": what, "X-Error-Message": what, "Content-Length": str(len(content))}
        if content is not None:
            headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
            return self._send(status, headers | {"Content-Length": str(len(content))}, [content])
        if self.command == "HEAD":
            return self._send(status, headers, [])
        skip = int(asked.split("=")[1].split("-")[0]) if asked else 0
        size = self._size()
        answer.read(skip)
        headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
        if skip:
            status, headers["Content-Range"] = 206, f"bytes {skip}-{size - 1}/{size}"
        blocks = iter(lambda: answer.read(2**20), b"")
        self._send(status, headers | {"Content-Length": str(size - skip)}, blocks)

    do_HEAD = do_POST = do_GET

    def _size(self) -> int:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=900)
        upstream.request("HEAD", self.path)
        return int(upstream.getresponse().getheader("content-length"))

    def _send(self, status: int, headers: dict, blocks):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        for block in blocks:
            cut = self.server.cut if "/resolve/" in self.path and self.path not in self.server.broken else None
            breaks = cut is not None and len(block) > cut
            stalls = self.server.stall is not None and self.server.stall in self.path
            block = block[:cut] if breaks else block[: len(block) // 2] if stalls else block
            self.wfile.write(block)
            self.server.sent[self.path] += len(block)
            while self.server.stall is not None and stalls:
                time.sleep(0.05)
            if breaks or stalls:
                self.server.broken.add(self.path)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return


@contextmanager
def serve(mirrors: Path, scratch: Path):
    """Serves the repositories under `mirrors`, and yields the [`Proxy`] to ask."""
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
    with open(scratch / "olah.txt", "w") as log:
        command = [str(OLAH), "--config", str(config), "--log-path", str(scratch / "logs")]
        server = subprocess.Popen(command, cwd=scratch, stdout=log, stderr=log)
        try:
            for _ in range(300):
                if server.poll() is not None:
                    raise RuntimeError((scratch / "olah.txt").read_text()[-2000:])
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/repos", timeout=5)
                    break
                except urllib.error.HTTPError:
                    break
                except OSError:
                    time.sleep(0.1)
            proxy = Proxy(port, mirrors)
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            yield proxy
            proxy.shutdown()
            proxy.server_close()
        finally:
            server.terminate()
            server.wait()
