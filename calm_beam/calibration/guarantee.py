"""Guarantees as users ask for them: one at a time, or as every combination of lists."""

import dataclasses
import itertools
from collections.abc import Sequence

from calm_beam.manifest import CONSISTENCIES, LOSSES_OF, OF_VARIANTS, PARETO, AskedTest, Objective, PlannedTest
from calm_beam.metrics.registry import is_binary
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.rules import tail_name
from calm_beam.risk.testing import check_asked
from calm_beam.text import function_itself

PROCEDURE = "fixed_sequence"
"""The default procedure for testing thresholds."""
MOST_KEPT_LOSSES = 2_000_000
"""Most single losses kept if no p-value is named: examples times thresholds or settings times entries."""


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """A guarantee: with probability at least 1 - epsilon, outputs lose at most delta to the full model's, on average.

    With `tail`, at most a share delta of outputs loses more than `tail`.

    >>> Guarantee("textual", "rouge_l_unicode", delta=0.1).epsilon
    0.05
    >>> Guarantee("textual", "rouge_l_unicode", delta=0.1, tail=0.3).planned().p_value
    'exact_binomial'

    Source: CALM, Definitions 1 (textual consistency) and 2 (risk consistency).

    Attributes:
      consistency: `textual`: the loss is 1 - score of the early-exit output against the full model's; or `risk`: the
        loss is how much lower the early-exit output scores than the full model's against the references.
      metric: Name of a metric, or `module:function` for your own.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the chosen threshold breaks the tolerance, in (0, 1).
      loss: For risk consistency, `signed` or `relu` (the paper's); None takes `signed`, or `relu` if the p-value is for
        losses in [0, 1]. Tail guarantees use `relu`.
      tail: A loss in [0, 1) that an output may have; `delta` is then the share of outputs that may lose more. None
        bounds the mean loss.
      p_value: Test of one threshold; None takes the default for the loss and the data (`default_p_value`).
      procedure: How several thresholds are tested.
    """

    consistency: str
    metric: str
    _: dataclasses.KW_ONLY
    delta: float
    epsilon: float = 0.05
    loss: str | None = None
    tail: float | None = None
    p_value: str | None = None
    procedure: str = PROCEDURE

    def __post_init__(self) -> None:
        if found := function_itself(self.metric):
            raise ValueError(f"metric must be a name, got {found}.")
        # Errors are raised here and not when the guarantee is used.
        self.planned()

    def planned(self, *, is_clustered: bool = False, is_kept: bool = False) -> PlannedTest:
        """Returns the planned test, with all defaults filled in.

        Args:
          is_clustered: Whether losses are means over clusters.
          is_kept: Whether every single loss may be kept, rather than sums alone.

        Raises:
          ValueError: If a value or a combination is not allowed.
        """
        if self.tail is not None and self.consistency in LOSSES_OF:
            loss = tail_name(self.loss or LOSSES_OF[self.consistency][-1], self.tail)
        else:
            loss = self.loss or (_default_risk_loss(self.p_value) if self.consistency == "risk" else "dissimilarity")
        objective = Objective(self.consistency, self.metric, loss=loss)
        is_of_0_and_1 = objective.tail is not None or (is_binary(self.metric) and not objective.is_signed)
        p_value = self.p_value or default_p_value(
            is_binary=is_of_0_and_1 and not is_clustered,
            is_signed=objective.is_signed,
            # Where a selection part chooses among variants, only sums are kept.
            is_kept=is_kept and self.procedure != PARETO,
        )
        check_asked(
            delta=self.delta,
            epsilon=self.epsilon,
            p_value=p_value,
            procedure=self.procedure,
            procedures=(*PROCEDURES, *OF_VARIANTS),
        )
        if objective.is_signed and not P_VALUES[p_value].takes_signed:
            valid = " or ".join(name for name, method in P_VALUES.items() if method.takes_signed)
            raise ValueError(
                f"p_value {p_value} is for losses in [0, 1], but the signed loss of risk consistency lies in "
                f"[-1, 1]. Take {valid}, or risk_loss=relu."
            )
        return PlannedTest(
            **vars(objective), delta=self.delta, epsilon=self.epsilon, p_value=p_value, procedure=self.procedure
        )


