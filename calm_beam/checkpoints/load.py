"""Detects the layout of a folder and reads it; models on Cloud Storage are copied first.

A local copy has only the files that readers need. A run's folder holds many steps, each with files of many gigabytes,
and some Hugging Face folders have the same weights in three formats. So names alone decide which files are copied; the
readers of local folders detect the layout.
"""

import collections
import concurrent.futures
import dataclasses
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from calm_beam.inputs.vocabularies.sentence_piece import SENTINEL_FILES
from calm_beam.inputs.vocabularies.tokenizer_json import TOKENIZER, TOKENIZER_FILES
from calm_beam.model import infer_config
from calm_beam.storage import (
    base_name,
    cached_folder,
    is_cloud_path,
    joined,
    list_below,
    obstacle,
    parent,
    replacing,
    stat,
)

from .checkpoint import Checkpoint, Declared, StoredModel, stored_architecture
from .gguf_file import SUFFIX, read_gguf
from .hugging_face import is_hugging_face, read_hugging_face
from .hugging_face.files import read_generation
from .maxtext import CONFIG, GENERATION, is_maxtext, read_maxtext
from .metadata import CheckpointError
from .model_folder import read_native
from .orbax import find_item, read_orbax
from .rearranged import unstack_layers
from .stored_array import StoredArrays
from .t5x import GIN_FILE, find_facts, read_t5x

# The second is Hugging Face's name for the same file; the last is used if there is neither.
VOCABULARIES = ("sentencepiece.model", "spiece.model", TOKENIZER)
# Files that the steps of a run share: vocabulary, sentinels, and T5X's configuration.
_BESIDE = tuple(dict.fromkeys((*VOCABULARIES, *TOKENIZER_FILES, *SENTINEL_FILES, GIN_FILE, CONFIG, GENERATION)))
# Names of step folders: T5X's, or just the number, as Orbax has it.
STEP = re.compile(r"(?:checkpoint_)?(\d+)")

# The files that writers of a layout store last.
_LAST = ("config.json", "checkpoint")
_PARALLEL_UPLOADS = 8
# Suffixes of the files that are read in a native or Hugging Face folder.
_SUFFIXES = (".json", ".safetensors", ".model", ".jinja")
# A step's folder has one of these files: T5X's, or Orbax's, which may be in an item below.
_MARKS = re.compile(r"(?:(?:state|default|params|items)/)?(?:_METADATA|checkpoint)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchedModel:
    """A local copy of a model.

    Attributes:
      directory: The local copy of the folder that was named.
      root: The local folder above it.
      cloud_root: The `gs://` folder that `root` is a copy of.
    """

    directory: pathlib.Path
    root: pathlib.Path
    cloud_root: str

    def cloud_path(self, path: pathlib.Path) -> str:
        """Returns the `gs://` path that a local path is a copy of."""
        return joined(self.cloud_root, *path.relative_to(self.root).parts)


def fetch_model(path: str) -> FetchedModel:
    """Returns a local copy of the model in a `gs://` folder, or of the latest step in it.

    Args:
      path: A `gs://` path that `load_checkpoint` accepts.

    Raises:
      CheckpointError: If the folder is empty, or has nothing that could be a model.
      OSError: If the folder cannot be read.
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
        # The steps of a run share these files.
        beside = [stat(joined(cloud_root, name)) for name in _BESIDE]
        files += [file for file in beside if file is not None]
    root = cached_folder(cloud_root, files)
    return FetchedModel(directory=root / base_name(folder), root=root, cloud_root=cloud_root)


def store_model(folder: pathlib.Path, path: str) -> None:
    """Moves the files of a model to Cloud Storage; the one that marks the model as complete is last.

    Args:
      folder: A local folder, which is empty afterwards.
      path: An empty `gs://` folder.

    Raises:
      FileExistsError: If another process writes a model there.
      OSError: If it cannot be written.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    last = [file for file in files if file.name in _LAST]

    def store(file: pathlib.Path) -> None:
        with replacing(joined(path, *file.relative_to(folder).parts), overwrite=False) as temporary:
            shutil.move(file, temporary)

    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_UPLOADS) as pool:
        for _ in pool.map(store, sorted(set(files) - set(last))):
            """Waits for each upload, and raises its error."""
    for file in last:
        store(file)


