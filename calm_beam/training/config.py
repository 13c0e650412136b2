"""Settings of training runs, without JAX, since flags are made from them."""

import dataclasses
import math

from calm_beam.model.registry import USUAL_INPUT_LENGTH
from calm_beam.precision import Precision

OBJECTIVES = ("independent", "geometric")
"""Names of the objectives of the exit classifier."""

LAYER_WEIGHTS = ("linear", "uniform", "exponential")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Settings of Muon and Adam; the defaults train a new model of a few million weights.

    Attributes:
      muon_learning_rate: Peak rate of the layers' kernels.
      adam_learning_rate: Peak rate of everything else: embedding, head, norms, relative positions.
      warmup_steps: Steps over which the rates rise to their peak; at most a fifth of all steps is used. The rates then
        fall linearly to 0.
      clip_norm: Largest norm of the whole gradient.
      momentum: Nesterov momentum of Muon.
      newton_schulz_steps: Iterations that make a kernel's update orthogonal.
      adam_b1: Adam's decay of the mean gradient.
      adam_b2: Adam's decay of the mean squared gradient.
    """

    muon_learning_rate: float = 8e-3
    adam_learning_rate: float = 3e-3
    warmup_steps: int = 100
    clip_norm: float = 1.0
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    adam_b1: float = 0.9
    adam_b2: float = 0.98

    def __post_init__(self) -> None:
        for name in ("muon_learning_rate", "adam_learning_rate", "clip_norm"):
            _check_positive(name, getattr(self, name))
        for name in ("momentum", "adam_b1", "adam_b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}.")
        if self.newton_schulz_steps < 1:
            raise ValueError(f"newton_schulz_steps must be at least 1, got {self.newton_schulz_steps}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdafactorConfig:
    """Settings of Adafactor, which T5X and the paper use for fine-tuning.

    Second moments are factored, with decay 1 - t^-0.8 and no momentum; an update's root mean square is clipped to 1.

    Attributes:
      learning_rate: The same at every step, and relative: an array changes by at most about this share of its root
        mean square. The paper tried 1e-3 and 1e-4.
    """

    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive("learning_rate", self.learning_rate)


OptimizerConfig = MuonConfig | AdafactorConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of a training run.

    Attributes:
      steps: Optimiser steps; a run takes as many epochs as they need.
      batch_tokens: Tokens of a batch on its wider side, padding included.
      num_shapes: Most batch shapes, each of which is compiled once.
      max_input_length: Most tokens of a prompt, eos included; longer ones are refused.
      max_target_length: Most tokens of a target, its end token included; longer ones are cut.
      dropout_rate: Share of activations dropped, in [0, 1).
      layer_dropout: Share of rows that skip the last decoder layer, in [0, 1); lower layers are skipped less often; see
        `layer_dropout_rates`.
      layer_weights: Share of each decoder layer in the loss: `linear`, `uniform` or `exponential`.
      sampled_layers: Lower decoder layers whose loss a step computes in addition to the last, drawn again for each
        step so that the loss is unbiased; 0 computes all.
      rotating_layers: R, to compute the losses of every R-th lower layer in turn instead of a sample; 0 for a sample.
      label_smoothing: Probability, in [0, 1), that the loss moves from the target to all other ids.
      z_loss: Weight of the squared log-normalizer in the loss, at least 0.
      seed: Decides initial weights, batches, sampled layers and dropout.
      progress_every: Steps between two calls of the progress callback.
      validate_every: Steps between two validations; 0 validates only at the end.
      save_every: Steps between two states from which a run can resume; 0 saves none.
      optimizer: The optimiser's settings, which also select it.
      dtype: The model's compute type, `float32` or `bfloat16`. Weights, gradients and the optimiser's state are always
        float32.
      model_parallelism: Number of devices that share the model and the optimiser's state: the first of the process.
    """

    steps: int
    batch_tokens: int = 1500
    num_shapes: int = 6
    max_input_length: int = USUAL_INPUT_LENGTH
    max_target_length: int = 128
    dropout_rate: float = 0.1
    layer_dropout: float = 0.0
    layer_weights: str = "linear"
    sampled_layers: int = 2
    rotating_layers: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    seed: int = 0
    progress_every: int = 10
    validate_every: int = 0
    save_every: int = 0
    optimizer: OptimizerConfig = dataclasses.field(default_factory=MuonConfig)
    dtype: str = "float32"
    model_parallelism: int = 1

    def __post_init__(self) -> None:
        # Validates the type.
        Precision(dtype=self.dtype)
        for name in ("steps", "batch_tokens", "num_shapes", "progress_every", "model_parallelism"):
            self._check_at_least(1, name)
        for name in ("max_input_length", "max_target_length"):
            self._check_at_least(2, name, meaning=" (one token and eos)")
        for name in ("sampled_layers", "rotating_layers", "seed", "validate_every", "save_every"):
            self._check_at_least(0, name)
        for name in ("dropout_rate", "layer_dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must be at least 0 and finite, got {self.z_loss}.")
        if self.layer_weights not in LAYER_WEIGHTS:
            raise ValueError(f"layer_weights must be one of {', '.join(LAYER_WEIGHTS)}; got {self.layer_weights!r}.")

    def _check_at_least(self, least: int, name: str, *, meaning: str = "") -> None:
        if getattr(self, name) < least:
            raise ValueError(f"{name} must be at least {least}{meaning}, got {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Settings of the training of an exit classifier.

    Attributes:
      steps: Training batches, at most an epoch. Their states are held in memory: about
        `batch_tokens` * (layers - 1) * width * 4 bytes each.
      batch_tokens: Tokens of a batch on its wider side, padding included.
      num_shapes: Most batch shapes, each of which is compiled once.
      max_input_length: Most tokens of a prompt, eos included; longer ones are refused.
      max_target_length: Most tokens of a target, its end token included; longer ones are cut.
      objective: `independent` (every layer separately) or `geometric` (up to the first layer that agrees).
      balance_classes: Whether both classes have equal total weight within each batch and layer.
      num_logits: 2 as the released T5X code has it, or 1: the d + 1 weights of the paper. Scores are the same.
      stored_dtype: Type in which the classifier is stored, `float32` or `float16`; it is rounded before validation.
      seed: Decides the choice of batches.
      dtype: The model's compute type, `float32` or `bfloat16`; the classifier learns from these states.
      model_parallelism: Number of devices that share the model: the first of the process.
    """

    steps: int = 100
    batch_tokens: int = 1500
    num_shapes: int = 6
    max_input_length: int = USUAL_INPUT_LENGTH
    max_target_length: int = 128
    objective: str = "independent"
    balance_classes: bool = False
    num_logits: int = 2
    stored_dtype: str = "float32"
    seed: int = 0
    dtype: str = "float32"
    model_parallelism: int = 1

    def __post_init__(self) -> None:
        # Validates the type.
        Precision(dtype=self.dtype)
        for name in ("steps", "batch_tokens", "num_shapes", "model_parallelism"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("max_input_length", "max_target_length"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2 (one token and eos), got {getattr(self, name)}.")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}.")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}; got {self.objective!r}.")
        if self.balance_classes and self.objective != "independent":
            raise ValueError(
                f"balance_classes needs objective independent, got {self.objective}: leave one of them out."
            )
        if self.num_logits not in (1, 2):
            raise ValueError(f"num_logits must be 1 or 2, got {self.num_logits}.")


def _check_positive(name: str, value: float) -> None:
    # Written so that NaN fails too.
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {value}.")
