"""The default p-value of a plan, and plans of earlier versions."""

import dataclasses

from calm_beam.calibration.guarantee import MOST_KEPT_LOSSES, are_kept
from calm_beam.calibration.plan import as_settled_before, earlier_forms, gone_on_with, single_losses
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import HAND_ON, EarlierPlan, Plan
from tests.plans import all_specs, build_plan


@dataclasses.dataclass(frozen=True)
class _Examples:
    """A given number of examples."""

    count: int

    def examples(self, *, at_most: int) -> int | None:
        """Returns the number of examples; None if it exceeds a limit."""
        return self.count if self.count <= at_most else None


def _plan(*, losses: int | None = 1000) -> Plan:
    specs = all_specs(
        consistencies=("textual", "risk"),
        metrics=("exact_match", "token_f1"),
        deltas=(0.1,),
        epsilons=(0.05,),
        tails=(0.3,),
        losses=losses,
    )
    settings = DecodeSettings(rule=ExitRule(), thresholds=(0.9, 0.5), max_input_length=8, max_decode_length=4)
    return build_plan(specs, settings)


def _listed(*plans: Plan) -> list[EarlierPlan]:
    return [
        EarlierPlan(plan=plan.digest, command="calibrate", asked="2026-01-01T00:00:00Z", answered=False)
        for plan in plans
    ]


def test_losses_are_counted_while_they_may_be_kept() -> None:
    """Losses are examples times thresholds; beyond the limit over all entries, counting stops."""
    for entries in (1, 3):
        most = MOST_KEPT_LOSSES // (20 * entries)
        losses = single_losses(_Examples(most), thresholds=20, entries=entries)
        assert losses == 20 * most
        assert are_kept(losses, entries=entries)
        assert not are_kept(20 * (most + 1), entries=entries)
        assert single_losses(_Examples(most + 1), thresholds=20, entries=entries) is None


def test_earlier_versions_tested_by_sums() -> None:
    """Earlier versions tested sums for any metric, and tails by the binomial test."""
    before = as_settled_before(_plan())
    mean = ["hoeffding_bentkus"] * 2 + ["signed_mixture"] * 2
    assert [test.p_value for test in before.tests] == [*mean, *["exact_binomial"] * 4]
    assert [test.p_value for test in _plan().tests][:2] == ["exact_binomial", "star_bets"]
    assert dataclasses.replace(before, tests=_plan().tests) == _plan()


def test_a_run_goes_on_as_it_was_asked() -> None:
    """A run resumes by its listed plan, an earlier version's unless this one was asked since."""
    plan, before = _plan(), as_settled_before(_plan())
    assert gone_on_with(plan, _listed(before), is_open=True) == before
    assert gone_on_with(plan, _listed(before), is_open=False) == plan
    assert gone_on_with(plan, _listed(before, plan), is_open=True) == plan
    assert gone_on_with(plan, _listed(_plan(losses=None)), is_open=True) == plan
    assert gone_on_with(plan, [], is_open=True) == plan


def test_a_joint_run_of_an_earlier_version_goes_on_without_handing_on() -> None:
    """A joint run of an earlier version resumes without handing on, whether or not a p-value was named."""
    plan = dataclasses.replace(_plan(), joint_epsilon=0.99, joint_procedure=HAND_ON)
    before = dataclasses.replace(plan, joint_procedure=None)
    for is_open in (False, True):
        assert earlier_forms(plan, is_open=is_open)[0] == before
        assert gone_on_with(plan, _listed(before), is_open=is_open) == before
        assert gone_on_with(plan, _listed(plan), is_open=is_open) == plan
    assert as_settled_before(plan).joint_procedure is None
