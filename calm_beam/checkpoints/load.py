"""Finding out which layout a folder has, and reading it."""

import dataclasses
import pathlib

import numpy as np

from calm_beam.model import T5Config, infer_config
from calm_beam.storage import is_cloud_path

from .checkpoint import Checkpoint, CheckpointError
from .cloud import STEP, VOCABULARIES, fetch_model
from .hugging_face import is_hugging_face, read_hugging_face
from .native import read_native
from .orbax import find_item, read_orbax
from .scanned import unstack_layers
from .t5x import read_t5x


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model that is in a folder, before it is read.

    Attributes:
      layout: `native`, `hugging_face`, `t5x` or `orbax`.
      directory: The folder that holds it.
      step: The training step that this folder is named by, or None.
    """

    layout: str
    directory: pathlib.Path
    step: int | None


def find_model(directory: pathlib.Path) -> FoundModel | None:
    """Returns which model `load_checkpoint` reads in a folder that exists, or None if there is none."""
    if (directory / "config.json").is_file():
        layout = "hugging_face" if is_hugging_face(directory) else "native"
        return FoundModel(layout=layout, directory=directory, step=None)
    steps = [found for child in directory.iterdir() if (found := _find_step(child)) and found.step is not None]
    return _find_step(directory) or max(steps, key=lambda found: found.step or 0, default=None)


def load_checkpoint(path: str | pathlib.Path) -> Checkpoint:
    """Returns the model in a folder, whatever its layout.

    Args:
      path: A native folder, one of Hugging Face's, a step's folder of T5X or Orbax, or a folder of those, of which the
        latest is read; local, or on Cloud Storage, of which a local copy is kept.

    Returns:
      The weights as float32, checked against the sizes inferred from them.

    Raises:
      CheckpointError: If there is no model, it is damaged, or its arrays are not those of a T5 encoder-decoder.
      OSError: If Cloud Storage cannot be read.
    """
    if is_cloud_path(path):
        fetched = fetch_model(str(path))
        try:
            checkpoint = load_checkpoint(fetched.directory)
        except CheckpointError as error:
            # The user knows nothing of copies.
            raise CheckpointError(str(error).replace(str(fetched.root), fetched.cloud_root)) from error
        vocabulary = checkpoint.vocabulary_path
        return dataclasses.replace(
            checkpoint,
            cloud_directory=fetched.cloud_path(checkpoint.directory),
            cloud_vocabulary=fetched.cloud_path(vocabulary) if vocabulary else None,
        )
    # Absolute, since workers have folders of their own and TensorStore takes no other.
    directory = pathlib.Path(path).resolve()
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint {path}: no such directory.")
    found = find_model(directory)
    if found is None:
        names = ", ".join(sorted(child.name for child in directory.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"checkpoint {path}: no model here. Expected config.json with model.safetensors (native or Hugging Face), "
            f"checkpoint_<step>/checkpoint (T5X) or checkpoint_<step> with _METADATA in it (Orbax); found {names}."
        )
    try:
        stored_config, arrays = _read(found)
        config = infer_config({name: array.shape for name, array in arrays.items()})
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"checkpoint {found.directory}: {error}") from error
    if stored_config is not None:
        # The only size that no shape shows.
        config = dataclasses.replace(config, relative_max_distance=stored_config.relative_max_distance)
    if stored_config not in (None, config):
        raise CheckpointError(
            f"checkpoint {found.directory}: config.json says {stored_config}, the arrays are of {config}."
        )
    return Checkpoint(
        config=config,
        arrays=arrays,
        directory=found.directory,
        vocabulary_path=_find_vocabulary(found),
        layout=found.layout,
        step=found.step,
    )


def _find_step(directory: pathlib.Path) -> FoundModel | None:
    """Returns the model in the folder of one training step."""
    match = STEP.fullmatch(directory.name)
    step = int(match.group(1)) if match else None
    if find_item(directory) is not None:
        return FoundModel(layout="orbax", directory=directory, step=step)
    if (directory / "checkpoint").is_file():
        return FoundModel(layout="t5x", directory=directory, step=step)
    return None


def _read(found: FoundModel) -> tuple[T5Config | None, dict[str, np.ndarray]]:
    """Returns the stored config, where there is one, and the arrays."""
    if found.layout == "native":
        return read_native(found.directory)
    if found.layout == "hugging_face":
        return read_hugging_face(found.directory)
    if found.layout == "t5x":
        return None, unstack_layers(read_t5x(found.directory))
    item = find_item(found.directory)
    assert item is not None
    return None, unstack_layers(read_orbax(item))


def _find_vocabulary(found: FoundModel) -> pathlib.Path | None:
    folders = [found.directory]
    if found.layout in ("t5x", "orbax"):
        # Shared by the steps of a run.
        folders.append(found.directory.parent)
    paths = [folder / name for folder in folders for name in VOCABULARIES]
    return next((path for path in paths if path.is_file()), None)
