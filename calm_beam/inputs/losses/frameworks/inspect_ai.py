"""Inspect: logs in `.eval` (a ZIP file with a member for each sample) or `.json`."""

import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.examples import check_row_size
from calm_beam.inputs.losses.tables import name_of
from calm_beam.risk.testing import LossesError
from calm_beam.storage import open_input, strict_json

from .example import ScoredExample, cluster_of, digest_of_asked

_HEADER, _SAMPLES = "header.json", "samples/"
_ZIP = b"PK"
_ZSTANDARD = 93
# The methods that Inspect writes. Others are refused: their decoders take as much memory as a file asks for.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, _ZSTANDARD)
_ENCRYPTED = 1
_LOCAL_HEADER = 30
_BEGINNING = 4096
# Inspect's own values of its grades: correct, incorrect, partly correct, no answer.
_CORRECTNESS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_GRADES = {**_CORRECTNESS, "yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}
_ATTACHMENT = "attachment://"


class InspectAi:
    """Samples with their scores by scorer; if a scorer gives several, they are called `SCORER/NAME`."""

    name = "inspect"
    files: tuple[str, ...] = ("*.eval", "*.json")

    def is_of(self, path: str) -> bool:
        """Returns whether the file is a ZIP file named `.eval`, or JSON that begins like a log."""
        with open_input(path) as file:
            beginning = file.read(_BEGINNING)
        if path.endswith(".eval"):
            return beginning.startswith(_ZIP)
        return path.endswith(".json") and all(key in beginning for key in (b'"version"', b'"status"', b'"eval"'))

    def task(self, path: str) -> str:
        """Returns the task in the log's header."""
        task = _part(_log(path), "eval", path=path).get("task")
        return task if isinstance(task, str) and task else path

    def higher_is_better(self, path: str, metric: str) -> bool | None:
        """Returns None: Inspect does not write which scores are better, but grades of samples may show it."""
        return None

    def examples(self, path: str, *, cluster_key: str | None = None) -> Iterator[ScoredExample]:
        """Yields the samples; refuses a log that did not succeed, was invalidated, or lacks samples."""
        log = _log(path)
        status = log.get("status")
        if status != "success":
            raise LossesError(
                f"{path}: the evaluation's status is {status!r:.80}, so samples may be missing. Finish it (inspect "
                "eval-retry)."
            )
        if log.get("invalidated"):
            raise LossesError(f"{path}: the log was invalidated, as its header says. {_INVALIDATED}")
        number = 0
        for number, sample in enumerate(_samples(log, path), start=1):
            yield self._example(sample, f"{path}, sample {number}", path=path, cluster_key=cluster_key)
        results = log.get("results")
        total = results.get("total_samples") if isinstance(results, dict) else None
        if isinstance(total, int) and not isinstance(total, bool) and total != number:
            raise LossesError(f"{path}: holds {number} samples, and its header counts {total}. Restore the whole log.")

    def _example(self, sample: object, where: str, *, path: str, cluster_key: str | None) -> ScoredExample:
        if not isinstance(sample, dict):
            raise LossesError(f"{where}: is not a sample of {self.name}.")
        name = name_of(sample.get("id"), "id", where=where)
        if sample.get("epoch", 1) != 1:
            raise LossesError(
                f"{path}: sample {name!r} has several epochs, which are not independent draws. Log one epoch, or "
                "write all losses to a file for --losses, with the sample as --cluster_key."
            )
        if sample.get("invalidation"):
            raise LossesError(f"{path}: sample {name!r} was invalidated. {_INVALIDATED}")
        scores = _scores(sample, where)
        return ScoredExample(
            id=name,
            scores={
                scorer: _GRADES.get(value, value) if isinstance(value, str) else value
                for scorer, value in scores.items()
            },
            content=_content(sample),
            cluster=None if cluster_key is None else cluster_of(sample, cluster_key, where=where),
            graded=frozenset(
                scorer for scorer, value in scores.items() if isinstance(value, str) and value in _CORRECTNESS
            ),
        )


_INVALIDATED = "Withdrawn samples prove nothing: run them again (inspect eval-retry)."


def _samples(log: Mapping[str, Any], path: str) -> Iterator[object]:
    if path.endswith(".eval"):
        return _members(path)
    samples = log.get("samples")
    if samples is not None and not isinstance(samples, list):
        raise LossesError(f"{path}: samples must be a list, got {samples!r:.80}.")
    return iter(samples or ())


def _scores(sample: Mapping[str, Any], where: str) -> dict[str, object]:
    """Returns the values of scores, as the log has them."""
    found = sample.get("scores")
    if found is not None and not isinstance(found, dict):
        raise LossesError(f"{where}: scores must be an object with a score for each scorer, got {found!r:.80}.")
    scores: dict[str, object] = {}
    for scorer, score in (found or {}).items():
        if score is not None and not isinstance(score, dict):
            raise LossesError(f"{where}: the score of {scorer} must be an object with a value, got {score!r:.80}.")
        value = (score or {}).get("value")
        if isinstance(value, dict):
            scores.update((f"{scorer}/{name}", part) for name, part in value.items())
        else:
            scores[scorer] = value
    return scores


def _content(sample: Mapping[str, Any]) -> str | None:
    """Returns a digest of input, choices and target; None if a log lacks them."""
    if "input" not in sample:
        return None
    attachments = sample.get("attachments")
    stored = attachments if isinstance(attachments, dict) else {}
    asked = sample["input"]
    if isinstance(asked, list):
        # The ids of messages differ between runs.
        asked = [
            [each.get("role"), _plain(each.get("content"), stored)] if isinstance(each, dict) else each
            for each in asked
        ]
    else:
        asked = _plain(asked, stored)
    target = sample.get("target")
    return digest_of_asked(asked, sample.get("choices"), target if isinstance(target, list) else [target])


def _plain(content: object, attachments: Mapping[str, object]) -> object:
    """Returns the content of a message: one text for a text or a list of one; attachments are inserted."""
    if isinstance(content, str):
        if content.startswith(_ATTACHMENT):
            return attachments.get(content.removeprefix(_ATTACHMENT), content)
        return content
    if isinstance(content, list):
        parts = [_plain(part, attachments) for part in content]
        return parts[0] if len(parts) == 1 else parts
    if isinstance(content, dict):
        # A text, a picture and so on is under the name of its type.
        kind = content.get("type")
        return _plain(content[kind], attachments) if isinstance(kind, str) and kind in content else content
    return content


def _part(log: Mapping[str, Any], key: str, *, path: str) -> Mapping[str, Any]:
    part = log.get(key)
    if not isinstance(part, dict):
        raise LossesError(f"{path}: is not a log of inspect, which has {key}.")
    return part


def _log(path: str) -> Mapping[str, Any]:
    """Returns a log, or the header of a log in a ZIP file."""
    with open_input(path) as raw:
        if not path.endswith(".eval"):
            return _loaded(raw.read(), path)
        return _loaded(_member(raw, _directory(raw, path).get(_HEADER), f"{path}, {_HEADER}"), path)


def _members(path: str) -> Iterator[object]:
    """Yields the samples of a ZIP file."""
    with open_input(path) as raw:
        for name, member in _directory(raw, path).items():
            if name != _HEADER:
                yield _loaded(_member(raw, member, f"{path}, {name}"), f"{path}, {name}")


def _directory(raw: BinaryIO, path: str) -> dict[str, zipfile.ZipInfo]:
    """Returns the header and samples of a ZIP file, by name.

    Raises:
      LossesError: If it is damaged, or has two members with one name.
    """
    try:
        with zipfile.ZipFile(raw) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OverflowError, ValueError, struct.error, OSError) as error:
        _raise_of_disk(error)
        raise LossesError(f"{path}: damaged ZIP data ({error}).") from error
    members = [member for member in members if member.filename.startswith(_SAMPLES) or member.filename == _HEADER]
    found = {member.filename: member for member in members}
    if len(found) < len(members):
        raise LossesError(f"{path}: has two members of one name. Restore the log, or run the evaluation again.")
    return found


