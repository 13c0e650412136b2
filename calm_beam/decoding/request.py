"""What a decoder is asked for."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .branches import Branch
from .result import KnownOutput


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt that is to be decoded. Two requests are never equal, also of one prompt.

    Attributes:
      ids: Its tokens, 1 to `max_input_length` of them.
      branches: By which it is decoded, if not by the decoder's own: as many, of the same rules, at other thresholds.
      known: Its output at a threshold above all of these, or the beginning of every output: what branches have in
        common with it is not decided again. Of no use to rules that need the full model.
    """

    ids: Sequence[int]
    _: dataclasses.KW_ONLY
    branches: Sequence[Branch] | None = None
    known: KnownOutput | None = None

    def thresholds(self, usual: np.ndarray) -> np.ndarray:
        """Returns the thresholds of its branches, (steps, branches), given those of the decoder."""
        if self.branches is None:
            return usual
        return np.stack([branch.thresholds for branch in self.branches], axis=1)
