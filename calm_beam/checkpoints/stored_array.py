"""Weights that stay where they are stored until they are asked for, whole or by parts.

A model larger than the memory of its host is hashed, checked and given to its devices piece by piece.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from .metadata import CheckpointError

# Most bytes of a piece, unless what is stored together takes more.
_PIECE_BYTES = 1 << 24
_FLOAT_BYTES = 4

Slices = tuple[slice, ...]


class StoredArray:
    """An array in a file. Whatever its stored type, what is read of it is float32.

    Attributes:
      shape: Its shape.
      stored_dtype: The type that it is stored in.
      chunk: The shape of what is stored together: reading less of it costs as much as reading all.
    """

    dtype = np.dtype(np.float32)

    def __init__(
        self,
        shape: tuple[int, ...],
        stored_dtype: np.dtype[Any],
        *,
        read: Callable[[Slices], np.ndarray],
        chunk: tuple[int, ...] | None = None,
    ) -> None:
        """Remembers where an array is.

        Args:
          shape: Its shape.
          stored_dtype: A type of floats.
          read: Returns a part of it, in any type of floats, given a slice for each axis, of step 1.
          chunk: The shape of what is stored together; None if any part can be read by itself.
        """
        self.shape = shape
        self.stored_dtype = stored_dtype
        self.chunk = chunk or (1,) * len(shape)
        self._read = read

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        count = 1
        for dimension in self.shape:
            count *= dimension
        return count

    @property
    def T(self) -> Self:  # noqa: N802 - numpy's name
        """The array with its axes reversed, as unread as it is."""
        return type(self)(
            self.shape[::-1],
            self.stored_dtype,
            read=lambda slices: self._read(slices[::-1]).T,
            chunk=self.chunk[::-1],
        )

    def at(self, index: int, *, axis: int) -> Self:
        """Returns what stands at an index of an axis, which it then lacks, as unread as it is."""

        def read(slices: Slices) -> np.ndarray:
            return self._read((*slices[:axis], slice(index, index + 1), *slices[axis:])).squeeze(axis)

        without = [(*sizes[:axis], *sizes[axis + 1 :]) for sizes in (self.shape, self.chunk)]
        return type(self)(without[0], self.stored_dtype, read=read, chunk=without[1])

    def joined(self, axis: int) -> Self:
        """Returns it with an axis and the next one as one, as unread as it is."""
        inner = self.shape[axis + 1]

        def read(slices: Slices) -> np.ndarray:
            wanted = slices[axis]
            whole = slice(wanted.start // inner, -(-wanted.stop // inner))
            values = self._read((*slices[:axis], whole, slice(0, inner), *slices[axis + 1 :]))
            values = values.reshape(*values.shape[:axis], -1, *values.shape[axis + 2 :])
            first = whole.start * inner
            cut = slice(wanted.start - first, wanted.stop - first)
            return values[(slice(None),) * axis + (cut,)]

        joined = [(*sizes[:axis], sizes[axis] * inner, *sizes[axis + 2 :]) for sizes in (self.shape, self.chunk)]
        return type(self)(joined[0], self.stored_dtype, read=read, chunk=joined[1])

    def __getitem__(self, index: Any) -> np.ndarray:
        """Returns a part of it as float32, read now; `index` is a slice of step 1 for each of the first axes."""
        given = index if isinstance(index, tuple) else (index,)
        given = tuple(slice(None) if each is Ellipsis else each for each in given)
        slices = (*given, *(slice(None),) * (self.ndim - len(given)))
        bounds = [each.indices(size) for each, size in zip(slices, self.shape, strict=True)]
        assert all(step == 1 for _, _, step in bounds), "only parts that lie together are read"
        values = self._read(tuple(slice(start, stop) for start, stop, _ in bounds))
        with np.errstate(over="ignore"):
            # What is too large for float32 becomes infinite, and is found then.
            return np.asarray(values, dtype=np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns all of it, read now, for numpy."""
        if copy is False:
            raise ValueError("an array that is stored cannot be had without a copy.")
        values = self[...]
        return values if dtype is None else values.astype(dtype, copy=False)

    def divides(self, axis: int, parts: int) -> bool:
        """Returns whether equal parts along an axis can be read without reading anything twice."""
        return self.shape[axis] % (parts * self.chunk[axis]) == 0


