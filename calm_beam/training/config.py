"""Settings of a training run."""

import dataclasses
import math

from .objective import LAYER_WEIGHTS
from .optimizer import MuonConfig, OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of a training run.

    Attributes:
      steps: Optimiser steps; as many epochs as they need.
      batch_tokens: Tokens of a batch on its wider side, padding included.
      num_shapes: Most batch shapes, each of which is compiled once.
      max_input_length: Most source tokens, eos included; longer sources are cut.
      max_target_length: Most target tokens, eos included; longer targets are cut.
      dropout_rate: Share of activations dropped, in [0, 1).
      layer_weights: Share of each decoder layer in the loss: `linear`, `uniform` or `exponential`.
      sampled_layers: Lower decoder layers whose loss a step computes beside the last, drawn anew for each step so that
        the loss is unbiased; 0 computes all.
      label_smoothing: Probability, in [0, 1), that the loss moves from the target to all other ids.
      z_loss: Weight of the squared log-normalizer in the loss, at least 0.
      seed: Decides initial weights, batches, sampled layers and dropout.
      progress_every: Steps between two calls of the progress callback.
      validate_every: Steps between two validations; 0 validates only at the end.
      save_every: Steps between two states that a run can be taken up from; 0 saves none.
      optimizer: Which one, with its rates.
    """

    steps: int
    batch_tokens: int = 1500
    num_shapes: int = 6
    max_input_length: int = 128
    max_target_length: int = 128
    dropout_rate: float = 0.1
    layer_weights: str = "linear"
    sampled_layers: int = 2
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    seed: int = 0
    progress_every: int = 10
    validate_every: int = 0
    save_every: int = 0
    optimizer: OptimizerConfig = dataclasses.field(default_factory=MuonConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "num_shapes", "progress_every"):
            self._check_at_least(1, name)
        for name in ("max_input_length", "max_target_length"):
            self._check_at_least(2, name, meaning=" (one token and eos)")
        for name in ("sampled_layers", "seed", "validate_every", "save_every"):
            self._check_at_least(0, name)
        for name in ("dropout_rate", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must be at least 0 and finite, got {self.z_loss}.")
        if self.layer_weights not in LAYER_WEIGHTS:
            raise ValueError(f"layer_weights must be one of {', '.join(LAYER_WEIGHTS)}; got {self.layer_weights!r}.")

    def _check_at_least(self, least: int, name: str, *, meaning: str = "") -> None:
        if getattr(self, name) < least:
            raise ValueError(f"{name} must be at least {least}{meaning}, got {getattr(self, name)}.")
