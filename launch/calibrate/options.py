"""The options of `calm-beam calibrate` alone: guarantees, tests, variants, rounds and resuming."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from calm_beam.calibration.guarantee import MOST_KEPT_LOSSES
from calm_beam.calibration.pareto import MOST_BY_THEMSELVES, SELECTION_SHARE
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.flags.shared_options import GUARANTEE, METRIC_NAMES
from calm_beam.manifest import (
    COUNT_NEAR_TIES,
    FLOPS,
    LATENCY,
    LAYERS,
    LOSSES_OF,
    NEAR_TIES,
    OBJECTIVES,
    THROUGHPUT,
)
from calm_beam.metrics.registry import DEFAULT_METRIC
from calm_beam.options import Options, again, listed, option, options_of, switch
from calm_beam.options.groups import Tolerances, check_fractions
from calm_beam.options.kinds import (
    Kind,
    ValueRefusedError,
    confidences,
    measures_in_words,
    number,
    numbers,
    share,
    texts,
    utf8_text,
    whole_number,
    whole_numbers,
)
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.rules import ROUNDS_WITHOUT_GAIN

ROUND_EXAMPLES = 500
"""Examples of a round by default."""
BATCH = 64
"""Prompts of a batch whose throughput is meant where nobody says how many."""
_TEXTS = str | Sequence[str]
_NUMBERS = float | Sequence[float]


def _read_exits(value: Any) -> str:
    """Returns `auto`, which lets the tool choose; in Python, the value may be an exit rule instead."""
    if value != "auto":
        raise ValueRefusedError(f"expected auto, got {value!r:.40}")
    return "auto"


def _read_objective(value: Any) -> str:
    """Returns an objective, with its batch size if it has one."""
    name, _, batch = str(value).partition(":")
    is_size = name == THROUGHPUT and batch.isascii() and batch.isdecimal() and int(batch) > 1
    if name not in OBJECTIVES or (":" in str(value) and not is_size):
        raise ValueRefusedError(f"expected {', '.join(OBJECTIVES)} or {THROUGHPUT}:N, N above 1; got {value!r:.40}")
    return str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tails(Options):
    """Guarantees of tails."""

    SECTION: ClassVar[str | None] = GUARANTEE

    tail: _NUMBERS = option(
        (),
        "losses in [0, 1) that an output may have: besides the mean, the share of outputs that lose more is held to "
        "every --delta, by the exact binomial test",
        kind=numbers,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarantees(Options):
    """The guarantees that are asked for."""

    SECTION: ClassVar[str | None] = GUARANTEE

    consistency: _TEXTS | None = option(None, "textual, risk; default: textual (demo model: both)", kind=texts)
    metric: _TEXTS | None = option(None, f"{METRIC_NAMES}; default: {DEFAULT_METRIC}", kind=texts)
    # The demo data have their own tolerances.
    delta: _NUMBERS | None = again(Tolerances, "delta", default=None)
    epsilon: _NUMBERS = again(Tolerances, "epsilon")
    joint: bool = switch("let all entries hold together, with probability 1 - epsilon")
    serve: str | None = option(
        None,
        "the entry that will be served, settled before any loss is seen, such as textual,0.05: its consistency, "
        "delta, metric or loss, or NAME=VALUE, as many as distinguish it from the others",
        metavar="ENTRY",
    )
    group_key: str | None = option(
        None,
        "key of a row that names its group, such as its language: besides the entries about all prompts, each group "
        "has entries of its own",
        kind=utf8_text,
    )
    output: str | os.PathLike[str] = option("calibration", "directory for manifest, risk table and generations")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fractions(delta=listed(self.delta), epsilon=listed(self.epsilon))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tests(Options):
    """How the guarantees are tested."""

    SECTION: ClassVar[str | None] = "test"

    risk_loss: str | None = option(
        None,
        "for risk consistency; relu is the paper's; default: signed, or relu if --p_value needs losses in [0, 1]",
        choices=LOSSES_OF["risk"],
    )
    p_value: str | None = option(
        None,
        "test of one threshold; default: signed_mixture with --sequential; else exact_binomial for tails and "
        "exact_match; else star_bets, if every single loss can be kept: without groups and --selection_share, up to "
        f"{MOST_KEPT_LOSSES:,} (examples x thresholds x variants x entries); else signed_mixture for signed losses, "
        "and hoeffding_bentkus",
        choices=tuple(P_VALUES),
    )
    procedure: str | None = option(
        None,
        "test of the grid of thresholds; default: fixed_sequence; several variants have procedures of their own",
        choices=tuple(PROCEDURES),
    )
    cluster_key: str | None = option(
        None, "key of a row that names its cluster, where examples are drawn in clusters", kind=utf8_text
    )
    seed: int = option(
        0,
        "of the order of examples, for wsr, star_bets and --sequential, and of which of them choose among variants, or "
        "confirm",
        kind=whole_number(0),
    )
    sweep: str = option(
        "full",
        "lazy decodes the grid in blocks from the top, until no guarantee's test goes on: the same manifest entries "
        "for less work, with generations of the upper thresholds only",
        choices=("full", "lazy"),
    )
    near_ties: str = option(
        COUNT_NEAR_TIES,
        "outputs that depend on a comparison as close as rounding errors, which another engine may decide "
        "otherwise: count them, or worst_case, which gives them loss 1 (default: %(default)s)",
        choices=NEAR_TIES,
    )
    holdout_share: float | None = option(
        None,
        "share of the examples, such as 0.3, that choose nothing: they are decoded at the chosen thresholds, and at "
        "two that are safer, by the decoder that serves, and only thresholds that they prove again are promised",
        kind=share,
        metavar="SHARE",
        old_name="confirm_share",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variants(Options):
    """Variants of decoding, each of which is swept.

    Attributes:
      AUTO: The value that lets the tool choose the exit rules.
    """

    AUTO: ClassVar[str] = "auto"

    SECTION: ClassVar[str | None] = (
        "variants (lists are comma-separated; every combination is swept; each is tested by itself, or some of the "
        "examples choose what the others test)"
    )

    confidence: _TEXTS | None = option(
        None, f"confidence measures: {measures_in_words()}; default: softmax, without --exits=auto", kind=confidences
    )
    tau: _NUMBERS | None = option(None, "temperatures of a decaying schedule", kind=numbers)
    min_exit_layer: int | Sequence[int] | None = option(
        None, "lowest layers that may exit; default: 1, without --exits=auto", kind=whole_numbers(1)
    )
    exit_interval: int | Sequence[int] | None = option(
        None, "distances of layers that may exit; default: 1, without --exits=auto", kind=whole_numbers(1)
    )
    exits: ExitRule | str | None = option(
        None,
        "auto: sweep several measures and choices of layers, and promise what saves most by --objective; never a "
        "threshold that makes the model slower than it is without exits; default: auto, unless another flag says how "
        "tokens exit, or goes with one way of exiting alone",
        kind=Kind(
            _read_exits,
            lambda value: value if isinstance(value, ExitRule) else _read_exits(value),
            placeholder="auto",
            name="text",
        ),
    )
    objective: str | None = option(
        None,
        f"what --exits=auto is to save: {LATENCY}, the time of single prompts, measured here in a few seconds; "
        f"{THROUGHPUT}, that of batches of {BATCH}, or :N of N; {LAYERS}; or {FLOPS}, operations; default: {LATENCY}",
        kind=Kind(_read_objective, _read_objective, placeholder="SAVED", name="text"),
    )
    selection_share: float | None = option(
        None,
        "share of the examples that choose, and test nothing; default: none where there are up to "
        f"{MOST_BY_THEMSELVES} variants, each of which is then tested by itself at an equal share of epsilon, and "
        f"{SELECTION_SHARE:g} where there are more",
        kind=share,
        metavar="SHARE",
        old_name="choosing_share",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential(Options):
    """Whether tests are evaluated after every round, and when they stop."""

    SECTION: ClassVar[str | None] = "sequential (stop decoding when enough is proved)"

    sequential: bool = switch(
        "decode in rounds, look at the tests after each, and stop by the first of the following rules, or when nothing "
        "is left to prove; tests by signed_mixture, which holds at any time"
    )
    round_examples: int | None = option(
        None,
        f"a round has as many shards as hold about so many examples; default: {ROUND_EXAMPLES}",
        kind=whole_number(1),
    )
    stop_at_threshold: float | None = option(
        None, "stop once every entry has accepted this threshold", kind=number, metavar="L"
    )
    stop_at_layers: float | None = option(
        None, "stop once every entry uses at most so many mean layers", kind=number, metavar="X"
    )
    stop_gain: float | None = option(
        None,
        f"stop after {ROUNDS_WITHOUT_GAIN} rounds in a row in which no entry saved this share of its layers, such as "
        "2%%; entries without a threshold go on",
        kind=share,
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = next((name for name, _ in options_of(Sequential) if getattr(self, name) not in (None, False)), None)
        if given is not None and not self.sequential:
            raise UsageError(f"--{given} belongs to --sequential, which is missing.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoingOn(Options):
    """How the results of an earlier run are used."""

    SECTION: ClassVar[str | None] = "going on"

    resume: bool = switch(
        "go on with a run that was killed or failed: decode the missing shards only; or with a sequential one that "
        "stopped, by another rule"
    )
    generations: str | None = option(
        None,
        "calibrate the generations of an earlier run, its --output or a folder below generations/, and decode nothing; "
        "--thresholds or --grid_step may take a part of its grid. Every plan is listed next to them, and only the "
        "first is sure to have been settled before its results were seen",
        metavar="DIR",
    )
