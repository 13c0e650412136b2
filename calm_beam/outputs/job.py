"""All that decides what outputs are, besides the content of the data files: a sealed file in their folder.

A sweep's is `decode.json`, and what it makes are generations: every prompt by every branch, or an output of every
prompt under every setting of a decoder of the user's. That of `calm-beam generate` is `generate.json`, and what it
makes are answers: every prompt by the one branch that a manifest promises.
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
"""Forms of the files of answers, and the suffix of each."""

PARTS = "parts"
"""Folder of the Parquet files of answers, where users read others that are made of them."""

_STORED = "parquet"
_ANSWERS_NAME = re.compile(r"answers-\d{5,}-of-\d{5,}\.(parquet|jsonl\.gz)")
_ENGINE_FIELDS = tuple(
    f"{where}engine.{field.name}" for where in ("", "settings.") for field in dataclasses.fields(EngineRecord)
)
_EXAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(Example))


class OutputsError(CalmBeamError, ValueError):
    """Stored outputs that cannot be trusted, or are not those that were asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """What messages call outputs of a kind.

    Attributes:
      outputs: What they are.
      example: What each is made of.
      made: What is done to make them.
      anew: How to make them again, as an imperative.
      lenient: What `--on_error` is where examples may fail.
    """

    outputs: str
    example: str
    made: str
    anew: str
    lenient: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a job of any kind says.

    Attributes:
      patterns: Data patterns as the user gave them.
      files: The files that they name, sorted.
      num_shards: Number of shards, those without examples included.
      software: Versions of what decodes, by name.
      reading: What was chosen about the form of the data, as in `Reading.choices`.
      group_key: Key of a row that names its group; None where none is read.
    """

    FILE: ClassVar[str]
    """Name of the file that says it."""
    SCHEMA: ClassVar[str]
    """Form of that file."""
    WORDS: ClassVar[Words]

    patterns: tuple[str, ...]
    files: tuple[str, ...]
    num_shards: int
    software: Mapping[str, str] = dataclasses.field(hash=False)
    reading: Mapping[str, Any] = dataclasses.field(hash=False, default_factory=dict)
    group_key: str | None = None

    @property
    def decoded_by(self) -> EngineRecord | None:
        """What decodes; None in jobs of earlier versions, which do not say."""
        raise NotImplementedError

    def digest(self) -> str:
        """Returns `sha256:` and 64 digits, over everything."""
        return content_digest(self._content())

    def differences(self, other: Self) -> tuple[str, ...]:
        """Returns in words where another job differs, each as `NAME is THEIRS there, OURS here`."""
        # Whatever changes generations shows in their fingerprint too, which says nothing in words.
        found = differences(self._content(), other._content(), but=("outputs", *_ENGINE_FIELDS))
        return (*engine_difference(self.decoded_by, other.decoded_by), *found)

    def write(self, folder: str) -> None:
        """Writes the file into a folder where there is none.

        Raises:
          FileExistsError: If there is one, of another job.
        """
        write_sealed(joined(folder, self.FILE), self._content(), replaces="")

    @classmethod
    def read(cls, folder: str) -> Self:
        """Returns the job of a folder.

        Raises:
          OutputsError: If its file is missing or not as it was written.
        """
        path, words = joined(folder, cls.FILE), cls.WORDS
        again = words.anew.capitalize()
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
        """Returns the Parquet file of a shard: what is stored once, and says all that became of its examples."""
        return joined(folder, self._shard_name(shard, suffix=_STORED))

    def published_path(self, folder: str, shard: int) -> str:
        """Returns the file of a shard that users read."""
        return self.shard_path(folder, shard)

    @classmethod
    def shard_files(cls, folder: str) -> tuple[str, ...]:
        """Returns the files of shards that are in a folder, whatever they hold."""
        raise NotImplementedError

    def check_files(self, folder: str, shards: Sequence[int]) -> None:
        """Refuses a folder that holds files of other shards than these.

        Raises:
          OutputsError: If it does: what is left over is of other data.
        """
        expected = {path(folder, shard) for path in (self.shard_path, self.published_path) for shard in shards}
        strange = [path for path in self.shard_files(folder) if path not in expected]
        if strange:
            words = self.WORDS
            raise OutputsError(
                f"{strange[0]}: the data have no {words.example} for this file, so it was {words.made} from other "
                f"data. Restore the data, or {words.anew} with --overwrite."
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
        """Returns what tells an example from others, as JSON has it."""
        raise NotImplementedError

    def _content(self) -> dict[str, Any]:
        """Returns what the file says, but for its digest."""
        raise NotImplementedError

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Self:
        """Returns the job of which a file says this; raises an error of Python's if it is something else."""
        raise NotImplementedError

    @classmethod
    def _common(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of every kind."""
        return {
            "patterns": tuple(content["patterns"]),
            "files": tuple(content["files"]),
            "num_shards": content["num_shards"],
            "software": content["software"],
            "reading": content["reading"],
            "group_key": content.get("group_key"),
        }


def _model_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a job that decodes by a model of ours."""
    return {
        "model": ModelRecord.from_dict(content["model"], at="model"),
        "vocabulary": VocabularyRecord.from_dict(content["vocabulary"]) if content["vocabulary"] else None,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptJob(Job):
    """A job whose outputs are generations.

    Attributes:
      cluster_key: Key of a row that names its cluster; None where none is read.
    """

    FILE = "decode.json"
    WORDS = Words(outputs="generations", example="example", made="decoded", anew="decode anew", lenient="worst_case")

    cluster_key: str | None

    def outputs(self) -> str:
        """Returns the fingerprint of all that decides the outputs but the data: the folder's name."""
        raise NotImplementedError

    @classmethod
    def shard_files(cls, folder: str) -> tuple[str, ...]:
        """Returns the files of shards that are in a folder, whatever they hold."""
        return list_files(joined(glob.escape(folder), "*.parquet"))

    def _identity(self, example: Example) -> list[Any]:
        fields = dict(zip(_EXAMPLE_FIELDS, dataclasses.astuple(example), strict=True))
        group, repeats_prompt = fields.pop("group"), fields.pop("repeats_prompt")
        # Only where they are told: shards of earlier versions know nothing of them.
        return [
            *fields.values(),
            *([repeats_prompt] if repeats_prompt else []),
            *([{"group": group}] if group is not None else []),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeJob(SweptJob):
    """A job whose outputs are generations of a model, at every threshold.

    Attributes:
      model: The model.
      vocabulary: Its vocabulary, which decides the texts of outputs; None where there is none, and they are ids.
      settings: How it decodes.
      on_long: `truncate` or `error`, for prompts longer than the settings allow.
      order: Salt of the order that examples are in, by ids; None where shards are made by prompts.
      part: Which part of the data is decoded, where one confirms what the other has chosen; None where all of it is.
      end_ids: Ids of the model of which each ends an output. Jobs of earlier versions do not say, and count as T5's.
      decoder: `batch` where the decoder that serves has decoded, at one threshold after the other; None where a sweep
        has, at all of them together.
      exit_head: Form of the output head that was asked for where the decoder that serves has decoded, which the
        manifest names; None where a sweep has.
    """

    # The first version kept outputs of id prompts as ids whatever vocabulary there was, and held them against texts.
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
        """What decodes; None in jobs of earlier versions, which do not say."""
        return self.settings.engine

    def outputs(self) -> str:
        """Returns the fingerprint of all that decides the outputs but the data: the folder's name."""
        return self.settings.fingerprint(model=self.model.fingerprint, vocabulary=self.vocabulary_identity())

    def vocabulary_identity(self) -> str | None:
        """Returns a fingerprint of the vocabulary with its extra ids and its chat; None where there is none."""
        if self.vocabulary is None:
            return None
        chat = self.vocabulary.chat
        # Names of generations without a chat are older than chats.
        made = "" if chat is None else f"+{content_digest(chat.to_dict())}"
        return f"{self.vocabulary.fingerprint}+{self.vocabulary.extra_ids}{made}"

    def _content(self) -> dict[str, Any]:
        return {
            "schema": self.SCHEMA,
            "outputs": self.outputs(),
            "model": self.model.to_dict(),
            "vocabulary": self.vocabulary.to_dict() if self.vocabulary else None,
            # As JSON gives it back: tuples become lists.
            "settings": json.loads(json.dumps(self.settings.to_dict())),
            "dtype": self.settings.precision.dtype,
            "on_long": self.on_long,
            "cluster_key": self.cluster_key,
            "patterns": list(self.patterns),
            "files": list(self.files),
            "num_shards": self.num_shards,
            "software": dict(self.software),
            "reading": dict(self.reading),
            # Only where there is one: jobs of earlier versions know nothing of it.
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
    """Where generations are stored, or will be, and what they are.

    Attributes:
      directory: Their folder.
      job: What they are.
    """

    directory: str
    job: DecodeJob

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The grid that is decoded, descending; what is tested is the same or a part of it."""
        return self.job.settings.thresholds

    def shard_path(self, shard: int) -> str:
        """Returns the file of a shard."""
        return self.job.shard_path(self.directory, shard)


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
class AnswerJob(Job):
    """A job whose outputs are answers.

    Attributes:
      model: The model.
      vocabulary: Its vocabulary, which decides the texts of outputs; None where there is none, and they are ids.
      manifest: Digest of the manifest.
      calibration: Place of its entry that answers prompts of no group.
      output_format: One of `FORMATS`.
      probe: Which prompts are decoded by the full model as well; None for none.
      engine: What decodes; None in jobs of earlier versions, which do not say.
    """

    FILE = "generate.json"
    SCHEMA = "calm-beam/answers/v1"
    WORDS = Words(outputs="answers", example="prompt", made="answered", anew="answer anew", lenient="list")

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
        """What decodes; None in jobs of earlier versions, which do not say."""
        return self.engine

    def shard_path(self, folder: str, shard: int) -> str:
        """Returns the Parquet file of a shard, which lies apart where users read another."""
        return super().shard_path(folder if self.output_format == _STORED else joined(folder, PARTS), shard)

    def published_path(self, folder: str, shard: int) -> str:
        """Returns the file of a shard that users read; the same, unless another format was asked for."""
        return joined(folder, self._shard_name(shard, suffix=FORMATS[self.output_format]))

    def losses_path(self, folder: str, calibration: int) -> str:
        """Returns the file of losses about an entry of the manifest, by its place.

        The losses of one promise say nothing about another, so each has a file of its own: `losses.jsonl` is about the
        entry that answers prompts of no group.
        """
        return joined(folder, "losses.jsonl" if calibration == self.calibration else f"losses-{calibration:05d}.jsonl")

    @classmethod
    def shard_files(cls, folder: str) -> tuple[str, ...]:
        """Returns the files of shards that are in a folder, whatever they hold; others may keep files there."""
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
