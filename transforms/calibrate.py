"""Testing in a pipeline: scoring generations, summing exactly, testing, confirming, and writing the manifest.

Chosen thresholds are confirmed by examples that had no part in choosing them. Losses of any origin are summed exactly,
and every setting is tested:

    import apache_beam as beam
    from calm_beam import transforms
    from calm_beam.risk.testing import RiskTest

    tests = [RiskTest(delta=0.05, epsilon=0.05)]
    with beam.Pipeline() as pipeline:
        _ = (
            pipeline
            | beam.Create([("prompt-1", "8 bits", 0.0), ("prompt-1", "4 bits", 0.2)])  # (id, setting, loss), each once
            | beam.CombineGlobally(transforms.SumLosses(tests))
            | transforms.ControlRisk(tests, order=["8 bits", "4 bits"])
            | beam.Map(print)
        )
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam

from calm_beam.calibration.confirmation import confirmed_outcome
from calm_beam.calibration.guarantee import Guarantee
from calm_beam.calibration.pareto import CHOOSING
from calm_beam.calibration.plan import PlanTerms, gone_on_with, layout_of, part_of_unit, settled_plan
from calm_beam.calibration.publish import EarlierResult, RunProvenance, publish
from calm_beam.calibration.result import CalibrationOutcome, choose_thresholds, has_ended, risk_rows, with_example_risks
from calm_beam.calibration.variants import variant_rows, whole_of
from calm_beam.errors import UsageError
from calm_beam.inputs.examples import DataError
from calm_beam.manifest import COUNT_NEAR_TIES, Plan, Variant
from calm_beam.metrics import NO_SETTINGS, MetricSettings
from calm_beam.metrics.registry import full_name
from calm_beam.outputs import FinishedSweep, StoredGenerations, StoredShard
from calm_beam.outputs.scoring import USUAL_SCORING, Scoring
from calm_beam.outputs.totals import CalibrationTotals, Layout
from calm_beam.risk.evidence import RiskTotals
from calm_beam.risk.testing import LossSums, RiskTest, SettingResult, control_risk
from calm_beam.storage import absolute, make_folder

from .decode import maker_of
from .scoring import ShardScorer, SumMerged
from .sweep import ReadGenerations, Sweep, Swept


@dataclasses.dataclass
class Calibrate(beam.PTransform):
    """Tests every threshold that was swept, and chooses the least safe one that is proved to keep each guarantee.

        sweeps | Calibrate([Guarantee("textual", "rouge_l_unicode", delta=0.1, epsilon=0.05)])

    The plan is settled when the pipeline is built, before any loss is seen; the manifest shows its digest.

    Attributes:
      guarantees: The requested guarantees; each becomes an entry of the manifest.
      group_key: Key by which `ReadExamples` read groups; each is then given every guarantee, in addition to all
        examples together. None means no groups.
      joint: Whether all are to hold together with probability 1 - epsilon.
      serve: The entry that will be served, such as `textual,0.05`, as `--serve` names it; None leaves that open.
      seed: Of the order in which `star_bets` and `wsr` bet on examples.
      max_failures: Most examples that may fail; None for few.
      metric_settings: Files and settings of metrics.
      near_ties: The policy for outputs that depended on a decision within rounding, which another engine may make
        otherwise: `count`, or `worst_case` for loss 1.
      created: When the manifest says that the run began, ISO 8601 in UTC; None for now.
      holdout_share: Share of the examples that were kept back to confirm what these choose, which the list of plans
        says; None where none were.
    """

    guarantees: Sequence[Guarantee]
    _: dataclasses.KW_ONLY
    group_key: str | None = None
    joint: bool = False
    serve: str | None = None
    seed: int = 0
    max_failures: int | None = None
    metric_settings: MetricSettings = NO_SETTINGS
    near_ties: str = COUNT_NEAR_TIES
    created: str | None = None
    holdout_share: float | None = None

    def expand(self, sweeps: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of one `CalibrationOutcome`, given what `Sweep` or `ReadGenerations` yields."""
        swept: Swept | None = maker_of(sweeps, Sweep) or maker_of(sweeps, ReadGenerations)
        if swept is None:
            raise UsageError("Calibrate takes what Sweep or ReadGenerations gives.")
        job = swept.job
        guarantees = [
            dataclasses.replace(guarantee, metric=full_name(guarantee.metric, self.metric_settings))
            for guarantee in self.guarantees
        ]
        plan = settled_plan(
            guarantees,
            job,
            swept.data,
            groups=self._groups(swept),
            joint=self.joint,
            serve=self.serve,
            terms=PlanTerms(seed=self.seed, on_error=swept.on_error, near_ties=self.near_ties),
        )
        listed = plan.confirmed_by(self.holdout_share)
        if isinstance(swept, Sweep) and swept.resume:
            is_open = all(each.p_value is None for each in guarantees)
            listed = gone_on_with(listed, swept.plans.plans(), is_open=is_open)
        self.plan = plan = listed.that_chooses()
        asked = swept.data.asked(listed, swept.plans, command=swept.command)
        earlier = swept.plans.ask(asked, is_answered=isinstance(swept, ReadGenerations))
        provenance = RunProvenance.of_job(job, plan.tests, created=self.created)
        return sweeps | CalibrateGenerations(
            plan=plan,
            plan_digest=plan.digest,
            provenance=dataclasses.replace(provenance, earlier_plans=earlier),
            stored=StoredGenerations(directory=swept.folder, job=job),
            tested=len(plan.thresholds),
            scoring=Scoring(max_failures=self.max_failures, metric_settings=self.metric_settings),
        )

    def _groups(self, swept: Swept) -> tuple[str, ...]:
        if self.group_key is None:
            return ()
        if self.group_key != swept.job.group_key:
            raise UsageError(
                f"group_key is {self.group_key!r}, but the examples were read with group_key {swept.job.group_key!r}. "
                "Give ReadExamples the same."
            )
        return tuple(group.name for group in swept.data.groups())


