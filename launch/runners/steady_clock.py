"""A clock that never goes back, for what Beam and gRPC wait by.

Both wait until a time of day. Where a machine's clock is set back, by its owner or after a pause of a virtual machine,
such a time comes late or never, and a run with worker processes does not end. Here their modules see a `time` of which
the time of day moves on as the monotonic clock does.

gRPC also gives times of day to its core, which reads the machine's own clock. Modules that do so see that clock itself.
"""

import importlib
import time
import types
from collections.abc import Callable
from typing import Any

_WAITING = ("apache_beam.runners.worker.data_plane", "grpc._common", "grpc._utilities")
_TELLING_THE_CORE = ("grpc._channel", "grpc._server")


class _Time(types.ModuleType):
    """What a module has for `time`, with another time of day."""

    def __init__(self, time_of_day: Callable[[], float]) -> None:
        super().__init__("time")
        self.time = time_of_day

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def wait_by_steady_clock() -> None:
    """Makes Beam and gRPC of this process wait by a clock that never goes back; a second call changes nothing.

    A version of theirs that has no such module, or asks another one for the time, stays as it is.
    """
    difference = _machine_time() - time.monotonic()

    def steady() -> float:
        return difference + time.monotonic()

    for names, time_of_day in ((_WAITING, steady), (_TELLING_THE_CORE, _machine_time)):
        for name in names:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            if getattr(module, "time", None) is time:
                module.time = _Time(time_of_day)  # type: ignore[attr-defined]


def _machine_time() -> float:
    return time.clock_gettime(time.CLOCK_REALTIME)
