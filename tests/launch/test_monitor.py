"""`calm-beam monitor` from flags to exit status."""

import io
import json
import pathlib
import re
from collections.abc import Sequence

import pytest

from calm_beam.inputs.examples import LARGEST_ROW
from calm_beam.launch.cli import main
from calm_beam.manifest import read_manifest, write_manifest
from tests.calm_beam.manifest.builders import build_calibration, build_manifest, build_never_exit

_GOOD = ([0.0] * 9 + [0.5]) * 10
_BAD = [1.0] * 12


@pytest.fixture
def manifest(tmp_path: pathlib.Path) -> pathlib.Path:
    """A manifest with one entry that has a threshold, at delta 0.1, and one that has none."""
    path = tmp_path / "manifest.json"
    write_manifest(build_manifest(), path)
    return path


def _write(path: pathlib.Path, losses: Sequence[float | str]) -> pathlib.Path:
    path.write_text("".join(f"{loss}\n" for loss in losses), encoding="utf-8")
    return path


def test_good_losses_raise_no_alarm(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Good losses give status 0, and what was watched and found is printed."""
    losses = _write(tmp_path / "losses.txt", _GOOD)
    assert main(["monitor", f"--manifest={manifest}", f"--losses={losses}"]) == 0
    printed = capsys.readouterr()
    watched = "textual, rouge_l, delta 0.1, epsilon 0.05 (threshold 0.8): 100 losses, mean 0.0500."
    assert printed.out.splitlines()[0] == watched
    assert re.search(r"No alarm: the capital is 0\.\d+; 20 raises an alarm\.", printed.out)
    assert printed.err == ""


def test_bad_losses_raise_the_alarm(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad losses give status 3 and the loss at which the alarm was raised; all losses of the file are counted."""
    losses = _write(tmp_path / "losses.txt", _GOOD + _BAD)
    assert main(["monitor", f"--manifest={tmp_path}", f"--losses={losses}"]) == 3
    printed = capsys.readouterr().out
    assert "112 losses" in printed
    assert re.search(r"ALARM at loss 10\d: the losses show that the risk exceeds delta 0\.1\.", printed)


def test_the_state_is_taken_up_again(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses given in two calls count as in one, and an alarm stays."""
    flags = ["monitor", f"--manifest={manifest}", f"--state={tmp_path / 'state.json'}"]
    whole = ["monitor", f"--manifest={manifest}", f"--state={tmp_path / 'whole.json'}"]
    assert main([*flags, f"--losses={_write(tmp_path / 'a', _GOOD)}"]) == 0
    assert main([*flags, f"--losses={_write(tmp_path / 'b', _BAD)}"]) == 3
    assert main([*whole, f"--losses={_write(tmp_path / 'c', _GOOD + _BAD)}"]) == 3
    in_parts, at_once = (json.loads((tmp_path / name).read_text()) for name in ("state.json", "whole.json"))
    assert in_parts["monitor"] == at_once["monitor"]
    capsys.readouterr()
    assert main([*flags, f"--losses={_write(tmp_path / 'd', [0.0] * 300)}"]) == 3
    assert "412 losses" in capsys.readouterr().out


def test_missing_losses_prove_no_excess(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With risk 0 and every third label missing the status is 4, and the message says that it is no proof."""
    stream = _write(tmp_path / "losses.txt", [0.0, 0.0, "missing"] * 60)
    assert main(["monitor", f"--manifest={manifest}", f"--losses={stream}"]) == 4
    printed = capsys.readouterr().out
    assert "180 losses, 60 of them missing, mean 0.0000." in printed
    assert re.search(
        r"ALARM at loss \d+: the risk exceeds delta 0\.1, or losses are missing\. With each missing one counted as 1 "
        r"the capital has reached 20; with each counted as 0 it is 0\.\d+, which does not prove",
        printed,
    )
    assert "the losses show that the risk exceeds" not in printed


def test_a_proof_does_not_need_missing_losses(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the present losses prove the excess, the status is 3; without an alarm both capitals are printed."""
    assert main(["monitor", f"--manifest={manifest}", f"--losses={_write(tmp_path / 'a', ['missing', 1.0] * 12)}"]) == 3
    assert "the losses show that the risk exceeds delta 0.1, even if each missing one is 0." in capsys.readouterr().out
    assert main(["monitor", f"--manifest={manifest}", f"--losses={_write(tmp_path / 'a', ['missing', 0.0])}"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"capital is 0\.\d+ \(\d\.\d+ with each missing loss counted as 1\); 20 raises an alarm", printed)


def test_rows_with_a_failure_are_missing(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure in a probe's row marks the loss as missing; any other value there is refused."""
    about = {"manifest": read_manifest(manifest).digest, "calibration": 0}
    losses = tmp_path / "losses.jsonl"

    def rows(failure: object) -> str:
        return "".join(json.dumps({"id": str(n), "loss": 1.0, "failure": failure, **about}) + "\n" for n in range(40))

    losses.write_text(rows("no references: none had come"))
    assert main(["monitor", f"--manifest={manifest}", f"--losses={losses}"]) == 4
    assert "40 losses, 40 of them missing.\nALARM" in capsys.readouterr().out
    losses.write_text(rows(None))
    assert main(["monitor", f"--manifest={manifest}", f"--losses={losses}"]) == 3
    losses.write_text(rows(3))
    assert main(["monitor", f"--manifest={manifest}", f"--losses={losses}"]) == 1
    assert "line 1: failure must be a text, or null where the loss was measured, got 3." in capsys.readouterr().err


def test_a_stream_ends_at_the_alarm_about_missing_losses(
    manifest: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm about missing losses ends a stream once; with its state it continues until losses prove the excess."""
    flags = ["monitor", f"--manifest={manifest}", "--losses=-", f"--state={tmp_path / 'state.json'}"]
    monkeypatch.setattr("sys.stdin", io.StringIO("missing\n" * 50))
    assert main(flags) == 4
    first = json.loads((tmp_path / "state.json").read_text())["monitor"]
    assert first["n"] == first["missing_alarm_at"] < 20
    monkeypatch.setattr("sys.stdin", io.StringIO("missing\n" * 5 + "1\n" * 90))
    assert main(flags) == 3
    second = json.loads((tmp_path / "state.json").read_text())["monitor"]
    assert second["n"] == second["alarm_at"] > first["n"] + 5
    assert second["missing_alarm_at"] == first["n"]


def test_a_state_of_the_first_version_is_read(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state of the first version, which counted missing losses as 1, is read and kept in the new format."""
    state, losses = tmp_path / "state.json", _write(tmp_path / "a", [0.0])
    old = {
        "schema": "calm-beam/monitor/v1",
        "manifest": read_manifest(manifest).digest,
        "calibration": 0,
        "monitor": {
            "delta": 0.1,
            "alpha": 0.05,
            "is_signed": False,
            "n": 20,
            "loss_sum": 20 * 2**32,
            "stakes": [1e9] * 7,
            "alarm_at": 4,
        },
    }
    state.write_text(json.dumps(old))
    assert main(["monitor", f"--manifest={manifest}", f"--losses={losses}", f"--state={state}"]) == 4
    printed = capsys.readouterr()
    assert "is of a version that counted missing losses as 1" in printed.err
    assert "ALARM at loss 4: the risk exceeds delta 0.1, or losses are missing." in printed.out
    assert json.loads(state.read_text())["schema"] == "calm-beam/monitor/v3"
    assert main(["monitor", f"--manifest={manifest}", f"--losses={losses}", f"--state={state}"]) == 4
    assert "is of a version" not in capsys.readouterr().err
    state.write_text(json.dumps({**old, "schema": "calm-beam/monitor/v4"}))
    assert main(["monitor", f"--manifest={manifest}", f"--losses={losses}", f"--state={state}"]) == 1
    assert "schema is 'calm-beam/monitor/v4', this calm-beam knows" in capsys.readouterr().err


class _Watching:
    """Calls of `monitor` with one state, on files of one folder."""

    def __init__(self, manifest: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = manifest.parent / "state.json"
        self._flags = ["monitor", f"--manifest={manifest}", f"--state={self.state}"]
        self._about = {"manifest": read_manifest(manifest).digest, "calibration": 0, "failure": None}
        self._capsys = capsys

    def row(self, name: int, loss: float = 0.0) -> str:
        """Returns a row of a probe."""
        return json.dumps({"id": str(name), "loss": loss, **self._about}) + "\n"

    def rows(self, *names: int) -> str:
        return "".join(map(self.row, names))

    def counts(self, losses: pathlib.Path) -> tuple[int, str]:
        """Returns how many losses the state has counted after a call, and what the call said."""
        assert main([*self._flags, f"--losses={losses}"]) == 0
        return json.loads(self.state.read_text())["monitor"]["n"], self._capsys.readouterr().err


@pytest.fixture
def watching(manifest: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> _Watching:
    """No call yet."""
    return _Watching(manifest, capsys)


def test_a_file_counts_once_and_what_it_grew_by(
    watching: _Watching, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called again, monitor counts what has been added to a file, by whatever path it is named, and says so."""
    losses = tmp_path / "losses.jsonl"
    losses.write_text(watching.rows(*range(24)))
    assert watching.counts(losses) == (24, "")
    again = f"{losses}: 24 losses counted before, 0 new"
    count, said = watching.counts(losses)
    assert count == 24
    assert again in said
    monkeypatch.chdir(tmp_path)
    assert watching.counts(pathlib.Path("losses.jsonl"))[0] == 24
    with losses.open("a") as file:
        file.write(watching.rows(24, 25))
    count, said = watching.counts(losses)
    assert count == 26
    assert "24 losses counted before, 2 new" in said
    assert len(json.loads(watching.state.read_text())["files"]) == 1


def test_an_empty_file_has_no_losses_yet(watching: _Watching, tmp_path: pathlib.Path) -> None:
    """A file that a service has just made counts nothing, and later what was added."""
    losses = tmp_path / "losses.jsonl"
    losses.touch()
    assert watching.counts(losses) == (0, "")
    losses.write_text(watching.rows(1))
    assert watching.counts(losses) == (1, "")


def test_errors_in_a_file_that_grew_name_the_line_of_the_file(
    watching: _Watching, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines are numbered from the file's first one, and a bad line leaves the state as it was."""
    losses = _write(tmp_path / "losses", [0.0, 0.0])
    assert watching.counts(losses)[0] == 2
    before = watching.state.read_text()
    _write(losses, [0.0, 0.0, 0.5, "half"])
    assert main(["monitor", f"--manifest={tmp_path}", f"--state={watching.state}", f"--losses={losses}"]) == 1
    assert f"{losses}, line 4: expected a loss" in capsys.readouterr().err
    assert watching.state.read_text() == before


def test_a_rotated_file_is_a_new_one_and_the_old_one_is_known(watching: _Watching, tmp_path: pathlib.Path) -> None:
    """After a rotation both files count what they have beyond what was counted, in whatever order they come."""
    losses, rotated = tmp_path / "losses.jsonl", tmp_path / "losses.jsonl.1"
    losses.write_text(watching.rows(1, 2, 3))
    assert watching.counts(losses)[0] == 3
    rotated.write_text(watching.rows(1, 2, 3, 4))
    losses.write_text(watching.rows(5))
    assert watching.counts(losses) == (4, "")
    count, said = watching.counts(rotated)
    assert count == 5
    assert "3 losses counted before, 1 new" in said
    for path in (losses, rotated):
        assert watching.counts(path)[0] == 5


def test_a_copy_and_its_original_count_once(watching: _Watching, tmp_path: pathlib.Path) -> None:
    """Rows are known again under another path, even if the copy has grown since."""
    losses, copy = tmp_path / "losses.jsonl", tmp_path / "copy.jsonl"
    losses.write_text(watching.rows(1, 2))
    assert watching.counts(losses)[0] == 2
    copy.write_text(watching.rows(1, 2, 3))
    for path in (copy, losses, copy):
        assert watching.counts(path)[0] == 3


def test_equal_numbers_in_another_file_are_other_losses(watching: _Watching, tmp_path: pathlib.Path) -> None:
    """Numbers have no ids: leaving out a file for its values would count bad losses only."""
    assert watching.counts(_write(tmp_path / "monday", [0.0, 0.0]))[0] == 2
    assert watching.counts(_write(tmp_path / "tuesday", [0.0, 0.0]))[0] == 4
    assert watching.counts(_write(tmp_path / "tuesday", [0.0, 0.0, 0.5]))[0] == 5


def test_half_a_last_line_waits_for_its_end(watching: _Watching, tmp_path: pathlib.Path) -> None:
    """A line without a line break is not counted, nor is half of it, before it is whole."""
    losses = tmp_path / "losses"
    for content, count in (("0.5\n0.", 1), ("0.5\n0.25", 1), ("0.5\n0.25\n", 2), ("0.5\n0.25\n", 2)):
        losses.write_text(content)
        found, said = watching.counts(losses)
        assert found == count
        assert ("the last line has no line break; it is counted once it has one" in said) == (content[-1] != "\n")


def test_a_state_that_knows_no_files_is_read(watching: _Watching, tmp_path: pathlib.Path) -> None:
    """A state of the second version goes on, says that it knows no files, and knows them from then on."""
    losses = _write(tmp_path / "losses", [0.5])
    watching.counts(losses)
    content = json.loads(watching.state.read_text())
    del content["files"]
    watching.state.write_text(json.dumps({**content, "schema": "calm-beam/monitor/v2"}))
    count, said = watching.counts(losses)
    assert count == 2
    assert "did not keep which files it had counted" in said
    assert watching.counts(losses)[0] == 2


@pytest.mark.parametrize(
    "files",
    [{}, [1], [{"path": "a", "bytes": 1, "sha256": "0"}], [{"path": 1, "bytes": 1, "sha256": "0", "losses": 1}]],
)
def test_a_state_with_impossible_files_is_refused(
    files: object, watching: _Watching, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that no state has are an error that names the state."""
    losses = _write(tmp_path / "losses", [0.5])
    watching.counts(losses)
    watching.state.write_text(json.dumps({**json.loads(watching.state.read_text()), "files": files}))
    assert main(["monitor", f"--manifest={tmp_path}", f"--state={watching.state}", f"--losses={losses}"]) == 1
    assert f"state {watching.state}: " in capsys.readouterr().err


def test_a_stream_ends_at_the_alarm(
    manifest: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From standard input, nothing is read after the alarm, and a stored alarm needs no loss at all."""
    stream = io.StringIO("1\n" * 50)
    monkeypatch.setattr("sys.stdin", stream)
    flags = ["monitor", f"--manifest={manifest}", "--losses=-", f"--state={tmp_path / 'state.json'}"]
    assert main(flags) == 3
    read = 50 - len(stream.read().split())
    found = re.search(r"(\d+) losses, mean 1.0000.\nALARM at loss (\d+):", capsys.readouterr().out)
    assert found is not None
    assert int(found[1]) == int(found[2]) == read < 20
    monkeypatch.setattr("sys.stdin", io.StringIO("no loss\n"))
    assert main(flags) == 3


def test_a_stream_that_ends_keeps_its_state(
    manifest: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses read before the stream's end, a bad line or Ctrl-C are kept, since they will not come again."""

    class Interrupted(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
            line = super().readline(size or -1)
            if not line:
                raise KeyboardInterrupt
            return line

    flags = ["monitor", f"--manifest={manifest}", "--losses=-", f"--state={tmp_path / 'state.json'}"]
    counts = []
    for stream, status in ((io.StringIO("0\n" * 250), 0), (io.StringIO("0\nx\n"), 1), (Interrupted("0.5\n"), 130)):
        monkeypatch.setattr("sys.stdin", stream)
        assert main(flags) == status
        counts.append(json.loads((tmp_path / "state.json").read_text())["monitor"]["n"])
    assert counts == [250, 251, 252]


def test_a_file_with_a_bad_line_changes_nothing(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong line is named with its number and value; the corrected file can be given again."""
    flags = ["monitor", f"--manifest={manifest}", f"--state={tmp_path / 'state.json'}"]
    assert main([*flags, f"--losses={_write(tmp_path / 'a', [0.5])}"]) == 0
    before = (tmp_path / "state.json").read_text()
    for line in ("half", "1.5", "-0.5", "nan", "", "1_0e-1_0", "٠.٥", "0_1"):
        losses = tmp_path / "bad"
        losses.write_text(f"0\n{line}\n")
        assert main([*flags, f"--losses={losses}"]) == 1
        assert f"{losses}, line 2: expected a loss in [0, 1], got {line!r}." in capsys.readouterr().err
    losses.write_bytes(b"0\n0.5\n\xff\xfe0.5\n")
    assert main([*flags, f"--losses={losses}"]) == 1
    assert f"{losses}, line 3: is not text in UTF-8: it holds the byte 0xff." in capsys.readouterr().err
    assert (tmp_path / "state.json").read_text() == before


def test_signed_losses_may_be_negative(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the manifest's loss is signed, losses lie in [-1, 1]."""
    entry = build_calibration(consistency="risk", loss="signed", p_value="signed_mixture")
    write_manifest(build_manifest(calibrations=(entry,)), tmp_path / "manifest.json")
    losses = _write(tmp_path / "losses.txt", [-0.5, 0.5])
    assert main(["monitor", f"--manifest={tmp_path}", f"--losses={losses}"]) == 0
    assert "2 losses, mean 0.0000." in capsys.readouterr().out


def test_losses_of_a_tail_are_0_and_1(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tail's losses are 0 or 1, and others are refused; an entry is chosen by its loss."""
    entries = (build_calibration(), build_calibration(loss="dissimilarity>0.3", p_value="exact_binomial"))
    write_manifest(build_manifest(calibrations=entries), tmp_path / "manifest.json")
    flags = ["monitor", f"--manifest={tmp_path}", "--loss=dissimilarity>0.3"]
    assert main([*flags, f"--losses={_write(tmp_path / 'losses.txt', [0.0, 1.0])}"]) == 0
    assert "textual > 0.3, rouge_l, delta 0.1" in capsys.readouterr().out
    assert main([*flags, f"--losses={_write(tmp_path / 'losses.txt', [0.0, 0.4])}"]) == 1
    message = "line 2: the entry is about the share of outputs that lose more than 0.3: expected 1 where one does and"
    assert message in capsys.readouterr().err


def test_one_of_several_entries_is_chosen(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where several entries have a threshold, flags say which; without them the entries are listed."""
    entries = (build_calibration(), build_calibration(metric="token_f1"), build_never_exit())
    write_manifest(build_manifest(calibrations=entries), tmp_path / "manifest.json")
    flags = ["monitor", f"--manifest={tmp_path}", f"--losses={_write(tmp_path / 'losses.txt', [0.0])}"]
    assert main(flags) == 2
    message = capsys.readouterr().err
    assert "2 entries of the manifest have a threshold and match what was asked; exactly one is watched." in message
    assert "textual, rouge_l, delta 0.01, epsilon 0.05 (never exit)" in message
    assert main([*flags, "--metric=token_f1"]) == 0
    assert "textual, token_f1, delta 0.1" in capsys.readouterr().out
    assert main([*flags, "--delta=0.01"]) == 2
    assert "what was asked for says never exit: there is no risk to watch." in capsys.readouterr().err


def test_rows_of_a_probe_name_their_entry(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a probe name their entry without a flag; rows of other or invalid manifests are refused."""
    entries = (build_calibration(), build_calibration(metric="token_f1"))
    manifest = build_manifest(calibrations=entries)
    write_manifest(manifest, tmp_path / "manifest.json")
    losses = tmp_path / "losses.jsonl"
    flags = ["monitor", f"--manifest={tmp_path}", f"--losses={losses}"]
    row = {"manifest": manifest.digest, "calibration": 1, "loss": 0.25, "failure": None}
    losses.write_text(f"{json.dumps(row)}\n", encoding="utf-8")
    assert main(flags) == 0
    assert "textual, token_f1, delta 0.1, epsilon 0.05 (threshold 0.8): 1 loss, mean 0.2500" in capsys.readouterr().out
    for wrong in ({"manifest": "sha256:0"}, {"calibration": 2}, {"calibration": True}, {"calibration": -1}):
        losses.write_text(f"{json.dumps({**row, **wrong})}\n", encoding="utf-8")
        assert main(flags) == 2
        assert "2 entries of the manifest have a threshold and match what was asked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --manifest, --losses"),
        (["--manifest={tmp}/none", "--losses=-"], "--manifest {tmp}/none: no such file."),
        (
            ["--manifest={tmp}", "--losses={tmp}/none"],
            "--losses {tmp}/none: no such file. calm-beam generate writes it with",
        ),
        (["--manifest={tmp}", "--losses=-", "--alpha=5"], "--alpha must be in (0, 1), got 5."),
        (["--manifest={tmp}", "--losses=-", "--alpha=nan"], "--alpha must be in (0, 1), got nan."),
        (["--manifest={tmp}", "--losses=-", "--alpha=low"], "argument --alpha: expected a number, got 'low'"),
        (["--manifest={tmp}", "--losses=-", "--delta=0.2"], "0 entries of the manifest have a threshold and match"),
        (["--manifest={tmp}", "--losses=-", "--state={tmp}/no/s"], "--state {tmp}/no/s: the folder {tmp}/no does not"),
        (
            ["--manifest={tmp}", "--losses=s3://b/x"],
            "--losses s3://b/x: of object stores only",
        ),
        (["--manifest={tmp}", "--losses=-", "--sate=x"], "unknown flag --sate. Did you mean --state?"),
    ],
)
def test_bad_usage(
    flags: list[str], message: str, manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has status 2 and says what was wrong."""
    assert main(["monitor", *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


def test_a_state_of_another_promise_is_refused(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state continues only with the manifest, the entry and the alpha with which it began."""
    flags = [f"--losses={_write(tmp_path / 'a', [0.5])}", f"--state={tmp_path / 'state.json'}"]
    assert main(["monitor", f"--manifest={manifest}", *flags]) == 0
    assert main(["monitor", f"--manifest={manifest}", "--alpha=0.01", *flags]) == 2
    assert "was kept with --alpha=0.05, now it is 0.01." in capsys.readouterr().err
    write_manifest(build_manifest(created="2027-01-31T12:00:00Z"), manifest, overwrite=True)
    assert main(["monitor", f"--manifest={manifest}", *flags]) == 2
    assert "Name those that it was kept for, or start a new state." in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"schema": 1, "manifest": 1, "calibration": 1, "monitor": []}',
        "[" * 100_000,
        '{"schema": 1, "schema": 2}',
    ],
)
def test_a_state_that_is_none_is_refused(
    content: str, manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is not a state gives status 1, is named, and is not changed."""
    state = tmp_path / "state.json"
    state.write_text(content)
    losses = _write(tmp_path / "a", [0.5])
    assert main(["monitor", f"--manifest={manifest}", f"--losses={losses}", f"--state={state}"]) == 1
    assert f"calm-beam monitor: state {state}: " in capsys.readouterr().err
    assert state.read_text() == content


def test_a_state_of_more_losses_than_there_are_is_refused(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A count beyond every stream, and one more loss after the largest countable number, are clear errors."""
    state = tmp_path / "state.json"
    flags = ["monitor", f"--manifest={manifest}", f"--losses={_write(tmp_path / 'a', [0.5])}", f"--state={state}"]
    assert main(flags) == 0
    for count in (10**400, 10**12):
        content = json.loads(state.read_text())
        content["monitor"]["n"] = count
        state.write_text(json.dumps(content))
        _write(tmp_path / "a", [0.5, 0.5])
        capsys.readouterr()
        assert main(flags) == 1
        assert "n must be at most 1000000000000, which no stream has" in capsys.readouterr().err


def test_a_line_without_end_is_refused(
    manifest: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line longer than any row may be is named, and reading stops."""
    losses = tmp_path / "losses"
    losses.write_text("0\n" + "1" * (LARGEST_ROW + 1))
    assert main(["monitor", f"--manifest={manifest}", f"--losses={losses}"]) == 1
    assert f"calm-beam monitor: {losses}, line 2: is longer than 4 MiB" in capsys.readouterr().err


def test_a_broken_manifest_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest that cannot be trusted has status 1."""
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["monitor", f"--manifest={tmp_path}", "--losses=-"]) == 1
    assert "schema is missing" in capsys.readouterr().err
