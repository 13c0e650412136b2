"""Trials of both distributions, and their report."""

import pathlib
import re
import subprocess
import sys
import zipfile
from typing import Any

import pytest

from calm_beam.inputs.demo import embedded
from calm_beam.launch.doctor import command
from tests.setup_file import read_setup
from tools import wheels
from tools.wheels import (
    ALONE,
    EXTRAS,
    REQUIRED,
    SERVING,
    USES,
    WHOLE,
    Trial,
    TrialError,
    Use,
    extras_of,
    main,
    provide,
    tried,
    wheels_in,
)


def _wheel(folder: pathlib.Path, name: str, extras: tuple[str, ...] = ()) -> pathlib.Path:
    """Writes a wheel that holds its metadata, and the demo model in one file."""
    path = folder / f"{name}-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        metadata = "".join(f"{line}\n" for line in ("Name: x", *(f"Provides-Extra: {extra}" for extra in extras)))
        archive.writestr(f"{name}-0.1.0.dist-info/METADATA", metadata)
        archive.writestr("calm_beam/inputs/demo/model/config.json", "{}")
        archive.writestr("calm_beam/inputs/demo/embedded.py", "")
    return path


@pytest.fixture
def both(tmp_path: pathlib.Path) -> dict[str, pathlib.Path]:
    """A wheel of each distribution, in the folder `dist`."""
    (tmp_path / "dist").mkdir()
    return {
        name: _wheel(tmp_path / "dist", name.replace("-", "_"), ("dev", "docs", "plots", "gcp"))
        for name in (WHOLE, SERVING)
    }


