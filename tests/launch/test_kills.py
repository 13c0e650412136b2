"""Killed runs complete on the second call, with the right n and the result of an uninterrupted run."""

import pathlib
import random

import pytest

from tests.kills import SHARDS, AnswersBench, CalibrationBench, KillBench


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["launcher", "worker"])
@pytest.mark.parametrize(("kind", "kills"), [(CalibrationBench, 3), (AnswersBench, 1)])
def test_a_killed_run_completes(tmp_path: pathlib.Path, kind: type[KillBench], kills: int, target: str) -> None:
    """SIGKILL at random moments of decoding: --resume gives the result of an uninterrupted run; see tests/kills.py."""
    bench, generator = kind(tmp_path, target), random.Random(7)
    for index in range(kills):
        shards, seconds = generator.randint(0, SHARDS - 1), generator.uniform(0, 0.3)
        outcome = bench.kill(f"run-{index}", shards=shards, seconds=seconds)
        assert outcome.second == 0
