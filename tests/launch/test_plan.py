"""`calm-beam plan` from flags to the table and the plot."""

import contextlib
import importlib.util
import itertools
import json
import math
import pathlib
import re

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.evaluation.device_forecast import device_forecast
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.cli import main
from calm_beam.precision import Precision
from calm_beam.risk.sample_size import exact_power
from tests.calm_beam.report.accessibility import violations
from tests.calm_beam.report.browser import in_a_browser, started_browser
from tests.pipelines import write_model

_NEEDS_PLOTS = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plots`")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def _rows(printed: str) -> dict[str, list[str]]:
    """Returns the cells of the table by p-value."""
    rows = [line.split() for line in printed.splitlines() if re.match(r" (?!deviation)\w+ +[\d>]", line)]
    return {row[0]: row[1:] for row in rows}


def test_examples_needed_for_coins(capsys: pytest.CaptureFixture[str]) -> None:
    """One row per p-value, one column per guess; the numbers have the requested power, and smaller ones have not."""
    assert main(["plan", "--delta=0.1", "--risk_guess=0.02,0.05", "--replications=200"]) == 0
    printed = capsys.readouterr().out
    rows = _rows(printed)
    assert list(rows) == [
        "hoeffding",
        "hoeffding_bentkus",
        "exact_binomial",
        "empirical_bernstein",
        "signed_mixture",
    ]
    for name in ("hoeffding", "hoeffding_bentkus", "exact_binomial"):
        for risk, cell in zip((0.02, 0.05), rows[name], strict=True):
            needed = int(cell.replace(",", ""))
            powers = [exact_power(name, n=needed + k, risk=risk, delta=0.1, epsilon=0.05) for k in range(-1, 11)]
            assert min(powers[1:]) >= 0.9
            assert min(powers[:-1]) < 0.9
    numbers = {name: [int(cell.replace(",", "")) for cell in cells] for name, cells in rows.items()}
    assert all(few < many for few, many in numbers.values())
    assert numbers["exact_binomial"][0] < numbers["hoeffding_bentkus"][0] < numbers["hoeffding"][0]
    assert "Epsilon 0.05." in printed
    left_out = "wsr and star_bets. Ask for them by --p_value=wsr,star_bets. calibrate takes star_bets by default"
    assert left_out in " ".join(printed.split())
    assert main(["plan", "--delta=0.1", "--risk_guess=0.02", "--p_value=hoeffding"]) == 0
    assert "star_bets" not in capsys.readouterr().out
    assert "0.02" in printed
    assert f"{math.sqrt(0.02 * 0.98):.3g}" in printed


def test_several_tolerances(capsys: pytest.CaptureFixture[str]) -> None:
    """Each tolerance and each probability of error has a table, as if it had been asked about alone."""
    asked = ["plan", "--risk_guess=0.02,0.03", "--p_value=exact_binomial,hoeffding"]
    alone = {}
    for delta, epsilon in itertools.product((0.1, 0.2), (0.05, 0.01)):
        assert main([*asked, f"--delta={delta}", f"--epsilon={epsilon}"]) == 0
        alone[delta, epsilon] = _rows(capsys.readouterr().out)
    assert main([*asked, "--delta=0.1,0.2", "--epsilon=0.05,0.01"]) == 0
    _, *tables = capsys.readouterr().out.split("Examples needed to accept a threshold at delta ")
    named = {(float(table.split()[0].strip(",")), float(table.split()[2].strip(","))): _rows(table) for table in tables}
    assert named == alone
    assert main(["plan", "--delta=0.02,0.03,0.1", "--risk_guess=0.01,0.02", "--p_value=hoeffding"]) == 0
    printed = capsys.readouterr().out
    # A question that no number of examples can answer takes nothing from the others.
    assert "an expected loss of 0.02 is not below --delta=0.02: no number of examples can prove that it is." in printed
    assert [len(_rows(table)["hoeffding"]) for table in printed.split("at delta ")[1:]] == [1, 2, 2]
    assert main([*asked, "--delta=0.1,0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["needed"]
    assert [(each["delta"], each["risk"], each["p_value"]) for each in found] == [
        *itertools.product((0.1, 0.2), (0.02, 0.03), ("exact_binomial", "hoeffding"))
    ]


def test_less_spread_needs_fewer_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """With small spread, p-values that learn the spread need fewer examples; the binomial one is not listed."""
    flags = ["plan", "--delta=0.1", "--risk_guess=0.05", "--p_value=wsr,signed_mixture", "--replications=200"]
    assert main(flags) == 0
    wide = _rows(capsys.readouterr().out)
    assert main([*flags, "--loss_std=0.08"]) == 0
    narrow = _rows(capsys.readouterr().out)
    assert list(wide) == list(narrow) == ["wsr", "signed_mixture"]
    assert all(int(narrow[name][0]) < int(wide[name][0]) for name in wide)
    assert main(["plan", "--delta=0.4", "--risk_guess=0.05", "--loss_std=0.08", "--replications=100"]) == 0
    assert "exact_binomial" not in _rows(capsys.readouterr().out)


def test_a_simulation_is_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed prints the same."""
    flags = ["plan", "--delta=0.1", "--risk_guess=0.05", "--p_value=wsr", "--replications=100"]
    outputs = []
    for seed in (1, 1, 2):
        assert main([*flags, f"--seed={seed}"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_pilot_takes_the_place_of_guesses(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pilot's losses of 0 and 1 are treated as coins; signed ones exclude p-values that do not take them."""
    pilot = tmp_path / "pilot.txt"
    pilot.write_text("0\n" * 19 + "1\n")
    assert main(["plan", "--delta=0.1", f"--pilot={pilot}", "--p_value=exact_binomial"]) == 0
    from_pilot = _rows(capsys.readouterr().out)
    assert main(["plan", "--delta=0.1", "--risk_guess=0.05", "--p_value=exact_binomial"]) == 0
    assert from_pilot == _rows(capsys.readouterr().out)
    pilot.write_text("0\n-0.25\n0.25\n0\n")
    assert main(["plan", "--delta=0.1", f"--pilot={pilot}", "--replications=100"]) == 0
    assert list(_rows(capsys.readouterr().out)) == ["signed_mixture", "wsr", "star_bets"]


def test_what_cannot_be_had_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A guess hardly below delta may need more examples than the search tries, which is printed."""
    flags = ["plan", "--delta=0.1", "--risk_guess=0.09999", "--p_value=exact_binomial"]
    assert main(flags) == 0
    assert "> 10,000,000" in capsys.readouterr().out


@_NEEDS_PLOTS
@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_plot(suffix: str, start: bytes, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plot is written in the format of its name, the same each time."""
    output = tmp_path / f"plan{suffix}"
    flags = ["plan", "--delta=0.2", "--risk_guess=0.05,0.1", "--p_value=exact_binomial", f"--output={output}"]
    assert main(flags) == 0
    assert f"Plot: {output}" in capsys.readouterr().out
    content = output.read_bytes()
    assert content.startswith(start)
    assert list(tmp_path.iterdir()) == [output]
    assert main(flags) == 0
    assert output.read_bytes() == content


@_NEEDS_PLOTS
def test_plot_shows_every_guess_and_p_value(tmp_path: pathlib.Path) -> None:
    """Each guess has a panel, and each p-value a curve in it with the number of examples."""
    output = tmp_path / "plan.svg"
    flags = ["plan", "--delta=0.2", "--risk_guess=0.05,0.1", "--p_value=exact_binomial,hoeffding", f"--output={output}"]
    assert main(flags) == 0
    drawn = output.read_text()
    assert drawn.count("<!-- exact_binomial: ") == drawn.count("<!-- hoeffding: ") == 2
    assert "<!-- expected loss 0.05, deviation 0.218 -->" in drawn
    assert "<!-- expected loss 0.1, deviation 0.3 -->" in drawn


def test_page(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A page has a drawing for every guess and a row for every p-value, the same each time, without matplotlib."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    output = tmp_path / "plan.html"
    flags = ["plan", "--delta=0.2", "--risk_guess=0.05,0.1", "--p_value=exact_binomial,hoeffding", f"--output={output}"]
    assert main(flags) == 0
    printed = capsys.readouterr().out
    assert f"Page: {output}" in printed
    content = output.read_text(encoding="utf-8")
    assert content.count("<svg viewBox") == 2
    text = re.sub(r"<[^>]+>", "", content)
    for cells in _rows(printed).values():
        assert all(cell in text for cell in cells)
    needed = _rows(printed)["exact_binomial"][0]
    assert f"exact_binomial needs {needed} examples, the fewest." in text
    assert main(flags) == 0
    assert output.read_text(encoding="utf-8") == content


@in_a_browser
def test_everybody_can_use_the_page(tmp_path: pathlib.Path) -> None:
    """Axe finds no accessibility problem on the page."""
    output = tmp_path / "plan.html"
    assert main(["plan", "--delta=0.2", "--risk_guess=0.05", "--p_value=exact_binomial", f"--output={output}"]) == 0
    with started_browser() as browser:
        assert violations(browser, output) == []


def test_page_of_what_cannot_be_proved(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no number of examples within the search is enough, the page says so."""
    monkeypatch.setattr("calm_beam.risk.sample_size._MOST_EXAMPLES_COMPUTED", 100)
    output = tmp_path / "plan.html"
    flags = ["plan", "--delta=0.1", "--risk_guess=0.09", "--p_value=hoeffding", f"--output={output}"]
    assert main(flags) == 0
    text = re.sub(r"<[^>]+>", "", output.read_text(encoding="utf-8"))
    assert "at delta 0.1 is not accepted with probability 0.9 by 100 examples or fewer." in text
    assert "&gt; 100" in text


def test_a_missing_extra_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib a plot is refused before anything is computed, and the extra is named."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plan", "--delta=0.1", "--risk_guess=0.05", f"--output={tmp_path / 'plan.svg'}"]) == 2
    printed = capsys.readouterr()
    assert (
        "plots need matplotlib, which is not installed: pip install 'calm-beam[plots]' (in a checkout: " in printed.err
    )
    assert printed.out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--risk_guess=0.1"], "an expected loss of 0.1 is not below --delta=0.1: no number of"),
        (["--delta=0.1"], "--risk_guess is missing: expected losses, comma-separated (or --pilot with measured ones)."),
        (["--delta=5", "--risk_guess=0.1"], "--delta must be in (0, 1), got 5. It is a fraction"),
        (["--delta=0.05,2", "--risk_guess=0.03"], "--delta must be in (0, 1), got 2. It is a fraction"),
        (["--delta=0.05,0.1", "--risk_guess=0.2"], "an expected loss of 0.2 is not below --delta=0.1"),
        (
            ["--delta=10%", "--risk_guess=0.03"],
            "argument --delta: expected numbers separated by commas, got '10%'. For 5 % pass 0.05",
        ),
        (["--delta=0.1", "--epsilon=0", "--risk_guess=0.05"], "--epsilon must be in (0, 1), got 0."),
        (["--delta=0.1", "--power=nan", "--risk_guess=0.05"], "--power must be in (0, 1), got nan."),
        (
            ["--delta=0.1", "--risk_guess=-0.1"],
            "--risk_guess must be in [0, 1), got -0.1. Where the mean of signed losses is negative, guess 0",
        ),
        (["--delta=0.1", "--risk_guess=nan"], "--risk_guess must be in [0, 1), got nan."),
        (["--delta=0.1", "--risk_guess=0.05,0.1"], "an expected loss of 0.1 is not below --delta=0.1: no number of"),
        (["--delta=0.1", "--risk_guess=low"], "argument --risk_guess: expected numbers separated by commas, got 'low'"),
        (["--delta=0.1", "--risk_guess=0.05", "--loss_std=0.5"], "loss_std must be above 0 and below 0.2179, which"),
        (["--delta=0.1", "--risk_guess=0", "--loss_std=0.5"], "loss_std must be above 0 and below 0,"),
        (["--delta=0.1", "--risk_guess=0.05", "--p_value=best"], "--p_value best: not known. Choose from hoeffding,"),
        (
            ["--delta=0.1", "--risk_guess=0.05", "--loss_std=0.1", "--p_value=exact_binomial"],
            "--p_value exact_binomial: is for losses of 0 and 1 only.",
        ),
        (
            ["--delta=0.1", "--risk_guess=0.05", "--replications=10"],
            "expected a whole number of at least 100, got '10'",
        ),
        (["--delta=0.1", "--risk_guess=0.05", "--output=plan.txt"], "--output plan.txt: expected a name that ends in"),
        (["--delta=0.1", "--risk_guess=0.05", "--output=/no/p.svg"], "--output /no/p.svg: the folder /no does not"),
        (["--delta=0.1", "--pilot=/no/such"], "--pilot /no/such: no such file."),
        (
            ["--delta=0.1", "--pilot=s3://b/p"],
            "--pilot s3://b/p: of object stores only",
        ),
        (["--delta=0.1", "--pilot={pilot}", "--risk_guess=0.05"], "--pilot takes the place of --risk_guess and"),
        (
            ["--delta=0.1", "--pilot={pilot}", "--p_value=hoeffding"],
            "--p_value hoeffding: is for losses in [0, 1] only.",
        ),
        (["--delta=0.1", "--pilot={bad}"], "--pilot {bad}, line 2: expected a loss in [-1, 1], got 'x'."),
        (["--delta=0.1", "--pilot={digits}"], "--pilot {digits}, line 1: expected a loss in [-1, 1], got '0_1'."),
        (["--delta=0.1", "--pilot={latin}"], "--pilot {latin}, line 2: is not text in UTF-8: it holds the byte 0xe9."),
        (["--delta=0.1", "--pilot={empty}"], "--pilot {empty}: holds no losses."),
        (["--delta=0.1", "--risk_gues=0.05"], "unknown flag --risk_gues. Did you mean --risk_guess?"),
    ],
)
def test_bad_usage(flags: list[str], message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has status 2 and says what was wrong."""
    files = {name: tmp_path / name for name in ("pilot", "bad", "empty", "digits", "latin")}
    contents = (b"0\n-0.5\n", b"0\nx\n", b"", b"0_1\n", "0\né\n".encode("latin-1"))
    for path, content in zip(files.values(), contents, strict=True):
        path.write_bytes(content)
    assert main(["plan", *(flag.format(**files) for flag in flags)]) == 2
    printed = capsys.readouterr()
    assert message.format(**files) in printed.err
    assert printed.out == ""


def test_the_time_on_a_device_is_forecast(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    """The forecast on a device needs no examples: a row for each exit layer, which measures pay, and a note."""
    model = write_model(tmp_path / "model")
    assert main(["plan", "--device=v5e", f"--checkpoint={model}", "--dtype=bfloat16", "--positions=64"]) == 0
    shown = capsys.readouterr().out
    forecast = device_forecast(load_checkpoint(model).config, "v5e", Precision(dtype="bfloat16"), positions=64)
    assert "Least time of a step on TPU v5e" in shown
    layers = [line.split() for line in shown.splitlines() if re.match(r" +\d+ +\d", line)]
    assert [int(row[0]) for row in layers] == list(range(1, forecast.parts.layers + 1))
    assert f"{1e6 * forecast.exit_seconds(1, ExitRule()):.1f}" == layers[0][1]
    assert f"at least {1e6 * forecast.full_seconds():.1f} microseconds a step there (bfloat16, 1 prompt at" in shown
    assert "Measures that do not (state, classifier, static):" in shown
    assert "A forecast from bytes and operations: nothing was run." in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device=v5e"], r"--checkpoint is missing: the model whose steps --device=v5e is to take\."),
        (["--device=v5e", "--checkpoint=m", "--delta=0.1"], "--delta is about examples, or the cost of a run, and"),
        (["--device=v5e", "--checkpoint=m", "--output=a.html"], "--output is about examples"),
        (["--delta=0.1", "--positions=3"], "--positions is about the time on an accelerator: pass --device"),
        # The defaults.
        (["--delta=0.1", "--positions=192"], "--positions is about the time on an accelerator: pass --device"),
        (["--device=v5e", "--checkpoint=m", "--workers=1"], "--workers is about examples, or the cost of a run"),
        (["--device=v5e", "--checkpoint=m"], "checkpoint"),
        (["--device=v9", "--checkpoint=m"], "invalid choice: 'v9'"),
    ],
)
def test_the_questions_are_not_mixed(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag of another question, or a missing model, is refused."""
    with contextlib.suppress(SystemExit):
        assert main(["plan", *flags]) == 2
    assert re.search(message, capsys.readouterr().err)