def _member(raw: BinaryIO, member: zipfile.ZipInfo | None, where: str) -> bytes:
    """Returns the content of a member of a ZIP file, after verifying its checksum."""
    if member is None:
        raise LossesError(f"{where}: is not there, so that this is not a whole log of inspect.")
    try:
        # Both sizes come from the file and decide how many bytes are read.
        check_row_size(max(member.file_size, member.compress_size), where)
        if member.flag_bits & _ENCRYPTED:
            raise zipfile.BadZipFile("it is encrypted: write it again without a password")
        if member.compress_type not in _METHODS:
            raise zipfile.BadZipFile(f"it is compressed by method {member.compress_type}, which Inspect does not use")
        return _content_of(raw, member)
    except CalmBeamError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OverflowError, OSError) as error:
        _raise_of_disk(error)
        raise LossesError(f"{where}: is not a whole log of inspect ({error}).") from error


def _raise_of_disk(error: Exception) -> None:
    """Raises an error of the disk again; an impossible offset is an error of the file's content instead."""
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise error


def _content_of(raw: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """Returns the content of a member.

    Python's zipfile reads Zstandard only from 3.14 on, so members are unpacked here.
    """
    raw.seek(member.header_offset)
    header = raw.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or not header.startswith(_ZIP):
        raise zipfile.BadZipFile(f"nothing begins at {member.header_offset}, where the directory says")
    # The data follow a header of fixed size, which ends with the lengths of name and extra field, and these two.
    raw.seek(sum(struct.unpack("<26xHH", header)), os.SEEK_CUR)
    packed = raw.read(member.compress_size)
    content = _unpacked(packed, member)
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile(f"bad CRC-32 for {member.filename}")
    return content


def _unpacked(packed: bytes, member: zipfile.ZipInfo) -> bytes:
    """Returns at most as many bytes as the directory says."""
    if member.compress_type == zipfile.ZIP_STORED:
        return packed
    if member.compress_type == zipfile.ZIP_DEFLATED:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, member.file_size + 1)
    # Imported here because it is slow to import.
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.BufferReader(packed), "zstd") as stream:
        content: bytes = stream.read(member.file_size)
    return content


def _loaded(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        value = strict_json.loads(content, constants_allowed=True)
    except strict_json.StrictJSONError as error:
        raise LossesError(f"{where}: {error}.") from error
    if not isinstance(value, dict):
        raise LossesError(f"{where}: expected an object.")
    return value
