"""A proxy before the emulator that adds what it lacks: preconditions, generations, pages, and failures on demand.

The emulator accepts `ifGenerationMatch` and ignores it, so that of many writers that each require a missing file, every
one wins. The guard gives the real service's answer, 412. It refuses unknown requests with 501: a test that passes by
accident is worse than none.
"""

import contextlib
import dataclasses
import http.client
import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator

_OBJECT = "/storage/v1/b/"
# Preconditions that are enforced, on requests that are not resumed.
_KNOWN = "ifGenerationMatch"
_UNKNOWN = (
    "ifGenerationNotMatch",
    "ifMetagenerationMatch",
    "ifMetagenerationNotMatch",
    "ifSourceGenerationMatch",
    "ifSourceGenerationNotMatch",
    "ifSourceMetagenerationMatch",
    "ifSourceMetagenerationNotMatch",
)


@dataclasses.dataclass
class Fault:
    """An answer to give instead of the emulator's.

    Attributes:
      status: The HTTP status.
      method: Method of the requests that fail.
      part: Text in their unquoted address.
      times: How many fail.
      is_late: Whether the emulator has carried the request out before the answer is lost.
    """

    status: int
    method: str
    part: str = ""
    times: int = 1
    is_late: bool = False


@dataclasses.dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Guard:
    """The proxy's state, which tests read and set.

    Attributes:
      url: Its address.
      requests: Method and unquoted address of every request so far.
      faults: Answers to give instead of the emulator's, from now on.
      corrupted: Names of objects whose content arrives with one bit changed.
      damage: Bytes of uploads that arrive changed, and their replacement; None for no damage.
      page_size: Most objects in one answer to a listing.
      before: Called with method, unquoted address and body of every request, before it is answered.
    """

    def __init__(self, emulator_port: int) -> None:
        self._emulator_port = emulator_port
        # One request at a time, as if the service were linearisable: which it is, object by object.
        self._lock = threading.Lock()
        self._resumed: dict[str, tuple[str, str, str | None]] = {}
        self.url = ""
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.corrupted: set[str] = set()
        self.damage: tuple[bytes, bytes] | None = None
        self.page_size = 1000
        self.before: Callable[[str, str, bytes], None] | None = None

    def reset(self) -> None:
        """Forgets requests and failures."""
        self.requests, self.faults, self.corrupted, self.damage, self.page_size = [], [], set(), None, 1000
        self.before = None

    def answer(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> _Answer:
        """Returns the response to a request."""
        place = urllib.parse.unquote(target)
        if self.before is not None:
            self.before(method, place, body)
        with self._lock:
            self.requests.append((method, place))
            fault = next((fault for fault in self.faults if fault.method == method and fault.part in place), None)
            if fault is None:
                return self._guarded(method, target, headers, body)
            fault.times -= 1
            if not fault.times:
                self.faults.remove(fault)
            if fault.is_late:
                self._guarded(method, target, headers, body)
            return _error(fault.status, "a failure that the test asked for")

    def _guarded(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> _Answer:
        parts = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        unknown = [name for name in _UNKNOWN if name in query]
        if unknown or parts.path.startswith("/batch/"):
            return _error(501, f"the guard does not know {unknown or parts.path}")
        upload_id = query.get("upload_id")
        if upload_id is not None:
            bucket, name, expected = self._resumed[upload_id]
        else:
            bucket, name = _object_of(parts.path, query, body)
            expected = query.get(_KNOWN)
        generation = self._generation(bucket, name) if name and (expected or "generation" in query) else None
        if query.get("generation", generation) != generation:
            return _error(404, f"No such object: {bucket}/{name}")
        if expected is not None and expected != (generation or "0"):
            # The real service answers 404 to a client that reads a missing object.
            status = 404 if method == "GET" and generation is None else 412
            return _error(status, "At least one of the pre-conditions you specified did not hold.")
        if self.damage is not None and parts.path.startswith("/upload/"):
            body = body.replace(*self.damage)
        answer = self._forward(method, target, headers, body)
        if query.get("uploadType") == "resumable" and upload_id is None:
            location = dict(answer.headers).get("Location", "")
            started = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(location).query))
            self._resumed[started["upload_id"]] = (bucket, name, expected)
        if method == "GET" and name in self.corrupted and query.get("alt") == "media" and answer.body:
            answer = dataclasses.replace(answer, body=bytes([answer.body[0] ^ 1]) + answer.body[1:])
        if method == "GET" and parts.path.endswith("/o") and answer.status == 200:
            answer = self._page(answer, int(query.get("pageToken", "0")))
        return answer

    def _page(self, answer: _Answer, start: int) -> _Answer:
        listing = json.loads(answer.body)
        items = listing.get("items", [])
        listing["items"] = items[start : start + self.page_size]
        if start + self.page_size < len(items):
            listing["nextPageToken"] = str(start + self.page_size)
        return dataclasses.replace(answer, body=json.dumps(listing).encode())

    def _generation(self, bucket: str, name: str) -> str | None:
        answer = self._forward("GET", f"{_OBJECT}{bucket}/o/{urllib.parse.quote(name, safe='')}", [], b"")
        return str(json.loads(answer.body)["generation"]) if answer.status == 200 else None

    def _forward(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> _Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._emulator_port, timeout=30)
        with contextlib.closing(connection):
            # The emulator keeps chunked bodies apart only without a length, which they have here.
            kept = {key: value for key, value in headers if key.lower() not in ("transfer-encoding", "content-length")}
            connection.request(method, target, body=body, headers=kept)
            response = connection.getresponse()
            content = response.read()
            dropped = ("content-length", "date", "server", "connection")
            kept_headers = tuple((key, value) for key, value in response.getheaders() if key.lower() not in dropped)
            return _Answer(response.status, content, kept_headers)


