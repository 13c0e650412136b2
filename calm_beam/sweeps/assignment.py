"""What a worker is told."""

import dataclasses
from typing import TYPE_CHECKING

from calm_beam.generations import DecodeJob, StoredGenerations

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared


BATCH = "batch"
"""The `decoder` of a job whose outputs are made by the decoder of batches that serves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which generations a worker is to make, and how.

    Attributes:
      stored: What they are, and where they go. A worker that finds another model or vocabulary than the job's refuses.
      vocabulary_path: Path of the SentencePiece model; None if there is none, and all prompts are token ids.
      declared: Of the model, for layouts that do not say it.
      batch_size: Most prompts decoded together; None for as many as memory and speed recommend.
      token_budget: Most positions held at a time; None for a share of the memory that is free.
      exit_head: One of `EXIT_HEADS`: the form of the output head that decides. It moves outputs at near ties alone.
      engine: One of `engine_choice.ENGINE_CHOICES`: what decodes. Likewise; what it comes to on a worker must be the
        engine of the job's settings.
      on_error: `fail` or `worst_case`, for prompts that cannot be decoded.
      max_failures: Most examples that may fail; None as in `failure_limit`.
      model_copies: Most copies of the model in one process; threads beyond them wait.
      model_parallelism: Devices of a worker that share one model, each with a part of it; copies are on the others.
      above: The upper part of the grid, complete; the job's grid begins with it, and only what follows is decoded. None
        if all of it is.
      goes_on: Whether another run is to go on below this grid.
    """

    stored: StoredGenerations
    vocabulary_path: str | None
    declared: "Declared"
    batch_size: int | None
    token_budget: int | None
    exit_head: str
    on_error: str
    max_failures: int | None
    engine: str = "auto"
    model_copies: int = 1
    model_parallelism: int = 1
    above: StoredGenerations | None = None
    goes_on: bool = False

    @property
    def lanes(self) -> int:
        """How many a worker decodes: one a threshold that is not above, and the full model's unless that is."""
        thresholds = len(self.stored.thresholds)
        return 1 + thresholds if self.above is None else thresholds - len(self.above.thresholds)

    @property
    def job(self) -> DecodeJob:
        """What the generations are."""
        return self.stored.job
