"""The request of a certification, for `calm-beam certify` and `calm_beam.certify`, and its options.

The options say where losses come from, the order of the settings, what is proved, and how; `verify` shares those that
name losses and scores. Fields hold the given values. Properties fill in defaults, so that nothing rewrites a request.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from calm_beam.calibration.certification import ORDERS, SettingGuarantees, order_of_costs
from calm_beam.calibration.guarantee import MOST_KEPT_LOSSES
from calm_beam.errors import UsageError
from calm_beam.inputs.losses import DIRECTIONS
from calm_beam.manifest import CONSISTENCIES, SettingTest
from calm_beam.metrics.registry import DEFAULT_METRIC, is_binary
from calm_beam.options import Options, again, listed, option, options_of, switch
from calm_beam.options.groups import Telling, Tolerances
from calm_beam.options.kinds import (
    Kind,
    ValueRefusedError,
    number,
    numbers,
    paths,
    share,
    texts,
    utf8_text,
    whole_number,
)
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.rules import ROUNDS_WITHOUT_GAIN

ROUND_EXAMPLES = 100
"""Examples of a round by default."""
NAME_ONE_SOURCE = (
    "name either the losses (--losses) or the scores (--baseline and --candidates), or the outputs of a decoder of "
    "yours (--outputs)."
)
"""The error where two are named, or none."""
_NUMBERS = float | Sequence[float]
_OF_SCORES = ("baseline",)
_OF_OUTPUTS = ("outputs",)
_OF_ROUNDS = ("sequential",)


def _read_costs(text: str) -> tuple[tuple[str, float], ...]:
    return _costs(map(_written_cost, texts.read(text)))


def _take_costs(value: Any) -> tuple[tuple[str, float], ...]:
    if isinstance(value, str):
        return _read_costs(value)
    pairs = value.items() if isinstance(value, Mapping) else value
    return _costs((name, cost, f"{name}={cost}") for name, cost in pairs)


def _written_cost(part: str) -> tuple[str, str, str]:
    name, _, cost = part.rpartition("=")
    return name, cost, part


def _costs(given: Iterable[tuple[str, Any, str]]) -> tuple[tuple[str, float], ...]:
    """Returns the costs of settings, from triples of a name, a number, and a text for messages."""
    costs: dict[str, float] = {}
    for name, value, shown in given:
        try:
            cost = number.taken(value)
        except ValueRefusedError:
            cost = math.nan
        if not (name and isinstance(name, str) and math.isfinite(cost) and cost >= 0) or name in costs:
            raise ValueRefusedError(f"expected NAME=NUMBER for every setting, each once, got {shown!r}")
        costs[name] = cost
    if not costs:
        raise ValueRefusedError("expected NAME=NUMBER for every setting, got none")
    return tuple(costs.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSource(Options):
    """Losses of a sweep, or scores or outputs to compute them from."""

    SECTION: ClassVar[str | None] = "losses of a sweep, or scores or outputs that make them"

    losses: str | os.PathLike[str] | Sequence[str] | None = option(
        None, "tables with id, setting and loss: globs of .csv, .jsonl or .parquet", kind=paths
    )
    baseline: str | os.PathLike[str] | None = option(
        None, "scores that others are compared with: a log, or its folder", metavar="RUN"
    )
    candidates: str | Sequence[str] | None = option(
        None, "scores of the settings: RUN or NAME=RUN", kind=texts, metavar="RUN,...", belongs_to=_OF_SCORES
    )

    outputs: str | os.PathLike[str] | None = option(
        None, "outputs of a decoder of yours: the directory that transforms.SweepWith has written", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sources > 1:
            raise UsageError(NAME_ONE_SOURCE)
        if self.baseline is not None and not self.candidates:
            raise UsageError("--candidates is missing: the runs that are compared with --baseline.")

    @property
    def sources(self) -> int:
        """Number of sources that are named."""
        return bool(self.losses) + (self.baseline is not None) + (self.outputs is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhichScores(Options):
    """Which of the scores in a log are meant."""

    SECTION: ClassVar[str | None] = "which of the scores in a log"

    task: str | None = option(None, "task whose log is meant, where a folder has several", belongs_to=_OF_SCORES)
    metric: str | None = option(
        None,
        "metric of the log, such as exact_match or exact_match,strict-match; of --outputs, what scores them, as in "
        f"calibrate (default: {DEFAULT_METRIC})",
        belongs_to=(*_OF_SCORES, *_OF_OUTPUTS),
    )
    direction: str | None = option(
        None,
        "which score is better; needed where neither the logs, nor files next to them, nor the metric's name says it",
        choices=DIRECTIONS,
        belongs_to=_OF_SCORES,
    )
    consistency: str = option(
        "textual",
        "what outputs are held against: textual (those under the first setting) or risk (references; what is lost "
        "against the first setting)",
        choices=CONSISTENCIES,
        belongs_to=_OF_OUTPUTS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order(Options):
    """The order of the settings."""

    SECTION: ClassVar[str | None] = "order of the settings, declared before any loss is seen"

    order: str | Sequence[str] | None = option(
        None, "settings in testing order, the safest first, comma-separated", kind=texts
    )
    order_by: str | None = option(
        None,
        "the dearest first, or the cheapest; default: --order, or that of --candidates or of --outputs",
        choices=ORDERS,
    )
    costs: str | Mapping[str, float] | Sequence[tuple[str, float]] | None = option(
        None,
        "what settings cost, as NAME=NUMBER,..., the baseline too if you like; default: the column cost",
        kind=Kind(_read_costs, _take_costs, name="costs by setting", is_list=True, is_mapping=True),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order and self.order_by is not None:
            raise UsageError("--order and --order_by both say the order: leave one of them out.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarantees(Options):
    """The guarantees to prove."""

    SECTION: ClassVar[str | None] = "guarantee (lists are comma-separated; every combination is one manifest entry)"

    delta: _NUMBERS = again(Tolerances, "delta")
    epsilon: _NUMBERS = again(Tolerances, "epsilon")
    tail: _NUMBERS = option(
        (),
        "losses in [0, 1) that an example may have: besides the mean, the share of examples that lose more is held to "
        "every --delta",
        kind=numbers,
    )
    loss: str | None = option(
        None,
        "of --losses: given (in [0, 1], default) or signed (in [-1, 1]); of scores, and of --outputs with "
        "--consistency=risk: signed (baseline's minus candidate's, default) or relu (what is positive of it)",
        choices=("given", "signed", "relu"),
    )
    group_key: str | None = option(
        None, "column that names a group: each gets entries of its own, besides the whole", kind=utf8_text
    )
    joint: bool = switch("let all entries hold together, with probability 1 - epsilon")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tests(Options):
    """How the guarantees are tested."""

    SECTION: ClassVar[str | None] = "test"

    p_value: str | None = option(
        None,
        "test of one setting; default: signed_mixture with --sequential; else exact_binomial for tails, and for "
        f"exact_match of scores and outputs unless its loss is signed; else star_bets for up to {MOST_KEPT_LOSSES:,} "
        "losses (examples x settings x entries); else signed_mixture for signed losses, and hoeffding_bentkus",
        choices=tuple(P_VALUES),
    )
    procedure: str = option("fixed_sequence", "test of the settings together", choices=tuple(PROCEDURES))
    cluster_key: str | None = option(
        None,
        "what names the cluster, where examples are drawn in clusters: a column of --losses or --ids, or a field of "
        "what a log says of an example, such as doc.title or metadata.passage",
        kind=utf8_text,
    )
    seed: int = option(0, "of the order of examples, for wsr, star_bets and --sequential", kind=whole_number(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential(Options):
    """Whether tests are evaluated after every round of examples, and when they stop."""

    SECTION: ClassVar[str | None] = "sequential (stop evaluating when enough is proved)"

    sequential: bool = switch(
        "look at the tests after every round of examples that --losses holds whole, and stop by the first of the "
        "following rules, or when nothing is left to prove; otherwise say which examples to evaluate next"
    )
    ids: str | os.PathLike[str] | Sequence[str] | None = option(
        None,
        "all examples that may be evaluated, declared beforehand: globs of .txt (an id a line), .csv, .jsonl or "
        ".parquet with the column id, and those that --group_key and --cluster_key name",
        kind=paths,
        belongs_to=_OF_ROUNDS,
    )
    round_examples: int | None = option(
        None,
        f"a round ends with the example or cluster that makes it so many examples; default: {ROUND_EXAMPLES}",
        kind=whole_number(1),
        belongs_to=_OF_ROUNDS,
    )
    stop_at_setting: str | None = option(
        None,
        "stop once every entry has accepted this setting, or a later one",
        metavar="NAME",
        belongs_to=_OF_ROUNDS,
    )
    stop_at_cost: float | None = option(
        None, "stop once no entry's setting costs more than this", kind=number, metavar="X", belongs_to=_OF_ROUNDS
    )
    stop_gain: float | None = option(
        None,
        f"stop after {ROUNDS_WITHOUT_GAIN} rounds in a row in which no entry saved this share of its cost, such as "
        "2%%; entries without a setting go on",
        kind=share,
        metavar="SHARE",
        belongs_to=_OF_ROUNDS,
    )
    next_rounds: int | None = option(
        None, "of how many rounds ids are named next; default: 1", kind=whole_number(1), belongs_to=_OF_ROUNDS
    )
    resume: bool = switch("go on with a certification that stopped, by another rule", belongs_to=_OF_ROUNDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop_at_cost is not None and not 0 <= self.stop_at_cost < math.inf:
            raise UsageError(f"--stop_at_cost must be a finite number of at least 0, got {self.stop_at_cost:g}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Options):
    """Where the result goes."""

    output: str | os.PathLike[str] = option("certification", "directory for manifest, risk table and ids")
    overwrite: bool = switch("replace an earlier result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertifyRequest(SweepSource, WhichScores, Order, Guarantees, Tests, Sequential, Output, Telling):
    """A certification as a user asks for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequential:
            _check_sequential(self)
        elif not self.sources:
            raise UsageError(NAME_ONE_SOURCE)
        _check_order(self)
        _check_source(self)
        # Errors in these are reported before a file is read.
        self.tests()

    @property
    def kind_of_losses(self) -> str:
        """The kind of the losses: `given`, `signed` or `relu`."""
        if self.outputs is not None:
            return "given" if self.consistency == "textual" else self.loss or "signed"
        return self.loss or ("given" if self.baseline is None else "signed")

    @property
    def joint_epsilon(self) -> float | None:
        """The epsilon that all entries share; None if each has its own."""
        return listed(self.epsilon)[0] if self.joint else None

    @property
    def declared_costs(self) -> dict[str, float]:
        """Declared costs of settings."""
        return dict(listed(self.costs))

    @property
    def examples_of_a_round(self) -> int:
        """Number of examples per round."""
        return self.round_examples or ROUND_EXAMPLES

    @property
    def rounds_named(self) -> int:
        """Number of rounds whose ids are listed next."""
        return self.next_rounds or 1

    @property
    def order_of_rounds(self) -> tuple[str, ...]:
        """The settings in testing order, if it is settled before there are losses.

        Raises:
          UsageError: If costs make the order, and two settings cost the same.
        """
        return listed(self.order) or order_of_costs(self.declared_costs, order_by=self.order_by)

    def tests(
        self, *, groups: Sequence[str] = (), losses: int | None = None, metric: str | None = None
    ) -> tuple[SettingTest, ...]:
        """Returns the tests; `SettingGuarantees` describes the arguments and errors.

        A log's name of a `metric` may have a filter after a comma.
        """
        asked = SettingGuarantees(
            deltas=listed(self.delta),
            epsilons=listed(self.epsilon),
            tails=listed(self.tail),
            loss=self.kind_of_losses,
            is_binary=metric is not None and is_binary(metric.partition(",")[0]),
            p_value=self.p_value,
            procedure=self.procedure,
            joint=self.joint,
            clustered=self.cluster_key is not None,
            watched=self.sequential,
        )
        return asked.tests(groups=groups, losses=losses)