def _needed(names: Iterable[str]) -> list[str]:
    """Returns the existing files that a reader of the folder needs.

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


_NOTHING = Declared()
# A name on the Hugging Face Hub, or the address of its page.
_HUB_NAME = re.compile(r"(?:https://huggingface\.co/|hf://)?([\w-][\w.-]*)/([\w-][\w.-]*)/?", re.ASCII)
_UNKNOWN = re.compile(r"unknown (?!none|keys)")
_DROP_HINT = " If the model does not need them, calm-beam convert --drop_arrays=REGEX leaves them out."


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundModel:
    """An unread model in a folder.

    Attributes:
      layout: `native`, `hugging_face`, `gguf`, `t5x` or `orbax`.
      directory: The folder that holds it; for GGUF, the file.
      step: The training step in this folder's name, or None.
    """

    layout: str
    directory: pathlib.Path
    step: int | None


def find_model(directory: pathlib.Path) -> FoundModel | None:
    """Returns the model that `load_checkpoint` would read in an existing folder, or None if there is none."""
    if (directory / "config.json").is_file():
        layout = "hugging_face" if is_hugging_face(directory) else "native"
        return FoundModel(layout=layout, directory=directory, step=None)
    if len(files := sorted(directory.glob(f"*{SUFFIX}"))) == 1:
        return FoundModel(layout="gguf", directory=files[0], step=None)
    steps = [found for child in directory.iterdir() if (found := _find_step(child)) and found.step is not None]
    return _find_step(directory) or max(steps, key=lambda found: found.step or 0, default=None)


def load_checkpoint(
    path: str | pathlib.Path, *, declared: Declared = _NOTHING, drop_arrays: re.Pattern[str] | None = None
) -> Checkpoint:
    """Returns the model in a folder, whatever its layout.

    Args:
      path: A native folder, a Hugging Face folder, a step folder of T5X or Orbax, or a folder of such steps, whose
        latest is read; local, or on Cloud Storage with a local copy. Or a local GGUF file, or a folder with one.
      declared: Settings that the arrays do not show, for layouts that do not record them.
      drop_arrays: Arrays to leave out if their whole stored name matches.

    Returns:
      The weights, checked against the sizes inferred from them. They have been read once, piece by piece; each is read
      again, as float32, when it is used.

    Raises:
      CheckpointError: If there is no model, it is damaged, its arrays are not those of a supported model, or not all
        finite; or if the files contradict `declared`, or `drop_arrays` matches nothing.
      OSError: If Cloud Storage cannot be read.
    """
    if is_cloud_path(path):
        fetched = fetch_model(str(path))
        try:
            checkpoint = load_checkpoint(fetched.directory, declared=declared, drop_arrays=drop_arrays)
        except CheckpointError as error:
            # Users name the `gs://` path, not the local copy.
            raise CheckpointError(str(error).replace(str(fetched.root), fetched.cloud_root)) from error
        vocabulary = checkpoint.vocabulary_path
        return dataclasses.replace(
            checkpoint,
            cloud_directory=fetched.cloud_path(checkpoint.directory),
            cloud_vocabulary=fetched.cloud_path(vocabulary) if vocabulary else None,
            stated=tuple(text.replace(str(fetched.root), fetched.cloud_root) for text in checkpoint.stated),
            assumed=tuple(text.replace(str(fetched.root), fetched.cloud_root) for text in checkpoint.assumed),
        )
    directory = _resolved(path)
    is_file = directory.is_file()
    found = FoundModel(layout="gguf", directory=directory, step=None) if is_file else find_model(directory)
    if found is None:
        names = ", ".join(sorted(child.name for child in directory.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"checkpoint {path}: no model here. Expected config.json with model.safetensors (native or Hugging Face), "
            f"one file of GGUF, checkpoint_<step>/checkpoint (T5X) or checkpoint_<step> with _METADATA in it (Orbax); "
            f"found {names}."
        )
    dropped: list[str] = []

    def keeps(name: str) -> bool:
        if drop_arrays is None or not drop_arrays.fullmatch(name):
            return True
        dropped.append(name)
        return False

    try:
        checkpoint = _read(found, declared, keeps=keeps)
        if drop_arrays is not None and not dropped:
            raise ValueError("there is nothing to leave out.")
    except ValueError as error:
        place = "" if isinstance(error, CheckpointError) else f"checkpoint {found.directory}: "
        hint = _DROP_HINT if _UNKNOWN.search(str(error)) else ""
        if drop_arrays is not None and not dropped:
            hint = f" No array's whole name matches {drop_arrays.pattern!r}."
        raise CheckpointError(f"{place}{error}{hint}") from error
    _check_finite(checkpoint)
    return dataclasses.replace(checkpoint, dropped=tuple(sorted(dropped)))


def missing_folder(path: str | pathlib.Path, *, expected: str = "directory") -> str:
    """Returns the message for a missing path; if it may be a name on the Hub, with how to get that model."""
    if found := obstacle(path):
        return f"{path}: {found}"
    match = _HUB_NAME.fullmatch(str(path))
    is_folder_there = match is not None and pathlib.Path(match.group(1)).exists()
    if match is None or is_folder_there:
        return f"{path}: no such {expected}."
    owner, name = match.groups()
    return (
        f"{path}: no such {expected}. If that is a model on the Hugging Face Hub, fetch it first and name the folder: "
        f"hf download {owner}/{name} --local-dir {name}"
    )


def _resolved(path: str | pathlib.Path) -> pathlib.Path:
    """Returns the absolute path of an existing folder or GGUF file.

    Workers have other working directories, and TensorStore accepts only absolute paths.
    """
    try:
        directory = pathlib.Path(path).resolve(strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {missing_folder(path)}") from None
    # Circular links, and characters that no path can have.
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path}: cannot be opened: {error}.") from error
    if not directory.is_dir() and not (directory.suffix == SUFFIX and directory.is_file()):
        raise CheckpointError(f"checkpoint {path}: no such directory.")
    return directory


def _find_step(directory: pathlib.Path) -> FoundModel | None:
    """Returns the model in the folder of one training step."""
    match = STEP.fullmatch(directory.name)
    step = int(match.group(1)) if match else None
    if find_item(directory) is not None:
        return FoundModel(layout="orbax", directory=directory, step=step)
    if (directory / "checkpoint").is_file():
        return FoundModel(layout="t5x", directory=directory, step=step)
    return None


def _read(found: FoundModel, declared: Declared, *, keeps: Callable[[str], bool]) -> Checkpoint:
    """Returns the model, before the check for values that are not finite."""
    stored = _READERS[found.layout](found, declared, keeps)
    shapes = {name: array.shape for name, array in stored.arrays.items()}
    stored_architecture(stored.config).check(stored.config, shapes)
    return Checkpoint(
        config=stored.config,
        arrays=stored.arrays,
        directory=found.directory,
        vocabulary_path=_find_vocabulary(found),
        layout=found.layout,
        step=found.step,
        stated=stored.stated,
        assumed=stored.assumed,
        generation=stored.generation,
    )


def _read_native(found: FoundModel, declared: Declared, keeps: Callable[[str], bool]) -> StoredModel:
    stored = read_native(found.directory, keeps=keeps)
    kept, config = read_generation(found.directory, {}).facts(), stored.config
    stated = stored.stated
    # Of a T5 with the usual end token there is nothing to say.
    if "end_ids" in stored_architecture(config).fields(config):
        path = found.directory / "config.json"
        stated = (f"Outputs end with token {' or '.join(map(str, config.end_ids))}: {path} says so.", *stated)
    return _agreed(found, declared, dataclasses.replace(stored, generation=kept, stated=stated))


def _read_hugging_face(found: FoundModel, declared: Declared, keeps: Callable[[str], bool]) -> StoredModel:
    return _agreed(found, declared, read_hugging_face(found.directory, keeps=keeps))


def _read_gguf(found: FoundModel, declared: Declared, keeps: Callable[[str], bool]) -> StoredModel:
    return _agreed(found, declared, read_gguf(found.directory, keeps=keeps))


def _read_t5x(found: FoundModel, declared: Declared, keeps: Callable[[str], bool]) -> StoredModel:
    return _described(found, declared, arrays=read_t5x(found.directory, keeps=keeps))


def _read_orbax(found: FoundModel, declared: Declared, keeps: Callable[[str], bool]) -> StoredModel:
    item = find_item(found.directory)
    assert item is not None
    arrays = read_orbax(item, keeps=keeps)
    if is_maxtext(arrays):
        # A run's config is in the folder above that of its steps.
        folders = _folders(found) if found.step is None else (*_folders(found), found.directory.parent.parent)
        return _agreed(found, declared, read_maxtext(arrays, folders))
    return _described(found, declared, arrays=arrays)


# Readers by layout.
_READERS: Mapping[str, Callable[[FoundModel, Declared, Callable[[str], bool]], StoredModel]] = {
    "native": _read_native,
    "hugging_face": _read_hugging_face,
    "gguf": _read_gguf,
    "t5x": _read_t5x,
    "orbax": _read_orbax,
}


def _agreed(found: FoundModel, declared: Declared, stored: StoredModel) -> StoredModel:
    """Returns a model whose files record everything, if the user's declarations agree."""
    declared.check(
        activation=stored.config.activation,
        relative_max_distance=getattr(stored.config, "relative_max_distance", None),
        source=str(found.directory if found.layout == "gguf" else found.directory / "config.json"),
    )
    return stored


