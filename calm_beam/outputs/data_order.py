"""Texts of generations in the order of the data that they are of."""

import array
import tempfile
from collections.abc import Callable, Iterable
from typing import BinaryIO

import numpy as np

from .generations import Generation


def write_in_data_order(
    file: BinaryIO, generations: Iterable[Generation], *, text_of: Callable[[Generation], str], folder: str
) -> None:
    """Writes a text for each generation, in the order of data files and of their lines.

    Generations are not held: their texts wait on a disk, and 32 bytes for each say where.

    Args:
      file: Where to.
      generations: In any order.
      text_of: Returns what is written of one.
      folder: On a local disk, with room for all texts once more; nothing stays there.

    Raises:
      OSError: If the disk is full.
    """
    # For each generation: file, line, first byte, number of bytes.
    places = array.array("q")
    with tempfile.TemporaryFile(dir=folder) as unordered:
        end = 0
        for generation in generations:
            text = text_of(generation).encode()
            unordered.write(text)
            places.extend((generation.example.file_index, generation.example.line, end, len(text)))
            end += len(text)
        # [generations * 4] -> [generations, 4]
        table = np.array(places, np.int64).reshape(-1, 4)
        for row in np.lexsort((table[:, 1], table[:, 0])):
            unordered.seek(table[row, 2])
            file.write(unordered.read(table[row, 3]))
