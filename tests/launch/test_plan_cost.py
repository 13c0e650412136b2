"""`calm-beam plan --pilot=RUN` from a small calibration to the table."""

import json
import pathlib
import re
import shutil

import pytest

from calm_beam.launch.cli import main
from tests.calm_beam.report.accessibility import violations
from tests.calm_beam.report.browser import in_a_browser, started_browser
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

_ASKED = ("--consistency=textual,risk", "--metric=token_f1", "--delta=0.6", "--epsilon=0.1")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model and thirty prompts."""
    folder = tmp_path_factory.mktemp("plan")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl", [{**row, "page": index // 3} for index, row in enumerate(id_rows(30))])
    return folder


@pytest.fixture(scope="module")
def pilot(place: pathlib.Path) -> pathlib.Path:
    """A calibration that was run on this machine."""
    assert _calibrate(place, place / "pilot") == 0
    return place / "pilot"


def _calibrate(place: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    paths = (f"--checkpoint={place / 'model'}", f"--data={place / 'rows.jsonl'}", f"--output={output}")
    return main(["calibrate", *paths, *SHORT_FLAGS, *_ASKED, *flags])


def _plan(pilot: pathlib.Path, *flags: str) -> int:
    return main(["plan", f"--pilot={pilot}", "--examples=1e4", *flags])


def _folder(output: pathlib.Path) -> pathlib.Path:
    (folder,) = (output / "generations").iterdir()
    return folder


def _numbers(printed: str, row: str) -> list[float]:
    """Returns the numbers of a row of the table, the expected one first."""
    (line,) = [line for line in printed.splitlines() if line.strip().startswith(row)]
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line.replace(row, ""))]


def test_cost_is_forecast(pilot: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Time, money, bytes, memory and shards, with intervals; and what may be saved, for every entry."""
    assert _plan(pilot, "--workers=4", "--price_per_hour=2") == 0
    printed = capsys.readouterr().out
    assert "10,000 examples on 4 workers, from a pilot of 30" in printed
    hours, low, high = _numbers(printed, "hours of all workers")
    assert low <= hours <= high
    money, *_ = _numbers(printed, "money, at 2 an hour and worker")
    assert money == pytest.approx(2 * hours, rel=0.02)
    assert _numbers(printed, "shards to ask for (--num_shards)") == [20]
    assert _numbers(printed, "generations stored, GiB")[0] > 0
    assert _numbers(printed, "memory of a worker, GiB")[0] > 0
    assert "30 examples in 3 shards" in printed
    assert "Measured on cpu by 1 process" in printed
    table = printed[printed.index("A sequential run") :]
    assert table.count("token_f1") == 2
    assert "A run that stops once all of these are proved saves" in table


