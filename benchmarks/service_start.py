"""The time until `calm-beam serve` answers, and until it ends.

    python -m benchmarks.service_start --manifest=build/demo-calibration

Starts the service with an empty cache of compiled code, with the one that the first start left, and with an empty cache
and `--lazy`. Prints, for each, the seconds until its port answers, until it is ready, from then to the first answer,
and from SIGTERM to the end of the process.
"""

import argparse
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

from .machine import describe_machine

_COMMAND = (sys.executable, "-c", "from calm_beam.launch.cli import entry_point; entry_point()", "serve")
_LONGEST = 900.0


def main() -> None:
    """Measures the three starts."""
    described = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_start", description=described)
    parser.add_argument("--manifest", required=True, help="folder of a calibration")
    parser.add_argument("--prompt", default="Do they want to repair their car?")
    flags, more = parser.parse_known_args()
    print(describe_machine())
    print("start | port, s | ready, s | first answer, s | end, s")
    with tempfile.TemporaryDirectory() as folder:
        for name, cache, words in (("cold", "first", ()), ("warm", "first", ()), ("lazy", "second", ("--lazy",))):
            seconds = _seconds([f"--manifest={flags.manifest}", *more, *words], f"{folder}/{cache}", flags.prompt)
            print(" | ".join([name, *(f"{value:.2f}" for value in seconds)]), flush=True)


def _seconds(words: Sequence[str], cache: str, prompt: str) -> tuple[float, float, float, float]:
    """Returns what `main` prints of one start."""
    pathlib.Path(cache).mkdir(exist_ok=True)
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    root = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "CALM_BEAM_CACHE": cache}
    began = time.perf_counter()
    with subprocess.Popen([*_COMMAND, *words, f"--port={port}"], env=environment, stderr=subprocess.DEVNULL) as service:
        try:
            is_open = _when(lambda: _answer(f"{root}/healthz"), service)
            is_ready = _when(lambda: _answer(f"{root}/readyz"), service)
            _answer(f"{root}/v1/completions", {"prompt": prompt})
            has_answered = time.perf_counter()
        finally:
            service.terminate()
            service.wait()
    ended = time.perf_counter()
    return is_open - began, is_ready - began, has_answered - is_ready, ended - has_answered


def _when(asked: Callable[[], object], service: subprocess.Popen[bytes]) -> float:
    """Returns the time at which a page answers with status 200."""
    end = time.perf_counter() + _LONGEST
    while time.perf_counter() < end and service.poll() is None:
        # Not open yet, or not ready yet, which is status 503.
        with contextlib.suppress(urllib.error.URLError):
            asked()
            return time.perf_counter()
        time.sleep(0.02)
    raise RuntimeError(f"the service has not answered (its exit status: {service.poll()})")


def _answer(address: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


if __name__ == "__main__":
    main()
