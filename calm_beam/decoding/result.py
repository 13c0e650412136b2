"""What a sweep gives back for one prompt."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Outputs of one prompt in every lane; lane 0 is the full model, lane k the k-th threshold.

    Attributes:
      tokens: int32, shape (lanes, max_decode_length). 0 after the output's end; eos is part of the output.
      exit_layers: int32, shape of `tokens`. Layers used, counted from 1; 0 after the end.
      confidences: float32, shape of `tokens`. Confidence at the exit layer; 0 after the end. It is the
        last layer's in the full model's lane, and wherever a token went that far.
      lengths: int32, shape (lanes,). Number of tokens, eos included.
      is_finite: Whether all logits and confidences that were used are finite numbers.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    lengths: np.ndarray
    is_finite: bool
