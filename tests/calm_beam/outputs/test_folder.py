"""Folders of generations begun by another engine."""

import dataclasses
import pathlib
from typing import Any

import pytest

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord, ModelRecord
from calm_beam.outputs import DecodeJob, FinishedSweep, OutputsError, StoredShard, stored_shard, write_generations
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.stored_shards import check_one_engine

_NATIVE = EngineRecord(name="native", instructions="avx2", head="uint8", prefill="native")
_XLA = EngineRecord(name="xla", instructions="cpu avx2", head="exact")


def _job(engine: EngineRecord | None, **changes: Any) -> DecodeJob:
    settings = DecodeSettings(
        rule=ExitRule(), thresholds=(0.5,), max_input_length=8, max_decode_length=4, engine=engine
    )
    job = DecodeJob(
        model=ModelRecord(uri="/models/tiny", fingerprint="sha256:6d", layers=4),
        vocabulary=None,
        settings=settings,
        on_long="truncate",
        cluster_key=None,
        patterns=("data.jsonl",),
        files=("data.jsonl",),
        num_shards=2,
        software={},
    )
    return dataclasses.replace(job, **changes)


def _begin(output: pathlib.Path, job: DecodeJob, *, resume: bool = False) -> str:
    return SweepHome(str(output)).begin([job], resume=resume, overwrite=False, tell=lambda _: None)


def test_the_engine_is_a_part_of_the_name_and_of_the_job(tmp_path: pathlib.Path) -> None:
    """Each engine has its own folder and digest; the folder's content reads back."""
    jobs = [_job(engine) for engine in (None, _XLA, _NATIVE, dataclasses.replace(_NATIVE, instructions="avx512_vnni"))]
    assert len({job.outputs() for job in jobs}) == len({job.digest() for job in jobs}) == 4
    for job in jobs:
        folder = tmp_path / job.outputs()
        folder.mkdir()
        job.write(str(folder))
        assert DecodeJob.read(str(folder)) == job


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (
            _NATIVE,
            "the engine is native (avx2), head uint8 there, xla (cpu avx2), head exact here; --engine=native takes the "
            "other, on a machine that has it",
        ),
        (
            None,
            "the engine is one that was not recorded there, xla (cpu avx2), head exact here; an earlier version of "
            "calm-beam decoded there",
        ),
    ],
)
def test_a_folder_of_another_engine_is_not_gone_on_with(
    theirs: EngineRecord | None, said: str, tmp_path: pathlib.Path
) -> None:
    """A folder of another engine is refused with both engines and advice, also an earlier version's unfinished one."""
    folder = pathlib.Path(_begin(tmp_path, _job(theirs)))
    write_generations(folder / "generations-00000-of-00002.parquet", [])
    with pytest.raises(UsageError) as error:
        _begin(tmp_path, _job(_XLA), resume=True)
    assert f"{folder} was begun in another way: {said}. Generations of different runs are never mixed" in str(
        error.value
    )
    assert _begin(tmp_path, _job(theirs), resume=True) == str(folder)


def test_what_else_differs_is_said_beside_the_engine(tmp_path: pathlib.Path) -> None:
    """Other differences are reported together with the engine, each once, by its own name."""
    ours, theirs = _job(_XLA), _job(_NATIVE, num_shards=3)
    first, second = ours.differences(theirs)
    assert first.startswith("the engine is native (avx2), head uint8 there")
    assert second == "num_shards is 3 there, 2 here"


def test_shards_of_two_engines_do_not_meet(tmp_path: pathlib.Path) -> None:
    """Shards of two engines are refused both while workers decode and in the final count."""
    one, other = "xla (cpu avx2), head exact", "xla (cpu avx512f), head exact"
    for shard, engine in ((0, one), (1, other)):
        write_generations(tmp_path / f"generations-{shard:05d}-of-00002.parquet", [], shard=shard, engine=engine)
    check_one_engine(str(tmp_path), one)
    with pytest.raises(OutputsError) as error:
        check_one_engine(str(tmp_path), other)
    assert f"some of the workers decode by {one}, others by {other}" in str(error.value)
    stored = [stored_shard(path) for path in DecodeJob.shard_files(str(tmp_path))]
    assert [shard.engine for shard in stored] == [one, other]
    with pytest.raises(OutputsError, match="outputs of two engines are never mixed"):
        FinishedSweep.of(stored, job="sha256:6a", examples=0)
    alike = [dataclasses.replace(shard, engine=one) for shard in stored]
    finished = FinishedSweep.of(alike, job="sha256:6a", examples=0)
    assert [StoredShard(**shard.to_dict()) for shard in finished.shards] == alike


def test_shards_of_a_known_engine_say_no_more_than_before(tmp_path: pathlib.Path) -> None:
    """Files and marks of shards with a known engine have the keys of earlier versions."""
    write_generations(tmp_path / "generations-00000-of-00001.parquet", [])
    check_one_engine(str(tmp_path), "xla (cpu avx2), head exact")
    assert set(stored_shard(str(tmp_path / "generations-00000-of-00001.parquet")).to_dict()) == {
        "shard",
        "examples",
        "failed",
        "digest",
    }