def _object_of(path: str, query: dict[str, str], body: bytes) -> tuple[str, str]:
    """Returns bucket and name of the object that a request is about, or empty texts."""
    pieces = path.split("/b/", 1)
    if len(pieces) < 2:
        return "", ""
    bucket, _, rest = pieces[1].partition("/o")
    name = urllib.parse.unquote(rest[1:])
    for verb in ("/copyTo/b/", "/rewriteTo/b/"):
        if verb in rest:
            # Content that is written decides.
            bucket, _, name = urllib.parse.unquote(rest.split(verb, 1)[1]).partition("/o/")
    if path.startswith("/upload/"):
        name = query.get("name") or _name_in(body)
    return bucket, name


def _name_in(body: bytes) -> str:
    """Returns the object's name in the JSON at the start of an upload, alone or as the first of several parts."""
    text = body[body.index(b"{") :].decode("utf-8", errors="replace")
    content, _ = json.JSONDecoder().raw_decode(text)
    return str(content["name"])


def _error(status: int, message: str) -> _Answer:
    content = {"error": {"code": status, "message": message, "errors": [{"message": message}]}}
    return _Answer(status, json.dumps(content).encode(), (("Content-Type", "application/json"),))


@contextlib.contextmanager
def serving_guard(emulator_port: int) -> Iterator[Guard]:
    """Gives a guard that listens on a free port of this machine until the block ends."""
    guard = Guard(emulator_port)

    class Handler(http.server.BaseHTTPRequestHandler):
        def _handle(self) -> None:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                body = _read_chunks(self)
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = guard.answer(self.command, self.path, self.headers.items(), body)
            self.send_response(answer.status)
            for key, value in answer.headers:
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _handle  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = _Server(("127.0.0.1", 0), Handler)
    guard.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield guard
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    # Racing requests all arrive at once.
    request_queue_size = 64


def _read_chunks(handler: http.server.BaseHTTPRequestHandler) -> bytes:
    chunks = []
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        chunks.append(handler.rfile.read(size))
        handler.rfile.readline()
    handler.rfile.readline()
    return b"".join(chunks)
