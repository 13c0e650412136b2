"""Models on Cloud Storage: a local copy of what their readers need, and no more.

A run's folder holds many steps, each with files of many gigabytes, and of Hugging Face's folders some hold the same
weights in three formats. So what to copy is decided by names alone; what it is, by the readers of local folders.
"""

import concurrent.futures
import dataclasses
import pathlib
import re
import shutil
from collections.abc import Iterable

from calm_beam.inputs.vocabularies.sentinels import SENTINEL_FILES
from calm_beam.inputs.vocabularies.tokenizer_files import TOKENIZER, TOKENIZER_FILES
from calm_beam.storage import base_name, cached_folder, joined, list_below, parent, replacing, stat

from .error import CheckpointError
from .maxtext import CONFIG, GENERATION
from .t5x_facts import GIN_FILE

# The second is Hugging Face's name for the same file; the last counts where there is neither.
VOCABULARIES = ("sentencepiece.model", "spiece.model", TOKENIZER)
# What the steps of a run share: vocabulary, its sentinels, and what T5X was configured with.
_BESIDE = tuple(dict.fromkeys((*VOCABULARIES, *TOKENIZER_FILES, *SENTINEL_FILES, GIN_FILE, CONFIG, GENERATION)))
# Folders of steps: T5X's, and the numbers alone that Orbax names them by.
STEP = re.compile(r"(?:checkpoint_)?(\d+)")

# Of the layouts that are written.
_LAST = ("config.json", "checkpoint")
_PARALLEL_UPLOADS = 8
# What is read of a native folder, or of Hugging Face's.
_SUFFIXES = (".json", ".safetensors", ".model", ".jinja")
# Files of which a step's folder has one: T5X's, or Orbax's, which may lie in an item below.
_MARKS = re.compile(r"(?:(?:state|default|params|items)/)?(?:_METADATA|checkpoint)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchedModel:
    """A model of which there is a local copy.

    Attributes:
      directory: The local folder that stands for the one that was named.
      root: The local folder above it.
      cloud_root: The `gs://` folder that `root` stands for.
    """

    directory: pathlib.Path
    root: pathlib.Path
    cloud_root: str

    def cloud_path(self, path: pathlib.Path) -> str:
        """Returns what a local path stands for."""
        return joined(self.cloud_root, *path.relative_to(self.root).parts)


def fetch_model(path: str) -> FetchedModel:
    """Returns a local copy of the model in a `gs://` folder, or of the latest step in it.

    Args:
      path: As `load_checkpoint` takes it.

    Raises:
      CheckpointError: If there is nothing in the folder, or nothing that could be a model.
      OSError: If it cannot be read.
    """
    folder = joined(path)
    below = {file.path.removeprefix(f"{folder}/"): file for file in list_below(folder)}
    if not below:
        raise CheckpointError(f"checkpoint {path}: no such folder, or nothing in it.")
    files = [below[name] for name in _needed(below)]
    if not files:
        found = sorted({name.split("/")[0] for name in below})
        raise CheckpointError(
            f"checkpoint {path}: no model here. Expected config.json with model.safetensors (native or Hugging Face), "
            f"checkpoint_<step>/checkpoint (T5X) or checkpoint_<step> with _METADATA in it (Orbax); found "
            f"{', '.join(found[:8])}."
        )
    cloud_root = parent(folder) if base_name(folder) else folder
    if _is_step(below) and base_name(folder):
        # Shared by the steps of a run.
        beside = [stat(joined(cloud_root, name)) for name in _BESIDE]
        files += [file for file in beside if file is not None]
    root = cached_folder(cloud_root, files)
    return FetchedModel(directory=root / base_name(folder), root=root, cloud_root=cloud_root)


def store_model(folder: pathlib.Path, path: str) -> None:
    """Moves the files of a model to Cloud Storage; the one without which there is no model comes last.

    Args:
      folder: A local folder, which is empty afterwards.
      path: A `gs://` folder in which there is nothing.

    Raises:
      FileExistsError: If somebody else writes a model there.
      OSError: If it cannot be written.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    last = [file for file in files if file.name in _LAST]

    def store(file: pathlib.Path) -> None:
        with replacing(joined(path, *file.relative_to(folder).parts), overwrite=False) as temporary:
            shutil.move(file, temporary)

    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_UPLOADS) as pool:
        for _ in pool.map(store, sorted(set(files) - set(last))):
            """Waits, and raises what went wrong."""
    for file in last:
        store(file)


def _needed(names: Iterable[str]) -> list[str]:
    """Returns the files that a reader of the folder needs, of those that are there.

    >>> sorted(_needed(["checkpoint_9/checkpoint", "checkpoint_10/checkpoint", "checkpoint_11/log", "spiece.model"]))
    ['checkpoint_10/checkpoint', 'spiece.model']
    """
    names = list(names)
    if "config.json" in names:
        return [name for name in names if "/" not in name and name.endswith(_SUFFIXES)]
    if _is_step(names):
        return names
    by_folder: dict[str, list[str]] = {}
    for name in names:
        folder, _, rest = name.partition("/")
        if rest and STEP.fullmatch(folder):
            by_folder.setdefault(folder, []).append(rest)
    steps = [folder for folder, rest in by_folder.items() if _is_step(rest)]
    if not steps:
        return []
    latest = max(steps, key=_step_of)
    return [name for name in names if name in _BESIDE or name.startswith(f"{latest}/")]


def _is_step(names: Iterable[str]) -> bool:
    return any(_MARKS.fullmatch(name) for name in names)


def _step_of(folder: str) -> int:
    match = STEP.fullmatch(folder)
    assert match is not None
    return int(match.group(1))
