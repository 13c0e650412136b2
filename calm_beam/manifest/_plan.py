"""What a run was asked for when it started, and whether that is what was then tested."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, TypeVar

from ._checks import ManifestError, check_choice, check_count, check_number, check_share, check_text, shown
from ._record import DigestedRecord, Record, check_record, check_tuple, checked_list, records_from_json
from .records import CONSISTENCIES, PROCEDURES, Calibration, check_loss

ON_ERROR = ("fail", "worst_case")
ON_LONG = ("truncate", "error")
# Procedures in which every p-value of the grid has a say.
_WHOLE_GRID = ("fallback", "holm", "bonferroni")
# Shares of epsilon, added up, may differ from the whole by their rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class PlannedTest(Record):
    """One promise that was asked for; its attributes are those of `Calibration`."""

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("group",)

    consistency: str
    metric: str
    loss: str
    group: str | None = None
    delta: float
    epsilon: float
    p_value: str
    procedure: str

    def __post_init__(self) -> None:
        check_choice("consistency", self.consistency, choices=CONSISTENCIES)
        check_text("metric", self.metric)
        check_loss("loss", self.loss)
        if self.group is not None:
            check_text("group", self.group)
        check_share("delta", self.delta)
        check_share("epsilon", self.epsilon)
        check_text("p_value", self.p_value)
        check_choice("procedure", self.procedure, choices=PROCEDURES)


@dataclass(frozen=True, kw_only=True)
class SequentialPlan(Record):
    """How a calibration is watched that stops when enough is proved.

    Attributes:
      round_examples: About how many examples a round has, at the end of which the tests are looked at.
      stop_at_threshold: Stops once every entry has accepted this threshold, or a lower one; None: whatever they accept.
      stop_at_layers: Stops once no entry uses more mean layers than this; None: whatever they use.
      stop_gain: Stops after rounds in which no entry saved this share of its layers; None: whatever they save.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("stop_at_threshold", "stop_at_layers", "stop_gain")

    round_examples: int
    stop_at_threshold: float | None = None
    stop_at_layers: float | None = None
    stop_gain: float | None = None

    def __post_init__(self) -> None:
        check_count("round_examples", self.round_examples, low=1)
        if self.stop_at_threshold is not None:
            check_number("stop_at_threshold", self.stop_at_threshold, low=0, high=1)
        if self.stop_at_layers is not None:
            check_number("stop_at_layers", self.stop_at_layers, low=1)
        if self.stop_gain is not None:
            check_share("stop_gain", self.stop_gain)


@dataclass(frozen=True, kw_only=True)
class PlanRecord(DigestedRecord):
    """Everything that the outcome depends on besides the data and the code of metrics, as it was when the run started.

    Attributes:
      thresholds: The grid in testing order: descending.
      tests: The promises asked for, one for each calibration, in the same order.
      joint_epsilon: Probability with which any of them may be broken, where they hold together; None: each alone.
      cluster_key: Field of a data row that names its cluster, the independent unit; None: every example is one.
      group_key: Field of a data row that names its group, where each has promises of its own; None where none has.
      salt: Decides the order of examples, for p-values that need one.
      on_error: What became of examples that could not be decoded or scored, one of `ON_ERROR`.
      on_long: What became of prompts that were too long, one of `ON_LONG`.
      model: Fingerprint of the model.
      outputs: Fingerprint of all that decides its outputs but the data.
      sequential: How it is watched, if it stops when enough is proved; None where all examples count.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("group_key", "sequential")

    thresholds: tuple[float, ...]
    tests: tuple[PlannedTest, ...]
    joint_epsilon: float | None
    cluster_key: str | None
    group_key: str | None = None
    salt: str
    on_error: str
    on_long: str
    model: str
    outputs: str
    sequential: SequentialPlan | None = None

    @classmethod
    def _from_json(cls, key: str, value: object, *, at: str) -> object:
        match key:
            case "thresholds":
                return tuple(checked_list(value, at=at))
            case "tests":
                return records_from_json(PlannedTest, value, at=at)
            case "sequential":
                return SequentialPlan.from_dict(value, at=at)
        return value

    def __post_init__(self) -> None:
        check_tuple("thresholds", self.thresholds)
        for index, threshold in enumerate(self.thresholds):
            check_number(f"thresholds[{index}]", threshold, low=0, high=1)
        if any(lower >= upper for upper, lower in pairwise(self.thresholds)):
            raise ManifestError(f"thresholds must be strictly descending, got {shown(self.thresholds)}")
        check_tuple("tests", self.tests, of=PlannedTest)
        check_joint(self.joint_epsilon, [test.epsilon for test in self.tests])
        if self.cluster_key is not None:
            check_text("cluster_key", self.cluster_key)
        if self.group_key is not None:
            check_text("group_key", self.group_key)
        check_text("salt", self.salt)
        check_choice("on_error", self.on_error, choices=ON_ERROR)
        check_choice("on_long", self.on_long, choices=ON_LONG)
        check_text("model", self.model)
        check_text("outputs", self.outputs)
        if self.sequential is not None:
            check_record("sequential", self.sequential, kind=SequentialPlan)

    def check_calibrations(self, calibrations: Sequence[Calibration]) -> None:
        """Refuses calibrations other than those that were planned.

        Raises:
          ManifestError: If their number, a setting or a tested threshold differs.
        """
        if len(calibrations) != len(self.tests):
            raise ManifestError(
                f"calibrations must be the {len(self.tests)} that were planned, got {len(calibrations)}"
            )
        for index, (planned, entry) in enumerate(zip(self.tests, calibrations, strict=True)):
            for name in (each.name for each in fields(planned)):
                value, found = getattr(planned, name), getattr(entry, name)
                if found != value:
                    raise ManifestError(
                        f"calibrations[{index}].{name} must be {shown(value)}, as was planned, got {shown(found)}"
                    )
            tested = [step.threshold for step in entry.path]
            expected = planned_path(self.thresholds, tested, procedure=entry.procedure)
            if tested != expected:
                raise ManifestError(
                    f"calibrations[{index}].path must test thresholds in the planned order, which begins "
                    f"{shown(expected)}, got {shown(tested)}"
                )


_T = TypeVar("_T")


def planned_path(grid: Sequence[_T], tested: Sequence[_T], *, procedure: str) -> list[_T]:
    """Returns in which order a path has to test what it has tested of a planned grid.

    Args:
      grid: All that may be tested, in the planned order.
      tested: What was.
      procedure: How: some go down from the first, some have to look at all.
    """
    if procedure == "fixed_sequence":
        return list(grid[: len(tested)])
    if procedure in _WHOLE_GRID:
        return list(grid)
    return [item for item in grid if item in tested]


def check_joint(joint_epsilon: object, epsilons: Sequence[float]) -> None:
    """Refuses a joint epsilon that is neither None nor at least as large as its shares together."""
    if joint_epsilon is None:
        return
    check_share("joint_epsilon", joint_epsilon)
    total = sum(epsilons)
    if isinstance(joint_epsilon, int | float) and total > joint_epsilon * (1 + _ROUNDING):
        raise ManifestError(
            f"joint_epsilon must be at least the sum of the tests' epsilons, {shown(total)}, got {shown(joint_epsilon)}"
        )
