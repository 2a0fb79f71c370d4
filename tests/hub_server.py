"""A server that answers as the Hugging Face hub does, for models and data sets of one's own.

It has what huggingface_hub asks for: a repository's information and tree at a revision, and files
with their ETag and commit. Errors are the hub's: its X-Error-Code headers.
"""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
FILE = re.compile(r"/(?:(dataset)s/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """The repositories' revisions and tokens, and what was asked for."""

    def __init__(self):
        # (kind, name) -> a branch or commit -> the content of each file by its path
        self.repos: dict[tuple[str, str], dict[str, dict[str, bytes]]] = {}
        self.tokens: dict[str, str] = {}  # name -> that its files are given for
        self.asked: list[tuple[str, str]] = []
        self.status = 0  # of every answer: the hub is down
        self.url = ""

    def commit(
        self, name: str, files: dict[str, bytes], *, kind: str = "model", branch: str = "main"
    ) -> str:
        """Puts files onto a branch of a repository; returns the commit's hash."""
        sha = _digest(repr(files).encode())
        self.repos.setdefault((kind, name), {}).update({branch: files, sha: files})
        return sha

    def downloads(self) -> list[str]:
        """The paths of the files whose content was asked for."""
        return [path for method, path in self.asked if method == "GET" and "/resolve/" in path]

    def answer(self, path: str, token: str) -> tuple[int, dict, bytes]:
        """Returns (status, headers, body) for a path."""
        of_api, of_file = API.fullmatch(path), FILE.fullmatch(path)
        if self.status or not (of_api or of_file):
            return self.status or 404, {}, b"down"
        if of_api:
            kind, name, what, revision = of_api.groups()
        else:
            kind, name, revision, file = of_file.groups()
        if (repo := self.repos.get((kind or "model", name))) is None:
            return _refusal(404 if token else 401, "RepoNotFound")
        if (files := repo.get(revision or "main")) is None:
            return _refusal(404, "RevisionNotFound")
        sha = _digest(repr(files).encode())
        if of_api:
            return 200, {"Content-Type": "application/json"}, _told(name, sha, files, what)
        if self.tokens.get(name, token) != token:
            return _refusal(403 if token else 401, "GatedRepo")
        if file not in files:
            return _refusal(404, "EntryNotFound", **{"X-Repo-Commit": sha})
        return 200, {"ETag": f'"{_digest(files[file])}"', "X-Repo-Commit": sha}, files[file]


def _told(name: str, sha: str, files: dict[str, bytes], what: str | None) -> bytes:
    answer = {"id": name, "sha": sha, "siblings": [{"rfilename": path} for path in files]}
    if what == "tree":
        of_file = {path: {"size": len(it), "oid": _digest(it)} for path, it in files.items()}
        answer = [{"type": "file", "path": path} | it for path, it in of_file.items()]
    return json.dumps(answer).encode()


def _refusal(status: int, code: str, **headers: str) -> tuple[int, dict, bytes]:
    return status, {"X-Error-Code": code, "X-Error-Message": code} | headers, b""


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Serves a hub, which is empty and may be filled meanwhile."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, headers, body = hub.answer(path, token)
            self.send_response_only(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield hub
        server.shutdown()
