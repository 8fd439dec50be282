"""A double of the Hub's API, in memory on loopback, as far as `push` uses it; any call can be made to fail.

    with HubDouble() as hub:
        hub.fail("commit", "503")      # the next commit; `times=` for more
        HfApi(endpoint=hub.endpoint, token="any")

Faults: an HTTP status (`"401"`, `"503"`, ...), `"cut"` (the connection breaks before anything is done), `"lost"` (all
is done, but the answer never arrives) and `"race"` (somebody else commits first).
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".png", ".jpg", ".webp")
ID = r"(?P<kind>model|dataset|space)s/(?P<repo>[^/]+/[^/]+)"
CALLS = [  # name, method, path; the first that fits
    ("create", "POST", r"/api/repos/create"),
    ("validate", "POST", r"/api/validate-yaml"),
    ("tree", "GET", rf"/api/{ID}/tree/(?P<revision>[^/]+)"),
    ("refs", "GET", rf"/api/{ID}/refs"),
    ("commits", "GET", rf"/api/{ID}/commits/(?P<revision>[^/]+)"),
    ("preupload", "POST", rf"/api/{ID}/preupload/(?P<revision>[^/]+)"),
    ("commit", "POST", rf"/api/{ID}/commit/(?P<revision>[^/]+)"),
    ("tag", "POST", rf"/api/{ID}/tag/(?P<revision>[^/]+)"),
    ("info", "GET", rf"/api/{ID}(/revision/(?P<revision>[^/]+))?"),
    ("batch", "POST", r"/((?P<kind>dataset|space)s/)?(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch"),
    ("upload", "PUT", r"/lfs/(?P<oid>[0-9a-f]{64})"),
]


class HubError(Exception):
    """An answer that is not 200: status, the Hub's error code, its message, and what else the body holds."""


