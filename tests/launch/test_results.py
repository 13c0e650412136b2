"""`--json` prints a command's result for programs, and `--require_threshold` makes "nothing proved" a failure."""

import json
import pathlib
from typing import Any

import pytest

from calm_beam.launch.cli import main
from calm_beam.launch.commands import COMMANDS, flag_parsers
from calm_beam.manifest import read_any_manifest
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

_WITH_RESULT = {
    *("calibrate", "certify", "doctor", "evaluate", "inspect", "monitor", "plan", "suitability", "train", "verify")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Holds a tiny random model, `model`, and data for and after a calibration."""
    folder = tmp_path_factory.mktemp("results")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl", id_rows(30))
    write_rows(folder / "fresh.jsonl", [{**row, "id": f"fresh {row['id']}"} for row in id_rows(60)[30:]])
    return folder


def _json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    """Returns the JSON that a command prints with `--json`, after checking that it prints nothing else."""
    capsys.readouterr()
    assert main([*argv, "--json"]) == status, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def _calibrated(folder: pathlib.Path, *flags: str) -> list[str]:
    paths = [f"--checkpoint={folder / 'model'}", f"--data={folder / 'rows.jsonl'}"]
    return ["calibrate", *paths, *SHORT_FLAGS, "--metric=token_f1", "--epsilon=0.3", *flags]


def test_a_calibration_and_all_that_is_asked_of_it(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibrations, verifications and monitors print figures on standard output and sentences on standard error."""
    output = folder / "proved"
    found = _json(capsys, *_calibrated(folder, "--delta=0.95", f"--output={output}", "--require_threshold"))
    manifest = read_any_manifest(output / "manifest.json")
    assert found == {"output": str(output), "manifest": json.loads((output / "manifest.json").read_text())}
    assert _json(capsys, "inspect", str(output)) == {"manifest": found["manifest"], "agreement": None}
    assert _json(capsys, "inspect", str(folder / "model"))["layout"] == "native"
    (folder / "losses.txt").write_text("0\n0.5\nmissing\n")
    watched = _json(capsys, "monitor", f"--manifest={output}", f"--losses={folder / 'losses.txt'}")
    assert (watched["losses"], watched["missing"], watched["alarm_at"]) == (3, 1, None)
    assert watched["promise"]["manifest"] == manifest.digest
    fresh = [f"--checkpoint={folder / 'model'}", f"--data={folder / 'fresh.jsonl'}"]
    verified = _json(capsys, "verify", f"--manifest={output}", *fresh)
    (verdict,) = verified["verdicts"]
    assert (verified["is_broken"], verdict["is_broken"], verdict["delta"]) == (False, False, 0.95)
    assert 0 <= verdict["risk"] <= 1


def test_nothing_proved_is_a_status_where_it_is_asked_for(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --require_threshold nothing proved has a status of its own, for thresholds and settings; else 0."""
    calibration = _calibrated(folder, "--delta=0.2", f"--output={folder / 'never'}", "--overwrite")
    assert main(calibration) == 0
    (entry,) = _json(capsys, *calibration, "--require_threshold", status=4)["manifest"]["calibrations"]
    assert entry["threshold"] is None
    rows = [f"{example},{setting},{loss}" for example in range(60) for setting, loss in (("a", 0), ("b", 1))]
    (folder / "losses.csv").write_text("\n".join(["id,setting,loss", *rows]) + "\n")
    certification = ["certify", f"--losses={folder / 'losses.csv'}", f"--output={folder / 'c'}", "--overwrite"]
    for order, status in (("b,a", 4), ("a,b", 0)):
        asked = [*certification, f"--order={order}", "--delta=0.2", "--require_threshold"]
        found = _json(capsys, *asked, status=status)
        assert found["manifest"]["calibrations"][0]["setting"] == (None if status else "a")
    capsys.readouterr()
    assert main([*certification, "--order=b,a", "--delta=0.2"]) == 0


def test_forecasts_as_json(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` and `suitability` print their figures."""
    found = _json(capsys, "plan", "--delta=0.1", "--risk_guess=0.03", "--p_value=hoeffding_bentkus")
    ((needed),) = found["needed"]
    assert needed.keys() == {"delta", "epsilon", "risk", "std", "p_value", "examples"}
    assert needed["examples"] > 30
    model, data = f"--checkpoint={folder / 'model'}", f"--data={folder / 'rows.jsonl'}"
    forecast = _json(capsys, "suitability", model, data, "--max_examples=5", "--max_decode_length=4")
    assert len(forecast["agreement"]) == 4
    assert forecast["verdict"]
    device = _json(capsys, "plan", "--device=v5e", model)
    assert device["full_microseconds"] > 0


def test_a_failure_prints_no_result(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On failure standard output is empty, the status is the error's, and the reason is on standard error."""
    assert main(["inspect", str(tmp_path / "nothing"), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "calm-beam inspect: " in printed.err


@pytest.mark.parametrize("command", COMMANDS)
def test_who_has_a_result_takes_the_flag(command: str) -> None:
    """All forms of commands with a result take `--json`, and those that prove something take `--require_threshold`."""
    for parser in flag_parsers(command):
        assert ("--json" in parser._option_string_actions) == (command in _WITH_RESULT)
        assert ("--require_threshold" in parser._option_string_actions) == (command in ("calibrate", "certify"))


def test_a_command_without_a_result_refuses_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """A command without a result refuses the flag as an unknown one."""
    assert main(["generate", "--manifest=m.json", "--json"]) == 2
    assert "unknown flag --json" in capsys.readouterr().err


def test_a_file_of_options_has_neither(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config file has neither flag, since both are about the call's result."""
    (tmp_path / "options.json").write_text('{"json": true}')
    assert main(["plan", f"--config={tmp_path / 'options.json'}"]) == 2
    assert "json is given on the command line, and not in a file" in capsys.readouterr().err
