"""From stored outputs of a decoder of the user's to the losses of every setting, and what is told of the decoder."""

import dataclasses
from collections.abc import Iterator
from typing import Self

from calm_beam.inputs.losses.rows import LossRow
from calm_beam.manifest import ElsewhereRecord, Objective
from calm_beam.metrics.registry import Metric
from calm_beam.outputs import FinishedSettings, Generation, OutputsError, SettingJob, read_generations, stored_shard
from calm_beam.outputs.contrast import Contrast
from calm_beam.outputs.folder import SettingHome
from calm_beam.outputs.scoring import score_by_policy
from calm_beam.risk.fixed_point import LOSS_SCALE
from calm_beam.storage import absolute

from .loss_table import LossTable, check_every_cost, mean_cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptSettings:
    """Outputs of every prompt under every setting, complete.

    Attributes:
      folder: Where they are.
      job: What they are.
      finished: The mark that they are complete.
    """

    folder: str
    job: SettingJob
    finished: FinishedSettings

    @classmethod
    def read(cls, directory: str) -> Self:
        """Returns what `SweepWith` has stored.

        Args:
          directory: Its output directory, or a folder below `generations/` in it.

        Raises:
          UsageError: If there is none, or several.
          OutputsError: If they are not complete, or not those of such a decoder.
          OSError: If they are on an object store that is not known.
        """
        folder = SettingHome(absolute(directory)).only_folder(flag="--outputs")
        job = SettingJob.read(folder)
        return cls(folder=folder, job=job, finished=FinishedSettings.read(folder, job))

    @property
    def tested(self) -> tuple[str, ...]:
        """The settings that are tested, in that order: all but the first, which they are compared with."""
        return self.job.settings[1:]

    def table(self, objective: Objective, metric: Metric, *, has_groups: bool, has_clusters: bool) -> LossTable:
        """Returns the losses of every tested setting.

        An example without an answer has loss 1 under every setting. A setting's cost is its mean over the others.

        Args:
          objective: Which losses, by scores of outputs held against those under the first setting, or references.
          metric: What scores.
          has_groups: Whether examples of groups are told apart.
          has_clusters: Whether clusters are the units.

        Raises:
          DataError: If references are needed, and an example has none.
          MetricError: If the metric fails, or leaves [0, 1]; names the example. Or if it tells nothing (`Contrast`).
          LossesError: If only some answers under a setting say a cost.
          OutputsError: If a shard is damaged, or not the one that was marked as complete.
        """
        rows: list[LossRow] = []
        costs: dict[str, list[float]] = {name: [] for name in self.tested}
        duplicates, contrast, metrics = 0, Contrast(), {objective.metric: metric}
        for generation in self._generations():
            duplicates += generation.duplicate
            scored = score_by_policy(
                generation, [objective], metrics=metrics, num_thresholds=len(self.tested), on_error="fail"
            )
            contrast = Contrast.merged((contrast, scored.contrast))
            example, losses = generation.example, scored.losses[0].tolist()
            for place, (name, loss) in enumerate(zip(self.tested, losses, strict=True), start=1):
                group, cluster = example.group if has_groups else None, example.cluster if has_clusters else None
                rows.append(LossRow(example.id, name, loss / LOSS_SCALE, None, group, cluster))
                if generation.outputs and (cost := generation.outputs[place].cost) is not None:
                    costs[name].append(cost)
        contrast.check([objective], metrics.__getitem__)
        answered = self.finished.examples - self.finished.failed
        for name, told in costs.items():
            if told:
                check_every_cost(name, rows=answered, told=len(told))
        decoder = ElsewhereRecord(
            name=self.job.decoder,
            outputs=self.finished.digest(),
            failed=self.finished.failed,
            duplicates=duplicates,
        )
        return dataclasses.replace(
            LossTable.of(rows),
            costs={name: mean_cost(told) for name, told in costs.items() if told},
            constant_costs=frozenset(name for name, told in costs.items() if len(set(told)) == 1),
            decoder=decoder,
        )

    def _generations(self) -> Iterator[Generation]:
        for shard in self.finished.shards:
            path = self.job.shard_path(self.folder, shard.shard)
            if stored_shard(path) != shard:
                raise OutputsError(
                    f"{path}: was replaced after decoding was complete. Decode anew, with overwrite=True."
                )
            yield from read_generations(path)