def default_p_value(*, is_binary: bool, is_signed: bool, is_kept: bool) -> str:
    """Returns the default p-value: a rule that looks at no loss, and is settled with the plan.

    For losses of 0 and 1 the binomial test is exact. For others, bets on one after the other prove most, but every
    single loss has to be kept; without single losses the default tests their sum.

    Args:
      is_binary: Whether the loss of every independent unit is known beforehand to be 0 or 1: a tail loss, or the loss
        of a metric that is declared binary. Means over clusters are not.
      is_signed: Whether losses lie in [-1, 1] and not in [0, 1].
      is_kept: Whether every single loss may be kept: see `are_kept`.

    Source: ours; compared in docs/measurements.md, "Examples that a proof takes".
    """
    if is_binary:
        return "exact_binomial"
    if is_kept:
        return "star_bets"
    return "signed_mixture" if is_signed else "hoeffding_bentkus"


def are_kept(losses: int | None, *, entries: int) -> bool:
    """Returns whether every single loss is kept where no p-value is named.

    Args:
      losses: Upper bound on the losses of an entry: examples times thresholds or settings; None where it is unknown.
      entries: Number of entries.

    >>> are_kept(5_000 * 20, entries=4), are_kept(10**7, entries=1), are_kept(None, entries=1)
    (True, False, False)
    """
    return losses is not None and losses * entries <= MOST_KEPT_LOSSES


def default_tests_in_words(tests: Sequence[AskedTest]) -> str:
    """Returns a sentence with the default p-values, for tests that name none."""
    names = ", ".join(dict.fromkeys(test.p_value for test in tests))
    return f"tested by {names}, since no --p_value is named"


def _default_risk_loss(p_value: str | None) -> str:
    """Returns the loss of risk consistency that suits a test: `signed`, or `relu` if it is for losses in [0, 1]."""
    is_for_unit_interval = p_value is not None and p_value in P_VALUES and not P_VALUES[p_value].takes_signed
    return "relu" if is_for_unit_interval else "signed"


def specs_of(
    guarantees: Sequence[Guarantee],
    *,
    groups: Sequence[str] = (),
    joint: bool = False,
    is_clustered: bool = False,
    losses: int | None = None,
) -> tuple[PlannedTest, ...]:
    """Returns the planned tests of guarantees, with all defaults filled in: for all prompts, then for each group.

    Args:
      guarantees: One or more, all different.
      groups: Names of groups, each of which is given every guarantee too.
      joint: Whether they must all hold together with probability 1 - epsilon. Then they have one epsilon, of which each
        gets an equal share (Bonferroni).
      is_clustered: Whether losses are means over clusters.
      losses: Number of losses as `are_kept` takes it; None if single losses are never kept. With groups they never are,
        since all entries of a guarantee have one test.

    Raises:
      ValueError: If there are none, two are equal, or a joint guarantee has several epsilons.
    """
    is_kept = not groups and are_kept(losses, entries=len(guarantees))
    # Checked before epsilon is divided, so that messages quote the value that was given.
    specs = tuple(guarantee.planned(is_clustered=is_clustered, is_kept=is_kept) for guarantee in guarantees)
    if not specs or len(set(specs)) != len(specs):
        raise ValueError(f"guarantees must list one or more different ones, got {list(guarantees)}.")
    if len(set(groups)) != len(groups):
        raise ValueError(f"groups must have different names, got {list(groups)}.")
    specs = tuple(dataclasses.replace(spec, group=group) for group in (None, *groups) for spec in specs)
    if not joint:
        return specs
    if len(epsilons := tuple(dict.fromkeys(spec.epsilon for spec in specs))) > 1:
        raise ValueError(f"a joint guarantee divides one epsilon among all entries, got {list(epsilons)}. Choose one.")
    return tuple(dataclasses.replace(spec, epsilon=spec.epsilon / len(specs)) for spec in specs)


