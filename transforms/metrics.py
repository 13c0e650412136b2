"""Counts of decoding and scoring, as Beam metrics whose names carry their units, and as lines of progress.

`Pipeline.run` blocks, and Beam's metrics arrive at the end. So a local run appends lines to a file that the launcher
reads; short appends to one file are atomic, whichever process makes them.
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence

from apache_beam.metrics import Metrics

from calm_beam.decoding.engine import Work

NAMESPACE = "calm_beam"
CLIPPED_SCORES = "clipped-scores"
EMPTY_REFERENCES = "examples-with-empty-references"


class DecodeMetrics:
    """Beam's counters of decoding; pickled with the DoFn that counts."""

    def __init__(self) -> None:
        self._prompts = Metrics.counter(NAMESPACE, "decoded-prompts")
        self._tokens = Metrics.counter(NAMESPACE, "generated-tokens")
        self._layer_rows = Metrics.counter(NAMESPACE, "layer-rows")
        self._padded_rows = Metrics.counter(NAMESPACE, "padded-layer-rows")
        self._projection_rows = Metrics.counter(NAMESPACE, "projection-rows")
        self._certified_rows = Metrics.counter(NAMESPACE, "certified-rows")
        self._taken_over = Metrics.counter(NAMESPACE, "taken-over-prompts")
        self._failures = Metrics.counter(NAMESPACE, "failed-prompts")
        self._call_msec = Metrics.distribution(NAMESPACE, "decode-call-msec")
        self._load_msec = Metrics.distribution(NAMESPACE, "model-load-msec")

    def count_call(self, work: Work, *, seconds: float) -> None:
        """Adds one call of the decoder: what it did, and how long it took, compilation included."""
        self._prompts.inc(work.prompts)
        self._tokens.inc(work.tokens)
        self._layer_rows.inc(work.layer_rows)
        self._padded_rows.inc(work.padded_rows)
        self._projection_rows.inc(work.projection_rows)
        self._certified_rows.inc(work.certified_rows)
        self._call_msec.update(round(1000 * seconds))

    def count_taken_over(self, examples: int) -> None:
        """Adds examples that an earlier attempt has decoded and stored."""
        self._taken_over.inc(examples)

    def count_failures(self, examples: int) -> None:
        """Adds examples that could not be decoded, before the decoder or by it."""
        self._failures.inc(examples)

    def count_loads(self, msecs: Sequence[int]) -> None:
        """Adds models that were loaded, each with the time it took."""
        for msec in msecs:
            self._load_msec.update(msec)


@dataclasses.dataclass(frozen=True)
class ProgressLog:
    """Where to report progress; nowhere if the path is None, or leads to no file on the worker's machine.

    Attributes:
      path: The file to append to, which its reader has made.
    """

    path: str | None

    def report(self, event: str, count: int) -> None:
        """Appends one line, such as `decoded 32`."""
        if self.path is None:
            return
        try:
            # Not made if it is missing: then this is another machine, where nobody would read it.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return
        try:
            # A full disk ends no run that has room for its outputs: who watches sees less.
            with contextlib.suppress(OSError):
                os.write(descriptor, f"{event} {count}\n".encode())
        finally:
            os.close(descriptor)


NOWHERE = ProgressLog(None)
