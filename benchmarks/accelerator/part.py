"""What the parts of the benchmark share: how large they are, how long they may take, and how a case is told."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from calm_beam.model import T5Config
from calm_beam.precision import FLOAT32, Precision

Case = dict[str, Any]
"""What was measured, and the figures: names, numbers, and texts that say what could not be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How a model computes.

    Attributes:
      name: In the output.
      precision: In which numbers.
    """

    name: str
    precision: Precision = FLOAT32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
      models: Names and sizes, in the order in which they are tried.
      ways: In which each is decoded.
      programs: Which programs are compiled and called, as a regular expression for their names.
      vocabularies: Of the output heads that decide.
      widths: Of these.
      rows: States that they decide at a time.
      square: Side of the matrices whose products tell the machine's rate.
      copied_bytes: Of the array whose copy tells its bandwidth.
      prompts: Prompts of a sweep.
      prompt_tokens: Tokens of each.
      steps: Most tokens of an output.
      thresholds: Numbers of thresholds that a sweep has.
      single_prompts: Prompts that are decoded one at a time.
      batches: Prompts at a time where they are served together.
      runs: Times that each is measured; the fastest counts.
    """

    models: tuple[tuple[str, T5Config], ...]
    ways: tuple[Way, ...]
    programs: str
    vocabularies: tuple[int, ...]
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    square: int
    copied_bytes: int
    prompts: int
    prompt_tokens: int
    steps: int
    thresholds: tuple[int, ...]
    single_prompts: int
    batches: tuple[int, ...]
    runs: int


class Clock:
    """The time that a part has."""

    def __init__(self, seconds: float) -> None:
        """Starts it."""
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether it is spent."""
        return time.monotonic() >= self._end

    def within(self, cases: Iterator[tuple[Case, Callable[[], Case]]]) -> Iterator[Case]:
        """Yields cases with their figures, the first and more as long as there is time, and then what was left out.

        A case that fails is told with its reason, and the next one is tried.

        Args:
          cases: What each is, and what measures it.
        """
        for place, (case, measure) in enumerate(cases):
            if place and self.is_over:
                yield {**case, "left_out": "no time was left"}
                continue
            try:
                yield {**case, **measure()}
            except Exception as error:  # A case that a device refuses is a finding, and does not end the run.
                yield {**case, "failed": f"{type(error).__name__}: {error}"[:500]}


def fastest(call: Callable[[], Any], *, runs: int, warm: bool = True) -> float:
    """Returns the seconds of the fastest of several calls, all of which are waited for.

    Args:
      call: Returns arrays on a device, or anything else.
      runs: Calls that are timed.
      warm: Whether one that is not timed comes first, which compiles.
    """
    if warm:
        jax.block_until_ready(call())
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def peak_device_bytes() -> int | None:
    """Returns the most memory that the first device has given away; None where it does not tell."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    return None if peak is None else int(peak)
