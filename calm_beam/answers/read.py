"""Reading answers back."""

from collections.abc import Iterator
from typing import Any

from calm_beam.storage import absolute

from .finished import FinishedAnswers
from .job import AnswerJob
from .paths import shard_path
from .shards import AnswersError, answer_rows, stored_answers


def read_answers(directory: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of all answers of a run that has finished, by shard and id: the same as its files hold.

    Args:
      directory: Its output folder.

    Raises:
      AnswersError: If answering did not finish there, or a shard is missing, damaged or not the one that was finished.
      OSError: If a file cannot be read.
    """
    folder = absolute(directory)
    job = AnswerJob.read(folder)
    for finished in FinishedAnswers.read(folder, job=job.digest()).shards:
        path = shard_path(folder, finished.shard, job=job)
        if stored_answers(path).digest != finished.digest:
            raise AnswersError(f"{path}: is not the shard that was finished.")
        yield from answer_rows(path)
