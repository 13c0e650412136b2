"""A folder of generations: what was decoded in it and how, and whether all of it is there.

`<output>/generations/<fingerprint of model and settings>/` holds

    decode.json                              what is decoded, how, and from what; written before anything is decoded
    generations-00000-of-00004.parquet       one file a shard that has examples
    complete.json                            the mark of success: every shard with its size and digest

A sequential calibration that stops before the end of its data leaves `round-00001.json`, ..., what was counted in each
round, and `stopped.json` instead of the mark: the shards that it has counted. Losses have decided which those are, so
only tests that may be watched can be made of them.

Files are written whole or not at all. A run that dies leaves the shards it finished; another run takes them over if
they are of the same job and the same examples. Files whose names begin with a dot are what a killed process left: they
are never read.
"""

import dataclasses
import glob
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from calm_beam.arithmetic import Arithmetic
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import Example
from calm_beam.inputs.set_parts import SetPart
from calm_beam.manifest import EngineRecord, ModelRecord, VocabularyRecord, engine_difference
from calm_beam.manifest.digest import content_digest
from calm_beam.storage import is_file, joined, list_files
from calm_beam.storage.sealed_json import differences, read_sealed, write_sealed
from calm_beam.text.counted import counted
from calm_beam.vocabularies.vocabulary import EOS_ID

from .shards import GenerationsError, StoredShard, stored_shard