def every_guarantee(
    *,
    consistencies: Sequence[str],
    metrics: Sequence[str],
    deltas: Sequence[float],
    epsilons: Sequence[float],
    tails: Sequence[float] = (),
    risk_loss: str | None = None,
    p_value: str | None = None,
    procedure: str = PROCEDURE,
) -> tuple[Guarantee, ...]:
    """Returns every combination of the lists, in the order of the arguments, the last varying fastest.

    Guarantees of the mean come before those of tails.

    >>> asked = every_guarantee(consistencies=["textual"], metrics=["rouge_l"], deltas=[0.05, 0.1], epsilons=[0.05])
    >>> [spec.delta for spec in specs_of(asked)]
    [0.05, 0.1]

    Args:
      consistencies: Kinds of consistency.
      metrics: Names of metrics.
      deltas: Risk tolerances.
      epsilons: Allowed probabilities of error.
      tails: Losses that at most a share delta of outputs may exceed; these guarantees come in addition to those of the
        mean.
      risk_loss: Loss of risk consistency for guarantees of the mean; None as in `Guarantee`. Tails use `relu`.
      p_value: Test of one threshold; None as in `Guarantee`.
      procedure: How several thresholds are tested.

    Raises:
      ValueError: If a list is empty or holds a value twice, or a value or combination is not allowed.
    """
    lists = {"consistency": consistencies, "metric": metrics, "delta": deltas, "epsilon": epsilons, "tail": tails}
    for name, values in lists.items():
        if not (values or name == "tail") or len(set(values)) != len(values):
            raise ValueError(f"{name} must list one or more different values, got {list(values)}.")
    return tuple(
        Guarantee(
            consistency,
            metric,
            delta=delta,
            epsilon=epsilon,
            loss=risk_loss if consistency == "risk" and tail is None else None,
            tail=tail,
            p_value=p_value,
            procedure=procedure,
        )
        for tail in (None, *tails)
        for consistency, metric, delta, epsilon in itertools.product(consistencies, metrics, deltas, epsilons)
    )


def place_of_served(asked: str, specs: Sequence[PlannedTest]) -> int:
    """Returns the index of the guarantee to serve, among all that are asked for.

    >>> lists = {"metrics": ["rouge_l"], "deltas": [0.05, 0.1], "epsilons": [0.05]}
    >>> specs = specs_of(every_guarantee(consistencies=["textual", "risk"], **lists))
    >>> place_of_served("textual,0.1", specs), place_of_served("delta=0.05,consistency=risk", specs)
    (1, 2)

    Args:
      asked: Values that identify the guarantee, comma-separated: its consistency, delta, metric or loss as they are, or
        any of these, epsilon and group as NAME=VALUE. Without a group it is a guarantee about all prompts.
      specs: All planned tests, in the order of the manifest's entries.

    Raises:
      ValueError: If it fits no guarantee, or several.
    """
    wanted: dict[str, str | float | None] = {"group": None}
    for part in asked.split(","):
        name, sign, value = part.strip().partition("=")
        if not sign:
            name, value = _name_of(name, specs), name
        if name not in _SERVED or not value:
            raise ValueError(
                f"serve takes {', '.join(_SERVED)}, as NAME=VALUE or the first four as they are; got {part!r}."
            )
        if wanted.get(name) is not None:
            raise ValueError(f"serve names {name} twice: {asked}.")
        wanted[name] = _number(name, value) if name in ("delta", "epsilon") else value
    found = [
        place for place, spec in enumerate(specs) if all(_fits(spec, name, value) for name, value in wanted.items())
    ]
    if len(found) != 1:
        all_of_them = "; ".join(_in_words(spec) for spec in specs)
        raise ValueError(
            f"serve must name one entry, and {asked} fits {len(found) or 'none'} of those that are asked for: "
            f"{all_of_them}."
        )
    return found[0]


_SERVED = ("consistency", "delta", "metric", "loss", "epsilon", "group")


def _name_of(value: str, specs: Sequence[PlannedTest]) -> str:
    """Returns the name of the field that a value without a name belongs to."""
    if value in CONSISTENCIES:
        return "consistency"
    if value in {spec.loss for spec in specs}:
        return "loss"
    try:
        float(value)
    except ValueError:
        return "metric"
    return "delta"


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"serve: {name} must be a number, got {value!r}.") from None


def _fits(spec: PlannedTest, name: str, value: str | float | None) -> bool:
    """Returns whether a guarantee has a value; for BLEURT, the name without the checkpoint's digest is enough."""
    own = getattr(spec, name)
    return own == value or (name == "metric" and str(own).startswith(f"{value}@"))


def _in_words(spec: PlannedTest) -> str:
    group = "" if spec.group is None else f"group={spec.group},"
    return f"{group}{spec.consistency},{spec.metric},{spec.loss},{spec.delta:g},epsilon={spec.epsilon:g}"
