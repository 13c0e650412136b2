"""What exits have of their own, in a file beside the model's, which transformers does not read."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from calm_beam.checkpoints.error import CheckpointError
from calm_beam.checkpoints.metadata import shortened
from calm_beam.checkpoints.safetensors_files import read_safetensors
from calm_beam.checkpoints.stored import StoredModel
from calm_beam.checkpoints.stored_array import StoredArrays
from calm_beam.model import parameter_shapes
from calm_beam.model.exit_parameters import exit_fields

EXITS = "calm_beam_exits.safetensors"
_CLASSIFIER = "decoder/meta_cls/kernel"


def without_exits(config: Any) -> Any:
    """Returns the config of a model without norms and heads of exits, and without a classifier."""
    return dataclasses.replace(config, exit_classifier=0, exit_norms=False, exit_heads=False)


def with_exits(directory: pathlib.Path, model: StoredModel, *, keeps: Callable[[str], bool]) -> StoredModel:
    """Returns a model with what the file beside it holds; itself if there is none.

    Args:
      directory: Folder of the model.
      model: What transformers' own files say.
      keeps: Which arrays to read, by name.

    Raises:
      CheckpointError: If the file is damaged, or holds something else.
      ValueError: If some exits lack what others have.
    """
    path = directory / EXITS
    if not path.is_file():
        return model
    found = read_safetensors(path, keeps=keeps)
    shapes = {name: array.shape for name, array in found.items()}
    own = exit_fields(shapes, model.config.num_decoder_layers)
    classifier = shapes.get(_CLASSIFIER, (0,))[-1]
    config = dataclasses.replace(model.config, exit_classifier=classifier, **own)
    unknown = sorted(found.keys() - (parameter_shapes(config).keys() - parameter_shapes(model.config).keys()))
    if unknown:
        raise CheckpointError(f"{path}: unknown {shortened(unknown[0])}; expected norms and heads of exits.")
    return dataclasses.replace(
        model,
        config=config,
        arrays=StoredArrays({**model.arrays, **found}, (*model.arrays.stamps, *found.stamps)),
    )
