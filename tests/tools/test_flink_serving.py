"""Checks of `RunInference` and `MonitorRisk` on Flink: what they compare; with the jars, on a cluster with a kill."""

import pathlib
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from tools.flink import served
from tools.flink.cluster import running_cluster
from tools.flink.files import Engines
from tools.flink.serving import Finding, Serving, differences

_NO_FLINK = Engines.here().missing("flink")


def _store(folder: pathlib.Path, *rows: dict[str, Any]) -> None:
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = pipeline | beam.Create(rows) | served.store_rows(folder)


def test_a_row_that_comes_again_adds_none(tmp_path: pathlib.Path) -> None:
    """Equal rows are stored once, and rows that differ in one bit are two."""
    _store(tmp_path / "rows", {"n": 1.0}, {"n": 1.0})
    _store(tmp_path / "rows", {"n": 1.0}, {"n": 1.0000000000000002})
    assert sorted(row["n"] for row in served.stored(tmp_path / "rows")) == [1.0, 1.0000000000000002]
    assert served.stored(tmp_path / "none") == ()


def test_a_loss_that_counts_twice_is_found(tmp_path: pathlib.Path) -> None:
    """A state that is missing, or that one process does not have, is a difference; equal states are not."""
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for folder, count in ((one, 5), (same, 5), (other, 6)):
        _store(folder / served.STATES, {"n": count})
    assert differences(one, same) == ()
    assert differences(one, other) == ("states: 1 missing, 1 that one process does not have",)
    _store(other / served.STATES, {"n": 5})
    assert differences(one, other) == ("states: 0 missing, 1 that one process does not have",)


def test_findings_in_words() -> None:
    """A line says that all is equal or what is wrong, how long it took, and what was counted."""
    assert Finding(seconds=3.2, wrong=(), seen="5 answers").in_words == "equal, 3 s; 5 answers"
    assert Finding(seconds=3.2, wrong=("a", "b"), seen="5 answers").in_words == "a; b, 3 s; 5 answers"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(bool(_NO_FLINK), reason=_NO_FLINK)
def test_workers_share_a_model_and_a_kill_changes_no_state(tmp_path: pathlib.Path) -> None:
    """On a cluster, two workers load one model, and answers, states and alarms equal one process's despite a kill."""
    serving = Serving(tmp_path)
    with running_cluster(Engines.here(), tries=10) as cluster:
        for check in ("answers", "kill"):
            assert serving.run(check, cluster).wrong == ()
