"""Sizes that batches of rows are padded to: few, so that XLA compiles rarely."""

import numpy as np

_FEWEST_ROWS = 16
_FEWEST_STEPS = 16
_FEWEST_RANKS = 8


def padded(values: np.ndarray, size: int, *, fill: int = 0) -> np.ndarray:
    """Returns int32 values with `fill` added along the first axis up to a size."""
    longer = np.full((size, *values.shape[1:]), fill, np.int32)
    longer[: len(values)] = values
    return longer


def buffer_bucket(count: int) -> int:
    """Returns the next of 1, 2, 3, 4, 6, 8, 12, ...: at most a third of a buffer is there for nothing."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def row_bucket(count: int) -> int:
    """Returns the next of 16, 64, 128, 192, 256, 384, 512, ...: few shapes, and little padding where rows are many."""
    size = _FEWEST_ROWS
    while size < count:
        is_power = size & (size - 1) == 0
        size = {16: 64, 64: 128}.get(size, size * 3 // 2 if is_power else size * 4 // 3)
    return size


def most_rows(count: int) -> int:
    """Returns the largest size of `row_bucket` up to a count, and at least the smallest."""
    size = _FEWEST_ROWS
    while row_bucket(size + 1) <= count:
        size = row_bucket(size + 1)
    return size


def rank_bucket(count: int) -> int:
    """Returns the next of 8, 32, 128, ...."""
    size = _FEWEST_RANKS
    while size < count:
        size *= 4
    return size


def path_lengths(steps: np.ndarray) -> np.ndarray:
    """Returns for each row the next of 16, 32, 64, ... above its step: the length of path that it is run with."""
    lengths = np.full(len(steps), _FEWEST_STEPS)
    while (short := lengths <= steps).any():
        lengths[short] *= 2
    return lengths
