"""Everything that can change a generated token."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import numpy as np

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord

# Every threshold is decoded for every prompt.
_FINEST_STEP = 0.001


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """What, besides model, vocabulary and prompt, determines an output.

    Attributes:
      rule: How exits are decided.
      thresholds: Exit thresholds, distinct, strictly descending, in [0, 1].
      max_input_length: Most tokens of a prompt, eos included; longer prompts are cut.
      max_decode_length: Most tokens of an output, eos included; also N of a decaying schedule.
      task_prefix: Put before every textual prompt.
      arithmetic: In which numbers the model computes: rounding moves exits.
      engine: What computes them, as `engine_choice` takes it: each rounds otherwise. None where it was not recorded.
    """

    rule: ExitRule
    thresholds: tuple[float, ...]
    max_input_length: int
    max_decode_length: int
    task_prefix: str = ""
    arithmetic: Arithmetic = FLOAT32
    engine: EngineRecord | None = None

    def __post_init__(self) -> None:
        grid = descending_grid(self.thresholds)
        if tuple(self.thresholds) != grid:
            raise ValueError(f"thresholds must be strictly descending, got {self.thresholds}.")
        # As plain floats, so that 1 and 1.0 are one grid with one fingerprint.
        object.__setattr__(self, "thresholds", grid)
        check_sizes(max_input_length=self.max_input_length, max_decode_length=self.max_decode_length)
        try:
            self.task_prefix.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"task_prefix must be text that UTF-8 can hold, got {self.task_prefix!a:.80}.") from error

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, without what is as it always was: fingerprints made before stand."""
        content = dataclasses.asdict(self)
        del content["arithmetic"], content["engine"]
        if self.engine is not None:
            content["engine"] = self.engine.to_dict()
        if self.arithmetic != FLOAT32:
            content["arithmetic"] = dataclasses.asdict(self.arithmetic)
        for name in ("patience", "confidence_source"):
            if content["rule"][name] is None:
                del content["rule"][name]
        return content

    def fingerprint(self, *, model: str, vocabulary: str | None) -> str:
        """Returns 24 hexadecimal digits that name the outputs of a model under these settings.

        Args:
          model: The model's fingerprint.
          vocabulary: The vocabulary's fingerprint, or None for token ids.
        """
        content = json.dumps([self.to_dict(), self.arithmetic.dtype, model, vocabulary], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def descending_grid(thresholds: Iterable[float]) -> tuple[float, ...]:
    """Returns thresholds in the order in which they are tested: strictly descending.

    Args:
      thresholds: Any order, at least one.

    Raises:
      ValueError: If there is none, one is outside [0, 1] or NaN, or two are equal (also when only as float32, the type
        that confidences are compared in).
    """
    grid = tuple(sorted((float(threshold) for threshold in thresholds), reverse=True))
    if not grid:
        raise ValueError("thresholds must not be empty.")
    for threshold in grid:
        if not 0 <= threshold <= 1:
            raise ValueError(f"thresholds must be in [0, 1], got {threshold}.")
    for upper, lower in itertools.pairwise(grid):
        if np.float32(upper) == np.float32(lower):
            raise ValueError(f"thresholds must be distinct in float32, got {upper} and {lower}.")
    return grid


def uniform_grid(step: float) -> tuple[float, ...]:
    """Returns the multiples of `step` below 1, descending to 0.

    1 itself is left out: next to "never exit", which is always the fallback, it would cost a full decode for almost
    nothing. `--thresholds` takes any grid.

    Args:
      step: In [0.001, 1).

    Raises:
      ValueError: If the step is outside that range.

    >>> uniform_grid(0.25)
    (0.75, 0.5, 0.25, 0.0)
    """
    if not _FINEST_STEP <= step < 1:
        raise ValueError(
            f"grid_step must be in [{_FINEST_STEP}, 1), got {step}. It is the distance of two thresholds, e.g. 0.05."
        )
    # In decimal, so that the grid holds 0.15 and not 0.15000000000000002.
    exact = Decimal(repr(float(step)))
    multiples = [index * exact for index in range(int(1 / exact) + 1)]
    return tuple(float(value) for value in reversed(multiples) if np.float32(value) < 1)


def check_sizes(**sizes: int | None) -> None:
    """Checks that sizes, by their names, are at least 1; None is a size that is chosen later.

    Raises:
      ValueError: If one is not, with its name.
    """
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
