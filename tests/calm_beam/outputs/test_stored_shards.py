"""Stored shards of a sweep are reused if their examples are the same, and only then."""

import dataclasses
import pathlib
import re

import pytest

from calm_beam.inputs.examples import DataError, Example
from calm_beam.outputs import OutputsError, StoredShard, read_generations, write_generations
from calm_beam.outputs.request import SweepAssignment
from calm_beam.outputs.stored_shards import (
    check_above,
    check_folder,
    finish,
    generations_above,
    store_shard,
    taken_over,
)
from tests.calm_beam.calibration.builders import build_example, build_generation
from tests.pipelines import build_assignment

_EXAMPLES = [build_example(id=name) for name in "ab"]


def _store(assignment: SweepAssignment, *, failure: str | None = None) -> StoredShard:
    """Writes shard 0 as a worker does, and returns the file's metadata."""
    digest = assignment.job.shard_digest(0, examples=_EXAMPLES)
    texts = () if failure else ("cat",) * 6
    write_generations(
        assignment.stored.shard_path(0),
        [build_generation(texts, example=example, failure=failure) for example in _EXAMPLES],
        digest=digest,
    )
    return StoredShard(shard=0, examples=2, failed=2 if failure else 0, digest=digest)


@pytest.fixture
def assignment(tmp_path: pathlib.Path) -> SweepAssignment:
    """An assignment to decode one shard into a folder."""
    return build_assignment(str(tmp_path), model="model")


def test_the_same_examples_are_taken_over(assignment: SweepAssignment) -> None:
    """A missing shard is not reused; a stored one is, if the data give the same examples for it."""
    assert taken_over(assignment, 0, examples=_EXAMPLES) is None
    stored = _store(assignment)
    assert taken_over(assignment, 0, examples=_EXAMPLES) == stored
    check_folder(assignment, [0])
    assert finish(assignment, [stored, stored], examples=2).shards == (stored,)


@pytest.mark.parametrize(
    ("examples", "change"),
    [
        (_EXAMPLES[:1], "example 'b' is gone"),
        ([*_EXAMPLES, build_example(id="c")], "example 'c' is new"),
        ([_EXAMPLES[0], build_example(id="b", input="the dog", line=7)], "example 'b' has another input and another"),
    ],
)
def test_other_examples_are_refused(assignment: SweepAssignment, examples: list[Example], change: str) -> None:
    """The message names the first example that has changed, and the change."""
    _store(assignment)
    with pytest.raises(OutputsError, match=rf"the data have changed since \({re.escape(change)}"):
        taken_over(assignment, 0, examples=examples)


def test_failures_are_taken_over_where_examples_may_fail(assignment: SweepAssignment) -> None:
    """Failures of an earlier run are reused by a run that counts failures with loss 1, within its limit."""
    stored = _store(assignment, failure="broken")
    with pytest.raises(DataError, match=r"holds 2 examples that could not be decoded, a first: broken\. Go on with "):
        taken_over(assignment, 0, examples=_EXAMPLES)
    lenient = dataclasses.replace(assignment, on_error="worst_case", max_failures=2)
    assert taken_over(lenient, 0, examples=_EXAMPLES) == stored
    assert finish(lenient, [stored], examples=2).failed == 2
    with pytest.raises(DataError, match="broken"):
        finish(dataclasses.replace(lenient, max_failures=1), [stored], examples=2)


def test_the_part_above_is_of_the_same_examples(assignment: SweepAssignment, tmp_path: pathlib.Path) -> None:
    """Outputs at upper thresholds are found by example; missing ones, and those of other prompts, are refused."""
    assert generations_above(assignment, 0, examples=_EXAMPLES) is None
    (tmp_path / "below").mkdir()
    below = dataclasses.replace(build_assignment(str(tmp_path / "below"), model="model"), above=assignment.stored)
    with pytest.raises(OutputsError, match="is missing, although the data give 2 examples for this shard"):
        check_above(below, 0, examples=_EXAMPLES)
    _store(assignment)
    found = generations_above(below, 0, examples=_EXAMPLES)
    assert found is not None
    assert {name: generation.example for name, generation in found.items()} == dict(zip("ab", _EXAMPLES, strict=True))
    with pytest.raises(OutputsError, match=r"\(example 'b' is gone\)"):
        check_above(below, 0, examples=_EXAMPLES[:1])
    with pytest.raises(OutputsError, match="the data have no example for this file"):
        check_folder(below, [])


def test_the_first_of_two_workers_counts(assignment: SweepAssignment) -> None:
    """A worker that decodes a stored shard again gets the stored one, to the byte."""
    one, other = ([build_generation((text,) * 6, example=example) for example in _EXAMPLES] for text in ("cat", "dog"))
    stored = store_shard(assignment, 0, examples=_EXAMPLES, outcomes=one)
    path = pathlib.Path(assignment.shard_path(0))
    before = path.read_bytes()
    assert store_shard(assignment, 0, examples=_EXAMPLES, outcomes=other) == stored
    assert path.read_bytes() == before
    assert list(read_generations(path)) == one