@dataclasses.dataclass
class CalibrateGenerations(beam.PTransform):
    """Turns complete generations into an `CalibrationOutcome`, by a plan that was settled before.

    Every shard counts once, however often runner or reader deliver it: shards are identified by their number, and at
    the end the counts are compared with the stored shards.

    Attributes:
      plan: The guarantees asked for, and their tests.
      plan_digest: Digest of the plan when it was settled.
      provenance: What else the manifest says.
      stored: The generations.
      tested: How many of the plan's thresholds are tested, from the top. If the tests of some guarantee would go on
        below, there is no outcome.
      scoring: How losses are made.
    """

    plan: Plan
    plan_digest: str
    _: dataclasses.KW_ONLY
    provenance: RunProvenance
    stored: StoredGenerations
    tested: int
    scoring: Scoring = USUAL_SCORING

    def expand(self, sweeps: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of one `CalibrationOutcome`, or of none, given one of a `FinishedSweep`."""
        tested = self.plan.upper_part(self.tested)
        finished = beam.pvalue.AsSingleton(sweeps)
        scorer = ShardScorer(tested, self.stored, scoring=self.scoring)
        return summed(sweeps, scorer) | "TestThresholds" >> beam.FlatMap(
            _outcome_of_one,
            finished,
            plan=self.plan,
            tested=tested,
            digest=self.plan_digest,
            provenance=self.provenance,
            scoring=self.scoring,
        )


@dataclasses.dataclass
class CalibrateVariants(beam.PTransform):
    """Turns complete generations of several variants into a `CalibrationOutcome`, by a plan that was settled before.

    Attributes:
      plan: The guarantees asked for, and how several variants are tested.
      plan_digest: Digest of the plan when it was settled.
      provenance: What else the manifest says.
      stored: The generations of every variant, in the plan's order.
      scoring: How losses are made; the limit of failures is one of all variants together.
    """

    plan: Plan
    plan_digest: str
    _: dataclasses.KW_ONLY
    provenance: RunProvenance
    stored: Sequence[StoredGenerations]
    scoring: Scoring = USUAL_SCORING

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, sweeps: tuple[beam.PCollection, ...]) -> beam.PCollection:
        """Returns a PCollection of one `CalibrationOutcome`, given one of a `FinishedSweep` for every variant."""
        scorers = [ShardScorer(self.plan, stored, scoring=self.scoring) for stored in self.stored]
        return summed_variants(sweeps, scorers) | "TestPath" >> beam.FlatMap(
            _outcome,
            plan=self.plan,
            tested=self.plan,
            digest=self.plan_digest,
            provenance=self.provenance,
            scoring=self.scoring,
        )


def summed_variants(sweeps: tuple[beam.PCollection, ...], scorers: Sequence[ShardScorer]) -> beam.PCollection:
    """Returns a PCollection of one dict, from the number of each variant to its `CalibrationTotals`.

    Args:
      sweeps: Of each variant one of a `FinishedSweep`.
      scorers: What reads each variant's generations.
    """
    return (
        tuple(
            of_variant | f"SumVariant{number}" >> _SumVariant(scorer, number)
            for number, (of_variant, scorer) in enumerate(zip(sweeps, scorers, strict=True))
        )
        | "JoinVariants" >> beam.Flatten()
        | "ListVariants" >> beam.combiners.ToDict()
    )


@dataclasses.dataclass
class _SumVariant(beam.PTransform):
    """Sums the losses of a variant, keyed by its number, having checked that every example was counted, and once.

    Attributes:
      scorer: Reads the variant's generations.
      number: The key.
    """

    scorer: ShardScorer
    number: int

    def expand(self, sweeps: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of one pair of int and `CalibrationTotals`, given one of a `FinishedSweep`."""
        finished = beam.pvalue.AsSingleton(sweeps)
        return summed(sweeps, self.scorer) | "CheckCounts" >> beam.Map(_checked, finished, number=self.number)


def summed(sweeps: beam.PCollection, scorer: ShardScorer) -> beam.PCollection:
    """Returns a PCollection of one `CalibrationTotals` over stored shards, given one of a `FinishedSweep`."""
    shards = (
        sweeps
        | "ListShards" >> beam.FlatMap(_numbered_shards)
        # Also spreads them over workers: the list is one element.
        | "CountShardsOnce" >> beam.GroupByKey()
    )
    score = beam.ParDo(_ScoreShard(scorer), beam.pvalue.AsSingleton(sweeps))
    layout = layout_of(scorer.plan)
    if scorer.plan.cluster_key is None:
        totals = shards | "ScoreExamples" >> score
    else:
        # Examples of a cluster may be stored in several shards.
        scored = shards | "ScoreMembers" >> score.with_outputs("losses", main="examples")
        units = (
            scored.losses
            | "GroupByCluster" >> beam.CombinePerKey(SumMerged())
            | "AverageClusters" >> beam.Map(totals_of_cluster, layout=layout, plan=scorer.plan)
        )
        totals = (scored.examples, units) | "JoinTotals" >> beam.Flatten()
    return totals | "SumLosses" >> beam.CombineGlobally(SumMerged(functools.partial(CalibrationTotals.zero, layout)))


def _numbered_shards(finished: FinishedSweep) -> Iterator[tuple[int, StoredShard]]:
    return ((shard.shard, shard) for shard in finished.shards)


class _ScoreShard(beam.DoFn):
    """Yields the totals of a stored shard; where units are clusters, with the tag `losses` what it has of each."""

    def __init__(self, scorer: ShardScorer) -> None:
        self._scorer = scorer

    def setup(self) -> None:
        self._scorer.setup()

    # Totals, and tagged pairs. Beam warns of a bare TaggedOutput in a hint at every run.
    def process(self, element: tuple[int, Iterable[StoredShard]], finished: FinishedSweep) -> Iterator[Any]:
        totals, clusters = self._scorer.totals(element, examples=finished.examples)
        for of_cluster in clusters.items():
            yield beam.pvalue.TaggedOutput("losses", of_cluster)
        yield totals


def totals_of_cluster(element: tuple[str, RiskTotals], *, layout: Layout, plan: Plan) -> CalibrationTotals:
    """Returns the totals of a cluster, given its name and the losses of all its examples, in the plan's layout."""
    cluster, losses = element
    part = part_of_unit(plan, cluster)
    totals = CalibrationTotals.of_losses(
        [cluster],
        losses.mean_up()[None],
        layout=layout,
        salt=plan.salt,
        scored=losses.n,
        groups=[part],
    )
    if part == CHOOSING:
        return totals
    return dataclasses.replace(totals, over_examples=losses)


def _checked(totals: CalibrationTotals, finished: FinishedSweep, *, number: int) -> tuple[int, CalibrationTotals]:
    totals.check(finished)
    return number, totals


def _outcome_of_one(totals: CalibrationTotals, finished: FinishedSweep, **given: Any) -> Iterator[CalibrationOutcome]:
    """Does what `_outcome` does where there is one way of decoding."""
    totals.check(finished)
    return _outcome({0: totals}, **given)


def _outcome(
    totals: dict[int, CalibrationTotals],
    *,
    plan: Plan,
    tested: Plan,
    digest: str,
    provenance: RunProvenance,
    scoring: Scoring,
) -> Iterator[CalibrationOutcome]:
    """Checks what was counted, and yields what it proves; nothing if tests would go on below what was tested."""
    variants = [of_variant for _, of_variant in sorted(totals.items())]
    whole = whole_of(variants)
    _check_examples(whole, provenance=provenance, scoring=scoring)
    num_layers, costs = provenance.model.layers, provenance.costs
    by_variant: dict[Variant | None, CalibrationTotals] = {None: whole}
    if plan.pareto is None:
        rows = risk_rows(whole, tested, num_layers=num_layers)
    else:
        by_variant = dict(zip(plan.pareto.variants, variants, strict=True))
        rows = variant_rows(variants, tested, num_layers=num_layers, costs=costs)
    full_cost = None if costs is None else costs.full()
    calibrations = choose_thresholds(rows, tested, num_layers=num_layers, full_cost=full_cost)
    if tested != plan and not has_ended(calibrations):
        return
    calibrations = with_example_risks(calibrations, by_variant, tested)
    manifest = provenance.manifest(whole, calibrations, plan=plan, digest=digest)
    yield CalibrationOutcome(manifest=manifest, rows=rows, failures=whole.failures)


def _check_examples(totals: CalibrationTotals, *, provenance: RunProvenance, scoring: Scoring) -> None:
    """Refuses examples that prove nothing: none at all, too many that failed, or scores that never differ."""
    if not totals.examples:
        raise DataError(f"the calibration set is empty: no examples in {', '.join(provenance.patterns)}.")
    totals.contrast.check(totals.layout.objectives, scoring.metric)
    scoring.check_failures(totals.failures, failed=totals.failed, examples=totals.examples)


@dataclasses.dataclass
class ConfirmThresholds(beam.PTransform):
    """Turns generations of the examples that confirm into the `CalibrationOutcome` that stands.

    Losses are those of the calibration, counted in the same way; each chosen threshold is tested by itself.

    Attributes:
      found: The thresholds that the other examples chose.
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
            _confirmed_outcome,
            found=self.found,
            variants=tuple(self.stored),
            plan=self.plan,
            digest=self.plan_digest,
            decoder=self.decoder,
            exit_head=self.exit_head,
            scoring=self.scoring,
        )


def _confirmed_outcome(
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


@dataclasses.dataclass
class WriteManifest(beam.PTransform):
    """Writes risk table, list of failures and manifest into a directory, the manifest last.

        outcomes | WriteManifest("calibration")

    A step that is run again writes the same once more; of two runs that write into one directory, one fails.

    Attributes:
      output: The directory; made if it is not there.
      earlier: The result there that may be replaced; whatever else is there makes the step fail.
    """

    output: str
    earlier: EarlierResult = dataclasses.field(default_factory=EarlierResult)

    def expand(self, outcomes: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of str with the manifest's path, given one of an `CalibrationOutcome`."""
        output = absolute(self.output)
        make_folder(output)
        return outcomes | "Publish" >> beam.Map(_publish, output=output, earlier=self.earlier)


def _publish(outcome: CalibrationOutcome, *, output: str, earlier: EarlierResult) -> str:
    return publish(output, outcome.manifest, rows=outcome.rows, failures=outcome.failures, earlier=earlier)


class SumLosses(SumMerged):
    """Sums losses exactly, by setting; for `CombineGlobally` and, for groups, `CombinePerKey`.

    Takes tuples of id, setting and loss, and gives `LossSums`, which do not depend on order, sharding or workers. Ids
    identify examples: one that has several losses under a setting, equal or not, ends in an error of `ControlRisk`,
    also where whole files were read twice. Per key, ids are compared within each key. The sums hold 16 bytes for each
    example, and the examples of one key may be 67 million.
    """

    def __init__(self, tests: Sequence[RiskTest]) -> None:
        """Keeps what will be asked of the sums."""
        super().__init__(functools.partial(LossSums, tuple(tests)))

    def add_input(self, accumulator: LossSums, element: tuple[str, str, float]) -> LossSums:
        """Adds one loss."""
        example_id, setting, loss = element
        accumulator.add(example_id, setting, loss=loss)
        return accumulator


@dataclasses.dataclass
class ControlRisk(beam.PTransform):
    """Tests every setting, given `LossSums`: yields a `SettingResult` for each test and setting.

    Attributes:
      tests: Those that the sums were made for.
      order: Settings in testing order, fixed before the losses were seen; the safest first.
    """

    tests: Sequence[RiskTest]
    order: Sequence[str]

    def expand(self, sums: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of `SettingResult`."""
        return sums | "TestSettings" >> beam.FlatMap(_tested, tests=tuple(self.tests), order=tuple(self.order))


def _tested(sums: LossSums, *, tests: tuple[RiskTest, ...], order: tuple[str, ...]) -> Iterator[SettingResult]:
    yield from control_risk(sums, tests, order=order)
