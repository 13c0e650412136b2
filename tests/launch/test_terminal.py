"""Ids, names and outputs from outside cannot control a terminal, whichever command prints them."""

import io
import json
import pathlib
import sys
import types

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.launch.cli import main
from calm_beam.launch.generate import here
from calm_beam.launch.generate.here import LayerPrinter
from calm_beam.launch.terminal import PlainConsole, say, say_loading, tell
from calm_beam.manifest import ModelRecord, write_manifest
from calm_beam.serving import Answer
from tests.calm_beam.manifest.builders import build_calibration, build_manifest
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import BROKEN_ID, SHORT_FLAGS, id_rows, write_model, write_rows

# Clears the screen, sets the title, reverses text, and writes red where rich reads its brackets.
_EVIL = "\x1b[2J\x1b]0;title\x07\x9b1m[red]\u202egnorw\u2066\r"
_SHOWN = "\\x1b[2J\\x1b]0;title\\x07\\x9b1m[red]\\u202egnorw\\u2066\\r"
_FORBIDDEN = {*map(chr, range(32)), "\x7f", "\x9b", "\u202e", "\u2066"} - {"\n"}


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")


def _check(capsys: pytest.CaptureFixture[str]) -> str:
    """Returns all that was printed on both streams, after checking that it is escaped and contains the text."""
    printed = capsys.readouterr()
    everything = printed.out + printed.err
    assert not _FORBIDDEN & set(everything)
    assert _SHOWN in everything
    return everything


@pytest.fixture
def manifest(tmp_path: pathlib.Path) -> pathlib.Path:
    """A valid, sealed manifest in which every free text has control characters."""
    path = tmp_path / "manifest.json"
    entry = build_calibration(metric=f"m{_EVIL}")
    model = ModelRecord(uri=f"/models/{_EVIL}", fingerprint="sha256:6d6f64656c", layers=6)
    write_manifest(build_manifest(model=model, calibrations=(entry,), guarantee=f"none\n{_EVIL}"), path)
    return path


def test_manifests_are_inspected(manifest: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's name, the metric and the guarantee are shown escaped, and brackets as brackets."""
    assert main(["inspect", str(manifest)]) == 0
    printed = _check(capsys)
    assert f"read from /models/{_SHOWN}" in printed
    assert f"none\\n{_SHOWN}" in printed
    assert f"m{_SHOWN}" in printed


def test_losses_are_monitored(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The watched entry, and a line without a loss, are printed escaped."""
    (tmp_path / "losses").write_text("0\n")
    assert main(["monitor", f"--manifest={manifest}", f"--losses={tmp_path / 'losses'}"]) == 0
    _check(capsys)
    evil = tmp_path / f"losses{_EVIL.replace('/', '')}"
    evil.write_text("x\n")
    assert main(["monitor", f"--manifest={manifest}", f"--losses={evil}"]) == 1
    _check(capsys)


@pytest.mark.parametrize(
    "argv",
    [
        [_EVIL],
        ["inspect", _EVIL],
        ["inspect", "x", f"--{_EVIL}"],
        ["calibrate", f"--data={_EVIL}", "--checkpoint=x"],
        ["plan", "--delta=0.1", f"--p_value={_EVIL}"],
        ["generate", f"--manifest={_EVIL}"],
        ["report", f"--calibration={_EVIL}"],
        ["convert", f"--checkpoint={_EVIL}", "--output=x", "--layout=native"],
        ["verify", f"--manifest={_EVIL}"],
        ["train", f"--data={_EVIL}", f"--validation_data={_EVIL}", "--output=x"],
    ],
)
def test_errors_show_what_was_given(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command that refuses a path or a value prints it escaped, with status 1 or 2."""
    monkeypatch.chdir(tmp_path)
    assert main(argv) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert not _FORBIDDEN & set(printed.err)
    assert "u202egnorw" in printed.err


def test_ids_of_a_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An example's id and a file's name are printed escaped, also from a worker's traceback."""
    model = write_model(tmp_path / "model", is_broken=True)
    rows = [*id_rows(3), {"id": f"id{_EVIL}", "input_ids": [3, BROKEN_ID], "reference_ids": [[5]]}]
    data = write_rows(tmp_path / f"rows{_EVIL}.jsonl", rows)
    flags = [f"--checkpoint={model}", f"--output={tmp_path / 'out'}", *SHORT_FLAGS, "--metric=token_f1"]
    assert main(["calibrate", f"--data={tmp_path}/rows*.jsonl", *flags]) == 1
    assert f"example id{_SHOWN}: the model gave logits that are not finite" in _check(capsys)
    data.write_text('{"id": 1}\n')
    assert main(["calibrate", f"--data={tmp_path}/rows*.jsonl", *flags]) == 2
    assert f"rows{_SHOWN}.jsonl, line 1:" in _check(capsys)


class _Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def _evil_answer() -> Answer:
    return Answer(
        text=f"out\n{_EVIL}", tokens=(5,), exit_layers=(1,), confidences=(1.0,), num_layers=4, truncated=False
    )


def test_answers_on_a_terminal_are_escaped_and_in_a_pipe_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers are written unchanged to a pipe, and escaped on a terminal."""
    here._print(iter([("a", _evil_answer())]), None, show_layers=False)  # type: ignore[arg-type]
    assert capsys.readouterr().out == f"out\n{_EVIL}\n"
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    here._print(iter([("a", _evil_answer())]), None, show_layers=False)  # type: ignore[arg-type]
    assert terminal.getvalue() == f"out\\n{_SHOWN}\n"


def test_coloured_tokens_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """With --show_layers, control characters in tokens are escaped; only our colours are not."""
    LayerPrinter(4).print_output([_EVIL, "a\nb"], [1, 2])
    assert capsys.readouterr().out == f"{_SHOWN}[1]a⏎b[2]\n"


def test_prompts_that_are_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The id of a refused prompt in a file is printed escaped."""
    model = write_model(tmp_path / "model")
    write_manifest(build_served_manifest(load_checkpoint(model), (build_entry(0.3),)), tmp_path / "manifest.json")
    rows = write_rows(tmp_path / "rows.jsonl", [{"id": _EVIL, "input_ids": [10**6]}])
    flags = ["generate", f"--manifest={tmp_path}", f"--checkpoint={model}", f"--input={rows}"]
    assert main(flags) == 2
    _check(capsys)
    rows = write_rows(tmp_path / "rows.jsonl", [{"id": _EVIL, "input_ids": [3, 1]}])
    assert main([*flags, f"--output={tmp_path / 'answers.jsonl'}"]) == 0
    # In a file it is data, and unchanged.
    assert json.loads((tmp_path / "answers.jsonl").read_text(encoding="utf-8"))["id"] == _EVIL


def test_a_terminal_is_told_what_is_loaded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Libraries that take seconds to load are named on a terminal before, and neither in a pipe nor once loaded."""
    monkeypatch.delitem(sys.modules, "apache_beam", raising=False)
    monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    say_loading("apache_beam", "jax")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say_loading("jax")
    say_loading("apache_beam", "jax")
    assert capsys.readouterr().err == "loading Apache Beam\n"


def test_what_is_said_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages keep their lines and have everything else escaped, in tables as well."""
    say(f"a\n{_EVIL}")
    tell(_EVIL)
    PlainConsole().print(_EVIL)
    printed = capsys.readouterr()
    assert printed.err == f"a\n{_SHOWN}\n"
    assert printed.out == f"{_SHOWN}\n{_SHOWN}\n"
