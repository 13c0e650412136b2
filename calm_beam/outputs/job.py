"""Jobs: everything that decides outputs, besides the content of the data files, in a sealed file in their folder.

A sweep's file is `decode.json`. Its outputs are generations: every prompt by every branch, or an output of every prompt
under every setting of a user's decoder. The file of `calm-beam generate` is `generate.json`, and its outputs are
answers: every prompt by the one branch that a manifest certifies.
"""

import dataclasses
import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import CalmBeamError
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import Example
from calm_beam.inputs.set_parts import Split
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID
from calm_beam.manifest import EngineRecord, ModelRecord, VocabularyRecord, engine_difference
from calm_beam.precision import Precision
from calm_beam.storage import base_name, joined, list_files
from calm_beam.storage.strict_json import content_digest, differences, read_sealed, write_sealed
from calm_beam.text import check_count

FORMATS = {"parquet": "parquet", "jsonl": "jsonl.gz"}
"""Formats of the files of answers, with their suffixes."""

PARTS = "parts"
"""Folder of the Parquet files of answers, if users read files in another format made from them."""

_STORED = "parquet"
_ANSWERS_NAME = re.compile(r"answers-\d{5,}-of-\d{5,}\.(parquet|jsonl\.gz)")
_ENGINE_FIELDS = tuple(
    f"{where}engine.{field.name}" for where in ("", "settings.") for field in dataclasses.fields(EngineRecord)
)
_EXAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(Example))


