"""`calm-beam serve` as a process of its own."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

import httpx

from tests.launch.serve.served import free_port


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """A process that serves.

    Attributes:
      process: The process.
      url: Its address.
      log_file: Its log.
    """

    process: subprocess.Popen[str]
    url: str
    log_file: pathlib.Path

    @property
    def log(self) -> str:
        """Returns the log so far."""
        return self.log_file.read_text(encoding="utf-8")

    def first_response(self, client: httpx.Client, path: str = "/healthz") -> httpx.Response:
        """Returns the first response, as soon as the process listens."""
        while self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                return client.get(path)
            time.sleep(0.02)
        raise AssertionError(f"the service ended with status {self.process.returncode}: {self.log}")

    def wait_until_ready(self, client: httpx.Client) -> None:
        """Waits until the service takes prompts."""
        while self.first_response(client, "/readyz").status_code != 200:
            time.sleep(0.05)


@contextlib.contextmanager
def started(
    folder: pathlib.Path, *flags: str, manifest: str = "manifest.json", environment: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """Yields a process that serves the model and a manifest of a folder, and kills it at the end."""
    port = free_port()
    command = [sys.executable, "-m", "calm_beam.launch.cli", "serve", f"--manifest={folder / manifest}"]
    command += [f"--checkpoint={folder / 'model'}", f"--port={port}", *flags]
    log_file = folder / f"log-{port}"
    with open(log_file, "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, text=True, env={**os.environ, **(environment or {})}
        )
    try:
        yield Service(process=process, url=f"http://127.0.0.1:{port}", log_file=log_file)
    finally:
        process.kill()
        process.wait()
