"""What a worker needs to know to decode."""

import dataclasses

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.generations import StoredGenerations, shard_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What a worker needs to know to decode.

    Attributes:
      checkpoint: Path of the model.
      model_fingerprint: What the weights there must be; a worker that finds others refuses to decode.
      vocabulary: Path of the SentencePiece model; None if there is none, and all prompts are token ids.
      vocabulary_fingerprint: What it must be there, like the weights; None if there is none.
      extra_ids: Sentinels of the vocabulary.
      settings: What determines the outputs.
      batch_size: Most prompts decoded together; None for as many as memory and speed recommend.
      token_budget: Most positions held at a time; None for a share of the memory that is free.
      on_long: `truncate` or `error`, for prompts longer than the settings allow.
      on_error: `fail` or `worst_case`, for prompts that cannot be decoded.
      max_failures: Most examples that may fail; None as in `failure_limit`.
      job: Digest of the `DecodeJob`, part of what shards are known by.
      directory: Folder of generations.
      num_shards: Number of shards, part of the files' names.
      model_copies: Most copies of the model in one process; threads beyond them wait.
      above: Where the upper part of the grid is stored, complete; the settings' grid begins with it, and only what
        follows is decoded. None if all of it is.
      above_job: Digest of the job of that part, by which its shards are known; None if there is none.
      goes_on: Whether another run is to go on below this grid.
      activation: Of the model, for layouts that do not say it; None to go by the files.
      relative_max_distance: The same.
    """

    checkpoint: str
    model_fingerprint: str
    vocabulary: str | None
    vocabulary_fingerprint: str | None
    extra_ids: int
    settings: DecodeSettings
    batch_size: int | None
    token_budget: int | None
    on_long: str
    on_error: str
    max_failures: int | None
    job: str
    directory: str
    num_shards: int
    model_copies: int = 1
    above: StoredGenerations | None = None
    above_job: str | None = None
    goes_on: bool = False
    activation: str | None = None
    relative_max_distance: int | None = None

    def shard_path(self, shard: int) -> str:
        """Returns the file of a shard."""
        return shard_path(self.directory, shard, num_shards=self.num_shards)