class _Commands:
    """Commands that print given texts, and end with given statuses."""

    def __init__(self, *done: tuple[int, str]) -> None:
        self.done = list(done)
        self.seen: list[tuple[list[str], Any]] = []

    def __call__(self, command: list[str], *, cwd: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
        self.seen.append((list(command), settings["env"]))
        status, printed = self.done[len(self.seen) - 1] if len(self.seen) <= len(self.done) else (0, "")
        return subprocess.CompletedProcess(command, status, stdout=printed)


@pytest.fixture
def one_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials are one command, which prints its folder and ends with status 1."""
    uses = dict.fromkeys(USES, (Use(words=("calm-beam", "where"), shows="in {environment}!", status=1),))
    monkeypatch.setattr(wheels, "USES", uses)


def test_both_are_used_with_all_that_they_offer() -> None:
    """Each wheel is tried with its requirements and with its extras; the serving one also with nothing else."""
    assert set(USES) == {(WHOLE, REQUIRED), (WHOLE, EXTRAS), (SERVING, ALONE), (SERVING, REQUIRED), (SERVING, EXTRAS)}
    for uses in USES.values():
        assert {use.words[0] for use in uses} <= {"calm-beam", "python"}
        assert "{environment}" in uses[0].shows
    commands = {use.words[1] for use in USES[WHOLE, REQUIRED] if use.words[0] == "calm-beam"}
    assert {"--help", "doctor", "calibrate", "report", "generate"} <= commands


def test_there_is_one_wheel_of_each(both: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """The wheels of a folder are distinguished; too many, or none, is an error with their number."""
    (tmp_path / "dist" / "calm_beam-0.1.0.tar.gz").touch()
    assert wheels_in(tmp_path / "dist") == both
    _wheel(tmp_path / "dist", "calm_beam_serving-0.0.9")
    with pytest.raises(TrialError, match=r"there must be one wheel of calm-beam-serving, found 2"):
        wheels_in(tmp_path / "dist")
    with pytest.raises(TrialError, match=r"there must be one wheel of calm-beam, found 0"):
        wheels_in(tmp_path)


def test_extras_are_those_for_users(both: dict[str, pathlib.Path]) -> None:
    """Extras are all in the metadata except those for developers; of the real ones, all that `doctor` knows."""
    assert extras_of(both[WHOLE]) == ["gcp", "plots"]
    assert set(read_setup()["extras_require"]).difference(("dev", "docs")) == command.EXTRAS.keys()


def test_what_is_served_was_made_by_the_whole(both: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """The full wheel's calibration is copied to each trial, and its model to the serving distribution's trial."""
    demo = tmp_path / f"3.12-{WHOLE}-{REQUIRED}-used" / "demo"
    demo.mkdir(parents=True)
    (demo / "manifest.json").write_text("{}")
    for name, found in ((SERVING, {"demo/manifest.json", "model/config.json"}), (WHOLE, {"demo/manifest.json"})):
        place = tmp_path / name
        place.mkdir()
        provide(place, Trial(python="3.12", distribution=name, besides=EXTRAS), wheel=both[WHOLE], output=tmp_path)
        assert {path.relative_to(place).as_posix() for path in place.rglob("*.json")} == found
    assert embedded.MODEL.parts[-4:] == ("calm_beam", "inputs", "demo", "model")


@pytest.mark.parametrize(("besides", "ends"), [(ALONE, "--no-deps"), (REQUIRED, ".whl"), (EXTRAS, ".whl[gcp,plots]")])
@pytest.mark.usefixtures("one_use")
def test_a_wheel_is_installed_and_used(
    besides: str, ends: str, both: dict[str, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment is made, the wheel installed with its extras, and its programs run without our sources."""
    trial = Trial(python="3.12", distribution=SERVING, besides=besides)
    environment = tmp_path / trial.name
    commands = _Commands((0, ""), (0, ""), (1, f"in {environment}!\n"))
    monkeypatch.setattr(subprocess, "run", commands)
    monkeypatch.setenv("PYTHONPATH", "sources")
    said = tried(trial, "/python", wheels=both, output=tmp_path)
    assert re.fullmatch(r"passed \(1 uses in \d+ s, installed in \d+ s\)", said)
    make, install, use = (command for command, _ in commands.seen)
    assert make == [sys.executable, "-m", "uv", "venv", "--python", "/python", str(environment)]
    assert install[-1].endswith(ends)
    assert use == [str(environment / "bin" / "calm-beam"), "where"]
    for _, variables in commands.seen:
        assert "PYTHONPATH" not in variables
        assert variables["CALM_BEAM_CACHE"] == str(tmp_path / "cache")
    assert f"$ {' '.join(use)}\nin {environment}!\n\nstatus 1\n" in (tmp_path / f"{trial.name}.log").read_text()


@pytest.mark.parametrize(
    ("done", "message"),
    [
        ([(1, "")], "not installable"),
        ([(0, ""), (2, "")], "not installable"),
        ([(0, ""), (0, ""), (0, "in {environment}!")], "failed at 'calm-beam where'"),
        ([(0, ""), (0, ""), (1, "elsewhere")], "failed at 'calm-beam where'"),
    ],
)
@pytest.mark.usefixtures("one_use")
def test_what_is_wrong_is_said(
    done: list[tuple[int, str]],
    message: str,
    both: dict[str, pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failed installation, a wrong status or another output ends a trial, and makes the whole fail."""
    environment = tmp_path / "out" / f"3.13-{WHOLE}-{REQUIRED}"
    commands = _Commands(*((status, printed.format(environment=environment)) for status, printed in done))
    monkeypatch.setattr(subprocess, "run", commands)
    monkeypatch.setattr(wheels, "pythons", lambda environment: {"3.13": "/python"})
    assert main([f"--output={tmp_path / 'out'}", "--python=3.13", f"--dist={tmp_path / 'dist'}"]) == 1
    assert f"3.13-{WHOLE}-{REQUIRED}: {message}" in capsys.readouterr().out.splitlines()[0]


def test_a_python_that_is_missing(
    both: dict[str, pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A missing Python is named as not run, which is neither failure nor success."""
    monkeypatch.setattr(wheels, "pythons", lambda environment: {})
    assert main([f"--output={tmp_path / 'out'}", "--python=3.13", f"--dist={tmp_path / 'dist'}"]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert table == [f"3.13-{name}-{besides}: not run: this Python is not here" for name, besides in USES]


def test_a_build_that_fails(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without wheels nothing is tried, and the log is named; each distribution is built under its own name."""
    seen = []

    def build(command: list[str], *, env: dict[str, str], **settings: Any) -> subprocess.CompletedProcess[str]:
        seen.append((env["CALM_BEAM_DISTRIBUTION"], command[-1]))
        return subprocess.CompletedProcess(command, len(seen) - 1)

    monkeypatch.setattr(subprocess, "run", build)
    assert main([f"--output={tmp_path / 'out'}"]) == 1
    assert seen == [(WHOLE, str(tmp_path / "out" / "dist")), (SERVING, "--wheel")]
    assert capsys.readouterr().out == f"calm-beam-serving: not built ({tmp_path / 'out' / 'build.log'})\n"


@pytest.mark.parametrize("status", [0, 1])
def test_a_wheel_with_native_code_is_tagged(
    status: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel is tagged by auditwheel and left in the folder under its new name; without a tag the build fails."""
    seen = []

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        seen.append(command[2])
        if command[2] == "build":
            _wheel(tmp_path, f"wheel{len(seen)}").rename(tmp_path / f"wheel{len(seen)}-0.1.0-py3-none-linux_x86_64.whl")
        elif not status:
            name = pathlib.Path(command[4]).name.replace("linux", "manylinux_2_28")
            (pathlib.Path(command[-1]) / name).touch()
        return subprocess.CompletedProcess(command, status if command[2] == "auditwheel" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    if status:
        with pytest.raises(TrialError, match=r"wheel1-0\.1\.0-py3-none-linux_x86_64\.whl: is for no Linux but this"):
            wheels.built(tmp_path, log=tmp_path / "log")
        return
    wheels.built(tmp_path, log=tmp_path / "log")
    assert seen == ["build"] * 2 + ["auditwheel"] * 2
    tagged = [f"wheel{number}-0.1.0-py3-none-manylinux_2_28_x86_64.whl" for number in (1, 2)]
    assert sorted(path.name for path in tmp_path.glob("*.whl")) == tagged
