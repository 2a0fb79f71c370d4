"""A server that answers as the Hugging Face hub does, for models and data sets of one's own.

It has what huggingface_hub asks for: a repository's information and tree at a revision, and files
with their ETag and commit. Errors are the hub's: its X-Error-Code headers.
"""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
FILE = re.compile(r"/(?:(dataset)s/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclasses.dataclass
class Repo:
    """A repository: its commits, which branch is at which, and who may read it."""

    commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    branches: dict[str, str] = dataclasses.field(default_factory=dict)
    token: str = ""  # that files are given for

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Puts files, by path, onto a branch; returns the commit's hash."""
        sha = hashlib.sha1(repr((files, len(self.commits))).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha


class Hub:
    """The repositories by (kind, name), and what was asked for."""

    def __init__(self):
        self.repos: dict[tuple[str, str], Repo] = {}
        self.asked: list[tuple[str, str]] = []
        self.status = 0  # of every answer: the hub is down
        self.url = ""

    def repo(self, name: str, kind: str = "model", **how) -> Repo:
        """Makes a repository."""
        return self.repos.setdefault((kind, name), Repo(**how))

    def downloads(self) -> list[str]:
        """The paths of the files whose content was asked for."""
        return [path for method, path in self.asked if method == "GET" and "/resolve/" in path]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        """Says nothing."""

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        if self.hub.status:
            return self._send(self.hub.status, {}, b"down")
        if of_api := API.fullmatch(path):
            kind, name, what, revision = of_api.groups()
        elif of_file := FILE.fullmatch(path):
            kind, name, revision, file = of_file.groups()
        else:
            return self._send(404, {}, b"")
        repo = self.hub.repos.get((kind or "model", name))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repo is None:
            return self._refuse(404 if token else 401, "RepoNotFound")
        sha = repo.branches.get(revision or "main", revision)
        if sha not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repo.commits[sha]
        if of_api:
            return self._tell(name, sha, files, what)
        if repo.token and token != repo.token:
            return self._refuse(403 if token else 401, "GatedRepo")
        if file not in files:
            return self._refuse(404, "EntryNotFound", sha)
        headers = {"ETag": f'"{_digest(files[file])}"', "X-Repo-Commit": sha}
        return self._send(200, headers, files[file])

    def _tell(self, name, sha, files, what) -> None:
        """The repository's information, or its tree."""
        answer = {"id": name, "modelId": name, "sha": sha, "private": False, "tags": []}
        answer |= {"downloads": 0, "likes": 0, "siblings": [{"rfilename": path} for path in files]}
        if what == "tree":
            answer = [
                {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                for path, content in files.items()
            ]
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _refuse(self, status: int, code: str, sha: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        self._send(status, headers | ({"X-Repo-Commit": sha} if sha else {}), b"")

    def _send(self, status: int, headers: dict, body: bytes) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Serves a hub on a port of this machine."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
