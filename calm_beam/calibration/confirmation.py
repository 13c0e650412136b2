"""Confirmation: a second test of chosen thresholds, by holdout examples that are decoded as they are served.

Losses of units that had no part in choosing thresholds are independent of the choice. So tests of a short chosen
sequence, one after the other at level epsilon up to the first that fails, err together with probability at most
epsilon, and their promise is about the decoder that made those losses: here the decoder that serves. A second test by
the selection units would prove nothing, since the thresholds were chosen for them.

A threshold that one part could just prove is seldom proved by another, so testing it alone mostly ends in "never exit".
Two safer thresholds are tested before it. They are chosen by their p-values, too: the logarithm of a p-value grows with
the number of units, so p ** r is about what r times as many units would give.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.decoding.settings import recorded_settings
from calm_beam.inputs.set_parts import CONFIRMING, part_of
from calm_beam.manifest import (
    EACH_VARIANT,
    Calibration,
    ConfirmationRecord,
    ManifestError,
    PathEntry,
    Plan,
    PlannedTest,
    Variant,
)
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.risk import elementary
from calm_beam.risk.evidence import betting_order
from calm_beam.risk.fwer import PROCEDURES, FwerResult
from calm_beam.risk.pvalues import p_values_of
from calm_beam.risk.testing import p_values_for

from .pareto import check_parts, check_split
from .plan import promise_of
from .publish import data_record, with_positions
from .result import CalibrationOutcome, RiskRow, example_risk
from .variants import whole_of

# Powers of epsilon: the p-values aimed at for the safer thresholds confirmed first; 0 is the chosen threshold itself.
_POWERS = (2.5, 1.25, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfirmedChoice:
    """The lowest threshold that the selection part found safe, safer ones, and the holdout's results for them.

    Attributes:
      path: Indices of the thresholds to confirm, the safest first and the chosen one last; empty if nothing was chosen.
      test: Result of the selection part for all thresholds.
      p_values: p-values of the holdout, one for each of `path`.
      promised: Index of the last threshold that was confirmed with all before it; None if there is none.
    """

    path: tuple[int, ...]
    test: FwerResult
    p_values: tuple[float, ...]
    promised: int | None

    @property
    def chosen(self) -> int | None:
        """Index of the lowest threshold found safe; None if there is none."""
        return self.path[-1] if self.path else None


def confirmed_calibration(
    losses: np.ndarray,
    served: np.ndarray,
    *,
    keys: Sequence[str],
    delta: float,
    epsilon: float,
    p_value: str,
    salt: str,
    holdout_share: float,
    procedure: str = "fixed_sequence",
) -> ConfirmedChoice:
    """Returns the lowest threshold found safe and its confirmation, given every single loss.

    With probability at least 1 - epsilon, the threshold that is promised has a risk of at most delta as it is served.
    The level at which it was chosen does not enter; epsilon is taken there too, since a threshold that some examples
    could not prove is seldom proved by fewer. `calibrate --holdout_share=0.3` does the same with sums.

    Args:
      losses: shape (units, thresholds), descending by threshold. Losses of the decoder that the selection part uses;
        those of other units are ignored. Each in [0, 1], or in [-1, 1] for a p-value that takes signed losses.
      served: The same shape. Losses of the decoder that serves; only those of holdout units at the thresholds to
        confirm are used.
      keys: One per unit, distinct: ids of examples, or names of clusters.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the promised threshold breaks it, in (0, 1).
      p_value: A key of `P_VALUES`.
      salt: Decides the parts, and the order of units for p-values that bet on them; fixed before any loss is seen.
      holdout_share: Probability that a unit is in the holdout, in (0, 1).
      procedure: Procedure by which the selection part tests thresholds, a key of `PROCEDURES`.

    Raises:
      ValueError: If shapes do not fit, keys repeat, a part is empty, or a value is out of range.
      EvidenceError: If the p-value is for losses of 0 and 1, and there are others.

    Source: ours; sample splitting, and a fixed sequence of tests (Maurer, Hothorn and Lehmacher 1995).
    """
    losses, served = np.asarray(losses, np.float64), np.asarray(served, np.float64)
    if losses.ndim != 2 or served.shape != losses.shape or len(keys) != len(losses):
        raise ValueError(
            f"losses and served must have shape (units, thresholds), with one key per unit; got {losses.shape}, "
            f"{served.shape} and {len(keys)} keys."
        )
    share = ("holdout_share", holdout_share)
    check_split(keys=keys, share=share, fault="confirm its own choice")
    order = betting_order(keys, salt=salt)
    losses, served = losses[order], served[order]
    confirms = np.array(
        [part_of(keys[place], salt=salt, holdout_share=holdout_share) == CONFIRMING for place in order], bool
    )
    check_parts(int((~confirms).sum()), int(confirms.sum()), verb="confirm")
    p_values = p_values_of(losses[~confirms], p_value=p_value, delta=delta, epsilon=epsilon)
    test = PROCEDURES[procedure](p_values, epsilon=epsilon)
    if not test.rejected.any():
        return ConfirmedChoice(path=(), test=test, p_values=(), promised=None)
    places = confirming_places(p_values, test.rejected, epsilon=epsilon, holdout_share=holdout_share)
    path = tuple(dict.fromkeys(places.tolist()))
    found = p_values_of(served[confirms][:, list(path)], p_value=p_value, delta=delta, epsilon=epsilon)
    last = int(PROCEDURES["fixed_sequence"](found, epsilon=epsilon).last_rejected())
    return ConfirmedChoice(
        path=path, test=test, p_values=tuple(found.tolist()), promised=path[last] if last >= 0 else None
    )


def confirming_places(p_values: ArrayLike, accepted: ArrayLike, *, epsilon: float, holdout_share: float) -> np.ndarray:
    """Returns which accepted thresholds to confirm: three indices, ascending, some of which may be equal.

    The last index is the last that was accepted. Before it are the last ones at which the holdout, if it saw the same
    mean loss, would have a p-value of about epsilon to the power of 2.5 and of 1.25; where there is none, the first
    that was accepted. The choice depends only on the losses of the selection part, so any rule would be valid. This one
    was settled by simulation: with 490 selection examples and 210 holdout examples it leaves 1 to 2 % of runs without a
    threshold, where the last index alone leaves 57 to 77 %.

    Args:
      p_values: shape (..., thresholds), from the selection part; the safest first.
      accepted: The same shape, bool.
      epsilon: Level of the confirming tests, in (0, 1).
      holdout_share: Probability that a unit is in the holdout, in (0, 1).

    Returns:
      Shape (..., 3), int64; -1 where nothing was accepted.

    Source: ours.

    >>> confirming_places([1e-30, 1e-12, 1e-7, 0.002, 0.04, 0.3], [1, 1, 1, 1, 1, 0], epsilon=0.05, holdout_share=0.3)
    array([1, 2, 4])
    """
    is_accepted = np.asarray(accepted, bool)
    # In exact logarithms, so that every machine decides alike.
    expected = elementary.log(p_values) * (holdout_share / (1 - holdout_share))
    levels = elementary.log(epsilon) * np.array(_POWERS)
    is_small = is_accepted[..., None, :] & (expected[..., None, :] <= levels[:, None])
    last = is_small.shape[-1] - 1 - is_small[..., ::-1].argmax(axis=-1)
    places = np.where(is_small.any(axis=-1), last, is_accepted.argmax(axis=-1)[..., None])
    return np.where(np.any(is_accepted, axis=-1, keepdims=True), places, -1)


def confirming_path(entry: Calibration, *, epsilon: float, holdout_share: float) -> tuple[PathEntry, ...]:
    """Returns the steps to confirm for an entry, in the order of the tests; empty where nothing was chosen."""
    chosen = entry.chosen
    if chosen is None:
        return ()
    path = entry.path
    if entry.procedure == EACH_VARIANT:
        # Each variant has its own sequence, in which thresholds safer than the chosen one come before it.
        path = tuple(step for step in path if step.variant == chosen.variant)
    p_values, accepted = [step.p_value for step in path], [step.rejected for step in path]
    places = confirming_places(p_values, accepted, epsilon=epsilon, holdout_share=holdout_share)
    return tuple(path[place] for place in dict.fromkeys(places.tolist()))


def paths_to_confirm(entries: Sequence[Calibration], plan: Plan) -> list[tuple[float, tuple[PathEntry, ...]]]:
    """Returns for every entry the level and the steps to confirm, in the order of the tests.

    Args:
      entries: The entries as the selection part found them.
      plan: The plan, with the holdout share.
    """
    assert plan.confirm_share is not None
    levels = plan.confirming_epsilons([entry.chosen is not None for entry in entries])
    return [
        (level, confirming_path(entry, epsilon=level, holdout_share=plan.confirm_share))
        for entry, level in zip(entries, levels, strict=True)
    ]


def thresholds_to_confirm(entries: Sequence[Calibration], plan: Plan) -> dict[Variant | None, tuple[float, ...]]:
    """Returns the thresholds to confirm for all entries, by variant, descending."""
    return _thresholds_of(paths_to_confirm(entries, plan))


def _thresholds_of(paths: Iterable[tuple[float, Sequence[PathEntry]]]) -> dict[Variant | None, tuple[float, ...]]:
    found: dict[Variant | None, set[float]] = {}
    for _, path in paths:
        for step in path:
            found.setdefault(step.variant, set()).add(step.threshold)
    return {variant: tuple(sorted(thresholds, reverse=True)) for variant, thresholds in found.items()}


def confirmed_outcome(
    found: CalibrationOutcome,
    totals: Mapping[Variant | None, CalibrationTotals],
    *,
    plan: Plan,
    digest: str,
    decoder: str,
    exit_head: str,
) -> CalibrationOutcome:
    """Returns the calibration with its thresholds confirmed, or without those that are not.

    Args:
      found: Result of the selection part.
      totals: Totals of the holdout, at the thresholds and variants that `thresholds_to_confirm` gives.
      plan: The plan, fixed before any loss was seen.
      digest: Digest of the plan at that time.
      decoder: Decoder of the holdout, as in `ConfirmationRecord`.
      exit_head: Exit head of the holdout, as in `ConfirmationRecord`.

    Raises:
      ManifestError: If the plan is another one.
      OutputsError: If variants saw different examples.
      ValueError: If no examples confirm.
      EvidenceError: If the losses do not allow a p-value that was planned.
    """
    if plan.digest != digest:
        raise ManifestError(f"the plan is {plan.digest}, but the run was started with {digest}.")
    manifest = found.manifest
    paths = paths_to_confirm(manifest.calibrations, plan)
    asked = _thresholds_of(paths)
    num_layers = manifest.model.layers
    per_spec = len(found.rows) // len(plan.tests)
    tested: list[list[_Confirmation]] = []
    for spec, (level, path) in zip(plan.tests, paths, strict=True):
        # The aim is the level as settled now: levels passed on later must not change a p-value.
        aimed = dataclasses.replace(spec, epsilon=level)
        tested.append([])
        for accepted in path:
            of_variant = totals[accepted.variant]
            # A group may have no units; the whole set has some.
            check_parts(manifest.data.units, of_variant.risk.n, verb="confirm")
            place = asked[accepted.variant].index(accepted.threshold)
            tested[-1].append(_tested(of_variant, aimed, place, accepted=accepted, num_layers=num_layers))
    levels = plan.confirmed_epsilons([[test.step.p_value for test in tests] for tests in tested])
    rows, entries = list(found.rows), []
    for index, (entry, level) in enumerate(zip(manifest.calibrations, levels, strict=True)):
        tests = _in_sequence(tested[index], epsilon=level)
        confirmed = _confirmed(entry, tests, epsilon=level, num_layers=num_layers)
        if confirmed.threshold is not None and confirmed.threshold_by_position is None:
            settings = recorded_settings(manifest.decode_of(confirmed), (confirmed.threshold,))
            confirmed = with_positions(confirmed, settings)
        entries.append(confirmed)
        by_place = {test.step.tested_as: test for test in tests}
        for at in range(index * per_spec, (index + 1) * per_spec):
            if (test := by_place.get((rows[at].threshold, rows[at].variant))) is not None:
                rows[at] = _with_confirmation(rows[at], test)
    whole = whole_of(list(totals.values())) if totals else None
    confirmation = None
    if whole is not None:
        confirmation = ConfirmationRecord(
            decoder=decoder,
            exit_head=exit_head,
            dtype=manifest.decode.dtype,
            # The engine belongs to the settings, by which both parts are decoded.
            engine=manifest.decode.engine,
            data=data_record(whole, plan.that_confirms(()), patterns=manifest.data.patterns),
        )
    return CalibrationOutcome(
        manifest=dataclasses.replace(
            manifest,
            plan=plan,
            calibrations=tuple(entries),
            confirmation=confirmation,
            guarantee=promise_of(plan, most_confirmed=plan.most_confirmed),
        ),
        rows=tuple(rows),
        failures=tuple(sorted((*found.failures, *(whole.failures if whole else ())))),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Confirmation:
    """The test of a threshold by holdout units.

    Attributes:
      step: Its record in the manifest; `rejected` is whether its p-value is at most the level of its test.
      loss_sum: Exact sum of losses in units of 2^-32.
      example_risk: Mean loss over examples; None where units are examples.
      is_reached: Whether all tests before it succeeded.
    """

    step: PathEntry
    loss_sum: int
    example_risk: float | None
    is_reached: bool = True


def _tested(
    totals: CalibrationTotals, spec: PlannedTest, place: int, *, accepted: PathEntry, num_layers: int
) -> _Confirmation:
    """Returns the test of an accepted threshold, given by its index among those decoded."""
    evidence = totals.evidence(spec)
    p_value = float(p_values_for(spec, evidence)[place])
    step = PathEntry(
        threshold=accepted.threshold,
        n=evidence.n,
        risk=float(evidence.risks()[place]),
        p_value=p_value,
        # Set later, where the level is known.
        rejected=False,
        layers=totals.of_group(spec.group).mean_layers(num_layers)[1 + place],
        variant=accepted.variant,
        near_ties=totals.of_group(spec.group).near_ties(place),
    )
    return _Confirmation(
        step=step, loss_sum=int(evidence.loss_sums[place]), example_risk=example_risk(totals, spec, place)
    )


def _in_sequence(tests: Sequence[_Confirmation], *, epsilon: float) -> list[_Confirmation]:
    """Returns the tests with `is_reached` set: tests after the first that failed are not reached."""
    held = [test.step.p_value <= epsilon for test in tests]
    failed = next((at for at, holds in enumerate(held) if not holds), len(tests))
    return [
        dataclasses.replace(test, step=dataclasses.replace(test.step, rejected=held[at]), is_reached=at <= failed)
        for at, test in enumerate(tests)
    ]


def _confirmed(entry: Calibration, tests: Sequence[_Confirmation], *, epsilon: float, num_layers: int) -> Calibration:
    """Returns an entry with its confirmations and the promise that remains."""
    reached = [test for test in tests if test.is_reached]
    if not reached:
        return entry
    steps = tuple(test.step for test in reached)
    promised = next((test for test in reversed(reached) if test.step.rejected), None)
    step = None if promised is None else promised.step
    is_chosen = promised is tests[-1]
    return dataclasses.replace(
        entry,
        confirmation=steps,
        confirming_epsilon=None if epsilon == entry.epsilon else epsilon,
        threshold=step.threshold if step else None,
        variant=step.variant if step else None,
        threshold_by_position=entry.threshold_by_position if is_chosen else None,
        rule=entry.rule if is_chosen else None,
        layers=step.layers if step else num_layers,
        risk=step.risk if step else 0.0,
        example_risk=promised.example_risk if promised else None,
    )


def _with_confirmation(row: RiskRow, test: _Confirmation) -> RiskRow:
    return dataclasses.replace(
        row,
        confirming_n=test.step.n,
        confirming_loss_sum=test.loss_sum,
        confirming_risk=test.step.risk,
        confirming_p_value=test.step.p_value,
        confirmed=test.is_reached and test.step.rejected,
    )
