"""The tensors of a folder that transformers saved, in one file or in the parts that its index names."""

import pathlib
from collections.abc import Callable, Iterable

from calm_beam.checkpoints.error import CheckpointError
from calm_beam.checkpoints.metadata import read_json, shortened
from calm_beam.checkpoints.safetensors_files import read_safetensors
from calm_beam.checkpoints.stored_array import Array, FileStamp, StoredArrays

# What torch.compile puts before every name.
_COMPILED = "_orig_mod."


def read_tensors(directory: pathlib.Path, keeps: Callable[[str], bool]) -> StoredArrays:
    """Returns all tensors of the folder, none of which is read yet.

    Args:
      directory: Folder with `model.safetensors`, or the parts named by its index.
      keeps: Which tensors to read, by name.

    Raises:
      CheckpointError: If a file is missing or damaged, or a part does not hold what the index says.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists():
        return read_safetensors(directory / "model.safetensors", keeps=keeps)
    if not index.is_file():
        raise CheckpointError(
            f"{directory}: no model.safetensors, nor model.safetensors.index.json. Weights in other files, such as "
            "pytorch_model.bin, are not read: save the model again with save_pretrained of a recent transformers."
        )
    parts = read_json(index).get("weight_map")
    # Names alone: nothing outside of the folder is a part of the model.
    if not isinstance(parts, dict) or not all(
        isinstance(part, str) and part == pathlib.PurePath(part).name for part in parts.values()
    ):
        raise CheckpointError(f'{index}: expected {{"weight_map": {{name of a tensor: name of its file}}}}.')
    tensors: dict[str, Array] = {}
    stamps: list[FileStamp] = []
    for part in sorted(set(parts.values())):
        found = read_safetensors(directory / part, keeps=keeps)
        if found.keys() != {name for name, place in parts.items() if place == part and keeps(name)}:
            raise CheckpointError(
                f"{shortened(directory / part)}: does not hold the tensors that {index.name} says it holds."
            )
        tensors.update(found)
        stamps += found.stamps
    return StoredArrays(tensors, stamps)


def check_names(directory: pathlib.Path, *, found: Iterable[str], expected: Iterable[str], model: str) -> None:
    """Refuses tensors that are not those of a model.

    Args:
      directory: Their folder.
      found: Their names.
      expected: The names of the model's.
      model: What `config.json` says it is, for the message.

    Raises:
      CheckpointError: If one is missing or unknown.
    """
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"{directory}: tensors are not those of the {model} in config.json; missing "
            f"{', '.join(missing[:4]) or 'none'} ({len(missing)}), unknown {', '.join(unknown[:4]) or 'none'} "
            f"({len(unknown)}).{prefix_in_words(found, missing)}"
        )


def prefix_in_words(found: Iterable[str], missing: Iterable[str]) -> str:
    """Returns a sentence on what stands before the names of all tensors, where without it they would be found.

    Args:
      found: Their names.
      missing: Names of which at least one is found behind the prefix.

    >>> prefix_in_words(["model.shared.weight", "model.lm_head.weight"], ["shared.weight"])
    " Every name begins with 'model.', which the model's own do not: save it without that."
    """
    names, wanted = sorted(found), tuple(f".{name}" for name in missing)
    match = next((name for name in names if name.endswith(wanted)), None)
    if not wanted or match is None:
        return ""
    prefix = next(match.removesuffix(name[1:]) for name in wanted if match.endswith(name))
    if not all(name.startswith(prefix) for name in names):
        return ""
    if prefix == _COMPILED:
        return (
            f" Every name begins with {prefix!r}: torch.compile puts that there. Save the model that was compiled, not "
            "what torch.compile made of it."
        )
    return f" Every name begins with {shortened(prefix)!r}, which the model's own do not: save it without that."
