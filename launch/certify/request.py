"""What a certification is asked for: `calm-beam certify` and `calm_beam.certify`.

Fields hold what was given. What was left open is filled in by properties, so that nothing rewrites a request.
"""

import dataclasses
from collections.abc import Sequence

from calm_beam.calibration.settings_plan import SettingGuarantees, order_of_costs
from calm_beam.errors import UsageError
from calm_beam.manifest import SettingTest
from calm_beam.options import listed, options_of
from calm_beam.options.groups import Telling

from .options import (
    NAME_ONE_SOURCE,
    ROUND_EXAMPLES,
    Guarantees,
    Order,
    Output,
    Sequential,
    SweepSource,
    Tests,
    WhichScores,
)


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
        # Whatever is wrong with these is told before a file is read.
        self.tests()

    @property
    def kind_of_losses(self) -> str:
        """What the losses are: `given`, `signed` or `relu`."""
        if self.outputs is not None:
            return "given" if self.consistency == "textual" else self.loss or "signed"
        return self.loss or ("given" if self.baseline is None else "signed")

    @property
    def joint_epsilon(self) -> float | None:
        """The epsilon that all entries share; None where each has its own."""
        return listed(self.epsilon)[0] if self.joint else None

    @property
    def declared_costs(self) -> dict[str, float]:
        """What settings cost, as far as it was declared."""
        return dict(listed(self.costs))

    @property
    def examples_of_a_round(self) -> int:
        """Examples of a round."""
        return self.round_examples or ROUND_EXAMPLES

    @property
    def rounds_named(self) -> int:
        """Of how many rounds ids are named next."""
        return self.next_rounds or 1

    @property
    def order_of_rounds(self) -> tuple[str, ...]:
        """The settings in testing order where that is settled before there are losses.

        Raises:
          UsageError: If two cost the same, and costs make the order.
        """
        return listed(self.order) or order_of_costs(self.declared_costs, order_by=self.order_by)

    def tests(self, *, groups: Sequence[str] = (), losses: int | None = None) -> tuple[SettingTest, ...]:
        """Returns what is tested; arguments and errors are those of `SettingGuarantees`."""
        asked = SettingGuarantees(
            deltas=listed(self.delta),
            epsilons=listed(self.epsilon),
            tails=listed(self.tail),
            loss=self.kind_of_losses,
            p_value=self.p_value,
            procedure=self.procedure,
            joint=self.joint,
            clustered=self.cluster_key is not None,
            watched=self.sequential,
        )
        return asked.tests(groups=groups, losses=losses)


def _check_sequential(request: CertifyRequest) -> None:
    """Refuses what rounds cannot have, and asks for what they need."""
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
    """Refuses losses whose order nobody declared, and what does not go with the order of rounds."""
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
    """Refuses what means nothing of losses, of scores, or of outputs."""
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