JOB = "decode.json"
COMPLETE = "complete.json"
STOPPED = "stopped.json"
# The first version kept outputs of id prompts as ids whatever vocabulary there was, and held them against texts.
_SCHEMA = "calm-beam/generations/v2"
_ENGINE_FIELDS = tuple(f"settings.engine.{field.name}" for field in dataclasses.fields(EngineRecord))
_FIELDS = tuple(field.name for field in dataclasses.fields(Example))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeJob:
    """All that decides what the generations of a run are, besides the content of its data files.

    Attributes:
      model: The model.
      vocabulary: Its vocabulary, which decides the texts of outputs; None where there is none, and they are ids.
      settings: How it decodes.
      on_long: `truncate` or `error`, for prompts longer than the settings allow.
      cluster_key: Key of a row that names its cluster; None where none is read.
      patterns: Data patterns as the user gave them.
      files: The files that they name, sorted.
      num_shards: Number of shards, those without examples included.
      software: Versions of what decodes, by name.
      reading: What was chosen about the form of the data, as in `Reading.choices`.
      order: Salt of the order that examples are in, by ids; None where shards are made by prompts.
      group_key: Key of a row that names its group; None where none is read.
      part: Which part of the data is decoded, where one confirms what the other has chosen; None where all of it is.
      end_ids: Ids of the model of which each ends an output. Jobs of earlier versions do not say, and count as T5's.
      decoder: `batch` where the decoder that serves has decoded, at one threshold after the other; None where a sweep
        has, at all of them together.
      exit_head: Form of the output head that was asked for where the decoder that serves has decoded, which the
        manifest names; None where a sweep has.
    """

    model: ModelRecord
    vocabulary: VocabularyRecord | None
    settings: DecodeSettings
    on_long: str
    cluster_key: str | None
    patterns: tuple[str, ...]
    files: tuple[str, ...]
    num_shards: int
    software: Mapping[str, str] = dataclasses.field(hash=False)
    reading: Mapping[str, Any] = dataclasses.field(hash=False, default_factory=dict)
    order: str | None = None
    group_key: str | None = None
    part: SetPart | None = None
    end_ids: tuple[int, ...] = (EOS_ID,)
    decoder: str | None = None
    exit_head: str | None = None

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

    def digest(self) -> str:
        """Returns `sha256:` and 64 digits, over everything."""
        return content_digest(self._content())

    def differences(self, other: Self) -> tuple[str, ...]:
        """Returns in words where another job differs, each as `NAME is THEIRS there, OURS here`."""
        # Whatever changes the outputs shows in their fingerprint too, which says nothing in words.
        found = differences(self._content(), other._content(), but=("outputs", *_ENGINE_FIELDS))
        return (*engine_difference(self.settings.engine, other.settings.engine), *found)

    def write(self, folder: str) -> None:
        """Writes `decode.json`."""
        write_sealed(joined(folder, JOB), self._content())

    @classmethod
    def read(cls, folder: str) -> Self:
        """Returns the job of a folder.

        Raises:
          GenerationsError: If its `decode.json` is missing or not as it was written.
        """
        path = joined(folder, JOB)
        content = _read(path)
        try:
            settings = content["settings"]
            job = cls(
                model=ModelRecord.from_dict(content["model"], at="model"),
                vocabulary=VocabularyRecord.from_dict(content["vocabulary"]) if content["vocabulary"] else None,
                settings=DecodeSettings(
                    **{
                        **settings,
                        "rule": ExitRule(**settings["rule"]),
                        "thresholds": tuple(settings["thresholds"]),
                        "arithmetic": Arithmetic(**settings.get("arithmetic", {})),
                        "engine": EngineRecord.from_dict(settings["engine"]) if "engine" in settings else None,
                    }
                ),
                on_long=content["on_long"],
                cluster_key=content["cluster_key"],
                patterns=tuple(content["patterns"]),
                files=tuple(content["files"]),
                num_shards=content["num_shards"],
                software=content["software"],
                reading=content["reading"],
                order=content.get("order"),
                group_key=content.get("group_key"),
                part=SetPart.from_dict(content["part"]) if "part" in content else None,
                end_ids=tuple(content.get("end_ids", (EOS_ID,))),
                decoder=content.get("decoder"),
                exit_head=content.get("exit_head"),
            )
            is_alike = job._content() == {key: value for key, value in content.items() if key != "digest"}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise GenerationsError(
                f"{path}: is not as calm-beam writes it ({type(error).__name__}: {error})."
            ) from error
        if not is_alike:
            raise GenerationsError(f"{path}: is of another version of calm-beam.")
        return job

    def _content(self) -> dict[str, Any]:
        return {
            "schema": _SCHEMA,
            "outputs": self.outputs(),
            "model": self.model.to_dict(),
            "vocabulary": self.vocabulary.to_dict() if self.vocabulary else None,
            # As JSON gives it back: tuples become lists.
            "settings": json.loads(json.dumps(self.settings.to_dict())),
            "dtype": self.settings.arithmetic.dtype,
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
        return shard_path(self.directory, shard, num_shards=self.job.num_shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedSweep:
    """The mark of success of a folder: all its shards.

    Attributes:
      job: Digest of the job.
      shards: Those that have examples, ascending by number.
    """

    job: str
    shards: tuple[StoredShard, ...]

    @property
    def examples(self) -> int:
        """Number of examples, failed ones included."""
        return sum(shard.examples for shard in self.shards)

    @property
    def failed(self) -> int:
        """Number of examples that could not be decoded."""
        return sum(shard.failed for shard in self.shards)

    @classmethod
    def of(cls, shards: Iterable[StoredShard], *, job: str, examples: int) -> Self:
        """Returns the mark of a finished run.

        Args:
          shards: What was decoded; a shard that was decoded twice may come twice.
          job: Digest of the job.
          examples: Number of examples that were read.

        Raises:
          GenerationsError: If the shards do not hold the examples that were read, each once.
        """
        by_number: dict[int, StoredShard] = {}
        for shard in shards:
            if by_number.setdefault(shard.shard, shard) != shard:
                raise GenerationsError(
                    f"shard {shard.shard} was decoded twice, with different results. Did the data change meanwhile?"
                )
        finished = cls(job=job, shards=tuple(shard for _, shard in sorted(by_number.items())))
        engines = sorted({shard.engine for shard in finished.shards if shard.engine is not None})
        if len(engines) > 1:
            raise GenerationsError(_mixed(*engines[:2]))
        if finished.examples != examples:
            raise GenerationsError(
                f"{counted(examples, 'example was', several='examples were')} read, but {finished.examples} decoded. "
                "Counting others than were drawn "
                "would void the guarantee."
            )
        return finished

    def digest(self) -> str:
        """Returns `sha256:` and 64 digits, over the job and every shard's content."""
        return content_digest({"job": self.job, "shards": [dataclasses.asdict(shard) for shard in self.shards]})

    def write(self, folder: str, name: str = COMPLETE) -> None:
        """Writes the mark: `complete.json`, or another name for shards that are not all."""
        write_sealed(
            joined(folder, name),
            {
                "schema": _SCHEMA,
                "job": self.job,
                "examples": self.examples,
                "shards": [shard.to_dict() for shard in self.shards],
            },
        )

    @classmethod
    def read(cls, folder: str, job: DecodeJob, *, or_stopped: bool = False) -> Self:
        """Returns the mark of a folder, having checked that the files it names are there, and no others.

        Args:
          folder: The folder.
          job: Its job.
          or_stopped: Whether the shards that a sequential calibration has counted will do, to be looked at. Others may
            be there then.

        Raises:
          GenerationsError: If decoding did not finish there, or files are missing, or left over.
        """
        path, stopped = joined(folder, COMPLETE), joined(folder, STOPPED)
        is_stopped = not is_file(path) and is_file(stopped)
        if is_stopped and not or_stopped:
            raise GenerationsError(
                f"{folder}: a sequential calibration stopped there when it had proved enough, so its losses have "
                "decided which examples are there. Other tests of them would prove nothing. Go on with that "
                "calibration with --resume, without a rule to stop, or decode anew."
            )
        if is_stopped:
            path = stopped
        elif not is_file(path):
            raise GenerationsError(
                f"{folder}: has no {COMPLETE}, so decoding did not finish there. Repeat that run with --resume first."
            )
        content = _read(path)
        try:
            finished = cls(job=content["job"], shards=tuple(StoredShard(**shard) for shard in content["shards"]))
            numbers = [shard.shard for shard in finished.shards]
            is_sound = finished.examples == content["examples"] and len(set(numbers)) == len(numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise GenerationsError(
                f"{path}: is not as calm-beam writes it ({type(error).__name__}: {error})."
            ) from error
        if not is_sound or finished.job != job.digest():
            raise GenerationsError(f"{path}: does not fit to {JOB} beside it, or to itself.")
        if not is_stopped:
            check_files(folder, numbers, num_shards=job.num_shards)
        found = set(shard_files(folder))
        missing = [name for name in numbers if shard_path(folder, name, num_shards=job.num_shards) not in found]
        if missing:
            raise GenerationsError(
                f"{folder}: {counted(len(missing), 'shard has no file', several='shards have no files')}, shard "
                f"{missing[0]} first."
            )
        return finished


def check_one_engine(folder: str, engine: str) -> None:
    """Refuses to decode into a folder by another engine than has decoded a shard that is there.

    Args:
      folder: Of the generations.
      engine: As in `StoredShard`.

    Raises:
      GenerationsError: If it is another one.
    """
    for path in shard_files(folder)[:1]:
        other = stored_shard(path).engine
        if other is not None and other != engine:
            raise GenerationsError(_mixed(other, engine))


def _mixed(one: str, other: str) -> str:
    return (
        f"some of the workers decode by {one}, others by {other}: outputs of two engines are never mixed. Take workers "
        "with one kind of processor (on Dataflow, --machine_type of one generation or --min_cpu_platform), and decode "
        "anew."
    )


def shard_path(folder: str, shard: int, *, num_shards: int) -> str:
    """Returns the file of a shard."""
    return joined(folder, f"generations-{shard:05d}-of-{num_shards:05d}.parquet")


def shard_files(folder: str) -> tuple[str, ...]:
    """Returns the files of shards that are in a folder, whatever they hold."""
    return list_files(joined(glob.escape(folder), "*.parquet"))


def check_files(folder: str, shards: Iterable[int], *, num_shards: int) -> None:
    """Refuses a folder that holds files of other shards than these.

    Raises:
      GenerationsError: If it does: what is left over is of other data.
    """
    expected = {shard_path(folder, shard, num_shards=num_shards) for shard in shards}
    strange = [path for path in shard_files(folder) if path not in expected]
    if strange:
        raise GenerationsError(
            f"{strange[0]}: the data have no example for this file, so it was decoded from other data. Restore the "
            "data, or decode anew with --overwrite."
        )


def shard_digest(job: str, shard: int, *, examples: Sequence[Example]) -> str:
    """Returns `sha256:` and 64 digits: equal for the same examples of the same job.

    Args:
      job: Digest of the job.
      shard: Number of the shard.
      examples: Its examples, in the order in which they are counted.
    """
    content = json.dumps([job, shard, [_as_list(example) for example in examples]])
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


def _as_list(example: Example) -> list[Any]:
    fields = dict(zip(_FIELDS, dataclasses.astuple(example), strict=True))
    group, repeats_prompt = fields.pop("group"), fields.pop("repeats_prompt")
    # Only where they are told: shards of earlier versions know nothing of them.
    return [
        *fields.values(),
        *([repeats_prompt] if repeats_prompt else []),
        *([{"group": group}] if group is not None else []),
    ]


def _read(path: str) -> dict[str, Any]:
    return read_sealed(path, schema=_SCHEMA, kind=GenerationsError, of="generations", again="Decode anew")