def _check_sequential(request: CertifyRequest) -> None:
    """Refuses options that do not work with rounds, and requires those that rounds need."""
    for name in ("baseline", "candidates", "outputs", *(name for name, _ in options_of(WhichScores))):
        if request.is_given(name):
            raise UsageError(
                f"--{name} names logs of a whole evaluation, and --sequential takes losses as they come: write them to "
                "a table, for --losses."
            )
    if not request.ids:
        raise UsageError(
            "--ids is missing: all examples that may be evaluated. Their order, and with it what is evaluated first, "
            "is settled before any loss is seen."
        )
    if request.order_by is not None and request.costs is None:
        raise UsageError(
            f"--order_by={request.order_by} needs --costs here: the order is settled before there are losses. Or give "
            "the order itself (--order)."
        )


def _check_order(request: CertifyRequest) -> None:
    """Refuses losses without a declared order, and options that conflict with the order of rounds."""
    has_own_order = request.baseline is not None or request.outputs is not None
    if not has_own_order and not request.order and request.order_by is None:
        raise UsageError(
            "the order of the settings is missing. Declare it before you look at the losses: --order=A,B,..., the "
            "safest first, or --order_by=cost."
        )
    if not request.sequential:
        return
    order, costs = request.order_of_rounds, request.declared_costs
    if len(set(order)) != len(order):
        raise UsageError("--order must name every setting once: it names a setting twice.")
    if costs and set(costs) != set(order):
        raise UsageError(
            f"--costs must name every setting once: the settings are {', '.join(order)}, it names {', '.join(costs)}."
        )
    if request.stop_at_setting is not None and request.stop_at_setting not in order:
        raise UsageError(f"--stop_at_setting={request.stop_at_setting}: is none of the settings {', '.join(order)}.")


def _check_source(request: CertifyRequest) -> None:
    """Refuses options that do not apply to the kind of source: losses, scores or outputs."""
    if request.outputs is not None:
        if request.loss is not None and (request.loss == "given") != (request.consistency == "textual"):
            raise UsageError(
                f"--loss={request.loss} is not a loss of --consistency={request.consistency}: that of textual is "
                "given, those of risk are signed and relu."
            )
        return
    if request.baseline is None:
        if request.loss == "relu":
            raise UsageError(
                "--loss=relu is made of scores. Of --losses it is given (in [0, 1]) or signed (in [-1, 1])."
            )
        return
    if request.group_key is not None:
        raise UsageError("--group_key names a column of --losses, and scores have none: leave it out.")
    if request.loss == "given":
        raise UsageError("--loss=given is of --losses. Of scores it is signed or relu.")
