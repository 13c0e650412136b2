"""Testing once more what was chosen: by examples that had no part in choosing, decoded as it is served.

Whatever chose a threshold, losses of units that had no part in it are independent of the choice. So one test of that
one threshold at level epsilon errs with probability at most epsilon, and its promise is about whatever made those
losses: here the decoder that serves. A second test by units that chose would prove nothing: they were chosen for.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from calm_beam.inputs.set_parts import CONFIRMING, part_of
from calm_beam.manifest import Calibration, ConfirmationRecord, ManifestError, PathEntry, Plan, PlannedTest, Variant
from calm_beam.risk.fwer import PROCEDURES, FwerResult
from calm_beam.risk.in_memory import p_values_of
from calm_beam.risk.testing import p_values_for

from .plan import promise_of
from .provenance import data_record
from .result import CalibrationOutcome, RiskRow, example_risk
from .split import check_parts, check_split
from .totals import CalibrationTotals
from .variants import whole_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfirmedChoice:
    """The lowest threshold that one part of a set found safe, and what the other part said of it.

    Attributes:
      chosen: Its index, or None: nothing was chosen, and nothing had to be confirmed.
      test: What the part that chose said of all thresholds.
      p_value: That of the part that confirms, at the chosen threshold alone; None without one.
      confirmed: Whether it is promised.
    """

    chosen: int | None
    test: FwerResult
    p_value: float | None
    confirmed: bool


def confirmed_calibration(
    losses: np.ndarray,
    served: np.ndarray,
    *,
    keys: Sequence[str],
    delta: float,
    epsilon: float,
    p_value: str,
    salt: str,
    confirm_share: float,
    procedure: str = "fixed_sequence",
) -> ConfirmedChoice:
    """Returns the lowest threshold found safe, and confirmed, given every single loss.

    With probability at least 1 - epsilon, a threshold that is confirmed has a risk of at most delta as it is served.
    The level at which it was chosen does not enter; epsilon is taken there too, since a threshold that some examples
    could not prove is seldom proved by fewer. `calibrate --confirm_share=0.3` does the same with sums.

    Args:
      losses: shape (units, thresholds), descending by threshold, by which the part that chooses does; those of other
        units are not looked at. Each in [0, 1], or in [-1, 1] for a p-value that takes signed losses.
      served: The same shape. Losses of what the decoder that serves gives; only those of units that confirm, at the
        chosen threshold, are looked at.
      keys: One per unit, distinct: ids of examples, or names of clusters.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that a confirmed threshold breaks it, in (0, 1).
      p_value: A key of `P_VALUES`; none that bets on the units one after the other.
      salt: Decides the parts; fixed before any loss is seen.
      confirm_share: Chance of a unit to be in the part that confirms, in (0, 1).
      procedure: How thresholds are tested where they are chosen, a key of `PROCEDURES`.

    Raises:
      ValueError: If shapes do not fit, keys repeat, a part is empty, or a value is out of range.
      EvidenceError: If the p-value is for losses of 0 and 1, and there are others.

    Source: ours; sample splitting.
    """
    losses, served = np.asarray(losses, np.float64), np.asarray(served, np.float64)
    if losses.ndim != 2 or served.shape != losses.shape or len(keys) != len(losses):
        raise ValueError(
            f"losses and served must have shape (units, thresholds), with one key per unit; got {losses.shape}, "
            f"{served.shape} and {len(keys)} keys."
        )
    share = ("confirm_share", confirm_share)
    check_split(keys=keys, p_value=p_value, share=share, fault="confirm its own choice")
    confirms = np.array([part_of(key, salt=salt, confirm_share=confirm_share) == CONFIRMING for key in keys], bool)
    check_parts(int((~confirms).sum()), int(confirms.sum()), verb="confirm")
    p_values = p_values_of(losses[~confirms], p_value=p_value, delta=delta)
    test = PROCEDURES[procedure](p_values, epsilon=epsilon)
    accepted = np.flatnonzero(test.rejected)
    if not len(accepted):
        return ConfirmedChoice(chosen=None, test=test, p_value=None, confirmed=False)
    chosen = int(accepted[-1])
    found = float(p_values_of(served[confirms, chosen], p_value=p_value, delta=delta))
    return ConfirmedChoice(chosen=chosen, test=test, p_value=found, confirmed=found <= epsilon)


def chosen_thresholds(entries: Sequence[Calibration]) -> dict[Variant | None, tuple[float, ...]]:
    """Returns what has to be confirmed: by way of decoding, the thresholds that entries chose, descending."""
    found: dict[Variant | None, set[float]] = {}
    for entry in entries:
        if (chosen := entry.chosen) is not None:
            found.setdefault(chosen.variant, set()).add(chosen.threshold)
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
    """Returns a calibration whose chosen thresholds stand if they are confirmed, and else not.

    Args:
      found: What the part that chooses came to.
      totals: Those of the other part, at the thresholds and of the ways of decoding that `chosen_thresholds` gives.
      plan: What is asked for, fixed before any loss was seen.
      digest: Of the plan, as it was then.
      decoder: What decoded the part that confirms, as in `ConfirmationRecord`.
      exit_head: Likewise.

    Raises:
      ManifestError: If the plan is another one.
      OutputsError: If ways of decoding saw different examples.
      ValueError: If no examples confirm.
      EvidenceError: If the losses do not allow a p-value that was planned.
    """
    planned = plan
    if planned.digest != digest:
        raise ManifestError(f"the plan is {planned.digest}, but the run was started with {digest}.")
    manifest, asked = found.manifest, chosen_thresholds(found.manifest.calibrations)
    num_layers = manifest.model.layers
    per_spec = len(found.rows) // len(plan.tests)
    rows, entries = list(found.rows), []
    for index, (spec, entry) in enumerate(zip(plan.tests, manifest.calibrations, strict=True)):
        chosen = entry.chosen
        if chosen is None:
            entries.append(entry)
            continue
        of_variant = totals[chosen.variant]
        # Those of a group may be none; of the whole they are some.
        check_parts(manifest.data.units, of_variant.risk.n, verb="confirm")
        place = asked[chosen.variant].index(chosen.threshold)
        loss_sum, step = _tested(of_variant, spec, place, chosen=chosen, num_layers=num_layers)
        over_examples = example_risk(of_variant, spec, place)
        entries.append(_confirmed(entry, step, num_layers=num_layers, example_risk=over_examples))
        for at in range(index * per_spec, (index + 1) * per_spec):
            if (rows[at].threshold, rows[at].variant) == (chosen.threshold, chosen.variant):
                rows[at] = _with_confirmation(rows[at], step, loss_sum)
    whole = whole_of(list(totals.values())) if totals else None
    confirmation = None
    if whole is not None:
        confirmation = ConfirmationRecord(
            decoder=decoder,
            exit_head=exit_head,
            dtype=manifest.decode.dtype,
            # A part of the settings, which both parts are decoded by.
            engine=manifest.decode.engine,
            data=data_record(whole, plan.that_confirms(()), patterns=manifest.data.patterns),
        )
    return CalibrationOutcome(
        manifest=dataclasses.replace(
            manifest,
            plan=planned,
            calibrations=tuple(entries),
            confirmation=confirmation,
            guarantee=promise_of(plan, is_confirmed=True),
        ),
        rows=tuple(rows),
        failures=tuple(sorted((*found.failures, *(whole.failures if whole else ())))),
    )


def _tested(
    totals: CalibrationTotals, spec: PlannedTest, place: int, *, chosen: PathEntry, num_layers: int
) -> tuple[int, PathEntry]:
    """Returns the sum of losses at a threshold, given by its place among those decoded, and its test."""
    evidence = totals.evidence(spec)
    p_value = float(p_values_for(spec, evidence)[place])
    return int(evidence.loss_sums[place]), PathEntry(
        threshold=chosen.threshold,
        n=evidence.n,
        risk=float(evidence.risks()[place]),
        p_value=p_value,
        rejected=p_value <= spec.epsilon,
        layers=totals.of_group(spec.group).mean_layers(num_layers)[1 + place],
        variant=chosen.variant,
        near_ties=totals.of_group(spec.group).near_ties(place),
    )


def _confirmed(entry: Calibration, step: PathEntry, *, num_layers: int, example_risk: float | None) -> Calibration:
    if step.rejected:
        return dataclasses.replace(
            entry, confirmation=step, layers=step.layers, risk=step.risk, example_risk=example_risk
        )
    return dataclasses.replace(
        entry,
        confirmation=step,
        threshold=None,
        variant=None,
        threshold_by_position=None,
        layers=num_layers,
        risk=0.0,
        example_risk=None,
    )


def _with_confirmation(row: RiskRow, step: PathEntry, loss_sum: int) -> RiskRow:
    return dataclasses.replace(
        row,
        confirming_n=step.n,
        confirming_loss_sum=loss_sum,
        confirming_risk=step.risk,
        confirming_p_value=step.p_value,
        confirmed=step.rejected,
    )
