"""Declared examples: their order, their rounds, and refused declarations."""

import itertools
import pathlib
import random

import numpy as np
import pytest

from calm_beam.calibration.settings_rounds import DeclaredExample, DeclaredExamples, IdReading
from calm_beam.inputs.losses.tables import read_rows, table_files
from calm_beam.risk.evidence import BettingTable
from calm_beam.risk.testing import LossesError
from tests.calm_beam.inputs.losses.builders import declared_examples


def _declared(examples: list[DeclaredExample], *, salt: str = "salt", round_examples: int = 10) -> DeclaredExamples:
    return DeclaredExamples.of(examples, salt=salt, round_examples=round_examples)


def test_the_order_is_that_of_bets() -> None:
    """Examples have the order of `BettingTable`, in whatever order they were declared."""
    examples = [DeclaredExample(f"e{index}") for index in range(95)]
    found = _declared(examples)
    table = BettingTable.of([each.id for each in examples], np.arange(95)[:, None], salt="salt")
    assert found.ids == tuple(examples[index].id for index in table.in_order()[:, 0].tolist())
    assert found.ends == (*range(10, 100, 10), 95)
    assert found.round(9) == slice(90, 95)
    shuffled = random.Random(1).sample(examples, 95)
    assert _declared(shuffled) == found
    assert _declared(examples, salt="other").ids != found.ids
    assert _declared(examples, salt="other").fingerprint == found.fingerprint


def test_clusters_are_not_divided() -> None:
    """Clusters are ordered as units: the examples of each follow each other, in one round."""
    examples = declared_examples(123)
    found = _declared(examples, round_examples=10)
    assert found.clusters is not None
    rounds = [{*found.clusters[found.round(number)]} for number in range(found.rounds)]
    assert sum(map(len, rounds)) == len({each.cluster for each in examples})
    assert all(10 <= end - start < 14 for start, end in itertools.pairwise((0, *found.ends[:-1])))
    assert found == _declared(examples[::-1], round_examples=10)


def test_groups_and_clusters_are_part_of_the_fingerprint() -> None:
    """Another group of one example is another declaration."""
    one = _declared([DeclaredExample("a", "x"), DeclaredExample("b", "y")])
    other = _declared([DeclaredExample("a", "x"), DeclaredExample("b", "x")])
    clusters = _declared([DeclaredExample("a", None, "x"), DeclaredExample("b", None, "y")])
    assert len({one.fingerprint, other.fingerprint, clusters.fingerprint}) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ids.txt", "\ufeffa\n1\n\nb c\n"),
        ("ids.csv", "id,topic\na,x\n1,y\nb c,x\n"),
        ("ids.jsonl", '{"id": "a"}\n{"id": 1}\n{"id": "b c"}\n'),
    ],
)
def test_files(tmp_path: pathlib.Path, name: str, text: str) -> None:
    """Plain text has one id a line, and tables have a column of ids."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    (path,) = table_files([str(tmp_path / name)], IdReading())
    assert [row.id for row in read_rows(path, IdReading())] == ["a", "1", "b c"]


@pytest.mark.parametrize(
    ("name", "text", "reading", "message"),
    [
        ("ids.txt", "", IdReading(), "ids.txt: holds no ids"),
        ("ids.txt", "a\n", IdReading(group_key="topic"), "has no column topic, only id. A table of ids has id"),
        ("ids.csv", "id,topic\na,\n", IdReading(group_key="topic"), "line 2: has no topic. Every row needs id"),
        ("ids.csv", 'id\n"a\nb"\n', IdReading(), r"id 'a\\nb' has a line break, and ids are listed one a line"),
        ("ids.xml", "a", IdReading(), r"tells no format of ids \(.csv, .jsonl, .txt, each also with .gz; .parquet\)"),
    ],
)
def test_malformed_files(tmp_path: pathlib.Path, name: str, text: str, reading: IdReading, message: str) -> None:
    """Errors are reported with the file."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(LossesError, match=message):
        _ = [list(read_rows(path, reading)) for path in table_files([str(tmp_path / name)], reading)]


def test_what_cannot_be_declared() -> None:
    """An empty declaration, and a repeated example, are refused."""
    with pytest.raises(LossesError, match=r"^there are no ids\.$"):
        _declared([])
    with pytest.raises(LossesError, match=r"^1 id \('a'\) declared several times"):
        _declared([DeclaredExample("a"), DeclaredExample("b"), DeclaredExample("a")])
