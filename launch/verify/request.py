"""What `calm-beam verify` and `calm_beam.verify` are asked for, of either kind of manifest: thresholds, or settings.

Promises about thresholds are tested by a model on fresh data, those about settings on fresh losses or scores.
"""

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import ClassVar

from calm_beam.errors import UsageError
from calm_beam.launch.certify.request import SweepSource, WhichScores
from calm_beam.launch.flags.shared_options import Job, MetricFiles
from calm_beam.options import Options, again, listed, option, options_of, switch
from calm_beam.options.groups import DataSource, Decoding, RecordedModel, RecordedPrecision, Spread, Telling, Trusted
from calm_beam.options.kinds import number, texts

STATE = "verification.json"
"""The file next to a manifest that keeps what runs with `--anytime` have found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promises(Options):
    """Which promises are tested, and how sure it has to be that one is broken."""

    manifest: str | os.PathLike[str] = option(
        dataclasses.MISSING, "a manifest, or the directory of the calibration or certification that holds one"
    )
    metric: str | Sequence[str] | None = option(
        None,
        "test the entries of these metrics alone, comma-separated; a metric of your own, module:function, is imported "
        "only if it is named here; of scores, the metric of the log",
        kind=texts,
    )
    alpha: float = option(0.05, "chance of calling any promise broken that is kept, in (0, 1)", kind=number)
    anytime: bool = switch(
        "count all runs with this flag together: --alpha is then the chance over all of them, however many there are, "
        f"and their state is kept in {STATE} next to the manifest"
    )
    state: str | os.PathLike[str] | None = option(
        None, "file that keeps the state of --anytime; made if there is none", belongs_to=("anytime",)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < 1:
            raise UsageError(f"--alpha must be in (0, 1), got {self.alpha:g}. It is a probability: for 5 % pass 0.05.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedMetrics(Options):
    """Files and settings of metrics that the manifest may name."""

    bleurt_checkpoint: str | None = again(MetricFiles, "bleurt_checkpoint", belongs_to=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshScores(Options):
    """Which of the scores in a log are meant, where the manifest leaves it open."""

    SECTION: ClassVar[str | None] = WhichScores.SECTION

    task: str | None = again(WhichScores, "task")
    direction: str | None = again(WhichScores, "direction")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyRequest(
    Promises,
    RecordedMetrics,
    Trusted,
    RecordedPrecision,
    DataSource,
    RecordedModel,
    Decoding,
    MetricFiles,
    Spread,
    Job,
    SweepSource,
    FreshScores,
    Telling,
):
    """A test of a manifest's promises, as a user asks for it."""

    data: str | Sequence[str] | None = again(
        DataSource, "data", sentence="files with the fresh examples: globs, comma-separated"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.losses and self.metric:
            raise UsageError("--metric belongs to --baseline, and --losses is given: leave one of them out.")

    def check_given(self, names: Collection[str]) -> None:
        """Refuses options about a model and its data if losses or scores are named.

        Args:
          names: Options that were given, with whatever value.
        """
        of_settings = {name for group in (Promises, SweepSource, FreshScores, Telling) for name, _ in options_of(group)}
        declared = {name for name, _ in options_of(VerifyRequest)}
        given = next((name for name in names if name in declared - of_settings), None)
        if self.is_of_settings and given is not None:
            named = next(name for name in ("losses", "baseline", "outputs") if self.has(name))
            raise UsageError(f"--{given} is about outputs of a model, and --{named} needs none: leave one of them out.")

    @property
    def is_of_settings(self) -> bool:
        """Whether promises about settings are tested: by losses, by scores, or by outputs."""
        return self.sources > 0

    @property
    def metrics(self) -> tuple[str, ...] | None:
        """Metrics whose entries are tested; None for all."""
        return listed(self.metric) or None

    @property
    def metric_of_scores(self) -> str | None:
        """The metric of the log, whose name may have a comma; None as the manifest says."""
        return ",".join(listed(self.metric)) or None
