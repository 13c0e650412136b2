"""What a decoder of the user's is to make of a data set: an output of every prompt under every one of its settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from calm_beam.storage.digest import content_digest
from calm_beam.text import check_count

from .job import SweptJob

_DIGITS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingJob(SweptJob):
    """A job whose outputs are generations of a decoder that is not ours.

    Nothing here can tell one such decoder from another, or from itself after a change: its name does.

    Attributes:
      decoder: What decodes, as its user calls it.
      settings: Names of all settings, the safest first: outputs under the first are what the others are compared with.
    """

    SCHEMA = "calm-beam/settings/v1"

    decoder: str
    settings: tuple[str, ...]

    @property
    def decoded_by(self) -> None:
        """No engine of ours."""
        return None

    def outputs(self) -> str:
        """Returns the fingerprint of all that decides the outputs but the data: the folder's name."""
        digest = content_digest({"decoder": self.decoder, "settings": list(self.settings)})
        return digest.removeprefix("sha256:")[:_DIGITS]

    def _content(self) -> dict[str, Any]:
        return {
            "schema": self.SCHEMA,
            "outputs": self.outputs(),
            "decoder": self.decoder,
            "settings": list(self.settings),
            "patterns": list(self.patterns),
            "files": list(self.files),
            "reading": dict(self.reading),
            "group_key": self.group_key,
            "cluster_key": self.cluster_key,
            "num_shards": self.num_shards,
            "software": dict(self.software),
        }

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Self:
        job = cls(
            **cls._common(content),
            decoder=content["decoder"],
            settings=tuple(content["settings"]),
            cluster_key=content["cluster_key"],
        )
        check_count("num_shards", job.num_shards)
        if not all(isinstance(text, str) for text in (job.decoder, *job.settings, *job.patterns, *job.files)):
            raise TypeError("a name is no text")
        return job


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingAssignment:
    """Which of these outputs a worker is to make, and what is not part of what they are.

    Attributes:
      directory: Where they go.
      job: What they are.
      on_error: `fail`, or `worst_case`, which lets prompts fail.
      max_failures: Most examples that may fail; None as in `failure_limit`.
      batch_size: Most prompts of a call; None for all of a shard.
    """

    directory: str
    job: SettingJob
    on_error: str = "fail"
    max_failures: int | None = None
    batch_size: int | None = None

    def shard_path(self, shard: int) -> str:
        """Returns the Parquet file of a shard."""
        return self.job.shard_path(self.directory, shard)
