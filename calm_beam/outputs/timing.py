"""Timings of shards, stored next to them, for `calm-beam plan` only.

`timing-00000-of-00004.json` is written after its shard, and `timing-run.json` at the end of a run. No digest covers
them, and no calibration reads them: if they are lost, only a forecast is.
"""

import contextlib
import dataclasses
import glob
import json
from collections.abc import Iterable, Mapping
from typing import Any, Self

from calm_beam.storage import is_file, joined, list_files, open_input, replacing, strict_json

from .job import OutputsError
from .shards import StoredShard

_SCHEMA = "calm-beam/timing/v1"
_RUN = "timing-run.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lap:
    """Some consecutive steps of a shard's decoding.

    Attributes:
      steps: Number of steps.
      rows: Rows that a layer computed in them.
      seconds: Seconds for them, without compiling.
    """

    steps: int
    rows: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardTiming:
    """The timing of one shard's decoding.

    Attributes:
      shard: Number of the shard.
      digest: Digest of the stored shard.
      examples: Number of its examples.
      lanes: Branches that were decoded, the full model's included.
      slots: Most prompts that were decoded at the same time.
      began: When decoding began, in seconds since 1970.
      seconds: From then until the shard was stored.
      compile_seconds: The part of these in which XLA compiled, or read from its compilation cache.
      cpu_seconds: CPU time of all threads of the process in that time.
      load_seconds: Time to load the model before the first shard of a process; 0 for the other shards.
      steps: Steps of the decoder.
      rows: Rows that a layer computed.
      padded_rows: Rows of padding in addition to them.
      projections: Rows that were projected onto the vocabulary.
      tokens: Tokens of the full model's outputs.
      laps: All steps, in groups.
      bytes: Size of the shard's file.
      peak_bytes: Peak memory of the process until then.
      worker: A random text, the same for all shards of a process.
      device: JAX's name for the kind of device.
      cores: Cores that the process may use.
    """

    shard: int
    digest: str
    examples: int
    lanes: int
    slots: int
    began: float
    seconds: float
    compile_seconds: float
    cpu_seconds: float
    load_seconds: float
    steps: int
    rows: int
    padded_rows: int
    projections: int
    tokens: int
    laps: tuple[Lap, ...]
    bytes: int
    peak_bytes: int
    worker: str
    device: str
    cores: int

    @property
    def steady_seconds(self) -> float:
        """Seconds without compiling."""
        return max(0.0, self.seconds - self.compile_seconds)

    def write(self, folder: str, *, num_shards: int) -> None:
        """Writes the file next to the shard's; a disk error is ignored."""
        path = joined(folder, f"timing-{self.shard:05d}-of-{num_shards:05d}.json")
        _write(path, dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Returns the timing from a file's values; raises KeyError, TypeError or ValueError for anything else."""
        values = {field.name: content[field.name] for field in dataclasses.fields(cls)}
        timing = cls(**{**values, "laps": tuple(Lap(**lap) for lap in values["laps"])})
        texts = (timing.digest, timing.worker, timing.device)
        numbers = [value for name, value in values.items() if name not in ("digest", "worker", "device", "laps")] + [
            value for lap in timing.laps for value in dataclasses.astuple(lap)
        ]
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(number, int | float) and number >= 0 for number in numbers
        ):
            raise ValueError("texts or numbers are something else")
        return timing


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTiming:
    """The time of a whole run: reading, decoding, scoring and the report.

    Attributes:
      began: When the command was started, in seconds since 1970.
      seconds: Seconds from then until its end.
    """

    began: float
    seconds: float

    @property
    def ended(self) -> float:
        """When the command ended, in seconds since 1970."""
        return self.began + self.seconds

    def write(self, folder: str) -> None:
        """Writes the file next to the shards; a disk error is ignored."""
        _write(joined(folder, _RUN), dataclasses.asdict(self))


def read_timings(folder: str, shards: Iterable[StoredShard]) -> tuple[ShardTiming, ...]:
    """Returns the timings of shards, in their order; a shard without one, or with that of another file, is left out.

    Args:
      folder: Folder of the generations.
      shards: The shards that are stored there.

    Raises:
      OutputsError: If a timing is damaged.
    """
    found: dict[int, ShardTiming] = {}
    for path in list_files(joined(glob.escape(folder), "timing-*-of-*.json")):
        content = _read(path)
        if content is None:
            continue
        try:
            timing = ShardTiming.from_dict(content)
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, error) from error
        found[timing.shard] = timing
    return tuple(
        found[shard.shard] for shard in shards if shard.shard in found and found[shard.shard].digest == shard.digest
    )


def read_run_timing(folder: str) -> RunTiming | None:
    """Returns the timing of the last run that ended here; None if there is none.

    Raises:
      OutputsError: If the file is damaged.
    """
    path = joined(folder, _RUN)
    if not is_file(path):
        return None
    content = _read(path)
    if content is None:
        return None
    try:
        return RunTiming(began=float(content["began"]), seconds=float(content["seconds"]))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _write(path: str, content: dict[str, Any]) -> None:
    with contextlib.suppress(OSError), replacing(path) as temporary:
        temporary.write_text(json.dumps({"schema": _SCHEMA, **content}) + "\n", encoding="utf-8")


def _read(path: str) -> dict[str, Any] | None:
    """Returns a file's content; None if it is of another version of calm-beam."""
    try:
        with open_input(path) as file:
            content = strict_json.loads(file.read())
    except (OSError, strict_json.StrictJSONError) as error:
        raise _damaged(path, error) from error
    if not isinstance(content, dict) or "schema" not in content:
        raise _damaged(path, "it has no schema")
    return content if content["schema"] == _SCHEMA else None


def _damaged(path: str, reason: object) -> OutputsError:
    return OutputsError(f"{path}: is damaged ({reason}). Remove it: its timing then counts as missing.")
