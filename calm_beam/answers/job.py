"""All that decides what the answers of a run are, besides the content of its data files."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from calm_beam.manifest import EngineRecord, ModelRecord, VocabularyRecord, content_digest, engine_difference
from calm_beam.storage import joined
from calm_beam.storage.sealed_json import differences, read_sealed, write_sealed
from calm_beam.text.counted import check_count

from .shards import AnswersError

JOB = "generate.json"
FORMATS = {"parquet": "parquet", "jsonl": "jsonl.gz"}
"""Forms of the files of answers, and the suffix of each."""

_SCHEMA = "calm-beam/answers/v1"
_ENGINE_FIELDS = tuple(f"engine.{field.name}" for field in dataclasses.fields(EngineRecord))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Which prompts are decoded by the full model as well, so that their losses are known.

    Attributes:
      share: Share of the prompts, in (0, 1].
      salt: Of the hash of ids that decides.
      metric_source: Digest of the file that defines the metric of the losses, where that is the user's; None of ours.
    """

    share: float
    salt: str
    metric_source: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"probe_share must be in (0, 1], got {self.share}. It is a fraction: for 5 % pass 0.05.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerJob:
    """What is answered, by what, and in which form it is written.

    Attributes:
      manifest: Digest of the manifest.
      calibration: Place of its entry that answers prompts of no group.
      model: The model.
      vocabulary: Its vocabulary; None where prompts and outputs are token ids.
      output_format: One of `FORMATS`.
      patterns: Data patterns as the user gave them.
      files: The files that they name, sorted.
      reading: What was chosen about the form of the data, as in `Reading.choices`.
      group_key: Key of a row that names its group; None where none is read.
      num_shards: Number of shards, those without prompts included.
      probe: Which prompts are decoded by the full model as well; None for none.
      software: Versions of what decodes, by name.
      engine: What decodes; None in jobs of earlier versions, which do not say.
    """

    manifest: str
    calibration: int
    model: ModelRecord
    vocabulary: VocabularyRecord | None
    output_format: str
    patterns: tuple[str, ...]
    files: tuple[str, ...]
    reading: Mapping[str, Any] = dataclasses.field(hash=False)
    group_key: str | None
    num_shards: int
    probe: Probe | None
    software: Mapping[str, str] = dataclasses.field(hash=False)
    engine: EngineRecord | None = None

    def __post_init__(self) -> None:
        if self.output_format not in FORMATS:
            raise ValueError(f"output_format must be one of {', '.join(FORMATS)}, got {self.output_format!r:.40}.")

    def digest(self) -> str:
        """Returns `sha256:` and 64 digits, over everything."""
        return content_digest(self._content())

    def differences(self, other: Self) -> tuple[str, ...]:
        """Returns in words where another job differs, each as `NAME is THEIRS there, OURS here`."""
        found = differences(self._content(), other._content(), but=_ENGINE_FIELDS)
        return (*engine_difference(self.engine, other.engine), *found)

    def write(self, folder: str) -> None:
        """Writes `generate.json` where there is none.

        Raises:
          FileExistsError: If there is one, of another job.
        """
        write_sealed(joined(folder, JOB), self._content(), replaces="")

    @classmethod
    def read(cls, folder: str) -> Self:
        """Returns the job of a folder.

        Raises:
          AnswersError: If its `generate.json` is missing or not as it was written.
        """
        path = joined(folder, JOB)
        content = read_sealed(path, schema=_SCHEMA, kind=AnswersError, of="answers", again="Answer anew")
        try:
            job = cls(
                manifest=content["manifest"],
                calibration=content["calibration"],
                model=ModelRecord.from_dict(content["model"], at="model"),
                vocabulary=VocabularyRecord.from_dict(content["vocabulary"]) if content["vocabulary"] else None,
                output_format=content["output_format"],
                patterns=tuple(content["patterns"]),
                files=tuple(content["files"]),
                reading=content["reading"],
                group_key=content["group_key"],
                num_shards=content["num_shards"],
                probe=Probe(**content["probe"]) if content["probe"] else None,
                software=content["software"],
                engine=EngineRecord.from_dict(content["engine"]) if "engine" in content else None,
            )
            check_count("calibration", job.calibration)
            check_count("num_shards", job.num_shards)
            texts = (job.manifest, *job.patterns, *job.files)
            if not all(isinstance(text, str) for text in texts) or not isinstance(job.group_key, str | None):
                raise TypeError("a name is no text")
            is_alike = job._content() == {key: value for key, value in content.items() if key != "digest"}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise AnswersError(f"{path}: is not as calm-beam writes it ({type(error).__name__}: {error}).") from error
        if not is_alike:
            raise AnswersError(f"{path}: is of another version of calm-beam.")
        return job

    def _content(self) -> dict[str, Any]:
        return {
            "schema": _SCHEMA,
            "manifest": self.manifest,
            "calibration": self.calibration,
            "model": self.model.to_dict(),
            "vocabulary": self.vocabulary.to_dict() if self.vocabulary else None,
            "output_format": self.output_format,
            "patterns": list(self.patterns),
            "files": list(self.files),
            "reading": dict(self.reading),
            "group_key": self.group_key,
            "num_shards": self.num_shards,
            "probe": dataclasses.asdict(self.probe) if self.probe else None,
            "software": dict(self.software),
            **({"engine": self.engine.to_dict()} if self.engine is not None else {}),
        }
