"""Local in-memory server with the part of the Hub's HTTP API that pushing and loading models and datasets needs."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

OWNER, TOKEN = "me", "hf_a_token_of_the_test"
LARGE = ("*.safetensors", "*.parquet", "*.bin", "*.pt", "*.pth", "*.png")  # files that .gitattributes stores in LFS


@dataclass
class Repo:
    """Repository of the Hub.

    Attributes:
        private: Whether reading needs the token.
        commits: Files of each commit by path, with the newest commit last.
        messages: Messages of the commits.
    """

    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{}])
    messages: list[str] = field(default_factory=lambda: ["initial commit"])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    @property
    def sha(self) -> str:
        return self.sha_of(len(self.commits) - 1)

    @staticmethod
    def sha_of(number: int) -> str:
        return hashlib.sha1(f"commit {number}".encode()).hexdigest()

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the hash and the files of a revision, or None if there is no such revision."""
        if revision == "main":
            return self.sha, self.files
        known = {self.sha_of(number): files for number, files in enumerate(self.commits)}
        return (revision, known[revision]) if revision in known else None


class Refusal(Exception):
    """Error response of the Hub. Its client identifies the error by the code."""

    def __init__(self, status: int, message: str, code: str | None = None, **more: str) -> None:
        self.status, self.content = status, {"error": message, **more}
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}


