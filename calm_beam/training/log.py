"""The log of a training: a row for every report of its loop."""

import contextlib
import json
import os
import pathlib
import time
from typing import Any

from calm_beam.storage import replacing, writing

from .train import Progress


class TrainingLog:
    """A JSONL file with a row for every report: what people plot."""

    def __init__(self, path: pathlib.Path, *, after_step: int) -> None:
        """Prepares a log, and touches nothing.

        Args:
          path: The file.
          after_step: The last step of an earlier process, whose rows up to there are kept; 0 starts a new log.
        """
        self._path = path
        self._after_step = after_step
        self._earlier_seconds = 0.0
        self._start = 0.0
        self.has_begun = False

    def begin(self) -> None:
        """Makes the file, with its folder if needed, or drops the rows of an earlier one that are made again."""
        self.has_begun = True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in _read_rows(self._path) if row["step"] <= self._after_step]
        with replacing(self._path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self._earlier_seconds = kept[-1]["seconds"] if kept else 0.0
        self._start = time.monotonic()

    def append(self, progress: Progress) -> None:
        """Adds a row."""
        row: dict[str, Any] = {
            "step": progress.step,
            "loss": progress.loss,
            "target_tokens": progress.target_tokens,
            "seconds": round(self._earlier_seconds + time.monotonic() - self._start, 3),
        }
        if progress.validation is not None:
            row["validation_losses"] = progress.validation.losses
            if progress.validation.score is not None:
                row["validation_score"] = progress.validation.score
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def move_to(self, path: pathlib.Path) -> None:
        """Moves the file to its final place, and deletes its folder if nothing else is in it."""
        os.replace(self._path, path)
        self._remove_folder()

    def delete(self) -> None:
        """Deletes the file, and its folder if nothing else is in it."""
        self._path.unlink(missing_ok=True)
        self._remove_folder()

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            self._path.parent.rmdir()


def _read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    # A process that was killed may have written half of its last row.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
