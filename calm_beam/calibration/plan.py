"""What is settled before any loss is seen: the promise of every p-value and procedure rests on that."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.generations import DecodeJob
from calm_beam.manifest import PlannedTest, PlanRecord, SequentialPlan
from calm_beam.risk.pvalues import P_VALUES, why_not_watched
from calm_beam.risk.stopping import StopRule

from .layout import Layout
from .specs import Spec

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
      salt: Decides the order of examples, for p-values that need one.
      on_error: `fail` or `worst_case`: what becomes of examples that cannot be decoded or scored.
      on_long: `truncate` or `error`: what becomes of prompts that are too long.
      model: Fingerprint of the model.
      outputs: Fingerprint of all that decides its outputs but the data.
      sequential: How it is watched, if it stops when enough is proved; None where all examples count.
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

    def __post_init__(self) -> None:
        self._check_groups()
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
    ) -> Self:
        """Returns the plan of a run.

        Args:
          specs: From `all_specs`.
          settings: How outputs are decoded; their grid is the testing order.
          model: Fingerprint of the model.
          vocabulary: Fingerprint of the vocabulary, or None for token ids.
          joint_epsilon: As above.
          cluster_key: As above.
          seed: Decides the salt.
          on_error: As above.
          on_long: As above.
          sequential: As above.
          group_key: As above.

        Raises:
          ValueError: If tails of clusters are to be tested by the binomial test, a p-value is to be watched that may
            not be, or groups are to be told apart among clusters or by a p-value that needs single losses.
        """
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
            outputs=settings.fingerprint(model=model, vocabulary=vocabulary),
            sequential=sequential,
            group_key=group_key,
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
    ) -> Self:
        """Returns the plan of calibrating generations.

        Args:
          specs: As in `of`.
          job: What the generations are.
          settings: The job's, with the part of its grid that is tested; all of it if omitted.
          joint_epsilon: As above.
          seed: As in `of`.
          on_error: As above.
          sequential: As above.
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
            # Generations may have groups that nothing is asked of.
            group_key=job.group_key if any(spec.group is not None for spec in specs) else None,
        )

    def upper_part(self, thresholds: int) -> Self:
        """Returns the plan of the first thresholds of the testing order alone, to test as far as they go.

        Valid for fixed sequence testing, whose decisions do not depend on what would be tested later.
        """
        return dataclasses.replace(self, thresholds=self.thresholds[:thresholds])

    def layout(self) -> Layout:
        """Returns what is gathered for the planned tests."""
        return Layout.of(self.specs, thresholds=len(self.thresholds))

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

    def _check_watched(self) -> None:
        for spec in self.specs:
            if (reason := why_not_watched(spec.p_value)) is not None:
                raise ValueError(f"{reason}, or calibrate on all examples.")


def salt_of(seed: int) -> str:
    """Returns the salt that orders examples."""
    return f"calm-beam/{seed}"


def block_ends(thresholds: int) -> tuple[int, ...]:
    """Returns where the blocks of a grid end that are decoded and tested one after the other.

    A fifth of the grid each: at tolerances as in the paper, tests mostly fail in the first or second.

    >>> block_ends(20), block_ends(7), block_ends(1)
    ((4, 8, 12, 16, 20), (2, 4, 6, 7), (1,))
    """
    size = -(-thresholds // _BLOCKS)
    return tuple(min(end, thresholds) for end in range(size, thresholds + size, size))
