"""The requests of `calm-beam evaluate`: one for each experiment on a sample of prompts, and one for repeated splits."""

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from calm_beam.calibration.guarantee import every_guarantee, specs_of
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.measures import COMPARABLE
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import descending_grid, uniform_grid
from calm_beam.inputs.demo import embedded
from calm_beam.launch.calibrate.options import Guarantees, Tails, Tests, Variants
from calm_beam.launch.flags.shared_options import METRIC_NAMES, Job, MetricFiles
from calm_beam.launch.flags.task import TaskRequest, refuse_decoding
from calm_beam.manifest import PlannedTest
from calm_beam.metrics.registry import DEFAULT_METRIC
from calm_beam.options import Options, again, option, switch
from calm_beam.options.groups import GRID_STEP, ExitGrid, ExitLayers, Failures, Replacing, Spread
from calm_beam.options.kinds import Kind, ValueRefusedError, number, numbers, paths, texts, whole_number
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.text import written_int

DESCRIPTIONS = {
    "splits": "repeated random splits: thresholds chosen on one part, measured on the rest (the default)",
    "propagation": "what the cache of skipped layers does to outputs whose tokens are right",
    "sensitivity": "what one wrong token does to the whole output, by its position",
    "tradeoff": "layers per token against quality, for every confidence measure over the grid",
}
"""The question that each experiment answers, in one line."""
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
    """The options that all experiments on a sample share."""

    def settings(self) -> DecodeSettings:
        """Returns what determines the outputs: those of the full model, unless the experiment exits."""
        return DecodeSettings.of(self, ExitRule(), thresholds=(1.0,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptRequest(SampleRequest, Spread, Job):
    """The options that experiments share whose sweeps workers may decode."""


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
    """The effect of the cache of skipped layers on outputs whose tokens are right."""

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
    """The effect of one wrong token on the whole output, by its position."""

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
                    "oracle are always measured with them."
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
"""The request of each experiment, by its name."""


_CURVE = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
_DECIDES_OUTPUTS = (TaskRequest, ExitLayers, Failures, Spread, Job)
# Options of those groups that also apply to stored generations.
_ALSO_OF_STORED = ("checkpoint", "activation", "relative_max_distance", "vocabulary", "on_error", "max_failures")
_GOAL = "guarantee (lists are comma-separated; every combination is tried)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored(Options):
    """Stored generations that are split."""

    generations: str | Sequence[str] | None = option(
        None,
        "output directories of calibrations, or folders of generations, comma-separated: one for each confidence "
        "measure, of the same model and data; without it, --checkpoint and --data are swept first",
        kind=paths,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splitting(Options):
    """How generations are split."""

    SECTION: ClassVar[str | None] = "splits"

    trials: int = option(50, "number of random splits", kind=whole_number(1, 10_000))
    calibration_share: float = option(0.8, "expected share of the calibration part, in (0, 1)", kind=number)
    seed: int = option(0, "decides the splits", kind=whole_number(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goals(Tails, MetricFiles):
    """The guarantees that the calibration part chooses thresholds for, and its tests."""

    SECTION: ClassVar[str | None] = _GOAL

    consistency: str | Sequence[str] | None = again(
        Guarantees, "consistency", sentence="textual, risk; default: both if there are references"
    )
    metric: str | Sequence[str] | None = again(Guarantees, "metric")
    bleurt_checkpoint: str | None = again(MetricFiles, "bleurt_checkpoint")
    delta: float | Sequence[float] = again(
        Guarantees, "delta", default=(0.02, 0.05, 0.1, 0.25), sentence="risk tolerances of the table"
    )
    curve_delta: float | Sequence[float] = option(_CURVE, "risk tolerances of the curves", kind=numbers)
    epsilon: float | Sequence[float] = again(Guarantees, "epsilon", sentence="allowed probabilities of error")
    tail: float | Sequence[float] = again(Tails, "tail")
    risk_loss: str | None = again(Tests, "risk_loss", sentence="for risk consistency; relu is the paper's")
    p_value: str | Sequence[str] | None = option(
        None,
        "tests of one threshold, made of sums; default: exact_binomial for tails and exact_match, else signed_mixture "
        "for signed losses, and hoeffding_bentkus",
        kind=texts,
    )
    procedure: str | Sequence[str] = option(("fixed_sequence",), f"of {', '.join(PROCEDURES)}", kind=texts)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.p_value or ():
            if name in P_VALUES and P_VALUES[name].needs_table:
                raise UsageError(
                    f"--p_value={name} needs every single loss in an order of its own, and splits keep sums alone. "
                    "Take one that is made of sums, such as signed_mixture."
                )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that are asked for, by the names that were given."""
        return tuple(self.metric or (DEFAULT_METRIC,))

    def specs(
        self, deltas: Sequence[float], *, consistencies: Sequence[str], metrics: Sequence[str], is_clustered: bool
    ) -> tuple[PlannedTest, ...]:
        """Returns what is tested at some tolerances.

        Args:
          deltas: The tolerances.
          consistencies: Kinds of consistency, which the user may leave to the data.
          metrics: Their full names.
          is_clustered: Whether losses are means over clusters.

        Raises:
          ValueError: If a value or a combination is not allowed.
        """
        found = [
            spec
            for p_value in self.p_value or (None,)
            for procedure in self.procedure
            for spec in specs_of(
                every_guarantee(
                    consistencies=consistencies,
                    metrics=metrics,
                    deltas=deltas,
                    epsilons=_listed(self.epsilon),
                    tails=_listed(self.tail),
                    risk_loss=self.risk_loss,
                    p_value=p_value,
                    procedure=procedure,
                ),
                is_clustered=is_clustered,
            )
        ]
        return tuple(dict.fromkeys(found))

    def table_and_curve(
        self, *, consistencies: Sequence[str], metrics: Sequence[str], is_clustered: bool = False
    ) -> tuple[tuple[PlannedTest, ...], tuple[PlannedTest, ...]]:
        """Returns the specs of the table, and those of the curves; arguments and errors as in `specs`."""
        if self.risk_loss is not None and "risk" not in consistencies:
            raise UsageError("--risk_loss belongs to --consistency=risk, which is missing.")
        table, curve = (
            self.specs(_listed(deltas), consistencies=consistencies, metrics=metrics, is_clustered=is_clustered)
            for deltas in (self.delta, self.curve_delta)
        )
        return table, curve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing(Options):
    """Whether the served decoder is timed."""

    SECTION: ClassVar[str | None] = "speedup"

    speedup: bool = switch(
        "measure the served decoder against the full model, one prompt at a time, at the thresholds of the table"
    )
    speedup_prompts: int = option(200, "prompts timed, the same for all", kind=whole_number(1), belongs_to=("speedup",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measures(Options):
    """The measures that are swept first, if nothing is stored."""

    SECTION: ClassVar[str | None] = "exits"

    confidence: str | Sequence[str] | None = again(
        Variants,
        "confidence",
        default=None,
        sentence="confidence measures to sweep; default: softmax, state, and classifier if the model has one",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitsRequest(
    Experiment, Stored, Result, Splitting, Goals, Timing, TaskRequest, Measures, ExitLayers, Failures, Spread, Job
):
    """Repeated random splits, of generations that are there or are made first."""

    def check_given(self, names: Collection[str]) -> None:
        """Refuses options about decoding if nothing is decoded.

        Args:
          names: Options that were given, with whatever value.
        """
        if self.generations is not None:
            refuse_decoding(
                names,
                *_DECIDES_OUTPUTS,
                also=("confidence",),
                allowed=_ALSO_OF_STORED,
                generations=",".join(self.generations),
            )

    @property
    def is_demo(self) -> bool:
        """Whether neither model nor data were named: the demo model and data are meant."""
        return self.generations is None and super().is_demo

    @property
    def model_folder(self) -> str | None:
        """Folder of the model; None where that is the one that generations are of."""
        return self.model_path if self.generations is None else self.named_model

    @property
    def measures(self) -> tuple[str, ...] | None:
        """Confidence measures to sweep; None for the usual ones."""
        return None if self.confidence is None else tuple(self.confidence)

    def settings(self, measure: str) -> DecodeSettings:
        """Returns what determines the outputs by one measure.

        Raises:
          ValueError: If a value or a combination is wrong.
        """
        default = embedded.THRESHOLDS if self.is_demo else uniform_grid(GRID_STEP)
        return DecodeSettings.of(self, self.rule_by(measure).with_source(), thresholds=self.grid or default)


def _listed(values: float | Sequence[float]) -> tuple[float, ...]:
    """Returns the values of a list, which requests keep as tuples."""
    assert isinstance(values, tuple), "lists are kept as tuples"
    return values
