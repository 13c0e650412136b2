"""A folder of answers is begun, resumed or cleared, and foreign files are not touched."""

import dataclasses
import pathlib

import pytest

from calm_beam.errors import UsageError
from calm_beam.outputs import AnswerJob, OutputsError
from calm_beam.outputs.folder import AnswerHome
from calm_beam.outputs.job import Probe
from calm_beam.outputs.stored_shards import check_folder, finish
from tests.answers import build_answer_assignment, write_shard


def _begin(folder: pathlib.Path, job: AnswerJob, *, resume: bool = False, overwrite: bool = False) -> list[str]:
    told: list[str] = []
    AnswerHome(str(folder)).begin([job], resume=resume, overwrite=overwrite, tell=told.append)
    return told


def test_a_job_reads_back(tmp_path: pathlib.Path) -> None:
    """A written job reads back unchanged, and differences are named."""
    job = build_answer_assignment(tmp_path, probe=Probe(share=0.25, salt="s")).job
    job.write(str(tmp_path))
    assert AnswerJob.read(str(tmp_path)) == job
    other = dataclasses.replace(job, probe=Probe(share=0.5, salt="s"), num_shards=3)
    assert other.differences(job) == ("num_shards is 2 there, 3 here", "probe.share is 0.25 there, 0.5 here")
    with pytest.raises(ValueError, match="output_format must be one of parquet, jsonl, got 'csv'"):
        dataclasses.replace(job, output_format="csv")
    with pytest.raises(ValueError, match=r"probe_share must be in \(0, 1\], got 2"):
        Probe(share=2, salt="s")


def test_answers_are_gone_on_with(tmp_path: pathlib.Path) -> None:
    """Finished shards are kept with --resume, and only with it; partial files of a killed process are removed."""
    folder = tmp_path / "answers"
    assignment = build_answer_assignment(folder)
    assert _begin(folder, assignment.job) == []
    assert AnswerHome(str(folder)).begun_shards() is None
    write_shard(assignment, 1, ids=["a"])
    half = folder / ".answers-00000-of-00002.parquet.0badcafe.tmp"
    half.write_bytes(b"PAR1 half")
    with pytest.raises(
        UsageError, match=r"holds answers of a run that did not finish \(1 of at most 2 shards answered"
    ):
        _begin(folder, assignment.job)
    assert half.exists()
    (sentence,) = _begin(folder, assignment.job, resume=True)
    assert sentence.startswith(f"--resume: found 1 of at most 2 shards answered in {folder}")
    assert not half.exists()
    assert AnswerHome(str(folder)).begun_shards() == 2
    with pytest.raises(UsageError, match="was begun in another way: num_shards is 2 there, 5 here"):
        _begin(folder, dataclasses.replace(assignment.job, num_shards=5), resume=True)


def test_what_is_finished_is_not_begun_anew_by_accident(tmp_path: pathlib.Path) -> None:
    """Complete answers are refused too; --overwrite removes all of them, and nothing else."""
    assignment = build_answer_assignment(tmp_path, output_format="jsonl")
    _begin(tmp_path, assignment.job)
    finish(assignment, [write_shard(assignment, 0, ids=["a"], failed=["b"])], examples=2)
    mine = tmp_path / "notes.jsonl"
    mine.write_text("{}")
    (tmp_path / "answers-of-mine.parquet").write_text("mine")
    with pytest.raises(UsageError, match="holds answers \\(1 of"):
        _begin(tmp_path, assignment.job)
    _begin(tmp_path, assignment.job, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "answers-of-mine.parquet",
        "generate.json",
        "notes.jsonl",
        "parts",
    }
    assert not list((tmp_path / "parts").iterdir())


@pytest.mark.parametrize("name", ["manifest.json", "failures.jsonl", "losses.jsonl", "answers-00000-of-00001.parquet"])
def test_a_folder_of_others_is_left_alone(tmp_path: pathlib.Path, name: str) -> None:
    """A folder with files of such names and without generate.json is never changed, whatever the flags."""
    (tmp_path / name).write_text("of somebody")
    job = build_answer_assignment(tmp_path).job
    for resume, overwrite in ((False, False), (True, False), (False, True)):
        with pytest.raises(UsageError, match=rf"holds {name}, and no generate\.json that says it is of this command"):
            _begin(tmp_path, job, resume=resume, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_workers_check_the_folder(tmp_path: pathlib.Path) -> None:
    """A worker refuses a folder that it does not see, one of another job, and one with shards of other data."""
    assignment = build_answer_assignment(tmp_path)
    with pytest.raises(OutputsError, match=r"workers find no generate\.json there"):
        check_folder(assignment, [0])
    assignment.job.write(str(tmp_path))
    write_shard(assignment, 0, ids=["a"])
    check_folder(assignment, [0, 1])
    with pytest.raises(OutputsError, match="the data have no prompt for this file"):
        check_folder(assignment, [1])
    other = dataclasses.replace(assignment, job=dataclasses.replace(assignment.job, num_shards=3))
    with pytest.raises(OutputsError, match="another run has begun there meanwhile"):
        check_folder(other, [0])
    with pytest.raises(FileExistsError):
        other.job.write(str(tmp_path))


def test_a_failure_leaves_what_can_be_gone_on_with(tmp_path: pathlib.Path) -> None:
    """After a failure finished shards are reported; without any, nothing is left."""
    folder = tmp_path / "answers"
    assignment = build_answer_assignment(folder, output_format="jsonl")
    _begin(folder, assignment.job)
    assert AnswerHome(str(folder)).after_failure(str(folder), is_over=False) == ""
    assert (folder / "generate.json").exists()
    assert AnswerHome(str(folder)).after_failure(str(folder), is_over=True) == ""
    assert not folder.exists()
    _begin(folder, assignment.job)
    write_shard(assignment, 0, ids=["a"])
    assert AnswerHome(str(folder)).after_failure(str(folder), is_over=True) == (
        f"1 of at most 2 shards answered in {folder}: --resume goes on from there."
    )
