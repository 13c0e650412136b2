"""The request of `calm-beam decode`."""

import dataclasses
import os
from typing import ClassVar

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.launch.flags.shared_options import Job
from calm_beam.launch.flags.task import TaskRequest
from calm_beam.options import again, option
from calm_beam.options.groups import Engine, ExitGrid, Failures, OneRule, Replacing, Spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRequest(TaskRequest, OneRule, Failures, Spread, Replacing, Job):
    """Outputs of a data set at given thresholds."""

    HAS_DEMO: ClassVar[bool] = False

    grid_step: float | None = again(ExitGrid, "grid_step", sentence="grid of its multiples below 1, down to 0")
    # The outputs are read and compared by people.
    exit_head: str = again(Engine, "exit_head", default="exact")
    output: str | os.PathLike[str] | None = option(None, "JSONL file to write")

    def settings(self) -> DecodeSettings:
        """Returns the settings that determine the outputs.

        Raises:
          ValueError: If a value or a combination is wrong, or there are no thresholds.
        """
        if self.grid is None:
            raise UsageError("--thresholds is missing: exit thresholds, comma-separated (or --grid_step).")
        return DecodeSettings.of(self, self.rule_by(self.confidence).with_source(), thresholds=self.grid)