class HubDouble:
    def __init__(self):
        self.repos = {}  # (kind, "org/name") -> {"commits": [{"id", "title", "files"}], "tags": {name: commit}}
        self.stored = {}  # large files, by their SHA-256
        self.log = []  # names of the calls, in order
        self._faults = []

    def fail(self, call: str, fault: str, times: int = 1, after: int = 0):
        """The next `times` calls of that name fail, once `after` more have passed."""
        self._faults.append({"call": call, "fault": fault, "times": times, "after": after})

    def mend(self):
        self._faults.clear()

    def writes(self) -> list[str]:
        return [call for call in self.log if call in ("create", "upload", "commit", "tag")]

    def files(self, repo: str, kind: str = "model", revision: str = "main") -> dict[str, bytes]:
        return self.at(kind, repo, revision)["files"]

    def __enter__(self):
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                double._serve(self)

            do_POST = do_PUT = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    # ------------------------------------------------------------------------------------------------ serving

    def _serve(self, http):
        path = unquote(urlsplit(http.path).path)
        fitting = ((name, re.fullmatch(pattern, path)) for name, method, pattern in CALLS if method == http.command)
        name, match = next(((name, match) for name, match in fitting if match), (None, None))
        if match is None:
            return self._answer(http, 404, {"error": f"the double knows no {http.command} {path}"})
        fault = self._fault(name)
        if fault == "cut":
            if http.command != "GET":
                http.rfile.read1(1024)
            return self._break(http)
        body = self._body(http)
        self.log.append(name)
        try:
            if http.command != "GET" and name != "upload" and "authorization" not in http.headers:
                raise HubError(401, None, "Invalid username or password.")
            if fault == "race":
                self.commit(match["kind"], match["repo"], {"theirs.txt": b"hello"}, "somebody else")
            elif fault and fault != "lost":
                raise HubError(int(fault), None, f"injected {fault}")
            answer = getattr(self, f"_{name}")(body, **{k: v for k, v in match.groupdict().items() if v})
        except HubError as error:
            status, code, message, *more = error.args
            headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
            return self._answer(http, status, {"error": message} | dict(*more), headers)
        if fault == "lost":
            return self._break(http)
        self._answer(http, 200, answer)

    def _fault(self, name: str) -> str | None:
        for planned in self._faults:
            if planned["call"] == name and planned["times"] > 0:
                if planned["after"] > 0:
                    planned["after"] -= 1
                    return None
                planned["times"] -= 1
                return planned["fault"]
        return None

    def _body(self, http) -> bytes:
        if "chunked" not in http.headers.get("transfer-encoding", ""):
            return http.rfile.read(int(http.headers.get("content-length", 0)))
        body = b""
        while size := int(http.rfile.readline(), 16):
            body += http.rfile.read(size)
            http.rfile.readline()
        http.rfile.readline()
        return body

    def _break(self, http):
        http.close_connection = True
        http.connection.close()

    def _answer(self, http, status: int, value, headers: dict | None = None):
        content = json.dumps(value).encode()
        http.send_response(status)
        for key, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **(headers or {}),
        }.items():
            http.send_header(key, text)
        http.end_headers()
        http.wfile.write(content)

    # -------------------------------------------------------------------------------------------------- calls

    def commit(self, kind: str, repo: str, changes: dict[str, bytes | None], title: str) -> str:
        """Commits contents by path, None to delete; also what tests use as somebody else."""
        commits = self.repos[kind, repo]["commits"]
        files = {**(commits[-1]["files"] if commits else {}), **changes}
        files = {name: content for name, content in files.items() if content is not None}
        oid = hashlib.sha1(f"{repo}{len(commits)}{title}".encode()).hexdigest()
        commits.append({"id": oid, "title": title, "files": files})
        return oid

    def at(self, kind: str, repo: str, revision: str = "main") -> dict:
        if (kind, repo) not in self.repos:
            raise HubError(404, "RepoNotFound", "Repository not found")
        held = self.repos[kind, repo]
        commits = held["commits"]
        if revision == "main":
            return commits[-1]
        revision = held["tags"].get(revision, revision)
        for commit in commits:
            if commit["id"] == revision:
                return commit
        raise HubError(404, "RevisionNotFound", "Invalid rev id")

    def _create(self, body, **_):
        told = json.loads(body)
        kind, repo = told.get("type", "model"), f"{told['organization']}/{told['name']}"
        if (kind, repo) in self.repos:
            raise HubError(409, None, "You already created this repo", {"url": f"{self.endpoint}/{repo}"})
        if kind == "space":
            assert told["sdk"] == "gradio"
        self.repos[kind, repo] = {"commits": [], "tags": {}, "visibility": told.get("visibility", "public")}
        self.commit(kind, repo, {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return {"url": f"{self.endpoint}/{repo}", "name": repo, "id": repo}

    def _validate(self, body, **_):
        return {"errors": [], "warnings": []}

    def _info(self, _, kind, repo, revision="main"):
        commit = self.at(kind, repo, revision)
        return {"id": repo, "modelId": repo, "sha": commit["id"], "private": False, "tags": [], "downloads": 0,
                "likes": 0, "siblings": [{"rfilename": name} for name in commit["files"]]}  # fmt: skip

    def _tree(self, _, kind, repo, revision):
        found = []
        for path, content in self.at(kind, repo, revision)["files"].items():
            entry = {"type": "file", "path": path, "size": len(content)}
            entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
                entry["oid"] = hashlib.sha1(entry["lfs"]["oid"].encode()).hexdigest()
            found.append(entry)
        return found

    def _refs(self, _, kind, repo):
        tags = self.repos[kind, repo]["tags"]
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": self.at(kind, repo)["id"]}
        tags = [{"name": k, "ref": f"refs/tags/{k}", "targetCommit": v} for k, v in tags.items()]
        return {"branches": [main], "converts": [], "tags": tags}

    def _commits(self, _, kind, repo, revision):
        self.at(kind, repo, revision)
        told = {"message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}
        return [{"id": c["id"], "title": c["title"]} | told for c in reversed(self.repos[kind, repo]["commits"])]

    def _preupload(self, body, kind, repo, revision):
        self.at(kind, repo, revision)
        mode = {f["path"]: "lfs" if f["path"].endswith(LARGE) else "regular" for f in json.loads(body)["files"]}
        return {"files": [{"path": path, "uploadMode": m, "shouldIgnore": False} for path, m in mode.items()]}

    def _batch(self, body, repo, kind="model"):
        self.at(kind, repo)
        objects = []
        for told in json.loads(body)["objects"]:
            answer = {"oid": told["oid"], "size": told["size"]}
            if told["oid"] not in self.stored:
                answer["actions"] = {"upload": {"href": f"{self.endpoint}/lfs/{told['oid']}"}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def _upload(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            raise HubError(400, None, "the bytes do not have this hash")
        self.stored[oid] = body
        return {}

    def _commit(self, body, kind, repo, revision):
        head, changes, title = self.at(kind, repo, revision), {}, ""
        for line in map(json.loads, body.splitlines()):
            key, value = line["key"], line["value"]
            if key == "header":
                title = value["summary"]
                if value.get("parentCommit", head["id"]) != head["id"]:
                    raise HubError(412, None, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.stored:
                    raise HubError(400, None, f"{value['path']} was never uploaded")
                changes[value["path"]] = self.stored[value["oid"]]
            elif key == "deletedFile":
                changes[value["path"]] = None
        oid = self.commit(kind, repo, changes, title)
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.endpoint}/{repo}/commit/{oid}"}

    def _tag(self, body, kind, repo, revision):
        tags, name = self.repos[kind, repo]["tags"], json.loads(body)["tag"]
        if name in tags:
            raise HubError(409, None, "This reference already exists")
        tags[name] = self.at(kind, repo, revision)["id"]
        return {}
