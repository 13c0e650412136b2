"""A fake of Dataflow's REST service, which accepts jobs, runs none, and reports the state that a test sets."""

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

_JOBS = re.compile(r"/v1b3/projects/[^/]+/locations/[^/]+/jobs(?:/(?P<id>[^/:]+))?(?:/(?P<part>messages|metrics))?")


class DataflowService:
    """The service's state.

    Attributes:
      endpoint: Value of `--dataflow_endpoint`.
      jobs: The jobs that were submitted, in order, as JSON.
      final_state: Reported state of every job.
      errors: Error messages of every job.
      was_asked: Set when a client requests the state of a job.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.jobs: list[dict[str, Any]] = []
        self.final_state = "JOB_STATE_DONE"
        self.errors: list[str] = []
        self.was_asked = threading.Event()

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Returns status and content of the response to a request; 501 for an unknown one."""
        match = _JOBS.fullmatch(target.partition("?")[0])
        if match is None:
            return 501, {"error": {"code": 501, "message": f"the stand-in does not know {method} {target}"}}
        if method == "POST" and match["id"] is None:
            job = json.loads(body)
            self.jobs.append(job)
            identity = {"id": f"job-{len(self.jobs)}", "name": job["name"], "clientRequestId": job["clientRequestId"]}
            return 200, {**identity, "currentState": "JOB_STATE_PENDING"}
        if method == "GET" and match["part"] == "messages":
            time = "2000-01-01T00:00:00Z"
            messages = [
                {"time": time, "messageText": text, "messageImportance": "JOB_MESSAGE_ERROR"} for text in self.errors
            ]
            return 200, {"jobMessages": messages}
        if method == "GET" and match["part"] == "metrics":
            return 200, {}
        if method == "GET" and match["id"] is not None:
            self.was_asked.set()
            return 200, {"id": match["id"], "currentState": self.final_state}
        return 501, {"error": {"code": 501, "message": f"the stand-in does not know {method} {target}"}}


@contextlib.contextmanager
def serving_dataflow() -> Iterator[DataflowService]:
    """Gives a service that listens on a free port of this machine until the block ends."""
    service = DataflowService()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = service.answer(self.command, self.path, body)
            payload = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = _handle  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    # Beam uses REST and plain HTTP for an address with localhost.
    service.endpoint = f"http://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
