"""What is settled before any loss is seen: the promise of every p-value and procedure rests on that."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from calm_beam.decoding.recorded import settings_of_variant
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.inputs.examples import Example
from calm_beam.inputs.set_parts import SetPart, salt_of
from calm_beam.manifest import PARETO, ParetoPlan, PlannedTest, PlanRecord, SequentialPlan, guarantee_in_words
from calm_beam.outputs import DecodeJob
from calm_beam.risk.pvalues import P_VALUES, why_not_watched
from calm_beam.risk.stopping import StopRule

from .layout import Layout
from .pareto import PARTS, part_of
from .specs import COUNT_NEAR_TIES, NEAR_TIES, WORST_NEAR_TIES, Spec

_BLOCKS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the outcome depends on besides the data and the code of metrics.

    Attributes:
      specs: The guarantees asked for, and their tests.
      thresholds: The grid, descending: the testing order.
      joint_epsilon: Probability with which any entry may be wrong, if they are to hold together; None if each alone.
      cluster_key: Field of a data row that names its cluster, the independent unit; None where examples are.
      group_key: Field of a data row that names its group, where specs are about groups; None elsewhere.
      salt: Decides the order of examples, for p-values that need one, and which units choose or confirm where a part
        does.
      on_error: `fail` or `worst_case`: what becomes of examples that cannot be decoded or scored.
      on_long: `truncate` or `error`: what becomes of prompts that are too long.
      model: Fingerprint of the model.
      outputs: Fingerprint of all that decides its outputs but the data; of several variants all, with commas between.
      sequential: How it is watched, if it stops when enough is proved; None where all examples count.
      pareto: How a part of the set chooses what the other part tests, of several variants; None of one.
      confirm_share: Chance of a unit to choose nothing, and to confirm what the others have chosen; None where nothing
        is confirmed.
      near_ties: What becomes of outputs that hung on a decision within rounding: `count`, or `worst_case` for loss 1.
      serve: Place of the spec that will be served, which was settled with the rest; None where nobody said.
    """

    specs: tuple[Spec, ...]
    thresholds: tuple[float, ...]
    joint_epsilon: float | None
    cluster_key: str | None
    salt: str
    on_error: str
    on_long: str
    model: str
    outputs: str
    sequential: SequentialPlan | None = None
    group_key: str | None = None
    pareto: ParetoPlan | None = None
    confirm_share: float | None = None
    near_ties: str = COUNT_NEAR_TIES
    serve: int | None = None

    def __post_init__(self) -> None:
        if self.serve is not None and not 0 <= self.serve < len(self.specs):
            raise ValueError(f"serve must be the place of one of {len(self.specs)} specs, got {self.serve}.")
        if self.confirm_share is not None and not 0 < self.confirm_share < 1:
            raise ValueError(f"confirm_share must be in (0, 1), got {self.confirm_share}. For 30 % pass 0.3.")
        if self.near_ties not in NEAR_TIES:
            raise ValueError(f"near_ties must be one of {', '.join(NEAR_TIES)}, got {self.near_ties!r:.40}.")
        self._check_groups()
        self._check_pareto()
        if self.sequential is not None:
            self._check_watched()

    @classmethod
    def of(
        cls,
        specs: Sequence[Spec],
        settings: DecodeSettings,
        *,
        model: str,
        vocabulary: str | None,
        joint_epsilon: float | None = None,
        cluster_key: str | None = None,
        seed: int = 0,
        on_error: str = "fail",
        on_long: str = "truncate",
        sequential: SequentialPlan | None = None,
        group_key: str | None = None,
        pareto: ParetoPlan | None = None,
        confirm_share: float | None = None,
        near_ties: str = COUNT_NEAR_TIES,
        serve: int | None = None,
    ) -> Self:
        """Returns the plan of a run.

        Args:
          specs: From `all_specs`.
          settings: How outputs are decoded; their grid is the testing order, or that of every variant.
          model: Fingerprint of the model.
          vocabulary: Fingerprint of the vocabulary, or None for token ids.
          joint_epsilon: As above.
          cluster_key: As above.
          seed: Decides the salt.
          on_error: As above.
          on_long: As above.
          sequential: As above.
          group_key: As above.
          pareto: As above.
          confirm_share: As above.
          near_ties: As above.
          serve: As above.

        Raises:
          ValueError: If near ties count as the worst and are not seen by the measure, tails of clusters are tested
            by the binomial test, a p-value is to be watched that may not be, or groups or parts are to be told apart
            among clusters or by a p-value that needs single losses.
        """
        if near_ties == WORST_NEAR_TIES and not settings.rule.measure().sees_near_ties:
            raise ValueError(
                f"near_ties is {near_ties}, but near ties of confidence {settings.rule.confidence} are not seen: it is "
                "made of tokens, or of none. Take near_ties=count, or another measure."
            )
        if cluster_key is not None and any(
            spec.objective.tail is not None and not P_VALUES[spec.p_value].takes_fractions for spec in specs
        ):
            raise ValueError(
                "a tail of clusters is a share of each cluster's outputs, and p_value exact_binomial is for losses of "
                "0 and 1. Take hoeffding_bentkus."
            )
        return cls(
            specs=tuple(specs),
            thresholds=settings.thresholds,
            joint_epsilon=joint_epsilon,
            cluster_key=cluster_key,
            salt=salt_of(seed),
            on_error=on_error,
            on_long=on_long,
            model=model,
            outputs=",".join(
                each.fingerprint(model=model, vocabulary=vocabulary) for each in settings_of_all(settings, pareto)
            ),
            sequential=sequential,
            group_key=group_key,
            pareto=pareto,
            confirm_share=confirm_share,
            near_ties=near_ties,
            serve=serve,
        )

    @classmethod
    def of_job(
        cls,
        specs: Sequence[Spec],
        job: DecodeJob,
        *,
        settings: DecodeSettings | None = None,
        joint_epsilon: float | None = None,
        seed: int = 0,
        on_error: str = "fail",
        sequential: SequentialPlan | None = None,
        pareto: ParetoPlan | None = None,
        confirm_share: float | None = None,
        near_ties: str = COUNT_NEAR_TIES,
        serve: int | None = None,
    ) -> Self:
        """Returns the plan of calibrating generations.

        Args:
          specs: As in `of`.
          job: What the generations are; of one of the variants, if there are several.
          settings: The job's, with the part of its grid that is tested; all of it if omitted.
          joint_epsilon: As above.
          seed: As in `of`.
          on_error: As above.
          sequential: As above.
          pareto: As above.
          confirm_share: As above.
          near_ties: As above.
          serve: As above.
        """
        return cls.of(
            specs,
            settings or job.settings,
            model=job.model.fingerprint,
            vocabulary=job.vocabulary_identity(),
            joint_epsilon=joint_epsilon,
            cluster_key=job.cluster_key,
            seed=seed,
            on_error=on_error,
            on_long=job.on_long,
            sequential=sequential,
            pareto=pareto,
            confirm_share=confirm_share,
            near_ties=near_ties,
            serve=serve,
            # Generations may have groups that nothing is asked of.
            group_key=job.group_key if any(spec.group is not None for spec in specs) else None,
        )

    def upper_part(self, thresholds: int) -> Self:
        """Returns the plan of the first thresholds of the testing order alone, to test as far as they go.

        Valid for fixed sequence testing, whose decisions do not depend on what would be tested later.
        """
        return dataclasses.replace(self, thresholds=self.thresholds[:thresholds])

    def part(self, name: str) -> SetPart | None:
        """Returns a part of the set, as `calm_beam.inputs.set_parts` names it; None where all examples choose."""
        if self.confirm_share is None:
            return None
        return SetPart(name=name, confirm_share=self.confirm_share, salt=self.salt)

    def that_chooses(self) -> Self:
        """Returns the plan by which one part chooses what the other confirms: all but that."""
        return dataclasses.replace(self, confirm_share=None)

    def that_confirms(self, thresholds: Sequence[float]) -> Self:
        """Returns the plan by which losses are counted that confirm thresholds which were chosen.

        Args:
          thresholds: Those of one way of decoding, descending; each is tested for itself.
        """
        return dataclasses.replace(
            self,
            specs=tuple(dataclasses.replace(spec, procedure="fixed_sequence") for spec in self.specs),
            thresholds=tuple(thresholds),
            sequential=None,
            pareto=None,
            confirm_share=None,
        )

    def layout(self) -> Layout:
        """Returns what is gathered for the planned tests."""
        return Layout.of(self.specs, thresholds=len(self.thresholds), parts=() if self.pareto is None else PARTS)

    def group_of(self, example: Example) -> str | None:
        """Returns in which of the layout's groups an example counts: its own, or the part that it was drawn for."""
        if self.pareto is None:
            return example.group
        return self.part_of(example.id if example.cluster is None else example.cluster)

    def part_of(self, unit: str) -> str | None:
        """Returns which part of the set a unit was drawn for, by its name; None where there are no parts."""
        if self.pareto is None:
            return None
        return part_of(unit, salt=self.salt, choosing_share=self.pareto.choosing_share)

    def guarantee(self, *, is_confirmed: bool = False) -> str:
        """Returns what the planned tests promise together, in words."""
        return guarantee_in_words(
            joint_epsilon=self.joint_epsilon,
            cluster_key=self.cluster_key,
            group_key=self.group_key,
            is_sequential=self.sequential is not None,
            is_pareto=self.pareto is not None,
            is_confirmed=is_confirmed,
        )

    def record(self) -> PlanRecord:
        """Returns the plan as it stands in the manifest."""
        return PlanRecord(
            thresholds=self.thresholds,
            tests=tuple(
                PlannedTest(
                    consistency=spec.objective.consistency,
                    metric=spec.objective.metric,
                    loss=spec.objective.loss,
                    group=spec.group,
                    delta=spec.delta,
                    epsilon=spec.epsilon,
                    p_value=spec.p_value,
                    procedure=spec.procedure,
                )
                for spec in self.specs
            ),
            joint_epsilon=self.joint_epsilon,
            cluster_key=self.cluster_key,
            group_key=self.group_key,
            salt=self.salt,
            on_error=self.on_error,
            on_long=self.on_long,
            model=self.model,
            outputs=self.outputs,
            sequential=self.sequential,
            pareto=self.pareto,
            confirm_share=self.confirm_share,
            near_ties=None if self.near_ties == COUNT_NEAR_TIES else self.near_ties,
            serve=self.serve,
        )

    def tests_digest(self) -> str:
        """Returns a digest of everything but when to stop, which may be changed after losses were seen."""
        if self.sequential is None:
            return self.record().digest
        watched = SequentialPlan(round_examples=self.sequential.round_examples)
        return dataclasses.replace(self, sequential=watched).record().digest

    def stop_rule(self) -> StopRule:
        """Returns when a calibration that is watched has proved enough.

        Raises:
          ValueError: If the whole grid does not go down to the threshold that is waited for.
        """
        assert self.sequential is not None
        wanted = self.sequential.stop_at_threshold
        place = None
        if wanted is not None:
            place = next((place for place, threshold in enumerate(self.thresholds) if threshold <= wanted), None)
            if place is None:
                raise ValueError(
                    f"stop_at_threshold is {wanted:g}, but the lowest threshold of the grid is "
                    f"{self.thresholds[-1]:g}. Add it to the grid, or wait for a higher one."
                )
        return StopRule(place=place, cost=self.sequential.stop_at_layers, gain=self.sequential.stop_gain)

    def _check_groups(self) -> None:
        groups = {spec.group for spec in self.specs} - {None}
        if bool(groups) != (self.group_key is not None):
            raise ValueError(
                f"group_key is {self.group_key!r}, but the specs are about {len(groups)} groups: name it exactly if "
                "there are some."
            )
        if not groups:
            return
        if self.cluster_key is not None:
            raise ValueError(
                "group_key and cluster_key cannot be given together: a cluster may hold prompts of several groups. "
                "Leave one of them out."
            )
        for spec in self.specs:
            if P_VALUES[spec.p_value].needs_table:
                raise ValueError(
                    f"p_value {spec.p_value} needs every single loss, and those of groups are only summed. Take "
                    "another one, or leave group_key out."
                )

    def _check_pareto(self) -> None:
        if any((spec.procedure == PARETO) != (self.pareto is not None) for spec in self.specs):
            raise ValueError(
                f"procedure must be {PARETO} exactly if there are several variants, whose path it chooses."
            )
        if self.pareto is None:
            return
        if self.group_key is not None or self.sequential is not None:
            raise ValueError("several variants are neither calibrated for groups nor sequentially. Leave one out.")
        for spec in self.specs:
            if P_VALUES[spec.p_value].needs_table:
                raise ValueError(
                    f"p_value {spec.p_value} needs every single loss, and those of several variants are only summed. "
                    "Take another one, or one variant."
                )

    def _check_watched(self) -> None:
        for spec in self.specs:
            if (reason := why_not_watched(spec.p_value)) is not None:
                raise ValueError(f"{reason}, or calibrate on all examples.")


def settings_of_all(settings: DecodeSettings, pareto: ParetoPlan | None) -> tuple[DecodeSettings, ...]:
    """Returns the settings of every variant, in the plan's order; those that are given, where there are none.

    Raises:
      ValueError: If one cannot be.
    """
    if pareto is None:
        return (settings,)
    return tuple(settings_of_variant(settings, variant) for variant in pareto.variants)


def block_ends(thresholds: int) -> tuple[int, ...]:
    """Returns where the blocks of a grid end that are decoded and tested one after the other.

    A fifth of the grid each: at tolerances as in the paper, tests mostly fail in the first or second.

    >>> block_ends(20), block_ends(7), block_ends(1)
    ((4, 8, 12, 16, 20), (2, 4, 6, 7), (1,))
    """
    size = -(-thresholds // _BLOCKS)
    return tuple(min(end, thresholds) for end in range(size, thresholds + size, size))
