"""The tables on the terminal, at the width that terminals have by default."""

import dataclasses
import io
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.result import choose_thresholds, risk_rows, write_risk_table
from calm_beam.launch.terminal import PlainConsole
from calm_beam.launch.terminal.lines import PlainTable
from calm_beam.launch.terminal.summary import (
    _begins_with_failure,
    _ways_to_go_on,
    _what_was_counted,
    choices_table,
    headline,
    print_summary,
    speed_lines,
)
from calm_beam.manifest import Calibration, Manifest, repeats_in_words
from tests.calm_beam.calibration.builders import build_plan, build_totals
from tests.calm_beam.manifest.builders import (
    SPEED,
    build_calibration,
    build_each_variant_manifest,
    build_joint_confirmed_manifest,
    build_manifest,
    build_never_exit,
    build_path_entry,
    build_planned_manifest,
    build_timed_manifest,
)
from tests.plans import all_specs

_GRID = (0.9, 0.55, 0.125)
_METRICS = ("rouge_l", "rouge_l_unicode", "token_f1", "exact_match")


def _write_run(folder: pathlib.Path, *, consistencies: tuple[str, ...], metrics: tuple[str, ...]) -> Manifest:
    """Writes the table of a run over 200 examples whose risks are all different, and returns its manifest."""
    specs = all_specs(
        consistencies=consistencies, metrics=metrics, deltas=(0.1, 0.35), epsilons=(0.05,), p_value="signed_mixture"
    )
    plan = build_plan(specs, _GRID)
    layout = layout_of(plan)
    firsts = np.array(
        [[7 * row + 31 * column for column in range(len(_GRID))] for row in range(len(layout.objectives))]
    )
    totals = build_totals(np.arange(200)[:, None, None] < firsts, layout)
    whole = dataclasses.replace(
        totals.whole,
        layer_sums=(6 * 1000, *(6 * 1000 - 777 * place for place in range(1, 4))),
        token_counts=(1000,) * 4,
    )
    rows = risk_rows(dataclasses.replace(totals, whole=whole), plan, num_layers=6)
    write_risk_table(folder / "risk_table.csv", rows)
    entries = choose_thresholds(rows, plan, num_layers=6)
    data = build_manifest().data
    return build_manifest(
        calibrations=entries,
        data=type(data)(
            patterns=data.patterns, examples=200, duplicates=3, failed=0, truncated=7, fingerprint=data.fingerprint
        ),
    )


def _printed(
    folder: pathlib.Path, manifest: Manifest, capsys: pytest.CaptureFixture[str], *, verbose: bool = True
) -> str:
    print_summary(manifest, str(folder), seconds=12.6, verbose=verbose)
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


