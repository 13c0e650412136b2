"""Inspect: logs in `.eval` (a ZIP file with a member for each sample) or `.json`."""

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from calm_beam import strict_json
from calm_beam.examples import check_row_size
from calm_beam.risk.setting_sums import LossesError
from calm_beam.storage import open_input

from ..rows import name_of
from .example import ScoredExample

_HEADER, _SAMPLES = "header.json", "samples/"
_ZIP = b"PK"
_ZSTANDARD = 93
_LOCAL_HEADER = 30
_BEGINNING = 4096
# What Inspect itself makes of them.
_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0, "yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}


class InspectAi:
    """Samples with their scores by scorer; those of a scorer that gives several are called `SCORER/NAME`."""

    name = "inspect"
    files: tuple[str, ...] = ("*.eval", "*.json")

    def is_of(self, path: str) -> bool:
        """Returns whether the file is a ZIP file of this name, or JSON that begins as a log does."""
        with open_input(path) as file:
            beginning = file.read(_BEGINNING)
        if path.endswith(".eval"):
            return beginning.startswith(_ZIP)
        return path.endswith(".json") and all(key in beginning for key in (b'"version"', b'"status"', b'"eval"'))

    def task(self, path: str) -> str:
        """Returns what the log's header says."""
        task = _part(_log(path), "eval", path=path).get("task")
        return task if isinstance(task, str) else path

    def examples(self, path: str) -> Iterator[ScoredExample]:
        """Yields the samples; a log of an evaluation that did not succeed lacks some, and is refused."""
        log = _log(path)
        status = log.get("status")
        if status != "success":
            raise LossesError(
                f"{path}: the evaluation's status is {status!r}, so samples may be missing. Finish it (inspect "
                "eval-retry)."
            )
        for number, sample in enumerate(_members(path) if path.endswith(".eval") else log.get("samples") or (), 1):
            where = f"{path}, sample {number}"
            if not isinstance(sample, dict):
                raise LossesError(f"{where}: is not a sample of {self.name}.")
            name = name_of(sample.get("id"), "id", where=where)
            if sample.get("epoch", 1) != 1:
                raise LossesError(
                    f"{path}: sample {name!r} has several epochs, which are not independent draws. Log one epoch, or "
                    "write all losses to a file for --losses, with the sample as --cluster_key."
                )
            yield ScoredExample(id=name, scores=_scores(sample))


def _scores(sample: Mapping[str, Any]) -> dict[str, object]:
    scores: dict[str, object] = {}
    for scorer, score in (sample.get("scores") or {}).items():
        value = score.get("value") if isinstance(score, dict) else None
        if isinstance(value, dict):
            scores.update((f"{scorer}/{name}", _number(part)) for name, part in value.items())
        else:
            scores[scorer] = _number(value)
    return scores


def _number(value: object) -> object:
    return _GRADES.get(value, value) if isinstance(value, str) else value


def _part(log: Mapping[str, Any], key: str, *, path: str) -> Mapping[str, Any]:
    part = log.get(key)
    if not isinstance(part, dict):
        raise LossesError(f"{path}: is not a log of inspect, which has {key}.")
    return part


def _log(path: str) -> Mapping[str, Any]:
    """Returns a log, or the header of one in a ZIP file."""
    return _loaded(_member(path, _HEADER) if path.endswith(".eval") else _whole(path), path)


def _whole(path: str) -> bytes:
    with open_input(path) as file:
        return file.read()


def _members(path: str) -> Iterator[object]:
    """Yields the samples of a ZIP file."""
    with open_input(path) as raw:
        names = [name for name in _opened(raw, path).namelist() if name.startswith(_SAMPLES)]
    for name in names:
        yield _loaded(_member(path, name), f"{path}, {name}")


def _opened(raw: Any, path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(raw)
    except zipfile.BadZipFile as error:
        raise LossesError(f"{path}: damaged ZIP data ({error}).") from error


def _member(path: str, name: str) -> bytes:
    with open_input(path) as raw, _opened(raw, path) as archive:
        try:
            member = archive.getinfo(name)
            check_row_size(member.file_size, f"{path}, {name}")
            return _zstandard(raw, member) if member.compress_type == _ZSTANDARD else archive.read(name)
        except (KeyError, NotImplementedError, OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                # Of the disk, and not of what is on it.
                raise
            raise LossesError(f"{path}: is not a whole log of inspect ({error}).") from error


def _zstandard(raw: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """Returns the content of a member that is compressed as Python's zipfile learns to read in 3.14 only."""
    # Here, since importing it takes long.
    import pyarrow

    # Before the data: a header of fixed size that ends with the lengths of name and extra field, and these two.
    raw.seek(member.header_offset)
    lengths = struct.unpack("<26xHH", raw.read(_LOCAL_HEADER))
    raw.seek(sum(lengths), os.SEEK_CUR)
    compressed = pyarrow.BufferReader(raw.read(member.compress_size))
    with pyarrow.CompressedInputStream(compressed, "zstd") as stream:
        content: bytes = stream.read(member.file_size)
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile(f"bad CRC-32 for {member.filename}")
    return content


def _loaded(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        value = strict_json.loads(content, constants_allowed=True)
    except (strict_json.StrictJSONError, json.JSONDecodeError) as error:
        raise LossesError(f"{where}: {error}.") from error
    if not isinstance(value, dict):
        raise LossesError(f"{where}: expected an object.")
    return value