def _described(found: FoundModel, declared: Declared, *, arrays: StoredArrays) -> StoredModel:
    """Returns the T5 for arrays that do not show everything, and may have stacked layers."""
    arrays = arrays.of(unstack_layers(arrays))
    shapes = {name: array.shape for name, array in arrays.items()}
    gated_mlp = "decoder/layers_0/mlp/wi_0/kernel" in shapes
    # A folder that is not a step of a run is unrelated to the one above.
    folders = _folders(found) if found.step is not None else (found.directory,)
    facts = find_facts(folders, declared, gated_mlp=gated_mlp)
    config = infer_config(shapes, activation=facts.activation, relative_max_distance=facts.relative_max_distance)
    return StoredModel(config=config, arrays=arrays, stated=facts.stated, assumed=facts.assumed)


def _check_finite(checkpoint: Checkpoint) -> None:
    """Refuses weights that are not finite: every result they affect would not be finite either.

    This reads all of them, and so computes their fingerprint on the way.
    """
    broken: collections.Counter[str] = collections.Counter()

    def count(name: str, values: np.ndarray) -> None:
        if missing := values.size - int(np.isfinite(values).sum()):
            broken[name] += missing

    checkpoint.fingerprint(watch=count)
    if broken:
        shown = [f"{name} ({count} of {checkpoint.arrays[name].size} values)" for name, count in broken.items()]
        more = f" and {len(broken) - 4} more" if len(broken) > 4 else ""
        raise CheckpointError(
            f"checkpoint {checkpoint.directory}: weights are not finite numbers in {', '.join(shown[:4])}{more}. The "
            "model is damaged, or its training diverged: use another step or copy of it."
        )


def _folders(found: FoundModel) -> tuple[pathlib.Path, ...]:
    """Returns the folders of files next to the weights: with them, or shared by the steps of a run."""
    if found.layout in ("t5x", "orbax"):
        return (found.directory, found.directory.parent)
    return (found.directory.parent,) if found.layout == "gguf" else (found.directory,)


def _find_vocabulary(found: FoundModel) -> pathlib.Path | None:
    # transformers prefers tokenizer.json in its folders: it includes added tokens, and spiece.model does not.
    is_theirs = found.layout in ("hugging_face", "gguf")
    names = sorted(VOCABULARIES, key=lambda name: name != TOKENIZER) if is_theirs else VOCABULARIES
    paths = [folder / name for folder in _folders(found) for name in names]
    return next((path for path in paths if path.is_file()), None)