def test_the_same_is_printed_again(pilot: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulation is seeded; a folder of generations and the directory above it give the same."""
    tables = []
    for path in (pilot, _folder(pilot)):
        assert _plan(path, "--seed=3") == 0
        printed = capsys.readouterr().out
        tables.append(printed[printed.index("A sequential run") :])
    assert tables[0] == tables[1]


def test_other_tolerances_are_planned_for(pilot: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--delta replaces the tolerances of the manifest."""
    assert _plan(pilot, "--delta=0.00001") == 0
    printed = capsys.readouterr().out
    assert "1e-05" in printed
    assert "Stopping early saves nothing here: one of these is not proved" in " ".join(printed.split())


def test_what_is_missing_is_said(
    place: pathlib.Path, pilot: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing parts are explained: intervals without a second shard, entries without a manifest, start without time."""
    shutil.copytree(_folder(pilot), tmp_path / "alone")
    for path in sorted((tmp_path / "alone").glob("timing-0*"))[1:]:
        path.unlink()
    (tmp_path / "alone" / "timing-run.json").unlink()
    assert _plan(tmp_path / "alone") == 0
    printed = capsys.readouterr().out
    assert "There are no intervals: that takes a pilot of at least two shards." in printed
    assert "Of 2 more shards of the pilot, nobody knows what they took." in printed
    assert "The time to start and end is not known" in printed
    assert "A forecast of what stopping early may save takes the manifest of the pilot" in printed
    assert "unknown" in printed


def test_clusters_are_not_simulated(
    place: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With clusters, cost is forecast, but not the savings of stopping early."""
    assert _calibrate(place, tmp_path / "out", "--cluster_key=page") == 0
    capsys.readouterr()
    assert _plan(tmp_path / "out") == 0
    assert "For clusters there is no forecast" in capsys.readouterr().out


def test_timings_change_nothing_else(place: pathlib.Path, pilot: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A resumed run keeps the timings of stored shards and adds those of what it decodes."""
    shutil.copytree(pilot, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    folder = _folder(tmp_path / "out")
    (folder / "complete.json").unlink()
    first, *others = sorted(folder.glob("*.parquet"))
    first.unlink()
    before = {path.name: path.read_bytes() for path in folder.glob("timing-0*")}
    assert _calibrate(place, tmp_path / "out", "--resume") == 0
    after = {path.name: path.read_bytes() for path in folder.glob("timing-0*")}
    assert [name for name in before if before[name] != after[name]] == ["timing-00000-of-00003.json"]
    assert (folder / "complete.json").read_bytes() == (_folder(pilot) / "complete.json").read_bytes()
    assert len(others) == 2


def test_a_speed_is_not_guessed(pilot: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device other than the pilot's needs a factor, which is printed."""
    assert _plan(pilot, "--accelerator=nvidia-l4") == 2
    assert (
        "--accelerator=nvidia-l4: the pilot ran on cpu, which says nothing about the speed there. Measure a pilot on "
        "nvidia-l4, or pass --speedup"
    ) in capsys.readouterr().err
    assert _plan(pilot, "--accelerator=nvidia-l4", "--speedup=10") == 0
    assert "Decoding is assumed to be 10 times faster than the pilot's" in capsys.readouterr().out
    assert _plan(pilot, "--accelerator=cpu") == 0


def test_the_page(pilot: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has what the terminal shows, the effect of fewer and more workers, and no folders."""
    output = tmp_path / "plan.html"
    assert _plan(pilot, "--workers=4", "--price_per_hour=2", f"--output={output}") == 0
    printed = capsys.readouterr().out
    assert f"Page: {output}" in printed
    text = re.sub(r"<[^>]+>", "|", output.read_text(encoding="utf-8"))
    cells = set(re.split(r"\|+", text))
    assert {"10,000 examples", "4 workers", "hours of all workers", "generations stored, GiB"} <= cells
    assert {"1", "2", "4", "8", "20", "40"} <= cells
    assert "textual, token_f1" in text
    assert "a forecast, and no promise" in text
    assert str(pilot.parent) not in text


@in_a_browser
def test_everybody_can_use_the_page(pilot: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Axe finds no accessibility problem on the page."""
    output = tmp_path / "plan.html"
    assert _plan(pilot, f"--output={output}") == 0
    with started_browser() as browser:
        assert violations(browser, output) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--examples=0",), "argument --examples: expected a number of examples such as 1000000 or 1e6, got '0'"),
        (("--examples=1.5",), "expected a number of examples such as 1000000 or 1e6, got '1.5'"),
        (("--examples=1_000",), "expected a number of examples such as 1000000 or 1e6, got '1_000'"),
        (("--examples=١٠",), "expected a number of examples such as 1000000 or 1e6, got '١٠'"),
        (("--examples=many",), "expected a number of examples such as 1000000 or 1e6, got 'many'"),
        (("--price_per_hour=-1",), "argument --price_per_hour: expected a price of at least 0, got '-1'"),
        (("--speedup=0",), "argument --speedup: expected a number above 0, got '0'"),
        (("--workers=0",), "argument --workers: expected a whole number of at least 1, got '0'"),
        (("--delta=5",), "--delta must be in (0, 1), got 5."),
        (("--risk_guess=0.1",), "--risk_guess is about the power of a test"),
        (("--output=plan.svg",), "--output plan.svg: expected a name that ends in .html."),
    ],
)
def test_bad_usage(
    flags: tuple[str, ...], message: str, pilot: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has status 2 and says what was wrong; nothing is printed."""
    assert _plan(pilot, *flags) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_bad_pilots(pilot: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is no pilot, is unfinished, or has no timings is refused with a clear message."""
    assert main(["plan", f"--pilot={pilot}"]) == 2
    assert "--examples is missing: how many the run will have, such as 1e6." in capsys.readouterr().err
    assert main(["plan", "--delta=0.1", "--risk_guess=0.05", "--examples=10"]) == 2
    assert "--examples is about the cost of a run" in capsys.readouterr().err
    assert _plan(tmp_path) == 2
    assert (
        f"--pilot {tmp_path}: no decode.json there and no generations below it, so this is no folder of a calibration;"
        in (capsys.readouterr().err)
    )
    shutil.copytree(_folder(pilot), tmp_path / "run")
    for path in (tmp_path / "run").glob("timing-*"):
        path.unlink()
    assert _plan(tmp_path / "run") == 2
    assert f"--pilot {tmp_path / 'run'}: holds no timings" in capsys.readouterr().err
    (tmp_path / "run" / "complete.json").unlink()
    assert _plan(tmp_path / "run") == 2
    assert "so decoding did not finish there" in capsys.readouterr().err


def test_lazy_pilots_are_refused(
    place: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their timings are of the last block of the grid."""
    assert _calibrate(place, tmp_path / "out", "--sweep=lazy") == 0
    folder = _folder(tmp_path / "out")
    lanes = {json.loads(path.read_text())["lanes"] for path in folder.glob("timing-0*")}
    capsys.readouterr()
    status = _plan(tmp_path / "out")
    printed = capsys.readouterr()
    if lanes == {6}:
        # The first block was all that was needed.
        assert status == 0
    else:
        assert status == 2
        assert "was decoded with --sweep=lazy" in printed.err
