"""What `calm-beam evaluate` is asked for on a sample of prompts, an experiment a request."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.grid import descending_grid, uniform_grid
from calm_beam.exits.measures import COMPARABLE
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.flags.accelerators import Job
from calm_beam.launch.flags.metrics import METRIC_NAMES, MetricFiles
from calm_beam.launch.flags.task import TaskRequest
from calm_beam.metrics.registry import DEFAULT_METRIC
from calm_beam.options import Options, again, option
from calm_beam.options.groups import GRID_STEP, ExitGrid, ExitLayers, Replacing, Spread
from calm_beam.options.kinds import Kind, ValueRefusedError, texts, whole_number
from calm_beam.text import written_int

DESCRIPTIONS = {
    "splits": "repeated random splits: thresholds chosen on one part, measured on the rest (the default)",
    "propagation": "what the cache of skipped layers does to outputs whose tokens are right",
    "sensitivity": "what one wrong token does to the whole output, by its position",
    "tradeoff": "layers per token against quality, for every confidence measure over the grid",
}
"""What each experiment finds out, in one line."""
_DEFAULT_POSITIONS = 20
_LAST_POSITION = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Options):
    """Which experiment is asked for: that decides which other options there are."""

    experiment: str = option(
        "splits",
        "; ".join(f"{name}: {description}" for name, description in DESCRIPTIONS.items()),
        choices=tuple(DESCRIPTIONS),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result(Options):
    """Where what is found goes."""

    output: str | os.PathLike[str] = option("evaluation", "directory for tables, figures and page")
    overwrite: bool = again(Replacing, "overwrite", sentence="replace an earlier result of this experiment")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Options):
    """How large a sample is, and how its outputs are scored."""

    SECTION: ClassVar[str | None] = "sample"

    metric: str = option(DEFAULT_METRIC, METRIC_NAMES)
    bleurt_checkpoint: str | None = again(MetricFiles, "bleurt_checkpoint")
    max_examples: int = option(200, "size of the sample, drawn by a hash of the ids", kind=whole_number(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRequest(Experiment, Result, TaskRequest, Sample, MetricFiles):
    """What all experiments on a sample have in common."""

    def settings(self) -> DecodeSettings:
        """Returns what determines the outputs: those of the full model, unless the experiment exits."""
        return DecodeSettings.of(self, ExitRule(), thresholds=(1.0,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptRequest(SampleRequest, Spread, Job):
    """What experiments have in common whose sweeps may be decoded by workers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyCache(Options):
    """Exits by a confidence measure, of which the cache alone sees something."""

    SECTION: ClassVar[str | None] = "propagation: the noisy cache, in which exits are real but tokens the last layer's"

    confidence: str = option("softmax", "its confidence measure", choices=COMPARABLE)
    thresholds: float | Sequence[float] = again(
        ExitGrid,
        "thresholds",
        default=(0.9, 0.5, 0.0),
        sentence="its thresholds, comma-separated; default: 0.9,0.5,0",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PropagationRequest(SweptRequest, NoisyCache):
    """What the cache of skipped layers does to outputs whose tokens are right."""

    def settings(self) -> DecodeSettings:
        """Returns what determines the outputs of the noisy cache.

        Raises:
          ValueError: If a value is wrong.
        """
        assert isinstance(self.thresholds, tuple), "lists are kept as tuples"
        rule = ExitRule(confidence=self.confidence, token_from="last_layer")
        return DecodeSettings.of(self, rule, thresholds=descending_grid(self.thresholds))


def _positions(value: Any) -> tuple[int, ...]:
    """Returns the whole numbers of a list of numbers and ranges."""
    found: list[int] = []
    for part in texts(value if isinstance(value, str) else ",".join(map(str, value))):
        first, dash, last = part.partition("-")
        try:
            start = written_int(first)
            end = written_int(last) if dash else start
        except ValueError:
            start = end = -1
        # No output has so many, and a list of a billion would not fit in memory.
        if not 0 <= start <= end <= _LAST_POSITION:
            raise ValueRefusedError(f"expected positions from 0, as in 0-9,15,20; got {part!r}")
        found += range(start, end + 1)
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replaced(Options):
    """Which token of an output is replaced, and by what."""

    SECTION: ClassVar[str | None] = "sensitivity"

    positions: str | Sequence[int] | None = option(
        None,
        f"positions of the token to replace, from 0, as in 0-9,15,20; default: the first {_DEFAULT_POSITIONS}",
        kind=Kind(_positions, _positions, is_list=True),
    )
    rank: int = option(10, "rank of the token that replaces in `sampling`", kind=whole_number(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SensitivityRequest(SampleRequest, Replaced):
    """What one wrong token does to the whole output, by its position."""

    @property
    def places(self) -> tuple[int, ...]:
        """Positions of the token to replace."""
        assert self.positions is None or isinstance(self.positions, tuple), "lists are kept as tuples"
        return self.positions or tuple(range(min(_DEFAULT_POSITIONS, self.max_decode_length)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared(Options):
    """The confidence measures that are compared."""

    confidence: str | Sequence[str] | None = option(
        None,
        f"confidence measures, comma-separated, of {', '.join(COMPARABLE)}; default: all that the checkpoint has",
        kind=texts,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.measures or ():
            if name not in COMPARABLE:
                raise UsageError(
                    f"--confidence must list measures of {', '.join(COMPARABLE)}, got {name!r}. Static layers and the "
                    "oracle are always measured beside them."
                )
        if len(set(self.measures or ())) < len(self.measures or ()):
            raise UsageError(f"--confidence must list different measures, got {', '.join(self.measures or ())}.")

    @property
    def measures(self) -> tuple[str, ...] | None:
        """Those that are asked for; None for all that the checkpoint has."""
        return None if self.confidence is None else tuple(self.confidence)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TradeoffRequest(SweptRequest, Compared, ExitLayers):
    """Layers per token against quality, for every confidence measure over the grid."""

    def settings(self) -> DecodeSettings:
        """Returns what determines the outputs of the first measure, which stands for all of them.

        Raises:
          ValueError: If a value or a combination is wrong.
        """
        rule = self.rule_by(COMPARABLE[0]).with_source()
        return DecodeSettings.of(self, rule, thresholds=self.grid or uniform_grid(GRID_STEP))


REQUESTS: dict[str, type[SampleRequest]] = {
    "propagation": PropagationRequest,
    "sensitivity": SensitivityRequest,
    "tradeoff": TradeoffRequest,
}
"""What is asked for, by the name of the experiment."""
