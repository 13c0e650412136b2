"""calm-beam's own files are read as strictly as manifests: no ambiguous JSON."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy

from calm_beam.errors import CalmBeamError
from calm_beam.metrics.bleurt import CONFIG, BleurtConfig
from calm_beam.outputs import COMPLETE, DecodeJob, FinishedSweep, stored_shard
from calm_beam.report import read_calibrated, read_speedups
from calm_beam.training.saved_state import StateFolder
from tests.calm_beam.manifest.builders import build_manifest
from tests.calm_beam.outputs.test_job import build_job
from tests.calm_beam.report.builders import random_generations, write_calibration

_REPEATED = '{"schema": 1, "id": "a", "reason": "b", "id": "c"}'


def _read_job(folder: pathlib.Path, text: str) -> None:
    (folder / DecodeJob.FILE).write_text(text)
    DecodeJob.read(str(folder))


def _read_mark(folder: pathlib.Path, text: str) -> None:
    (folder / COMPLETE).write_text(text)
    FinishedSweep.read(str(folder), build_job())


def _read_bleurt_config(folder: pathlib.Path, text: str) -> None:
    (folder / CONFIG).write_text(text)
    BleurtConfig.read(folder)


def _read_bert_config(folder: pathlib.Path, text: str) -> None:
    (folder / CONFIG).write_text("{}")
    (folder / "bert_config.json").write_text(text)
    BleurtConfig.read(folder)


def _read_failures(folder: pathlib.Path, text: str) -> None:
    write_calibration(folder, random_generations(6))
    (folder / "failures.jsonl").write_text(f"{text}\n")
    read_calibrated(str(folder))


def _read_speedups(folder: pathlib.Path, text: str) -> None:
    (folder / "splits.json").write_text(text)
    read_speedups(str(folder), build_manifest())


def _read_training_state(folder: pathlib.Path, text: str) -> None:
    path = folder / "state_00000001.safetensors"
    path.write_bytes(safetensors.numpy.save({}, metadata={"state": text}))
    StateFolder(folder).load()


def _read_shard(folder: pathlib.Path, text: str) -> None:
    table = pyarrow.table({"id": ["a"]}).replace_schema_metadata({b"calm_beam": text.encode()})
    pyarrow.parquet.write_table(table, folder / "shard.parquet")
    stored_shard(str(folder / "shard.parquet"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_REPEATED, 'key "id" occurs twice in the same object'),
        ('{"a": {"b": 1, "b": 1}}', 'key "b" occurs twice in the same object'),
        ("[" * 100_000, "nested deeper than 100 levels"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested deeper than 100 levels"),
        ("{", "not JSON: "),
    ],
    ids=["repeated", "repeated below", "nested", "nested and whole", "cut"],
)
@pytest.mark.parametrize(
    "read",
    [
        _read_job,
        _read_mark,
        _read_bleurt_config,
        _read_bert_config,
        _read_failures,
        _read_speedups,
        _read_training_state,
        _read_shard,
    ],
)
def test_what_is_ambiguous_or_no_json_is_refused(
    read: Callable[[pathlib.Path, str], Any], text: str, message: str, tmp_path: pathlib.Path
) -> None:
    """A repeated key, endless nesting and half a file are refused with a clear message and the file's place."""
    with pytest.raises(CalmBeamError, match=re.escape(message)) as caught:
        read(tmp_path, text)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("line", ["3", "[]", "{}", '{"id": 1, "reason": "a"}', '{"id": "a", "reason": null}'])
def test_failures_of_another_form_are_refused(line: str, tmp_path: pathlib.Path) -> None:
    """A list of failures that calm-beam did not write is refused with the line."""
    with pytest.raises(CalmBeamError, match=r"failures\.jsonl, line 1: is not as calm-beam writes it"):
        _read_failures(tmp_path, line)
