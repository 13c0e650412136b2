"""Chat templates rendered in a process of their own, within limits of time, memory and length.

There is one such process for each process that renders, started when it is needed and kept: a start takes a tenth of a
second, a prompt a tenth of a millisecond. It ends with the process that started it.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from .model import VocabularyError

# Templates of published models take a millisecond of processor time, and a few megabytes.
PROCESSOR_SECONDS = 1.0
MEMORY_BYTES = 512 << 20
# Of a machine on which others compute, too.
_WALL_SECONDS = 120.0
# A prompt has the texts of its chat, and what the template puts around them.
_MOST_AROUND = 1 << 20
_MOST_TIMES = 4
_MOST_ERROR = 64 << 10

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from calm_beam.inputs.vocabularies.chat_renderer import main; main()"
)


def render(template: str, variables: Mapping[str, Any], *, texts: int) -> str:
    """Returns what a template makes.

    Args:
      template: The template.
      variables: What it sees; values that JSON has.
      texts: How many characters the texts of the chat have.

    Raises:
      VocabularyError: If it cannot be rendered, or not within the limits; says why.
    """
    return _RENDERER.render(template, variables, most=_MOST_AROUND + _MOST_TIMES * texts)


class _Renderer:
    """The process, and who may talk to it: one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, template: str, variables: Mapping[str, Any], *, most: int) -> str:
        request = {"template": template, "variables": variables, "most": most}
        with self._lock:
            process = self._running()
            answer = self._answer(process, f"{json.dumps(request)}\n".encode(), most=12 * most + _MOST_ERROR)
            if answer is None:
                raise VocabularyError(f"the chat template cannot be rendered: {self._ended()}.")
        if "error" in answer:
            raise VocabularyError(f"the chat template cannot be rendered: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        """Ends the process, if it is this process's."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> "subprocess.Popen[bytes]":
        # What a process has started, one that was forked from it does not share.
        if self._process is None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps([path or os.getcwd() for path in sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._owner = os.getpid()
            limits = {"seconds": PROCESSOR_SECONDS, "memory_bytes": MEMORY_BYTES}
            self._send(self._process, f"{json.dumps(limits)}\n".encode())
        return self._process

    def _answer(self, process: "subprocess.Popen[bytes]", request: bytes, *, most: int) -> dict[str, str] | None:
        """Returns an answer; None if the process has ended, or does not answer in time."""
        if not self._send(process, request):
            return None
        assert process.stdout is not None
        reading, content, deadline = process.stdout.fileno(), bytearray(), time.monotonic() + _WALL_SECONDS
        while not content.endswith(b"\n"):
            ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(reading, 1 << 20) if ready else b""
            content += piece
            if not piece or len(content) > most:
                return None
        answer: dict[str, str] = json.loads(content)
        return answer

    def _send(self, process: "subprocess.Popen[bytes]", line: bytes) -> bool:
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _ended(self) -> str:
        """Ends the process, and returns in words why it had to."""
        process, self._process = self._process, None
        assert process is not None
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"there was no answer after {_WALL_SECONDS:g} seconds"
        finally:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:
                    # What it was sent and has not read.
                    continue
        if process.returncode == -signal.SIGPROF:
            return f"it takes more than {PROCESSOR_SECONDS:g} s of processor time"
        if process.returncode < 0:
            return f"the process that rendered it was ended by {signal.Signals(-process.returncode).name}"
        return f"the process that rendered it ended with status {process.returncode}"


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)
