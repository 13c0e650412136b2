"""Finding out which layout a folder has, and reading it."""

import dataclasses
import pathlib

from calm_beam.model import infer_config

from .checkpoint import Checkpoint, CheckpointError
from .native import read_native
from .t5x import latest_step_directory, read_t5x

_VOCABULARY = "sentencepiece.model"


def load_checkpoint(path: str | pathlib.Path) -> Checkpoint:
    """Returns the model in a folder, in T5X's layout or the native one.

    Args:
      path: A native folder, a T5X `checkpoint_<step>` folder, or a folder of those, of which the latest is read.

    Returns:
      The weights as float32, checked against the sizes inferred from them.

    Raises:
      CheckpointError: If there is no model, it is damaged, or its arrays are not those of a T5 1.1 encoder-decoder.
    """
    # Absolute, since workers have folders of their own and TensorStore takes no other.
    directory = pathlib.Path(path).resolve()
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint {path}: no such directory.")
    if (directory / "config.json").is_file():
        stored_config, arrays = read_native(directory)
        layout, parents = "native", [directory]
    elif (step := directory if (directory / "checkpoint").is_file() else latest_step_directory(directory)) is not None:
        stored_config, arrays = None, read_t5x(step)
        directory = step
        layout, parents = "t5x", [step, step.parent]
    else:
        found = ", ".join(sorted(child.name for child in directory.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"checkpoint {path}: no model here. Expected checkpoint_<step>/checkpoint (T5X) or config.json with "
            f"model.safetensors (native); found {found}."
        )
    try:
        config = infer_config({name: array.shape for name, array in arrays.items()})
    except ValueError as error:
        raise CheckpointError(f"checkpoint {directory}: {error}") from error
    if stored_config is not None:
        # The only size that no shape shows.
        config = dataclasses.replace(config, relative_max_distance=stored_config.relative_max_distance)
    if stored_config not in (None, config):
        raise CheckpointError(f"checkpoint {directory}: config.json says {stored_config}, the arrays are of {config}.")
    vocabulary = next((folder / _VOCABULARY for folder in parents if (folder / _VOCABULARY).is_file()), None)
    return Checkpoint(config=config, arrays=arrays, directory=directory, vocabulary_path=vocabulary, layout=layout)