@pytest.mark.parametrize(
    ("consistencies", "metrics"),
    [
        (("textual",), ("token_f1",)),
        (("textual", "risk"), ("rouge_l", "token_f1")),
        (("textual", "risk"), _METRICS[:3]),
        (("textual", "risk"), _METRICS),
    ],
)
def test_no_number_is_lost(
    consistencies: tuple[str, ...],
    metrics: tuple[str, ...],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At 80 columns every risk, threshold, tolerance and mean of layers is printed in full."""
    monkeypatch.setenv("COLUMNS", "80")
    manifest = _write_run(tmp_path, consistencies=consistencies, metrics=metrics)
    text = _printed(tmp_path, manifest, capsys)
    assert "…" not in text
    tokens = text.split()
    objectives = len(consistencies) * len(metrics)
    for row in range(objectives):
        for column in range(3):
            assert f"{(7 * row + 31 * column) / 200:.4f}" in tokens
    for threshold, layers in zip(_GRID, ("5.22", "4.45", "3.67"), strict=True):
        assert f"{threshold:g}" in tokens
        assert layers in tokens
    for entry in manifest.calibrations:
        assert f"{entry.delta:g}" in tokens
        assert f"{entry.risk:.4f}" in tokens
    for metric in metrics:
        assert metric in tokens
    # The path is a word of its own and may be longer than a line.
    assert max(len(line.rstrip()) for line in text.splitlines() if str(tmp_path) not in line) <= 80


def test_what_is_said_besides(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts, time, the guarantee and the manifest's path follow the tables."""
    monkeypatch.setenv("COLUMNS", "300")
    manifest = _write_run(tmp_path, consistencies=("textual",), metrics=("token_f1",))
    text = _printed(tmp_path, manifest, capsys)
    assert "Tests: textual by signed_mixture of dissimilarity losses. Procedure: fixed_sequence." in text
    assert "200 examples in 13 s; 3 repeated inputs, 7 prompts cut, 0 failed." in text
    assert repeats_in_words(manifest) in text
    assert text.count("Leave in what repeats by itself where the model is served") == 1
    assert manifest.guarantee in text
    assert f"Manifest: {tmp_path / 'manifest.json'}" in text


def test_paths_with_square_brackets(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest's path can be copied from the terminal, whatever characters it has."""
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "run[bold]"
    folder.mkdir()
    manifest = _write_run(folder, consistencies=("textual",), metrics=("token_f1",))
    assert f"Manifest: {folder / 'manifest.json'}" in _printed(folder, manifest, capsys)


def _lines(manifest: Manifest, *, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(choices_table(manifest))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_remarks_follow_the_choices(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each remark is a line of its own, between the choices and the counts."""
    monkeypatch.setenv("COLUMNS", "300")
    manifest = _write_run(tmp_path, consistencies=("textual",), metrics=("token_f1",))
    print_summary(manifest, str(tmp_path), seconds=1, remarks=["One remark.", "Another one."])
    assert "\nOne remark.\nAnother one.\n200 examples in 1 s" in capsys.readouterr().out


def test_choices() -> None:
    """A choice shows threshold, layers, savings, risk and where testing ended; "never exit" saves nothing."""
    lines = _lines(build_manifest())
    assert lines[0] == "Lowest threshold with expected loss <= delta (probability 95 %)"
    assert "textual 0.1 0.8 4.25 29% 0.0300 0.7 (p = 0.4)" in lines
    assert "textual 0.01 never exit 6.00 0% 0.0000 0.9 (p = 0.3)" in lines
    assert lines.count("Metric: rouge_l.") == 1


def test_operations() -> None:
    """Operations are next to the layers, as a share of the full model's; without counts there is no such column."""
    console = Console(file=io.StringIO(), width=80)
    console.print(choices_table(build_manifest(), (1.28, None)))
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "textual 0.1 0.8 4.25 29% +28% 0.0300 0.7 (p = 0.4)" in lines
    assert "textual 0.01 never exit 6.00 0% 0% 0.0000 0.9 (p = 0.3)" in lines
    assert not any("ations" in line for line in _lines(build_manifest()))


def test_several_metrics_and_probabilities() -> None:
    """Settings that differ between entries are in the entries' lines."""
    other = dataclasses.replace(build_calibration(), metric="token_f1", epsilon=0.1)
    lines = _lines(build_manifest(calibrations=(build_calibration(), other)))
    assert "(probability 1 - epsilon)" in " ".join(lines)
    assert "rouge_l 0.05" in lines
    assert "token_f1 0.1" in lines


def _at(levels: tuple[float, ...], entries: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dataclasses.replace(entry, epsilon=level) for entry, level in zip(entries, levels, strict=True))


def test_levels_below_epsilon() -> None:
    """A test at a share of epsilon is shown with that share, also where shares differ; at epsilon, with none."""
    variants = build_each_variant_manifest()
    assert variants.plan is not None
    assert variants.plan.pareto is not None
    text = " ".join(_lines(variants))
    assert f"Tested at 0.025: {len(variants.plan.pareto.variants)} variants share epsilon 0.05." in text
    assert "Tested at 0.05: 2 promises share epsilon 0.1." in " ".join(_lines(build_joint_confirmed_manifest()))
    planned = build_planned_manifest()
    assert planned.plan is not None
    levels = (0.05, 0.06)
    different = dataclasses.replace(
        planned,
        plan=dataclasses.replace(planned.plan, tests=_at(levels, planned.plan.tests), joint_epsilon=0.11),
        calibrations=_at(levels, planned.calibrations),
    )
    text = " ".join(_lines(different))
    assert "Tested at 0.05 to 0.06: 2 promises share epsilon 0.11." in text
    assert "(p = 0.4 > 0.05)" in text
    assert "Tested at" not in " ".join(_lines(build_manifest()))


def test_the_result_comes_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence says what is proved and saved; --verbose adds the tables of all thresholds."""
    monkeypatch.setenv("COLUMNS", "300")
    manifest = _write_run(tmp_path, consistencies=("textual",), metrics=("token_f1",))
    first, second, *others = _printed(tmp_path, manifest, capsys, verbose=False).splitlines()
    assert first.startswith("2 of 2 promises proved, each with probability at least 95 %: expected loss at most ")
    assert "a token runs 4.45 to 5.22 of 6 layers on average: 13% to 26% fewer." in first
    assert second == f"Manifest: {tmp_path / 'manifest.json'}"
    assert not any(line.startswith(("Mean loss at", "Tests: ", "Engine: ")) for line in others)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ((build_calibration(),), "With probability at least 95 %"),
        ((build_never_exit(),), "Never exit: from 200"),
        ((build_never_exit(), build_never_exit(delta=0.02)), "None of 2 promises could be proved with probability"),
    ],
)
def test_headlines(entries: tuple[Calibration, ...], words: str) -> None:
    """A single promise is printed whole; if nothing is proved, the headline says so."""
    assert headline(build_manifest(calibrations=entries)).startswith(words)


def test_data_without_flaws_are_said_in_few_words() -> None:
    """Where nothing was repeated, cut or failed, no zeros are listed."""
    manifest = build_manifest()
    data = dataclasses.replace(manifest.data, duplicates=0, truncated=0, failed=0)
    said = next(_what_was_counted(dataclasses.replace(manifest, data=data), seconds=13.4))
    assert said == "200 examples in 13 s; none repeated, cut or failed."


def test_a_first_threshold_that_failed_says_how_to_go_on() -> None:
    """If not even the safest threshold was proved, what may help is named; more examples unless many lost too much."""
    few = build_never_exit(
        delta=0.02, path=(build_path_entry(threshold=0.95, risk=0.005, p_value=0.3, rejected=False),)
    )
    (said,) = _ways_to_go_on(build_manifest(calibrations=(few,)))
    assert said == (
        "Not even the safest threshold, 0.95, could be proved. What may help, on fresh examples: more examples; "
        "thresholds nearer to 1, such as --thresholds=0.999,0.99,0.95; fine-tuning (calm-beam train)."
    )
    path = (build_path_entry(threshold=0.9999, risk=0.5, p_value=1.0, rejected=False),)
    loses = build_never_exit(delta=0.1, path=path)
    (said,) = _ways_to_go_on(build_manifest(calibrations=(loses, build_calibration())))
    assert said.endswith(
        "could be proved for 1 of 2 promises. What may help, on fresh examples: fine-tuning (calm-beam train)."
    )
    hopeless = build_never_exit(delta=0.01, path=path)
    assert not [*_ways_to_go_on(build_manifest(calibrations=(hopeless,)))], "only more examples help, as is said"
    (said,) = _ways_to_go_on(build_manifest(calibrations=(hopeless, loses)))
    assert "What may help, on fresh examples: more examples; fine-tuning" in said, "200 examples can prove nothing"
    # Here a safer one was proved, and did not pay.
    timed = build_timed_manifest()
    assert not _begins_with_failure(_slow(timed), timed)


def _slow(manifest: Manifest) -> Calibration:
    """Returns the first entry of a manifest, whose threshold was proved, as one that does not pay."""
    of_none: dict[str, Any] = dict.fromkeys(("threshold", "variant", "threshold_by_position", "rule"))
    return dataclasses.replace(manifest.calibrations[0], pays=False, layers=manifest.model.layers, risk=0.0, **of_none)


def test_variants_are_described_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the letter of its variant; below the table each letter is described, and rows stay single lines."""
    monkeypatch.setenv("COLUMNS", "80")
    PlainConsole().print(choices_table(build_timed_manifest(), (0.9, None)))
    printed = capsys.readouterr().out
    assert re.search(r"^ textual +0\.1 +0\.9 a .* -10% .* 0\.6 b \(p = 0\.3\) *$", printed, re.MULTILINE)
    assert re.search(r"^ textual +0\.01 +never exit .* 0\.9 c \(p = 0\.3\) *$", printed, re.MULTILINE)
    exits = "Exits: a tau 4, from layer 2; b tau 1, from layer 1; c tau 1, from layer 2."
    assert exits in " ".join(printed.split())


def test_nothing_that_pays_is_not_nothing_proved() -> None:
    """Where thresholds were proved that are no faster, the headline does not say that nothing could be proved."""
    timed = build_timed_manifest()
    slow = _slow(timed)
    several = dataclasses.replace(timed, calibrations=(slow, timed.calibrations[1]), speeds=None)
    assert headline(several).startswith("Nothing that is faster could be proved for any of 2 promises with probability")


def test_several_speeds_are_a_table() -> None:
    """One promise has its speed in a sentence; of several, a table says once where and how they were measured."""
    alone = build_timed_manifest()
    (said,) = speed_lines(alone)
    assert isinstance(said, str)
    slow = dataclasses.replace(_slow(alone), delta=0.2)
    assert alone.plan is not None
    test = alone.plan.tests[0]
    plan = dataclasses.replace(alone.plan, tests=(test, dataclasses.replace(test, delta=0.2)))
    in_batches = dataclasses.replace(SPEED, calibrations=(0,), batch=64, factor=0.8)
    other = dataclasses.replace(SPEED, calibrations=(1,), factor=0.5)
    entries = (alone.calibrations[0], slow)
    several = dataclasses.replace(alone, plan=plan, calibrations=entries, speeds=(SPEED, in_batches, other))
    table, *others = speed_lines(several)
    assert others == []
    shown = io.StringIO()
    PlainConsole(file=shown, width=80).print(table)
    text = shown.getvalue()
    assert text.startswith("Times as fast as the full model, on the machine that calibrated\n")
    assert text.count("machine that calibrated") == 1
    assert re.search(r"textual +0\.1 +1\.25 +0\.80 +3\.50 *\n", text)
    assert re.search(r"textual +0\.2 +0\.50 +never exit *\n", text)
    assert "Fine-tuning moves exits down" in " ".join(text.split())
    assert headline(several).endswith(
        " On the machine that calibrated, 0.50 to 1.25 times as fast as the full model one prompt at a time, 0.80 in "
        "batches of 64; below 1 is slower. For 1 other, nothing that is faster was proved."
    )
    assert max(map(len, text.splitlines())) <= 80


def test_titles_are_as_wide_as_the_terminal() -> None:
    """The title of a narrow table stays on one line, and is broken only where the terminal ends."""
    table = PlainTable("Mean loss by setting (probability 95 %)")
    table.add_column("a")
    table.add_row("1")
    shown = io.StringIO()
    PlainConsole(file=shown, width=80).print(table)
    assert shown.getvalue().startswith("Mean loss by setting (probability 95 %)\n")


def test_choices_at_the_end_of_the_grid() -> None:
    """If every threshold passed, the choice says that testing ended with the grid."""
    entry = build_calibration(path=(build_path_entry(),), threshold=0.9, layers=5.5, risk=0.0125)
    assert any(line.endswith("end of grid") for line in _lines(build_manifest(calibrations=(entry,))))


def test_long_names_of_metrics() -> None:
    """The name of an imported metric does not push numbers off the screen."""
    entry = build_never_exit(metric="my_company.research.early_exit.scores:character_f_score_with_beta_2")
    text = " ".join(_lines(build_manifest(calibrations=(entry,))))
    for number in ("0.01", "95 %", "never exit", "6.00", "0%", "0.0000", "0.9", "p = 0.3"):
        assert number in text