Array = np.ndarray | StoredArray


def rows_of(array: Array, first: int, end: int) -> Array:
    """Returns some rows of an array, as unread as it is; they must not cut what is stored together."""
    if not isinstance(array, StoredArray):
        return array[first:end]
    shape = (end - first, *array.shape[1:])

    def read(slices: Slices) -> np.ndarray:
        return array[(slice(first + slices[0].start, first + slices[0].stop), *slices[1:])]

    return StoredArray(shape, array.stored_dtype, read=read, chunk=array.chunk)


def pieces(array: Array) -> Iterator[np.ndarray]:
    """Yields an array in C order as float32, by pieces of some rows that lie together in memory.

    A piece has 16 MiB at most, or what is stored together if that is more.
    """
    if isinstance(array, StoredArray) and array.ndim:
        together = array.chunk[0]
        row_bytes = _FLOAT_BYTES * max(1, array.size // array.shape[0]) if array.shape[0] else 1
        rows = max(1, _PIECE_BYTES // (row_bytes * together)) * together
        for first in range(0, array.shape[0], rows):
            yield np.ascontiguousarray(array[first : first + rows], dtype="<f4")
    else:
        # What is in memory is not copied, but for its order.
        yield np.ascontiguousarray(array, dtype="<f4")


def are_equal(one: Array, other: Array) -> bool:
    """Returns whether two arrays have the same shape and the same values, as float32, none of which is NaN."""
    if one.shape != other.shape:
        return False
    if not one.shape:
        return bool(np.array_equal(np.asarray(one), np.asarray(other)))
    first = 0
    for piece in pieces(one):
        if not np.array_equal(piece, np.asarray(other[first : first + len(piece)], np.float32)):
            return False
        first += len(piece)
    return True


@dataclasses.dataclass(frozen=True)
class FileStamp:
    """What tells a file from another, or a later one, of its name.

    Attributes:
      path: The file.
      mark: Its device, number, size and time of change.
    """

    path: pathlib.Path
    mark: tuple[int, int, int, int]

    @classmethod
    def of(cls, path: pathlib.Path) -> Self:
        """Returns the stamp of a file that exists."""
        return cls(path, _mark(path.stat()))

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.mark[2]

    def is_true(self) -> bool:
        """Returns whether the file is the same still."""
        try:
            return _mark(self.path.stat()) == self.mark
        except OSError:
            return False


def _mark(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class StoredArrays(Mapping[str, Array]):
    """Arrays by name, the files that they are read from, and what was computed of all of them once.

    Attributes:
      stamps: Of the files.
      known: Fingerprints of the arrays, by what else went into them.
    """

    def __init__(self, arrays: Mapping[str, Array], stamps: Iterable[FileStamp]) -> None:
        """Keeps arrays, and stamps that were taken before any of them was read."""
        self._arrays = dict(arrays)
        self.stamps = tuple(stamps)
        self.known: dict[str, str] = {}

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def of(self, arrays: Mapping[str, Array]) -> "StoredArrays":
        """Returns arrays that were made of these, with the same files."""
        return StoredArrays(arrays, self.stamps)

    def moved(self, arrays: Mapping[str, Any]) -> "StoredArrays":
        """Returns arrays of the same values that no file can change any more; digests stay known."""
        moved = StoredArrays(arrays, ())
        moved.known = self.known
        return moved

    def check_unchanged(self) -> None:
        """Refuses arrays whose files have changed since they were opened: parts would be of one model and of another.

        Raises:
          CheckpointError: If a file has changed, or is gone.
        """
        for stamp in self.stamps:
            if not stamp.is_true():
                raise CheckpointError(
                    f"{stamp.path}: has changed while the model was read, so that its weights may be of two models. "
                    "Do not write to a checkpoint that is in use; start again."
                )
