"""Measured speedups are taken over where they fit, and refused where they do not."""

import json
import pathlib
from typing import Any

import pytest

from calm_beam.manifest import Manifest
from calm_beam.report import ReportError, read_speedups
from tests.calm_beam.manifest.builders import build_manifest

_RULE = {
    "confidence": "softmax",
    "schedule": "decay",
    "tau": 4.0,
    "state_propagation": "from_exit",
    "token_from": "exit_layer",
    "min_exit_layer": 1,
    "exit_interval": 1,
}
_ROWS = "measure,threshold,speedup\nfast,0.8,1.75\nfast,0.5,2.5\nslow,0.8,1.1\nfast,,\n"


def _write(folder: pathlib.Path, *, table: str = _ROWS, rule: dict[str, Any] | None = None, **changes: Any) -> str:
    record = {
        "model": {"fingerprint": build_manifest().model.fingerprint},
        "max_decode_length": 64,
        "measures": [
            {"name": "slow", "rule": {**_RULE, "confidence": "state"}},
            {"name": "fast", "rule": rule or _RULE},
        ],
        **changes,
    }
    (folder / "splits.json").write_text(json.dumps(record), encoding="utf-8")
    (folder / "splits.csv").write_text(table, encoding="utf-8")
    return str(folder)


@pytest.fixture
def manifest() -> Manifest:
    """A manifest whose entries chose 0.8 and never exit."""
    return build_manifest()


def test_speedups_at_chosen_thresholds(tmp_path: pathlib.Path, manifest: Manifest) -> None:
    """Of the measure that exits as the manifest says, the promised thresholds are taken."""
    assert read_speedups(_write(tmp_path), manifest) == {0.8: 1.75}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"fingerprint": "sha256:00"}}, "is about another model"),
        ({"max_decode_length": 32}, "is about another model, or another way of decoding"),
        ({"rule": {**_RULE, "tau": 2.0}}, "is about another model, or another way of decoding"),
        ({"table": "measure,threshold,speedup\nfast,0.5,2.5\n"}, "no threshold of the manifest was timed there"),
        ({"table": "measure,threshold,speedup\nfast,0.8,\n"}, "no threshold of the manifest was timed there"),
        ({"table": "measure,threshold\nfast,0.8\n"}, r"as this version writes them \(KeyError: 'speedup'\)"),
        ({"measures": None}, "as this version writes them"),
    ],
)
def test_what_does_not_fit(tmp_path: pathlib.Path, manifest: Manifest, changes: dict[str, Any], message: str) -> None:
    """Times of another model or decoding, of other thresholds, or none at all, are refused in words."""
    with pytest.raises(ReportError, match=message):
        read_speedups(_write(tmp_path, **changes), manifest)
