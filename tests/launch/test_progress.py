"""Progress of a local run, shown while it runs."""

import pathlib
import re
import threading
from typing import Any

import pytest

from calm_beam.launch.terminal import progress
from calm_beam.launch.terminal.progress import shown_progress


def test_nothing_is_shown_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Runners whose workers have other disks have nowhere to report, and nothing is printed."""
    with shown_progress(enabled=False) as log:
        assert log.path is None
        log.report("decoded", 1)
    assert capsys.readouterr() == ("", "")


def test_the_file_is_there_while_the_block_runs() -> None:
    """Reports go to a file that is removed afterwards, also if the block fails; the watcher ends."""
    before = threading.active_count()
    with shown_progress(enabled=True) as log:
        assert log.path is not None
        log.report("read", 3)
        assert pathlib.Path(log.path).read_text() == "read 3\n"
    assert not pathlib.Path(log.path).exists()
    with pytest.raises(ValueError, match="stop"), shown_progress(enabled=True) as log:
        raise ValueError("stop")
    assert log.path is not None
    assert not pathlib.Path(log.path).parent.exists()
    assert threading.active_count() == before


def test_logs_get_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If stderr is no terminal, a line says how many prompts are decoded; stdout stays empty."""
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.02)
    with shown_progress(enabled=True) as log:
        log.report("read", 8)
        log.report("decoded", 2)
        threading.Event().wait(0.3)
        log.report("decoded", 2)
        threading.Event().wait(0.3)
    printed = capsys.readouterr()
    assert printed.out == ""
    before, after = (
        [line for line in printed.err.splitlines() if line.startswith(f"decoded {done} of 8 prompts in ")]
        for done in (2, 4)
    )
    # How long the first two took is not known, since nobody knows when they were begun.
    assert before
    assert not any("left" in line for line in before)
    assert any(", about " in line and line.endswith("s left") for line in after)


def test_terminals_get_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal, the bar ends at all prompts, on stderr."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "_TERMINAL_SECONDS", 0.02)
    with shown_progress(enabled=True) as log:
        log.report("read", 8)
        threading.Event().wait(0.1)
        for _ in range(8):
            log.report("decoded", 1)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "8/8 prompts" in printed.err


@pytest.mark.parametrize(
    ("reports", "first", "last"),
    [
        ((), "scoring", ""),
        ((("read", 60), ("stored", 60)), "reading", "60/60 outputs"),
        ((("to_time", 4), ("timed", 1)), "reading", "1/4 outputs"),
    ],
)
def test_no_bar_tells_what_nobody_knows(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reports: tuple[tuple[str, int], ...],
    first: str,
    last: str,
) -> None:
    """Where nothing is counted there is no count; what was stored counts as done; what is timed has its own count."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "_TERMINAL_SECONDS", 0.02)
    with shown_progress(enabled=True, first=first, unit="outputs") as log:
        for event, count in reports:
            log.report(event, count)
        threading.Event().wait(0.1)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).splitlines()[-1]
    assert "?" not in shown
    assert "-:--:--" not in shown
    assert re.findall(r"\d+/\d+ outputs", shown) == ([last] if last else [])
    assert shown.startswith({"": "scoring", "6": "scoring", "1": "compiling and measuring speed"}[last[:1]])


def test_prompts_to_time_are_counted_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A log says how far a measurement is, also if its end changes."""
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.02)
    with shown_progress(enabled=True) as log:
        told = progress.timing_in(log)
        told(2, 6)
        told(1, 8)
        threading.Event().wait(0.3)
    assert "compiling and measuring speed for 0 s: 3 of 8 prompts\n" in capsys.readouterr().err


def test_counts_are_summed(tmp_path: pathlib.Path) -> None:
    """Reports of one kind add up; without a file the count is 0."""
    path = tmp_path / "progress"
    assert progress._read_counts(path) == {}
    path.write_text("read 3\ndecoded 1\nread 4\n")
    assert progress._read_counts(path) == {"read": 7, "decoded": 1}


