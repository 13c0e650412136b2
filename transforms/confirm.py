"""Confirming chosen thresholds by examples that had no part in choosing them."""

import dataclasses
from collections.abc import Mapping

import apache_beam as beam

from calm_beam.calibration.confirmation import confirmed_outcome
from calm_beam.calibration.result import CalibrationOutcome
from calm_beam.manifest import Plan, Variant
from calm_beam.outputs import StoredGenerations
from calm_beam.outputs.scoring import USUAL_SCORING, Scoring
from calm_beam.outputs.totals import CalibrationTotals

from .calibrate import summed_variants
from .scoring import ShardScorer


@dataclasses.dataclass
class ConfirmThresholds(beam.PTransform):
    """Turns generations of the examples that confirm into the `CalibrationOutcome` that stands.

    Losses are those of the calibration, counted in the same way; each chosen threshold is tested by itself.

    Attributes:
      found: What the other examples have chosen.
      plan: The guarantees asked for, and their tests.
      plan_digest: Digest of the plan when it was settled.
      stored: By variant, or None where there is one way of decoding, the generations at its chosen thresholds.
      decoder: What made them, as in `ConfirmationRecord`.
      exit_head: Likewise.
      scoring: How losses are made; the limit of failures is one of these examples.
    """

    found: CalibrationOutcome
    _: dataclasses.KW_ONLY
    plan: Plan
    plan_digest: str
    stored: Mapping[Variant | None, StoredGenerations]
    decoder: str
    exit_head: str
    scoring: Scoring = USUAL_SCORING

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, sweeps: tuple[beam.PCollection, ...]) -> beam.PCollection:
        """Returns a PCollection of one `CalibrationOutcome`, given one of a `FinishedSweep` for every variant."""
        scorers = [
            ShardScorer(
                self.plan.that_confirms(stored.thresholds),
                stored,
                scoring=self.scoring,
            )
            for stored in self.stored.values()
        ]
        return summed_variants(sweeps, scorers) | "TestChosen" >> beam.Map(
            _outcome,
            found=self.found,
            variants=tuple(self.stored),
            plan=self.plan,
            digest=self.plan_digest,
            decoder=self.decoder,
            exit_head=self.exit_head,
            scoring=self.scoring,
        )


def _outcome(
    totals: dict[int, CalibrationTotals],
    *,
    found: CalibrationOutcome,
    variants: tuple[Variant | None, ...],
    plan: Plan,
    digest: str,
    decoder: str,
    exit_head: str,
    scoring: Scoring,
) -> CalibrationOutcome:
    """Checks what was counted, and returns what it confirms."""
    by_variant = {variants[number]: of_variant for number, of_variant in sorted(totals.items())}
    for each in by_variant.values():
        scoring.check_failures(each.failures, failed=each.failed, examples=each.examples)
        each.contrast.check_seen({objective.metric for objective in each.layout.objectives})
    return confirmed_outcome(found, by_variant, plan=plan, digest=digest, decoder=decoder, exit_head=exit_head)
