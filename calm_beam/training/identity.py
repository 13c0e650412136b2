"""The identity of a training run: settings and data that must not change when it resumes."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from calm_beam.checkpoints import Arrays, fingerprint
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID
from calm_beam.model import ModelConfig
from calm_beam.training.validation import GenerationScore

from .batches import Pair
from .config import TrainingConfig

# They change what is reported and stored, but no weight.
_WATCHING = ("progress_every", "save_every")


def identify_run(
    config: TrainingConfig,
    model_config: ModelConfig,
    *,
    pairs: Sequence[Pair],
    validation_pairs: Sequence[Pair],
    end_id: int,
    initial: Arrays | None,
    score: GenerationScore | None,
) -> dict[str, str]:
    """Returns everything that decides the weights a run ends with, by name; arguments as those of `train`."""
    settings = dataclasses.asdict(config)
    for name in _WATCHING:
        del settings[name]
    # Options that are off are omitted, as in older states. With more devices, sums are rounded in another order.
    for name, off in (("model_parallelism", 1), ("layer_dropout", 0.0), ("rotating_layers", 0)):
        if settings[name] == off:
            del settings[name]
    settings |= {"optimizer": type(config.optimizer).__name__, **settings["optimizer"]}
    settings |= {f"model {name}": value for name, value in dataclasses.asdict(cast(Any, model_config)).items()}
    for name in ("model exit_norms", "model exit_heads"):
        if not settings[name]:
            del settings[name]
    settings["training data"] = _digest(pairs)
    settings["validation data"] = _digest(validation_pairs)
    if end_id != EOS_ID:
        # T5's end, which older states do not name either.
        settings["end of targets"] = end_id
    settings["initial weights"] = "new" if initial is None else fingerprint(initial)
    settings["best by"] = "loss" if score is None else score.name
    return {name: str(value) for name, value in settings.items()}


def _digest(pairs: Sequence[Pair]) -> str:
    """Returns the number of pairs, and a digest of them in their order."""
    digest = hashlib.sha256()
    for pair in pairs:
        for side in pair:
            digest.update(len(side).to_bytes(8, "little") + np.asarray(side, "<i4").tobytes())
    return f"{len(pairs)} pairs, {digest.hexdigest()[:16]}"
