"""Weights that stay in their files until they are used, completely or in parts.

A model larger than its host's memory is hashed, checked and loaded onto devices piece by piece.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from .metadata import CheckpointError

# Most bytes of a piece, unless a chunk is larger.
_PIECE_BYTES = 1 << 24
_FLOAT_BYTES = 4

Slices = tuple[slice, ...]


class StoredArray:
    """An array in a file. It is read as float32, whatever its stored type.

    Attributes:
      shape: Its shape.
      stored_dtype: The type that it is stored in.
      chunk: The shape of what is stored together: reading a part of it costs as much as reading all of it.
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
        """Stores how to read an array.

        Args:
          shape: Its shape.
          stored_dtype: A floating-point type.
          read: Returns a part of it, in any floating-point type, given a slice of step 1 for each axis.
          chunk: The shape of what is stored together; None if any part can be read separately.
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
        """The array with its axes reversed, still unread."""
        return type(self)(
            self.shape[::-1],
            self.stored_dtype,
            read=lambda slices: self._read(slices[::-1]).T,
            chunk=self.chunk[::-1],
        )

    def at(self, index: int, *, axis: int) -> Self:
        """Returns the array at an index of an axis, without that axis, still unread."""

        def read(slices: Slices) -> np.ndarray:
            return self._read((*slices[:axis], slice(index, index + 1), *slices[axis:])).squeeze(axis)

        without = [(*sizes[:axis], *sizes[axis + 1 :]) for sizes in (self.shape, self.chunk)]
        return type(self)(without[0], self.stored_dtype, read=read, chunk=without[1])

    def joined(self, axis: int) -> Self:
        """Returns the array with an axis and the next one merged, still unread."""
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
        """Returns a part as float32, reading it now; `index` is a slice of step 1 for each of the first axes."""
        given = index if isinstance(index, tuple) else (index,)
        given = tuple(slice(None) if each is Ellipsis else each for each in given)
        slices = (*given, *(slice(None),) * (self.ndim - len(given)))
        bounds = [each.indices(size) for each, size in zip(slices, self.shape, strict=True)]
        assert all(step == 1 for _, _, step in bounds), "only parts that lie together are read"
        values = self._read(tuple(slice(start, stop) for start, stop, _ in bounds))
        with np.errstate(over="ignore"):
            # Values too large for float32 become infinite, and are found by the check for finite values.
            return np.asarray(values, dtype=np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the whole array for numpy, reading it now."""
        if copy is False:
            raise ValueError("a stored array cannot be read without a copy.")
        values = self[...]
        return values if dtype is None else values.astype(dtype, copy=False)

    def divides(self, axis: int, parts: int) -> bool:
        """Returns whether equal parts along an axis can be read without reading anything twice."""
        return self.shape[axis] % (parts * self.chunk[axis]) == 0


Array = np.ndarray | StoredArray


def rows_of(array: Array, first: int, end: int) -> Array:
    """Returns some rows of an array, still unread; they must not split a chunk."""
    if not isinstance(array, StoredArray):
        return array[first:end]
    shape = (end - first, *array.shape[1:])

    def read(slices: Slices) -> np.ndarray:
        return array[(slice(first + slices[0].start, first + slices[0].stop), *slices[1:])]

    return StoredArray(shape, array.stored_dtype, read=read, chunk=array.chunk)


def stacked(arrays: Sequence[Array]) -> StoredArray:
    """Returns matrices of one shape below each other as one matrix, still unread.

    Args:
      arrays: At least one; all (rows, columns).
    """
    rows, columns = arrays[0].shape

    def read(slices: Slices) -> np.ndarray:
        begin, end = slices[0].start, slices[0].stop
        first = min(begin // rows, len(arrays) - 1)
        last = max(first, (end - 1) // rows)
        parts = ((arrays[place], place * rows) for place in range(first, last + 1))
        return np.concatenate([part[max(begin - above, 0) : end - above, slices[1]] for part, above in parts])

    stored_dtype = arrays[0].stored_dtype if isinstance(arrays[0], StoredArray) else arrays[0].dtype
    return StoredArray((len(arrays) * rows, columns), stored_dtype, read=read)


def pieces(array: Array) -> Iterator[np.ndarray]:
    """Yields an array in C order as float32, in pieces of consecutive rows.

    A piece has at most 16 MiB, or one chunk if that is larger.
    """
    if isinstance(array, StoredArray) and array.ndim:
        together = array.chunk[0]
        row_bytes = _FLOAT_BYTES * max(1, array.size // array.shape[0]) if array.shape[0] else 1
        rows = max(1, _PIECE_BYTES // (row_bytes * together)) * together
        for first in range(0, array.shape[0], rows):
            yield np.ascontiguousarray(array[first : first + rows], dtype="<f4")
    else:
        # An array in memory is copied only if its order differs.
        yield np.ascontiguousarray(array, dtype="<f4")


def are_equal(one: Array, other: Array) -> bool:
    """Returns whether two arrays have the same shape and the same float32 values, without NaN."""
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
    """The identity of a file's content, to detect another or a later file of the same name.

    Attributes:
      path: The file.
      mark: Its device, inode number, size and time of change.
    """

    path: pathlib.Path
    mark: tuple[int, int, int, int]

    @classmethod
    def of(cls, path: pathlib.Path) -> Self:
        """Returns the stamp of a file that exists."""
        return cls(path, _mark(path.stat()))

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.mark[2]

    def is_true(self) -> bool:
        """Returns whether the file is still unchanged."""
        try:
            return _mark(self.path.stat()) == self.mark
        except OSError:
            return False


def _mark(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class StoredArrays(Mapping[str, Array]):
    """Arrays by name, with the files that they are read from and their cached fingerprints.

    Attributes:
      stamps: Stamps of the files.
      known: Fingerprints of the arrays, by the text that was hashed with them.
    """

    def __init__(self, arrays: Mapping[str, Array], stamps: Iterable[FileStamp]) -> None:
        """Keeps arrays, and stamps that were taken before reading any of them."""
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
        """Returns arrays that are derived from these, with the same files."""
        return StoredArrays(arrays, self.stamps)

    def moved(self, arrays: Mapping[str, Any]) -> "StoredArrays":
        """Returns arrays with the same values that no longer depend on files; fingerprints stay cached."""
        moved = StoredArrays(arrays, ())
        moved.known = self.known
        return moved

    def check_unchanged(self) -> None:
        """Refuses arrays whose files have changed since they were opened: parts could belong to different models.

        Raises:
          CheckpointError: If a file has changed, or is gone.
        """
        for stamp in self.stamps:
            if not stamp.is_true():
                raise CheckpointError(
                    f"{stamp.path}: has changed while the model was read, so that its weights may be of two models. "
                    "Do not write to a checkpoint that is in use; start again."
                )
