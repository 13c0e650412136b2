"""A shard of answers is stored atomically, once, with the result of every prompt."""

import dataclasses
import pathlib

import pytest

from calm_beam.inputs import read_examples
from calm_beam.outputs import OutputsError, stored_shard
from calm_beam.outputs.rows import write_answers
from calm_beam.outputs.shards import Failure, ProbedLoss, shard_rows
from calm_beam.outputs.stored_shards import taken_over
from calm_beam.serving.answer import Tally
from tests.answers import build_answer_assignment, write_shard
from tests.pipelines import write_rows


def test_what_is_stored_is_read_back(tmp_path: pathlib.Path) -> None:
    """Rows, failures, losses and counts read back unchanged, also of groups without a name."""
    assignment = build_answer_assignment(tmp_path)
    answered = write_shard(
        assignment,
        1,
        ids=["a", "b"],
        failed=["c"],
        losses=(ProbedLoss(id="a", loss=0.25, failure=None, calibration=0),),
        tallies={None: Tally(prompts=2, failed=1), "fr": Tally(prompts=1, tokens=3)},
    )
    path = assignment.shard_path(1)
    assert path == str(tmp_path / "answers-00001-of-00002.parquet")
    assert stored_shard(path) == answered
    assert answered.failures == (Failure(id="c", reason="it is broken"),)
    assert [(row["id"], row["text"], row["confidences"]) for row in shard_rows(path)] == [
        ("a", "to a", [0.75, 0.5]),
        ("b", "to b", [0.75, 0.5]),
    ]


def test_the_first_of_two_counts(tmp_path: pathlib.Path) -> None:
    """An existing file is replaced only by one of the same content; its bytes do not depend on the time."""
    assignment = build_answer_assignment(tmp_path)
    answered = write_shard(assignment, 0, ids=["a"])
    path = pathlib.Path(assignment.shard_path(0))
    before = path.read_bytes()
    rows = list(shard_rows(str(path)))
    write_answers(str(path), rows, shard=answered, has_groups=False)
    rows[0]["confidences"] = [0.75, 0.25]
    with pytest.raises(FileExistsError):
        write_answers(str(path), rows, shard=answered, has_groups=False)
    assert path.read_bytes() == before


def test_no_prompt_is_stored_twice_or_left_out(tmp_path: pathlib.Path) -> None:
    """A shard with a doubled or missing prompt, which would be our defect, is not written."""
    assignment = build_answer_assignment(tmp_path)
    for ids, failed in ((["a", "a"], []), (["a"], ["a"])):
        with pytest.raises(AssertionError):
            write_shard(assignment, 0, ids=ids, failed=failed)
    with pytest.raises(AssertionError):
        write_shard(assignment, 0, ids=["a"], tallies={None: Tally(prompts=2)})
    assert not list(tmp_path.iterdir())


def test_only_the_same_prompts_are_taken_over(tmp_path: pathlib.Path) -> None:
    """A stored shard is identified by its prompts, in content and group, and by the job."""
    rows = [{"id": "a", "input": "the cat"}, {"id": "b", "input": "the owl"}]
    examples = list(read_examples(str(write_rows(tmp_path / "rows.jsonl", rows))))
    assignment = build_answer_assignment(tmp_path)
    job = assignment.job
    digest, other = job.shard_digest(0, examples=examples), dataclasses.replace(job, num_shards=3)
    assert digest not in (job.shard_digest(1, examples=examples), other.shard_digest(0, examples=examples))
    assert taken_over(assignment, 0, examples=examples) is None
    stored = write_shard(assignment, 0, ids=["a", "b"], digest=digest)
    assert taken_over(assignment, 0, examples=examples) == stored
    with pytest.raises(OutputsError, match="was answered from other prompts than the data give now for shard 0 of 2"):
        taken_over(assignment, 0, examples=examples[:1])


def test_damage_is_noticed(tmp_path: pathlib.Path) -> None:
    """A flipped bit, half a file and a foreign file are named, with what to do."""
    assignment = build_answer_assignment(tmp_path)
    write_shard(assignment, 0, ids=[f"row-{index}" for index in range(50)])
    path = pathlib.Path(assignment.shard_path(0))
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:200] + bytes([content[200] ^ 1]) + content[201:]):
        path.write_bytes(damaged)
        with pytest.raises(OutputsError, match=r"answers-00000-of-00002\.parquet: is damaged .* --resume"):
            list(shard_rows(str(path)))