class OutputsError(CalmBeamError, ValueError):
    """Stored outputs that are damaged, inconsistent, or not the requested ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """The words that messages use for a kind of outputs.

    Attributes:
      outputs: Noun for the outputs.
      example: Noun for the input of each.
      made: Participle for how they are made.
      redo: How to make them again, as an imperative.
      lenient: Value of `--on_error` that lets examples fail.
    """

    outputs: str
    example: str
    made: str
    redo: str
    lenient: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The fields that all kinds of jobs have.

    Attributes:
      patterns: Data patterns as the user gave them.
      files: The files that the patterns match, sorted.
      num_shards: Number of shards, those without examples included.
      software: Versions of the software that decodes, by name.
      reading: Choices about the form of the data, as `Reading.choices` returns them.
      group_key: Key of a row that names its group; None if no group is read.
    """

    FILE: ClassVar[str]
    """Name of the job file."""
    SCHEMA: ClassVar[str]
    """Schema of that file."""
    WORDS: ClassVar[Words]

    patterns: tuple[str, ...]
    files: tuple[str, ...]
    num_shards: int
    software: Mapping[str, str] = dataclasses.field(hash=False)
    reading: Mapping[str, Any] = dataclasses.field(hash=False, default_factory=dict)
    group_key: str | None = None

    @property
    def decoded_by(self) -> EngineRecord | None:
        """The engine that decodes; None in jobs of earlier versions, which do not record it."""
        raise NotImplementedError

    def digest(self) -> str:
        """Returns `sha256:` and 64 digits, over all fields."""
        return content_digest(self._content())

    def differences(self, other: Self) -> tuple[str, ...]:
        """Returns how another job differs, each as `NAME is THEIRS there, OURS here`."""
        # Every change of the outputs also changes their fingerprint, but a fingerprint explains nothing.
        found = differences(self._content(), other._content(), but=("outputs", *_ENGINE_FIELDS))
        return (*engine_difference(self.decoded_by, other.decoded_by), *found)

    def write(self, folder: str) -> None:
        """Writes the file into a folder that has none.

        Raises:
          FileExistsError: If the folder has the file of another job.
        """
        write_sealed(joined(folder, self.FILE), self._content(), replaces="")

    @classmethod
    def read(cls, folder: str) -> Self:
        """Returns the job of a folder.

        Raises:
          OutputsError: If its file is missing or has been changed.
        """
        path, words = joined(folder, cls.FILE), cls.WORDS
        again = words.redo.capitalize()
        content = read_sealed(path, schema=cls.SCHEMA, kind=OutputsError, of=words.outputs, again=again)
        try:
            job = cls._of(content)
            is_alike = job._content() == {key: value for key, value in content.items() if key != "digest"}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise OutputsError(f"{path}: is not as calm-beam writes it ({type(error).__name__}: {error}).") from error
        if not is_alike:
            raise OutputsError(f"{path}: is of another version of calm-beam.")
        return job

    def shard_path(self, folder: str, shard: int) -> str:
        """Returns the Parquet file of a shard, which is stored once and has the outcome of all its examples."""
        return joined(folder, self._shard_name(shard, suffix=_STORED))

    def published_path(self, folder: str, shard: int) -> str:
        """Returns the file of a shard that users read."""
        return self.shard_path(folder, shard)

    @classmethod
    def shard_files(cls, folder: str) -> tuple[str, ...]:
        """Returns the files of shards that are in a folder, whatever their content."""
        raise NotImplementedError

    def check_files(self, folder: str, shards: Sequence[int]) -> None:
        """Refuses a folder that holds files of other shards than these.

        Raises:
          OutputsError: If it does: leftover shards belong to other data.
        """
        expected = {path(folder, shard) for path in (self.shard_path, self.published_path) for shard in shards}
        strange = [path for path in self.shard_files(folder) if path not in expected]
        if strange:
            words = self.WORDS
            raise OutputsError(
                f"{strange[0]}: the data have no {words.example} for this file, so it was {words.made} from other "
                f"data. Restore the data, or {words.redo} with --overwrite."
            )

    def shard_digest(self, shard: int, *, examples: Sequence[Example]) -> str:
        """Returns `sha256:` and 64 digits: equal for the same examples of the same job.

        Args:
          shard: Number of the shard.
          examples: Its examples, in the order in which they are counted.
        """
        content = json.dumps([self.digest(), shard, [self._identity(example) for example in examples]])
        return "sha256:" + hashlib.sha256(content.encode()).hexdigest()

    def _shard_name(self, shard: int, *, suffix: str) -> str:
        return f"{self.WORDS.outputs}-{shard:05d}-of-{self.num_shards:05d}.{suffix}"

    def _identity(self, example: Example) -> Any:
        """Returns the identity of an example, as JSON values."""
        raise NotImplementedError

    def _content(self) -> dict[str, Any]:
        """Returns the content of the file, without its digest."""
        raise NotImplementedError

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Self:
        """Returns the job with a file's content; raises a built-in error if the content is something else."""
        raise NotImplementedError

    @classmethod
    def _common(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that all kinds have."""
        return {
            "patterns": tuple(content["patterns"]),
            "files": tuple(content["files"]),
            "num_shards": content["num_shards"],
            "software": content["software"],
            "reading": content["reading"],
            "group_key": content.get("group_key"),
        }


def _model_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a job that decodes with calm-beam's own engines."""
    return {
        "model": ModelRecord.from_dict(content["model"], at="model"),
        "vocabulary": VocabularyRecord.from_dict(content["vocabulary"]) if content["vocabulary"] else None,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptJob(Job):
    """A job whose outputs are generations.

    Attributes:
      cluster_key: Key of a row that names its cluster; None if no cluster is read.
    """

    FILE = "decode.json"
    WORDS = Words(outputs="generations", example="example", made="decoded", redo="decode again", lenient="worst_case")

    cluster_key: str | None

    def outputs(self) -> str:
        """Returns the fingerprint of everything that decides the outputs except the data: the folder's name."""
        raise NotImplementedError

    @classmethod
    def shard_files(cls, folder: str) -> tuple[str, ...]:
        """Returns the files of shards that are in a folder, whatever their content."""
        return list_files(joined(glob.escape(folder), "*.parquet"))

    def _identity(self, example: Example) -> list[Any]:
        fields = dict(zip(_EXAMPLE_FIELDS, dataclasses.astuple(example), strict=True))
        group, repeats_prompt, earlier = (fields.pop(name) for name in ("group", "repeats_prompt", "earlier"))
        # Only values that are set, so that digests of earlier versions stay valid.
        return [
            *fields.values(),
            *([repeats_prompt] if repeats_prompt else []),
            *([{"group": group}] if group is not None else []),
            *([{"earlier": earlier}] if earlier is not None else []),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeJob(SweptJob):
    """A job whose outputs are a model's generations at every threshold.

    Attributes:
      model: The model.
      vocabulary: Its vocabulary, which decides the texts of outputs; None if there is none and outputs are ids.
      settings: The decode settings.
      on_long: `truncate` or `error`, for prompts longer than the settings allow.
      order: Salt of the order of examples by ids; None if shards are made by prompts.
      part: Which part of the data is decoded, if one part is for selection and the other is the holdout; None for all.
      end_ids: The model's end-of-sequence ids. Jobs of earlier versions do not record them, and count as T5's.
      decoder: `batch` if the serving decoder has decoded, at one threshold after the other; None if a sweep has, at all
        of them together.
      exit_head: The requested form of the output head if the serving decoder has decoded, for the manifest; None if a
        sweep has.
    """

    # v1 kept outputs of id prompts as ids even if there was a vocabulary, and compared them with texts.
    SCHEMA = "calm-beam/generations/v2"

    model: ModelRecord
    vocabulary: VocabularyRecord | None
    settings: DecodeSettings
    on_long: str
    order: str | None = None
    part: Split | None = None
    end_ids: tuple[int, ...] = (EOS_ID,)
    decoder: str | None = None
    exit_head: str | None = None

    @property
    def decoded_by(self) -> EngineRecord | None:
        """The engine that decodes; None in jobs of earlier versions, which do not record it."""
        return self.settings.engine

    def outputs(self) -> str:
        """Returns the fingerprint of everything that decides the outputs except the data: the folder's name."""
        return self.settings.fingerprint(model=self.model.fingerprint, vocabulary=self.vocabulary_identity())

    def vocabulary_identity(self) -> str | None:
        """Returns a fingerprint of the vocabulary with extra ids, chat template and stop strings; None without one."""
        if self.vocabulary is None:
            return None
        chat, stops = self.vocabulary.chat, self.vocabulary.stop_strings
        # Omitted where there is none, so that older folder names stay valid.
        made = "" if chat is None else f"+{content_digest(chat.to_dict())}"
        made += "" if stops is None else f"+stops:{content_digest({'stop_strings': list(stops)})}"
        return f"{self.vocabulary.fingerprint}+{self.vocabulary.extra_ids}{made}"

    def _content(self) -> dict[str, Any]:
        return {
            "schema": self.SCHEMA,
            "outputs": self.outputs(),
            "model": self.model.to_dict(),
            "vocabulary": self.vocabulary.to_dict() if self.vocabulary else None,
            # As JSON reads it back: tuples become lists.
            "settings": json.loads(json.dumps(self.settings.to_dict())),
            "dtype": self.settings.precision.dtype,
            "on_long": self.on_long,
            "cluster_key": self.cluster_key,
            "patterns": list(self.patterns),
            "files": list(self.files),
            "num_shards": self.num_shards,
            "software": dict(self.software),
            "reading": dict(self.reading),
            # Defaults are omitted, so that digests of earlier versions stay valid.
            **({"order": self.order} if self.order is not None else {}),
            **({"group_key": self.group_key} if self.group_key is not None else {}),
            **({"part": dataclasses.asdict(self.part)} if self.part is not None else {}),
            **({"end_ids": list(self.end_ids)} if self.end_ids != (EOS_ID,) else {}),
            **({"decoder": self.decoder} if self.decoder is not None else {}),
            **({"exit_head": self.exit_head} if self.exit_head is not None else {}),
        }

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Self:
        settings = content["settings"]
        return cls(
            **cls._common(content),
            **_model_of(content),
            settings=DecodeSettings(
                **{
                    **{name: value for name, value in settings.items() if name != "arithmetic"},
                    "rule": ExitRule(**settings["rule"]),
                    "thresholds": tuple(settings["thresholds"]),
                    "precision": Precision(**settings.get("arithmetic", {})),
                    "engine": EngineRecord.from_dict(settings["engine"]) if "engine" in settings else None,
                }
            ),
            on_long=content["on_long"],
            cluster_key=content["cluster_key"],
            order=content.get("order"),
            part=Split.from_dict(content["part"]) if "part" in content else None,
            end_ids=tuple(content.get("end_ids", (EOS_ID,))),
            decoder=content.get("decoder"),
            exit_head=content.get("exit_head"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredGenerations:
    """Stored generations: their folder, which need not exist yet, and their job.

    Attributes:
      directory: Their folder.
      job: Their job.
    """

    directory: str
    job: DecodeJob

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The decoded grid, descending; the tested grid is the same or a part of it."""
        return self.job.settings.thresholds

    def shard_path(self, shard: int) -> str:
        """Returns the file of a shard."""
        return self.job.shard_path(self.directory, shard)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """The sample of prompts that the full model decodes as well, so that their losses are known.

    Attributes:
      share: Share of the prompts, in (0, 1].
      salt: Salt of the hash of ids that draws the sample.
      metric_source: Digest of the file that defines the losses' metric if it is a user's; None for a built-in metric.
    """

    share: float
    salt: str
    metric_source: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"probe_share must be in (0, 1], got {self.share}. It is a fraction: for 5 % pass 0.05.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerJob(Job):
    """A job whose outputs are answers.

    Attributes:
      model: The model.
      vocabulary: Its vocabulary, which decides the texts of outputs; None if there is none and outputs are ids.
      manifest: Digest of the manifest.
      calibration: Index of the manifest entry that answers prompts without a group.
      output_format: One of `FORMATS`.
      probe: The sample of prompts that the full model decodes as well; None for none.
      engine: The engine that decodes; None in jobs of earlier versions, which do not record it.
    """

    FILE = "generate.json"
    SCHEMA = "calm-beam/answers/v1"
    WORDS = Words(outputs="answers", example="prompt", made="answered", redo="answer again", lenient="list")

    model: ModelRecord
    vocabulary: VocabularyRecord | None
    manifest: str
    calibration: int
    output_format: str
    probe: Probe | None
    engine: EngineRecord | None = None

    def __post_init__(self) -> None:
        if self.output_format not in FORMATS:
            raise ValueError(f"output_format must be one of {', '.join(FORMATS)}, got {self.output_format!r:.40}.")

    @property
    def decoded_by(self) -> EngineRecord | None:
        """The engine that decodes; None in jobs of earlier versions, which do not record it."""
        return self.engine

    def shard_path(self, folder: str, shard: int) -> str:
        """Returns the Parquet file of a shard, which is in a folder of its own if users read another file."""
        return super().shard_path(folder if self.output_format == _STORED else joined(folder, PARTS), shard)

    def published_path(self, folder: str, shard: int) -> str:
        """Returns the file of a shard that users read: the same, unless another format was requested."""
        return joined(folder, self._shard_name(shard, suffix=FORMATS[self.output_format]))

    def losses_path(self, folder: str, calibration: int) -> str:
        """Returns the file of losses about an entry of the manifest, given by its index.

        The losses of one guarantee say nothing about another, so each has its own file: `losses.jsonl` is about the
        entry that answers prompts without a group.
        """
        return joined(folder, "losses.jsonl" if calibration == self.calibration else f"losses-{calibration:05d}.jsonl")

    @classmethod
    def shard_files(cls, folder: str) -> tuple[str, ...]:
        """Returns the files of shards in a folder, whatever their content; users may keep other files there."""
        places = (folder, joined(folder, PARTS))
        found = [path for place in places for path in list_files(joined(glob.escape(place), "answers-*"))]
        return tuple(path for path in found if _ANSWERS_NAME.fullmatch(base_name(path)))

    def _identity(self, example: Example) -> str:
        return example.content_digest().hex()

    def _content(self) -> dict[str, Any]:
        return {
            "schema": self.SCHEMA,
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

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Self:
        job = cls(
            **cls._common(content),
            **_model_of(content),
            manifest=content["manifest"],
            calibration=content["calibration"],
            output_format=content["output_format"],
            probe=Probe(**content["probe"]) if content["probe"] else None,
            engine=EngineRecord.from_dict(content["engine"]) if "engine" in content else None,
        )
        check_count("calibration", job.calibration)
        check_count("num_shards", job.num_shards)
        texts = (job.manifest, *job.patterns, *job.files)
        if not all(isinstance(text, str) for text in texts) or not isinstance(job.group_key, str | None):
            raise TypeError("a name is no text")
        return job


_DIGITS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingJob(SweptJob):
    """A job whose outputs are generations by a user's decoder.

    Its name is its only identity: calm-beam cannot see whether two decoders are the same, or whether one has changed.

    Attributes:
      decoder: The user's name for the decoder.
      settings: Names of all settings, the safest first: the outputs of the others are compared with its outputs.
    """

    SCHEMA = "calm-beam/settings/v1"

    decoder: str
    settings: tuple[str, ...]

    @property
    def decoded_by(self) -> None:
        """None: the decoder is not an engine of calm-beam."""
        return None

    def outputs(self) -> str:
        """Returns the fingerprint of everything that decides the outputs except the data: the folder's name."""
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
    """A worker's assignment with a user's decoder, and the settings that do not change the outputs.

    Attributes:
      directory: Folder of the outputs.
      job: Their job.
      on_error: `fail`, or `worst_case`, which lets prompts fail.
      max_failures: Most examples that may fail; None for the default of `failure_limit`.
      batch_size: Most prompts of a call; None for all prompts of a shard.
    """

    directory: str
    job: SettingJob
    on_error: str = "fail"
    max_failures: int | None = None
    batch_size: int | None = None

    def shard_path(self, shard: int) -> str:
        """Returns the Parquet file of a shard."""
        return self.job.shard_path(self.directory, shard)
