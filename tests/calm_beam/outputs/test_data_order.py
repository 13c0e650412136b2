"""Texts of generations in the order of their data."""

import io
import pathlib
import random
import weakref
from collections.abc import Iterator

import pytest

from calm_beam.inputs.examples import Example
from calm_beam.outputs import Generation
from calm_beam.outputs.rows import write_in_data_order


def _generation(file: int, line: int) -> Generation:
    example = Example(
        id=f"{file}-{line}", has_own_id=True, input="é", input_ids=None, references=(), file_index=file, line=line
    )
    return Generation(example=example, truncated=False, duplicate=False, failure=None, outputs=())


def _written(generations: Iterator[Generation], folder: pathlib.Path) -> str:
    file = io.BytesIO()
    write_in_data_order(
        file, generations, text_of=lambda each: f"{each.example.input}{each.example.id}\n", folder=str(folder)
    )
    return file.getvalue().decode()


@pytest.mark.parametrize("seed", [0, 1])
def test_files_and_lines_come_in_order(seed: int, tmp_path: pathlib.Path) -> None:
    """For generations in any order, texts are sorted by file and then by line number; no temporary files stay."""
    places = [(file, line) for file in range(11) for line in range(1, 13)]
    shuffled = random.Random(seed).sample(places, len(places))
    assert _written((_generation(*place) for place in shuffled), tmp_path) == "".join(
        f"é{file}-{line}\n" for file, line in places
    )
    assert list(tmp_path.iterdir()) == []


def test_nothing_gives_nothing(tmp_path: pathlib.Path) -> None:
    """Without generations nothing is written."""
    assert _written(iter(()), tmp_path) == ""


def test_generations_are_let_go_of(tmp_path: pathlib.Path) -> None:
    """While a text is written, only its own generation and the one before it are held."""
    alive: weakref.WeakSet[Generation] = weakref.WeakSet()

    def made() -> Iterator[Generation]:
        for line in range(50):
            generation = _generation(0, line)
            alive.add(generation)
            yield generation

    def text_of(_: Generation) -> str:
        assert len(alive) <= 2
        return "text"

    write_in_data_order(io.BytesIO(), made(), text_of=text_of, folder=str(tmp_path))
