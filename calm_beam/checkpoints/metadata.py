"""Reads small files of a checkpoint, and checks sizes that it claims before allocating memory for them.

Readers raise `CheckpointError` if a claim cannot be true.
"""

import math
import pathlib
import stat
from collections.abc import Mapping
from typing import Any

from calm_beam.errors import CalmBeamError
from calm_beam.storage import strict_json
from calm_beam.storage.free_memory import available_bytes


class CheckpointError(CalmBeamError, ValueError):
    """A checkpoint that cannot be read, or is not one."""


# Limit on the text files of a checkpoint; the largest known ones have a few megabytes.
_MOST_TEXT = 64 << 20
_FLOAT_BYTES = 4


def check_is_file(path: pathlib.Path, *, failed: str = "cannot be read") -> None:
    """Refuses anything that a read might never finish, such as a pipe; `failed` is part of the message.

    Raises:
      CheckpointError: If there is nothing at `path`, or not a regular file.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {failed}: {error}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: {failed}: expected a regular file, found a folder, a pipe or a device.")


def read_text(path: pathlib.Path) -> str:
    """Returns a small UTF-8 file.

    Raises:
      CheckpointError: If it cannot be read, is not UTF-8, or is too large for such a file.
    """
    try:
        return _read(path, most=_MOST_TEXT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def read_json(path: pathlib.Path, *, constants_allowed: bool = True, expected: str = "a JSON object") -> dict[str, Any]:
    """Returns the object in a JSON file.

    Args:
      path: The file.
      constants_allowed: Whether NaN and Infinity are accepted: training libraries write them into unused files.
      expected: What should be in it, for messages.

    Raises:
      CheckpointError: If it cannot be read, is not strict JSON, or is not an object.
    """
    try:
        value = strict_json.loads(_read(path, most=_MOST_TEXT), constants_allowed=constants_allowed)
    except strict_json.StrictJSONError as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected {expected}, got {type(value).__name__}.")
    return value


def read_whole(path: pathlib.Path) -> bytes:
    """Returns the content of a file that may hold arrays.

    Raises:
      CheckpointError: If it cannot be read, or does not fit into memory.
    """
    return _read(path, most=available_bytes() // 2)


def check_memory(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses an array that alone does not fit into memory as float32; `shapes` are by name.

    Raises:
      CheckpointError: If there is one.
    """
    sizes = {name: _FLOAT_BYTES * math.prod(shape) for name, shape in shapes.items()}
    largest, free = max(sizes, key=lambda name: sizes[name], default=""), available_bytes()
    if sizes and sizes[largest] > free:
        raise CheckpointError(
            f"as float32, {shortened(largest)} of shape {shapes[largest]} would take {sizes[largest] / 2**30:.3g} GiB "
            f"of memory, of which {free / 2**30:.3g} GiB are free. If the model has that, use a machine with more "
            "memory; if not, the file is damaged."
        )


def check_together(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses arrays that must be in memory together and do not fit as float32; `shapes` are by name.

    Raises:
      CheckpointError: If they do not.
    """
    total, free = sum(_FLOAT_BYTES * math.prod(shape) for shape in shapes.values()), available_bytes()
    if total > free:
        raise CheckpointError(
            f"it stores layers together, so that its arrays have to be held while they are read: as float32 "
            f"{total / 2**30:.3g} GiB, of which {free / 2**30:.3g} GiB are free. Convert it on a machine with more "
            "memory: calm-beam convert --layout=native."
        )


def shortened(text: object, most: int = 200) -> str:
    """Returns a text for a message; a long one is cut."""
    shown = str(text)
    return shown if len(shown) <= most else f"{shown[:most]}..."


def _read(path: pathlib.Path, *, most: int) -> bytes:
    check_is_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1) if path.stat().st_size <= most else None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if content is None or len(content) > most:
        raise CheckpointError(f"{path}: is larger than {most >> 20} MiB, more than is read of such a file.")
    return content