@dataclass
class Hub:
    """State of the server.

    Attributes:
        endpoint: Value for `HF_ENDPOINT`.
        repos: Repositories by type and name, as in `repos["model", "me/mine"]`.
        requests: Method and path of each request.
        uploads: Content of LFS objects, by SHA-256.
        gated: Whether files of the repositories need an approval.
    """

    endpoint: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    gated: bool | str = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def create(self, body: dict) -> dict:
        kind, owner = body.get("type", "model"), body.get("organization") or OWNER
        name = f"{owner}/{body['name']}"
        url = f"{self.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if (kind, name) in self.repos:
            raise Refusal(409, "You already created this repo", url=url)
        self.repos[kind, name] = Repo(bool(body.get("private")) or body.get("visibility") == "private")
        return {"url": url, "name": name}

    def preupload(self, repo: Repo, body: dict) -> dict:
        def mode(file: dict) -> str:
            return "lfs" if any(fnmatch(file["path"], pattern) for pattern in LARGE) else "regular"

        return {"files": [{"path": f["path"], "uploadMode": mode(f), "shouldIgnore": False} for f in body["files"]]}

    def batch(self, body: dict) -> dict:
        def action(entry: dict) -> dict:
            if entry["oid"] in self.uploads:
                return entry
            return {**entry, "actions": {"upload": {"href": f"{self.endpoint}/lfs/{entry['oid']}"}}}

        return {"transfer": "basic", "objects": [action(entry) for entry in body["objects"]]}

    def upload(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refusal(400, "The content is not that of the object")
        self.uploads[oid] = content

    def commit(self, kind: str, name: str, repo: Repo, lines: list[dict]) -> dict:
        files, message = dict(repo.files), ""
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.uploads:
                        raise Refusal(400, f"{value['path']} was not uploaded")
                    files[value["path"]] = self.uploads[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        repo.commits.append(files)
        repo.messages.append(message)
        url = f"{self.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}/commit/{repo.sha}"
        return {"success": True, "commitOid": repo.sha, "commitUrl": url}


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a Hub without repositories until the end of the `with` block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_REPO = r"(?P<name>[^/]+/[^/]+)"
_API = rf"/api/(?P<kind>model|dataset)s/{_REPO}"
_FILE = rf"/(?P<kind>datasets/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)"


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            try:
                self.route(path, parse_qs(parts.query), body)
            except Refusal as refusal:
                self.send(refusal.content, refusal.status, refusal.headers)

    def route(self, path: str, query: dict, body: bytes) -> None:
        hub, asked = self.hub, f"{self.command} {path}"
        if asked == "POST /api/validate-yaml":
            return self.send({"errors": [], "warnings": []})
        if found := re.fullmatch(rf"(GET|HEAD) {_FILE}", asked):
            repo, sha, files = self.repo("dataset" if found["kind"] else "model", found["name"], found["revision"])
            return self.send_file(sha, files, found["path"])
        if found := re.fullmatch(rf"GET {_API}(/revision/(?P<revision>[^/]+))?", asked):
            return self.send(self.info(found["kind"], found["name"], found["revision"] or "main"))
        if found := re.fullmatch(rf"GET {_API}/tree/(?P<revision>[^/]+)(?P<folder>/.+)?", asked):
            _, _, files = self.repo(found["kind"], found["name"], found["revision"])
            return self.send(tree(files, (found["folder"] or "/")[1:], query.get("recursive") == ["true"]))
        if found := re.fullmatch(r"PUT /lfs/(\w+)", asked):  # needs no token, like the Hub's signed URLs
            return self.send(hub.upload(found[1], body))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, "Invalid username or password.")
        if asked == "GET /api/whoami-v2":
            return self.send({"type": "user", "name": OWNER, "orgs": []})
        if asked == "POST /api/repos/create":
            return self.send(hub.create(json.loads(body)))
        if found := re.fullmatch(rf"POST {_API}/preupload/main", asked):
            return self.send(hub.preupload(self.repo(found["kind"], found["name"])[0], json.loads(body)))
        if found := re.fullmatch(rf"POST /(?P<kind>datasets/)?{_REPO}.git/info/lfs/objects/batch", asked):
            return self.send(hub.batch(json.loads(body)))
        if found := re.fullmatch(rf"POST {_API}/commit/main", asked):
            lines = [json.loads(line) for line in body.splitlines()]
            repo = self.repo(found["kind"], found["name"])[0]
            return self.send(hub.commit(found["kind"], found["name"], repo, lines))
        raise Refusal(404, f"No such page: {asked}")

    def repo(self, kind: str, name: str, revision: str = "main") -> tuple[Repo, str, dict[str, bytes]]:
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            raise Refusal(404 if repo is None else 401, "Repository not found", "RepoNotFound")
        at = repo.at(revision)
        if at is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, *at

    def info(self, kind: str, name: str, revision: str) -> dict:
        repo, sha, files = self.repo(kind, name, revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        access = {"private": repo.private, "gated": self.hub.gated}
        return {"id": name, "sha": sha, "tags": [], "siblings": siblings, **access}

    def send_file(self, sha: str, files: dict[str, bytes], path: str) -> None:
        headers = {"X-Repo-Commit": sha}
        if path not in files:
            return self.send({"error": "Entry not found"}, 404, headers | {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(files[path]).hexdigest()
        return self.send(files[path], 200, headers | {"ETag": f'"{etag}"'})

    def send(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    """Return the entries of the files and folders in a folder. With `recursive`, include all levels below it."""
    start = f"{folder}/" if folder else ""
    inside = sorted(path for path in files if path.startswith(start))
    if folder and not inside:
        raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
    folders = {
        path[: match.start()] for path in inside for match in re.finditer("/", path) if match.start() > len(start)
    }
    entries = [{"type": "directory", "path": path, "oid": _sha1(path.encode()), "size": 0} for path in sorted(folders)]
    for path in inside:
        entry = {"type": "file", "path": path, "oid": _sha1(files[path]), "size": len(files[path])}
        if any(fnmatch(path, pattern) for pattern in LARGE):
            oid = hashlib.sha256(files[path]).hexdigest()
            entry["lfs"] = {"oid": oid, "size": len(files[path]), "pointerSize": 134}
        entries.append(entry)
    return entries if recursive else [entry for entry in entries if "/" not in entry["path"][len(start) :]]


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def start(hub, script, *arguments):
    """Run a script in a new Python process, because the Hub's client reads its endpoint when it is imported.

    Its cache is in the folder that is the first argument.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(arguments[0] / "home"), "OMP_NUM_THREADS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",  # Without Xet, the client uploads large files with LFS.
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4_000:]
    return done
