"""Where the files of answers lie below an output folder."""

import glob
import re

from calm_beam.storage import base_name, joined, list_files

from .job import FORMATS, AnswerJob

COMPLETE = "complete.json"
FAILURES = "failures.jsonl"
PARTS = "parts"
"""Folder of the Parquet files, where users read others that are made of them."""

_STORED = "parquet"
_SHARD_NAME = re.compile(r"answers-\d{5,}-of-\d{5,}\.(parquet|jsonl\.gz)")


def shard_path(folder: str, shard: int, *, job: AnswerJob) -> str:
    """Returns the Parquet file of a shard: what is stored once, and says all that became of its prompts."""
    place = folder if job.output_format == _STORED else joined(folder, PARTS)
    return joined(place, f"{_name(shard, job)}.{FORMATS[_STORED]}")


def published_path(folder: str, shard: int, *, job: AnswerJob) -> str:
    """Returns the file of a shard that users read; the same, unless another format was asked for."""
    return joined(folder, f"{_name(shard, job)}.{FORMATS[job.output_format]}")


def losses_path(folder: str, calibration: int, *, job: AnswerJob) -> str:
    """Returns the file of losses about an entry of the manifest, by its place.

    The losses of one promise say nothing about another, so each has a file of its own: `losses.jsonl` is about the
    entry that answers prompts of no group.
    """
    return joined(folder, "losses.jsonl" if calibration == job.calibration else f"losses-{calibration:05d}.jsonl")


def shard_files(folder: str) -> list[str]:
    """Returns the files of shards that are in a folder, whatever they hold."""
    places = (folder, joined(folder, PARTS))
    found = [path for place in places for path in list_files(joined(glob.escape(place), "answers-*"))]
    return [path for path in found if _SHARD_NAME.fullmatch(base_name(path))]


def _name(shard: int, job: AnswerJob) -> str:
    return f"answers-{shard:05d}-of-{job.num_shards:05d}"
