"""A monitor, and the file that keeps it between calls."""

import json
from collections.abc import Iterator, Sequence

from calm_beam.errors import UsageError
from calm_beam.launch.flags import naming
from calm_beam.launch.flags.data import check_parent
from calm_beam.launch.terminal import say
from calm_beam.risk.monitor import RiskMonitor
from calm_beam.serving.watched import MonitorError, Watched
from calm_beam.storage import (
    check_writable,
    exists,
    open_input,
    replacing,
    strict_json,
)

from .request import MonitorRequest

_SCHEMA = "calm-beam/monitor/v2"
_FIRST_SCHEMA = "calm-beam/monitor/v1"
_LOSSES_BETWEEN_SAVES = 100
# In bytes; states have some hundred.
_LARGEST_STATE = 100_000


class Session:
    """A monitor, and the file that keeps it."""

    def __init__(self, entry: Watched, request: MonitorRequest) -> None:
        """Takes up the stored state, or starts anew."""
        self._entry = entry
        self._path: str | None = request.state or None
        # What the state belongs to: another promise would be tested with losses that are not its own.
        self._promise = entry.belongs_to
        self.monitor = RiskMonitor.of_promise(entry.promise, alpha=request.alpha)
        if self._path is None:
            return
        with naming("--state"):
            check_parent("--state", self._path)
            check_writable(self._path)
            is_stored = exists(self._path)
        if is_stored:
            stored = self._load()
            if stored.alpha != request.alpha:
                raise UsageError(
                    f"--state {self._path}: was kept with --alpha={stored.alpha:g}, now it is {request.alpha:g}. An "
                    "alpha changed on the way promises nothing: go on with the old one, or start a new state."
                )
            self.monitor = stored

    def _load(self) -> RiskMonitor:
        assert self._path is not None
        try:
            with open_input(self._path) as file:
                content = strict_json.loads(file.read(_LARGEST_STATE))
            if not isinstance(content, dict) or content.keys() != {"schema", *self._promise, "monitor"}:
                raise ValueError(f"expected an object with the keys schema, {', '.join(self._promise)} and monitor.")
            if not isinstance(content["monitor"], dict):
                raise ValueError("monitor must be an object.")
            if content["schema"] not in (_SCHEMA, _FIRST_SCHEMA):
                raise ValueError(f'schema is {content["schema"]!r:.60}, this calm-beam knows "{_SCHEMA}".')
            is_of_first_version = content["schema"] == _FIRST_SCHEMA
            read = RiskMonitor.from_first_version if is_of_first_version else RiskMonitor.from_dict
            monitor = read(content["monitor"])
        except ValueError as error:
            raise MonitorError(f"state {self._path}: {error}") from error
        promise = {name: content[name] for name in self._promise}
        if promise != self._promise or (monitor.delta, monitor.is_signed) != (
            self.monitor.delta,
            self.monitor.is_signed,
        ):
            raise UsageError(
                f"--state {self._path}: was kept for another manifest or entry than {self._entry.words} of "
                "this one. Name those that it was kept for, or start a new state."
            )
        if is_of_first_version:
            say(
                f"state {self._path}: is of a version that counted missing losses as 1 and did not say which they are. "
                'What it has found goes into the alarm "the risk exceeds delta, or losses are missing"; the proof that '
                "the risk exceeds delta begins anew"
            )
        return monitor

    def _save(self) -> None:
        if self._path is not None:
            content = {"schema": _SCHEMA, **self._promise, "monitor": self.monitor.to_dict()}
            with replacing(self._path) as temporary:
                temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def take(self, losses: Sequence[float | None]) -> None:
        """Takes in all losses, and keeps the state."""
        self.monitor = self.monitor.observe(losses)
        self._save()

    def follow(self, losses: Iterator[float | None]) -> None:
        """Takes in losses one by one up to an alarm, and keeps the state now and then, at the end, and on errors.

        An alarm about missing losses that was raised before does not end it: a proof may still come.
        """
        ended_by_missing = self.monitor.missing_alarm_at is None
        try:
            while self.monitor.alarm_at is None:
                if ended_by_missing and self.monitor.missing_alarm_at is not None:
                    return
                try:
                    loss = next(losses)
                except StopIteration:
                    return
                self.monitor = self.monitor.observe([loss])
                if self.monitor.n % _LOSSES_BETWEEN_SAVES == 0:
                    self._save()
        finally:
            self._save()