def test_work_that_is_done_twice_counts_once(tmp_path: pathlib.Path) -> None:
    """A shard decoded again after its worker died counts once."""
    path = tmp_path / "progress"
    path.write_text("read 10\ndecoded 6\ndecoded 6\n")
    assert progress._read_and_decoded(progress._read_counts(path)) == (10, 10)


@pytest.mark.parametrize(
    ("counts", "phase"),
    [
        ({}, "reading"),
        ({"read": 8}, "reading"),
        ({"read": 8, "loading": 1}, "loading the model"),
        ({"read": 8, "loading": 2, "compiling": 1}, "compiling"),
        ({"read": 8, "loading": 2, "compiling": 2, "decoded": 1}, "decoding"),
        ({"read": 8, "stored": 3, "loading": 1, "compiling": 1}, "compiling"),
        ({"read": 8, "stored": 8}, "scoring"),
        ({"read": 8, "loading": 1, "compiling": 1, "decoded": 8}, "scoring"),
        ({"read": 8, "compiling": 1, "decoded": 8, "predicting": 1}, "computing what every layer predicts"),
        ({"read": 8, "decoded": 8, "predicting": 1, "to_time": 6}, "compiling and measuring speed"),
        ({"to_time": 6, "timed": 1}, "compiling and measuring speed"),
    ],
)
def test_what_a_run_is_doing(counts: dict[str, int], phase: str) -> None:
    """Until the first prompt is decoded, a run shows what its workers do: read, load the model or compile."""
    assert progress._phase_of(counts) == phase


def test_lines_of_a_log() -> None:
    """Before the first prompt is decoded, a line says what takes time; afterwards, how long the rest will take."""
    in_phase: dict[str, Any] = {"newly": 0, "in_phase": 30.0, "in_all": 42.0}
    assert progress._line("reading", 0, decoded=0, **in_phase) == "reading for 30 s"
    assert (
        progress._line("loading the model", 8, decoded=0, **in_phase)
        == "loading the model for 30 s; 8 prompts to decode"
    )
    assert progress._line("compiling", 1, decoded=0, **in_phase) == "compiling for 30 s; 1 prompt to decode"
    # Ten a second since the first one; earlier time does not count.
    assert (
        progress._line("decoding", 1000, decoded=300, newly=300, in_phase=30.0, in_all=42.0)
        == "decoded 300 of 1000 prompts in 42 s, about 70 s left"
    )
    # The first eleven are there at once, when their batch ends.
    just_seen = progress._line("decoding", 50, decoded=11, newly=0, in_phase=0.0, in_all=10.0)
    assert just_seen == "decoded 11 of 50 prompts in 10 s"
    assert progress._line("decoding", 50, decoded=11, newly=7, in_phase=0.3, in_all=10.0) == just_seen
    assert (
        progress._line("scoring", 1000, decoded=1000, **in_phase)
        == "decoded 1000 of 1000 prompts in 42 s; scoring for 30 s"
    )
    assert (
        progress._line("computing what every layer predicts", 5, decoded=5, **in_phase)
        == "decoded 5 of 5 prompts in 42 s; computing what every layer predicts for 30 s"
    )


@pytest.mark.parametrize(
    ("terminal", "said"), [(False, "compiling for 0 s; 8 prompts to decode"), (True, "compiling ")]
)
def test_compiling_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, said: str
) -> None:
    """Logs and terminals say so while workers compile."""
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.02)
    monkeypatch.setattr(progress, "_TERMINAL_SECONDS", 0.02)
    printed = ""
    with shown_progress(enabled=True) as log:
        log.report("read", 8)
        log.report("compiling", 1)
        for _ in range(500):
            printed += capsys.readouterr().err
            if said in printed:
                break
            threading.Event().wait(0.02)
    assert said in printed
