"""The metric: scores of pairs, one at a time, so that no score depends on a batch."""

import functools
import pathlib
import threading
from collections.abc import Sequence

import numpy as np

from calm_beam.metrics.best_reference import best_over_references
from calm_beam.metrics.sight import Sight, Sighted

from .checkpoint import BleurtConfig, BleurtModel, checkpoint_fingerprint, load_model, local_checkpoint
from .encoding import Encoder

_SHORTEST = 32


class Bleurt(Sighted):
    """BLEURT by one checkpoint, on the CPU, clipped to [0, 1]; threads may share it.

    A pair is scored alone, at the smallest of a few lengths that holds it (32, 64, 128, ... tokens; or at the only one
    that the model takes). Scores in a batch change in their last bits with its size, and a threshold can hang on those;
    on a CPU a batch of these models takes as long as its pairs one after the other.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Loads a checkpoint.

        Args:
          folder: As published: `bleurt_config.json`, `saved_model.pb`, `variables/` and a vocabulary.

        Raises:
          BleurtError: If it cannot be read, or is none.
          MissingExtraError: If the extra `bleurt` is not installed.
        """
        config = BleurtConfig.read(folder)
        self.name = config.name
        self._encoder = Encoder.of(config)
        self._model = load_model(config)
        self._lengths = _lengths(self._model, config.max_seq_length)
        self._lock = threading.Lock()
        self._clipped = 0
        # A model that loads may still not run.
        self._predict([self._encoder.cls_id], [0])

    def __call__(self, candidate: str, references: Sequence[str]) -> float:
        """Returns the score of the candidate, best over references.

        Args:
          candidate: The text to score.
          references: At least one text.

        Returns:
          A score in [0, 1]. Identical texts score 1, where BLEURT itself gives them somewhat less: else the full model
          would not be consistent with itself. An empty text is scored as any other against a text of which the
          vocabulary knows something.

        Raises:
          TypeError: If `references` is a single string.
          ValueError: If `references` is empty.
        """
        return best_over_references(self._clipped_score, candidate, references=references, sight=self.sight)

    @property
    def sight(self) -> Sight:
        """Pieces that the vocabulary knows."""
        return Sight(tokens=self._encoder.known)

    def score(self, *, reference: str, candidate: str) -> float:
        """Returns what the model predicts for a pair of texts, unclipped."""
        return self._predict(*self._encoder.encode(reference=reference, candidate=candidate))

    def take_clipped(self) -> int:
        """Returns how many scores have lain outside [0, 1] since this was last asked."""
        with self._lock:
            count, self._clipped = self._clipped, 0
        return count

    def _clipped_score(self, candidate: str, reference: str) -> float:
        if candidate == reference:
            return 1.0
        score = self.score(reference=reference, candidate=candidate)
        if score < 0 or score > 1:
            with self._lock:
                self._clipped += 1
            return min(max(score, 0.0), 1.0)
        # NaN too: the caller refuses it, and names the example.
        return score

    def _predict(self, ids: Sequence[int], segments: Sequence[int]) -> float:
        length = next(length for length in self._lengths if length >= len(ids))
        # [1, length], padded with zeros.
        arrays = np.zeros((3, 1, length), np.int64)
        arrays[0, 0, : len(ids)] = ids
        arrays[1, 0, : len(ids)] = 1
        arrays[2, 0, : len(ids)] = segments
        return self._model.predict(arrays)


@functools.cache
def _locks(path: str) -> threading.Lock:
    return threading.Lock()


@functools.cache
def _loaded(path: str) -> tuple[Bleurt, str]:
    folder = local_checkpoint(path)
    return Bleurt(folder), checkpoint_fingerprint(folder)


def load_bleurt(path: str) -> tuple[Bleurt, str]:
    """Returns a checkpoint as a metric, and its fingerprint; one for all threads of a process.

    Args:
      path: Folder, local or on Cloud Storage.

    Raises:
      BleurtError: If it cannot be read, or is none.
      MissingExtraError: If the extra `bleurt` is not installed.
      OSError: If Cloud Storage cannot be read.
    """
    with _locks(path):
        return _loaded(path)


def _lengths(model: BleurtModel, longest: int) -> tuple[int, ...]:
    """Returns the lengths that pairs are padded to, ascending."""
    if model.length is not None:
        return (model.length,)
    lengths = []
    length = _SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, longest)
