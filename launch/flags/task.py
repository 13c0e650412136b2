"""The request that all commands share which decode a data set: model, data, and settings."""

import dataclasses
import os
from collections.abc import Collection
from typing import ClassVar

from calm_beam.errors import UsageError
from calm_beam.inputs.demo import embedded
from calm_beam.options import Options, options_of
from calm_beam.options.groups import Chat, DataSource, Decoding, ModelFacts, ModelSource, OutputSettings, Telling


def refuse_decoding(
    given: Collection[str], *groups: type[Options], also: Collection[str], allowed: Collection[str], generations: str
) -> None:
    """Refuses options about decoding if nothing is decoded.

    Args:
      given: Options that were given, with whatever value.
      groups: Their options decide it.
      also: Others that do.
      allowed: What means something for stored generations too.
      generations: What `--generations` names.

    Raises:
      UsageError: If one is there; names it.
    """
    decides = {name for group in groups for name, _ in options_of(group)} | {*also}
    refused = next((name for name in given if name in decides - {*allowed}), None)
    if refused is not None:
        raise UsageError(
            f"--{refused} decides what is decoded, and --generations={generations} is decoded already: leave one out."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRequest(ModelSource, Chat, ModelFacts, DataSource, OutputSettings, Decoding, Telling):
    """The options that all requests share which decode a data set with a model.

    Attributes:
      HAS_DEMO: Whether the demo model and data are meant where neither is named.
    """

    HAS_DEMO: ClassVar[bool] = True

    @property
    def is_demo(self) -> bool:
        """Whether neither model nor data were named: the demo model and data are meant."""
        return self.HAS_DEMO and self.named_model is None and super().patterns is None

    @property
    def named_model(self) -> str | None:
        """Folder of the model; None if none was named."""
        return None if self.checkpoint is None else os.fspath(self.checkpoint)

    @property
    def model_path(self) -> str:
        """Folder of the model.

        Raises:
          UsageError: If none was named, but data were.
        """
        if self.is_demo:
            return str(embedded.MODEL)
        if self.named_model is None:
            raise UsageError(
                f"--checkpoint is missing: the folder of the model. The demo model is in {embedded.MODEL}."
            )
        return self.named_model

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """Patterns of the data files; None if no data are named."""
        return (str(embedded.CALIBRATION_SET),) if self.is_demo else super().patterns
