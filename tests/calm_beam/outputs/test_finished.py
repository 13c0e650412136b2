"""At the end of a run, only outputs that hold every prompt once are marked as complete."""

import dataclasses
import gzip
import json
import pathlib

import pytest

from calm_beam.inputs.examples import DataError
from calm_beam.outputs import COMPLETE, FinishedAnswers, OutputsError, read_answers
from calm_beam.outputs.job import Probe
from calm_beam.outputs.rows import publish_rows
from calm_beam.outputs.shards import ProbedLoss
from calm_beam.outputs.stored_shards import finish
from calm_beam.serving.answer import Tally
from tests.answers import build_answer_assignment, write_shard


def test_the_mark_counts_everything(tmp_path: pathlib.Path) -> None:
    """Shards in any order, one of them twice, give one mark, which reads back; rows are sorted by shard."""
    assignment = build_answer_assignment(tmp_path)
    assignment.job.write(str(tmp_path))
    shards = [
        write_shard(assignment, 1, ids=["a", "c"], failed=["b"]),
        write_shard(assignment, 0, ids=["d"], tallies={"fr": Tally(prompts=1, tokens=2, layers_used=3)}),
    ]
    finished = finish(assignment, [*shards, shards[0]], examples=4)
    assert isinstance(finished, FinishedAnswers)
    assert [shard.shard for shard in finished.shards] == [0, 1]
    assert finished.total == Tally(prompts=4, failed=1, tokens=6, layers_used=9, layers_saved=10)
    assert FinishedAnswers.read(str(tmp_path), assignment.job) == finished
    assert (tmp_path / "failures.jsonl").read_text() == '{"id": "b", "reason": "it is broken"}\n'
    assert [row["id"] for row in read_answers(str(tmp_path))] == ["d", "a", "c"]
    before = (tmp_path / COMPLETE).read_bytes()
    assert finish(assignment, shards[::-1], examples=4) == finished
    assert (tmp_path / COMPLETE).read_bytes() == before


def test_lost_and_doubled_prompts_are_refused(tmp_path: pathlib.Path) -> None:
    """A number of prompts other than was read, and two results of a shard, leave no mark."""
    assignment = build_answer_assignment(tmp_path)
    shard = write_shard(assignment, 0, ids=["a", "b"])
    for read in (1, 3):
        with pytest.raises(OutputsError, match=r"read, but 2 answered or listed as failed"):
            finish(assignment, [shard], examples=read)
    other = dataclasses.replace(shard, digest="sha256:2")
    with pytest.raises(OutputsError, match="shard 0 was answered twice, with different results"):
        finish(assignment, [shard, other], examples=2)
    assert not (tmp_path / COMPLETE).exists()


def test_too_many_failures_end_the_run(tmp_path: pathlib.Path) -> None:
    """Failures above the limit leave no mark; the first are named."""
    assignment = dataclasses.replace(build_answer_assignment(tmp_path), max_failures=1)
    shard = write_shard(assignment, 0, ids=["a"], failed=["b", "c"])
    with pytest.raises(DataError, match=r"2 examples failed, more than the 1 that may. The first: b \(it is broken\)"):
        finish(assignment, [shard], examples=3)
    assert not (tmp_path / COMPLETE).exists()


def test_losses_are_written_as_monitor_reads_them(tmp_path: pathlib.Path) -> None:
    """Each promise has its own file, by shard and id; without losses there is none, even if one was there."""
    assignment = build_answer_assignment(tmp_path, probe=Probe(share=0.5, salt="s"))
    losses = (
        ProbedLoss(id="a", loss=0.25, failure=None, calibration=0),
        ProbedLoss(id="b", loss=1.0, failure="no memory", calibration=0),
    )
    first = write_shard(assignment, 1, ids=["a", "b"], losses=losses)
    second = write_shard(assignment, 0, ids=["c"])
    (tmp_path / "losses.jsonl").write_text("of an earlier attempt\n")
    finished = finish(assignment, [first, second], examples=3)
    assert isinstance(finished, FinishedAnswers)
    assert finished.losses == {0: 2}
    rows = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    about = {"manifest": assignment.manifest.digest, "calibration": 0}
    assert rows == [
        {"id": "a", "loss": 0.25, "failure": None, **about},
        {"id": "b", "loss": 1.0, "failure": "no memory", **about},
    ]
    assert list(rows[0]) == ["id", "loss", "failure", "manifest", "calibration"]
    finish(assignment, [second], examples=1)
    assert not (tmp_path / "losses.jsonl").exists()


def test_json_lines_are_the_same_bytes_each_time(tmp_path: pathlib.Path) -> None:
    """JSON lines have the rows of their shard, without time or name, so that their bytes are reproducible."""
    assignment = build_answer_assignment(tmp_path, output_format="jsonl")
    write_shard(assignment, 0, ids=["a", "ö"])
    paths = [tmp_path / "one.jsonl.gz", tmp_path / "another.jsonl.gz"]
    for path in paths:
        publish_rows(assignment.shard_path(0), str(path))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    lines = gzip.decompress(paths[0].read_bytes()).decode().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["to a", "to ö"]


def test_what_is_no_mark_is_refused(tmp_path: pathlib.Path) -> None:
    """A missing mark, one of another job, and one that was changed are reported; answers without it are not read."""
    assignment = build_answer_assignment(tmp_path)
    with pytest.raises(OutputsError, match=r"has no complete\.json, so decoding did not finish there"):
        FinishedAnswers.read(str(tmp_path), assignment.job)
    finish(assignment, [write_shard(assignment, 0, ids=["a"])], examples=1)
    with pytest.raises(OutputsError, match=r"complete\.json: does not match generate\.json next to it"):
        FinishedAnswers.read(str(tmp_path), dataclasses.replace(assignment.job, num_shards=3))
    path = tmp_path / COMPLETE
    path.write_text(path.read_text().replace('"prompts": 1', '"prompts": 2', 1))
    with pytest.raises(OutputsError, match="was changed after it was written"):
        FinishedAnswers.read(str(tmp_path), assignment.job)
