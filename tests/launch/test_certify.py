"""`calm-beam certify` from flags to files, and the other commands on its manifest."""

import csv
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from calm_beam.calibration.certification import SettingRow
from calm_beam.calibration.result import read_risk_table
from calm_beam.inputs.losses.tables import LossRow
from calm_beam.launch.cli import main
from calm_beam.manifest import ManifestError, SettingManifest, content_digest, read_setting_manifest
from calm_beam.serving import Generator
from tests.calm_beam.inputs.losses.builders import ORDER, coin_rows, write_csv, write_helm, write_lm_eval

_ORDER = f"--order={','.join(ORDER)}"


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def losses(tmp_path: pathlib.Path) -> pathlib.Path:
    """Losses of 600 examples under four settings."""
    return write_csv(tmp_path / "losses.csv", coin_rows(600))


def _certify(losses: pathlib.Path, *flags: str, output: str = "out") -> SettingManifest:
    place = losses.parent / output
    assert main(["certify", f"--losses={losses}", f"--output={place}", *flags]) == 0
    return read_setting_manifest(place / "manifest.json")


def test_a_certification(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A certification prints the plan first if asked, then the result, and writes manifest and risk table."""
    manifest = _certify(losses, _ORDER, "--delta=0.05,0.15", "--verbose")
    printed = capsys.readouterr()
    assert printed.err.splitlines()[0] == f"plan {manifest.plan.digest}"
    assert "600 examples under 4 settings" in printed.err
    assert [entry.setting for entry in manifest.calibrations] == ["6bit", "4bit"]
    first = (
        "each with probability at least 95 %: expected loss of 6bit at most 0.05; expected loss of 4bit at most 0.15."
    )
    assert first in " ".join(printed.out.split())
    assert printed.out.endswith(f"Next:\n  calm-beam inspect {losses.parent / 'out'}\n")
    assert re.search(r"^ +0\.15 +4bit +4 ", printed.out, re.MULTILINE)
    assert "Loss: given." in printed.out
    assert manifest.data.patterns == (str(losses),)
    table = list(csv.DictReader((losses.parent / "out" / "risk_table.csv").open()))
    assert [row["setting"] for row in table] == [*ORDER, *ORDER]
    written = sorted(path.name for path in (losses.parent / "out").iterdir())
    assert written == ["manifest.json", "plans", "report.html", "risk_table.csv"]


def test_several_promises_of_which_each_holds_alone(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal warns against picking the best promise, and with --joint shows the level of each test."""
    alone = "choosing the best of them here voids its guarantee."
    _certify(losses, _ORDER, "--delta=0.05,0.15")
    printed = capsys.readouterr().out
    assert alone in printed
    assert "tested" not in printed.partition("Last setting")[2].partition("first not")[0]
    manifest = _certify(losses, _ORDER, "--delta=0.05,0.15", "--joint", output="joint")
    printed = capsys.readouterr().out
    assert alone not in printed
    for entry in manifest.calibrations:
        assert re.search(rf" {entry.delta:g} .* {entry.path_level:.4g} ", printed)
    # One probability, that of all together, and no key of the manifest.
    assert set(re.findall(r"probability (?:at least )?([\d.]+) %", printed)) == {"95"}
    assert "_epsilon" in manifest.guarantee
    assert "_epsilon" not in printed


def test_what_may_prove_more(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the mean loss is below delta and nothing is proved, `plan` is named, and its command works."""
    rows = [
        LossRow(id=str(index), setting=setting, loss=float(index < ones))
        for setting, ones in (("8bit", 3), ("4bit", 40))
        for index in range(60)
    ]
    few = write_csv(tmp_path / "losses.csv", rows)
    for delta, is_below in ((0.06, True), (0.04, False)):
        _certify(few, "--order=8bit,4bit", f"--delta={delta}", output=f"out{delta}")
        printed = capsys.readouterr().out
        assert ("More examples may prove it" in printed) == is_below
        assert " cost " not in printed
        if is_below:
            assert '8bit": its mean loss 0.0500 is below delta 0.06, but p = ' in printed
            assert "if all of them are fresh" in printed
            (command,) = re.findall(
                r"^  calm-beam (plan --delta=0\.06 --epsilon=0\.05 --risk_guess=0\.05 --p_value=star_bets)$",
                printed,
                re.MULTILINE,
            )
            # A tenth of the usual simulations, for a shorter test.
            assert main([*command.split(), "--replications=100"]) == 0
            capsys.readouterr()


def test_what_is_said_of_groups(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Terminal, manifest and `inspect` warn that a promise about all examples may be broken for a group."""
    manifest = _certify(losses, _ORDER, "--delta=0.15", "--group_key=group")
    caution = "is about all examples together, and may be broken for some of the groups."
    assert caution in manifest.guarantee
    assert caution in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(losses.parent / "out")]) == 0
    assert caution in " ".join(capsys.readouterr().out.split())


def test_groups_clusters_and_tails(losses: pathlib.Path) -> None:
    """Columns name groups and clusters; every combination is an entry, and they hold together."""
    flags = ("--order_by=cost", "--delta=0.2", "--group_key=group", "--cluster_key=cluster", "--joint")
    manifest = _certify(losses, *flags, "--tail=0.5", "--p_value=hoeffding_bentkus")
    assert manifest.plan.order == ORDER
    assert len(manifest.calibrations) == 8
    assert manifest.calibration(group="c", tail=0.5).epsilon == 0.05 / 8
    assert manifest.data.clusters == 150


def test_an_earlier_result_is_replaced_only_if_asked(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory with a manifest is left alone unless --overwrite is given."""
    first = _certify(losses, _ORDER, "--delta=0.05")
    assert main(["certify", f"--losses={losses}", _ORDER, "--delta=0.15", f"--output={losses.parent / 'out'}"]) == 2
    assert "holds a manifest already. Choose another directory, or pass --overwrite." in capsys.readouterr().err
    second = _certify(losses, _ORDER, "--delta=0.15", "--overwrite")
    assert first.plan.digest != second.plan.digest


def test_a_quantisation_sweep_of_the_harness(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Per-example scores of lm-evaluation-harness are joined by id; candidates are tested as they are listed."""
    full = [1.0] * 380 + [0.0] * 20
    int8 = [0.0] * 4 + full[4:]
    int4 = [0.0] * 60 + full[60:]
    runs = {
        name: write_lm_eval(tmp_path / name, {"strict-match": scores, "flexible-extract": full})
        for name, scores in (("bf16", full), ("int8", int8), ("int4", int4))
    }
    output = tmp_path / "out"
    status = main(
        [
            "certify",
            f"--baseline={runs['bf16']}",
            f"--candidates=int8={runs['int8']},{runs['int4']}",
            "--task=gsm8k",
            "--metric=exact_match,strict-match",
            "--costs=int8=8,int4=4",
            "--delta=0.05",
            f"--output={output}",
        ]
    )
    assert status == 0
    manifest = read_setting_manifest(output / "manifest.json")
    (entry,) = manifest.calibrations
    assert (entry.setting, entry.cost, entry.loss, entry.p_value) == ("int8", 8, "signed", "star_bets")
    assert [(step.setting, step.risk, step.rejected) for step in entry.path] == [
        ("int8", 0.01, True),
        ("int4", 0.15, False),
    ]
    assert (manifest.plan.task, manifest.plan.metric) == ("gsm8k", "exact_match,strict-match")
    assert manifest.plan.baseline == str(runs["bf16"])
    capsys.readouterr()
    assert main(["inspect", str(output)]) == 0
    assert "Losses: exact_match,strict-match of gsm8k (a higher score is better), against" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metric", "flags", "p_value"),
    [
        ("exact_match", ["--loss=relu"], "exact_binomial"),
        ("exact_match", ["--loss=signed"], "star_bets"),
        ("exact_match", ["--loss=relu", "--cluster_key=doc.passage"], "star_bets"),
        ("f1", ["--loss=relu"], "star_bets"),
    ],
)
def test_the_default_for_metrics_of_0_and_1(
    metric: str, flags: list[str], p_value: str, tmp_path: pathlib.Path
) -> None:
    """Losses known by their metric to be 0 or 1 are tested by the exact binomial; others, and clusters, are not."""
    runs = [
        write_lm_eval(tmp_path / name, {"none": [float(index >= wrong) for index in range(300)]}, metric=metric)
        for name, wrong in (("a", 0), ("b", 1))
    ]
    asked = [f"--baseline={runs[0]}", f"--candidates={runs[1]}", "--delta=0.02", f"--output={tmp_path / 'out'}"]
    assert main(["certify", *asked, *flags]) == 0
    (entry,) = read_setting_manifest(tmp_path / "out" / "manifest.json").calibrations
    assert entry.p_value == p_value
    if p_value == "exact_binomial":
        assert entry.setting == "b"


def test_the_cost_of_the_baseline(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The baseline has a row of loss 0, with its cost if that is declared; costs of other settings are refused."""
    runs = [write_helm(tmp_path / name, [1.0] * 100) for name in ("bf16", "int8")]
    flags = [f"--baseline={runs[0]}", f"--candidates=int8={runs[1]}", "--metric=exact_match", "--delta=0.1"]
    for costs in ("int4=4", "fp32=32,int8=8"):
        assert main(["certify", *flags, f"--costs={costs}", f"--output={tmp_path / 'out'}"]) == 2
        error = capsys.readouterr().err
        assert "--costs must name every setting once: the settings are int8" in error
        assert "The baseline, bf16, may be added to them." in error
    for costs, cost in (("int8=8", ""), ("bf16=16,int8=8", "16")):
        assert main(["certify", *flags, f"--costs={costs}", f"--output={tmp_path / 'out'}", "--overwrite"]) == 0
        assert re.search(
            rf"^ bf16 \(baseline\) +{cost} +0 *\n int8 +8 +0.0000 *$", capsys.readouterr().out, re.MULTILINE
        )
        manifest = read_setting_manifest(tmp_path / "out" / "manifest.json")
        assert [(setting.name, setting.cost) for setting in manifest.settings] == [("int8", 8)]
    assert main(["certify", *flags, f"--output={tmp_path / 'out'}", "--overwrite"]) == 0
    assert re.search(r"^ bf16 \(baseline\) +0 *$", capsys.readouterr().out, re.MULTILINE)


def test_lower_is_better(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A toxicity that rises from .05 to .60 is not an improvement; plan, report and `inspect` show the direction."""
    base = write_lm_eval(tmp_path / "base", {"none": [0.05] * 400}, metric="toxicity", higher=False)
    worse = write_lm_eval(tmp_path / "worse", {"none": [0.6] * 400}, metric="toxicity", higher=False)
    better = write_lm_eval(tmp_path / "better", {"none": [0.01] * 400}, metric="toxicity", higher=False)
    output = tmp_path / "out"
    asked = ["certify", f"--baseline={base}", f"--candidates={better},{worse}", "--delta=0.1", f"--output={output}"]
    assert main([*asked, "--direction=higher"]) == 1
    assert "says that a lower toxicity,none is better, and --direction=higher says" in capsys.readouterr().err
    assert main(asked) == 0
    assert "toxicity,none: a lower score is better, as the logs say" in capsys.readouterr().err
    manifest = read_setting_manifest(output / "manifest.json")
    assert manifest.plan.direction == "lower"
    (entry,) = manifest.calibrations
    assert entry.setting == "better"
    assert [step.risk for step in entry.path] == pytest.approx([-0.04, 0.55])
    assert [step.rejected for step in entry.path] == [True, False]
    assert main(["inspect", str(output)]) == 0
    assert "toxicity,none of gsm8k (a lower score is better), against" in capsys.readouterr().out
    assert "a lower score" in (output / "report.html").read_text()
    # Fresh runs are read in the same direction, whatever flag is given.
    fresh = [
        f"{kind}={write_lm_eval(tmp_path / f'fresh-{kind}', {'none': [score] * 300}, metric='toxicity', first=900)}"
        for kind, score in (("base", 0.05), ("better", 0.5))
    ]
    verify = ["verify", f"--manifest={output}", f"--baseline={fresh[0].partition('=')[2]}", f"--candidates={fresh[1]}"]
    assert main([*verify, "--direction=higher"]) == 2
    assert "--direction=higher: the manifest says that a lower score is better" in capsys.readouterr().err
    assert main(verify) == 3


def test_a_direction_that_nobody_says(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A metric whose direction no file or list knows needs the flag, which is part of the plan and changes its hash."""
    runs = [
        write_lm_eval(tmp_path / name, {"none": [score] * 300}, metric="quality")
        for name, score in (("a", 0.9), ("b", 0.8))
    ]
    asked = ["certify", f"--baseline={runs[0]}", f"--candidates={runs[1]}", "--delta=0.3"]
    assert main([*asked, f"--output={tmp_path / 'out'}"]) == 2
    printed = capsys.readouterr()
    assert "nothing says whether a higher or a lower quality,none is better" in printed.err
    assert "--direction=higher or --direction=lower" in printed.err
    assert not (tmp_path / "out").exists()
    digests = set()
    for direction in ("higher", "lower"):
        output = tmp_path / direction
        assert main([*asked, f"--direction={direction}", f"--output={output}"]) == 0
        manifest = read_setting_manifest(output / "manifest.json")
        assert manifest.plan.direction == direction
        assert manifest.calibrations[0].path[0].risk == pytest.approx(0.1 if direction == "higher" else -0.1)
        digests.add(manifest.plan.digest)
    assert len(digests) == 2


def test_an_early_manifest_of_scores(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An early manifest, which assumed that higher is better, verifies no metric where lower is better."""
    runs = {
        name: write_lm_eval(tmp_path / name, {"none": [score] * 300}, metric="toxicity", first=first)
        for name, score, first in (("a", 0.1, 0), ("b", 0.1, 0), ("c", 0.1, 900), ("d", 0.1, 900))
    }
    output = tmp_path / "out"
    asked = [f"--baseline={runs['a']}", f"--candidates=x={runs['b']}"]
    assert main(["certify", *asked, "--delta=0.3", "--direction=higher", f"--output={output}"]) == 0
    assert "caution: of what is usually called toxicity,none, a lower score is better." in capsys.readouterr().err
    path = output / "manifest.json"
    content = json.loads(path.read_text())
    del content["plan"]["direction"]
    content["plan"]["digest"] = content_digest(
        {key: value for key, value in content["plan"].items() if key != "digest"}
    )
    content["digest"] = content_digest({key: value for key, value in content.items() if key != "digest"})
    path.write_text(json.dumps(content))
    capsys.readouterr()
    fresh = [f"--baseline={runs['c']}", f"--candidates=x={runs['d']}"]
    assert main(["verify", f"--manifest={output}", *fresh]) == 2
    assert "it promises the opposite of what it says. Certify again." in capsys.readouterr().err
    assert main(["verify", f"--manifest={output}", *fresh, "--direction=higher"]) == 0


def test_clusters_of_scores(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Passages that a log names are the units that count, in the manifest and when it is verified."""
    runs = {
        name: write_lm_eval(tmp_path / name, {"none": [1.0] * 400}, first=first)
        for name, first in (("a", 0), ("b", 0), ("c", 900), ("d", 900))
    }
    output = tmp_path / "out"
    asked = [f"--baseline={runs['a']}", f"--candidates=x={runs['b']}", "--cluster_key=doc.passage"]
    assert main(["certify", *asked, "--delta=0.1", f"--output={output}"]) == 0
    manifest = read_setting_manifest(output / "manifest.json")
    assert (manifest.data.examples, manifest.data.clusters, manifest.plan.cluster_key) == (400, 200, "doc.passage")
    assert manifest.calibrations[0].path[0].n == 200
    assert "drawing a cluster, which doc.passage names" in manifest.guarantee
    fresh = [f"--baseline={runs['c']}", f"--candidates=x={runs['d']}"]
    assert main(["verify", f"--manifest={output}", *fresh]) == 0
    asked[-1] = "--cluster_key=doc.title"
    assert main(["certify", *asked, "--delta=0.1", f"--output={tmp_path / 'other'}"]) == 1
    assert "has no doc.title, which --cluster_key names" in capsys.readouterr().err


def test_logs_without_what_was_asked(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If no log holds the prompts, a message says that ids alone were joined; if both do, there is no message."""
    for number, asked in enumerate(("easy ", None)):
        runs = [write_helm(tmp_path / f"{name}{number}", [1.0] * 100, asked=asked) for name in "ab"]
        flags = [f"--baseline={runs[0]}", f"--candidates=x={runs[1]}", "--metric=exact_match", "--delta=0.1"]
        assert main(["certify", *flags, f"--output={tmp_path / f'out{number}'}"]) == 0
        assert ("joined by their ids alone" in capsys.readouterr().err) is (asked is None)


_GOOD = "id,setting,loss\n1,a,0\n1,b,1\n"


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (_GOOD + "1,a,0\n", (), r"setting 'a' has several losses for 1 id \('1'\)"),
        (_GOOD + "2,a,0\n", (), r"setting 'b' has no loss for 1 id \('2'\)"),
        (_GOOD + "2,c,0\n", (), r"setting 'a' has no loss for 1 id \('2'\)"),
        (_GOOD + "2,a,2\n2,b,0\n", (), r"line 4: the loss must be a number in \[0, 1\], got '2'"),
        (_GOOD + "2,a,\n2,b,0\n", (), "line 4: has no loss"),
        (_GOOD + "2,a\n", (), "line 4: has 2 cells, and the header names 3 columns"),
        ("id,loss\n1,0\n", (), "has no column setting, only id, loss"),
        ("", (), "holds no losses"),
        (_GOOD, ("--order=a",), r"--order must name every setting once: it lacks 1 setting \('b'\)"),
        (_GOOD, ("--order=a,b,c",), r"names 1 setting \('c'\) without losses"),
        (_GOOD, ("--order_by=cost",), "--order and --order_by both say the order"),
        (_GOOD, ("--group_key=topic",), "has no column topic"),
        (_GOOD, ("--loss=relu",), "--loss=relu is made of scores"),
        (_GOOD, ("--metric=acc",), "--metric belongs to --baseline"),
        (_GOOD, ("--direction=lower",), "--direction belongs to --baseline"),
        (_GOOD, ("--costs=a=1_0,b=2",), "expected NAME=NUMBER for every setting, each once, got 'a=1_0'"),
        (_GOOD, ("--costs=a=١,b=2",), "expected NAME=NUMBER for every setting, each once, got 'a=١'"),
        (_GOOD + "2,a,1_0e-1_0\n2,b,0\n", (), r"line 4: the loss must be a number in \[0, 1\], got '1_0e-1_0'"),
        (_GOOD + "2,a,٠\n2,b,0\n", (), r"line 4: the loss must be a number in \[0, 1\], got '٠'"),
        (_GOOD, ("--baseline=run",), "name either the losses .* or the scores"),
        (_GOOD, ("--costs=a=1",), "--costs must name every setting once: the settings are a, b, it names a"),
        (_GOOD, ("--costs=a=1,b=cheap",), "expected NAME=NUMBER for every setting, each once, got 'b=cheap'"),
        (_GOOD, ("--delta=5",), r"--delta must be in \(0, 1\), got 5"),
        (_GOOD, ("--p_value=exact_binomial", "--cluster_key=id"), "losses of clusters are means over their examples"),
        (_GOOD, ("--candidate=x",), "unknown flag --candidate. Did you mean --candidates?"),
        ("id,setting,loss\n1,a,0.5\n1,b,1\n", ("--p_value=exact_binomial",), "is for losses of 0 and 1 only"),
        ("id,setting,loss,cost\n1,a,0,1\n1,b,1,1\n", ("--costs=a=1,b=2",), "--costs and the column cost both say"),
    ],
)
def test_malformed_input(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], text: str, flags: tuple[str, ...], message: str
) -> None:
    """Malformed losses or flags are reported, and nothing is written."""
    path = tmp_path / "losses.csv"
    path.write_text(text)
    asked = ["certify", f"--losses={path}", "--order=a,b", "--delta=0.1", f"--output={tmp_path / 'out'}", *flags]
    assert main(asked) in (1, 2)
    printed = capsys.readouterr()
    assert re.search(message, printed.err), printed.err
    assert printed.out == ""
    assert [child.name for child in tmp_path.iterdir()] == ["losses.csv"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "name either the losses"),
        (("--baseline=x",), "--candidates is missing"),
        (("--baseline=x", "--candidates=y", "--group_key=g"), "--group_key names a column of --losses"),
        (("--baseline=x", "--candidates=y", "--loss=given"), "--loss=given is of --losses"),
        (("--baseline=x", "--candidates=y"), "x: no such file or folder. Expected a log of lm-evaluation-harness"),
        (("--losses=none.csv",), "the order of the settings is missing. Declare it before you look"),
        (("--losses=none.csv", "--order=a"), "none.csv: no such file"),
    ],
)
def test_sources_that_are_not_there(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    """Missing files, and flags that name none, are reported, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert main(["certify", "--delta=0.1", *flags]) in (1, 2)
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_runs_that_do_not_pair(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Examples that one run lacks end the command with their names, and two candidates of one name are refused."""
    one = write_lm_eval(tmp_path / "one", {"none": [1.0] * 9})
    two = write_lm_eval(tmp_path / "two", {"none": [1.0] * 7})
    asked = ["certify", f"--baseline={one}", "--delta=0.1", f"--output={tmp_path / 'out'}"]
    assert main([*asked, f"--candidates={two}"]) == 1
    assert "lacks 2 ids ('7', '8') of the baseline. Every example needs a score in every run" in capsys.readouterr().err
    assert main([*asked, f"--candidates=a={two},a={two}"]) == 2
    assert "--candidates: two are called 'a'. Name them" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_of_two_tasks_are_not_joined(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Examples of two tasks may have the same ids: neither certify nor verify takes them for the same."""
    runs = {
        (task, name): write_lm_eval(tmp_path / task / name, {"strict-match": [1.0] * 300}, task=task)
        for task in ("gsm8k", "arc")
        for name in ("one", "two", "three")
    }
    flags = [f"--baseline={runs['gsm8k', 'one']}", f"--output={tmp_path / 'out'}", "--delta=0.05"]
    assert main(["certify", *flags, f"--candidates=low={runs['arc', 'two']}"]) == 2
    assert "is of task 'arc', and the baseline of 'gsm8k'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["certify", *flags, f"--candidates=low={runs['gsm8k', 'two']}"]) == 0
    assert read_setting_manifest(tmp_path / "out" / "manifest.json").plan.task == "gsm8k"
    fresh = [f"--baseline={runs['arc', 'one']}", f"--candidates=low={runs['arc', 'three']}"]
    assert main(["verify", f"--manifest={tmp_path / 'out'}", *fresh]) == 2
    assert "the fresh runs are of task 'arc', and the manifest is about 'gsm8k'" in capsys.readouterr().err


def test_a_column_of_ids_names_no_groups(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column of ids is refused as a group: a promise for each example would prove nothing."""
    path = tmp_path / "losses.csv"
    path.write_text("id,setting,loss\n" + "".join(f"e{index},a,0\n" for index in range(101)))
    assert main(["certify", f"--losses={path}", "--order=a", "--delta=0.1", "--group_key=id"]) == 2
    assert "--group_key=id: there are 101 groups, more than 100" in capsys.readouterr().err


def test_inspect(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest is described as text; a model to compare it with is refused."""
    manifest = _certify(losses, _ORDER, "--delta=0.15")
    capsys.readouterr()
    output = str(losses.parent / "out")
    assert main(["inspect", output]) == 0
    printed = capsys.readouterr().out
    assert "of kind settings; its digest is right" in printed
    assert f"Plan settled before the run: {manifest.plan.digest}" in printed
    assert "Order: 8bit, 6bit, 4bit, 3bit." in printed
    assert main(["inspect", output, "--checkpoint=model"]) == 2
    assert "is of kind settings: it belongs to no model" in capsys.readouterr().err


def test_serving_refuses_it(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`generate` and `Generator` refuse the manifest, as a file or as a value, and say why."""
    manifest = _certify(losses, _ORDER, "--delta=0.15")
    path = losses.parent / "out" / "manifest.json"
    for given in (path, manifest):
        with pytest.raises(ManifestError, match=r"is of kind settings: .* names no model and no exit threshold"):
            Generator.from_manifest(given, "nowhere")  # type: ignore[arg-type]
    capsys.readouterr()
    assert main(["generate", f"--manifest={path}", "--checkpoint=nowhere", "--prompt=a"]) == 1
    assert "is of kind settings" in capsys.readouterr().err


def test_verify(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fresh losses prove promises again with status 0, or break them with status 3."""
    _certify(losses, _ORDER, "--delta=0.15")
    folder = losses.parent
    asked = ["verify", f"--manifest={folder / 'out'}"]
    kept = write_csv(folder / "kept.csv", coin_rows(600, seed=1))
    broken = write_csv(folder / "broken.csv", coin_rows(600, seed=1, wrong=(0, 0, 0.5, 0)))
    assert main([*asked, f"--losses={kept}"]) == 0
    assert "No promise is found broken at level 0.05; 1 of 1 is proved again" in capsys.readouterr().out
    assert main([*asked, f"--losses={broken}"]) == 3
    assert "1 of 1 promise is BROKEN" in capsys.readouterr().out
    assert main([*asked, f"--losses={losses}"]) == 2
    assert "these are the very losses that were certified" in capsys.readouterr().err
    assert main([*asked, "--baseline=x", "--candidates=y"]) == 2
    assert "the manifest was made of losses (--losses): name fresh ones" in capsys.readouterr().err
    assert main([*asked, f"--data={kept}"]) == 1
    assert "verify with --losses tests it" in capsys.readouterr().err


def test_verify_on_some_of_the_same_examples(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids that were certified and come again are reported, since examples cannot test what they chose."""
    _certify(losses, _ORDER, "--delta=0.15")
    fresh = [dataclasses.replace(row, id=f"fresh {row.id}") for row in coin_rows(600, seed=1)]
    asked = ["verify", f"--manifest={losses.parent / 'out'}"]
    path = write_csv(losses.parent / "fresh.csv", fresh)
    capsys.readouterr()
    assert main([*asked, f"--losses={path}"]) == 0
    assert capsys.readouterr().err == ""
    mixed = write_csv(losses.parent / "mixed.csv", [*fresh, *coin_rows(60)])
    assert main([*asked, f"--losses={mixed}"]) == 0
    found = re.search(r"caution: of 256 certified ids that the manifest remembers, (\d+) are", capsys.readouterr().err)
    assert found is not None
    assert 10 < int(found[1]) < 45


def _part(folder: pathlib.Path, seed: int, *, wrong: float = 0.02, count: int = 60) -> pathlib.Path:
    """Writes fresh losses with new ids."""
    rows = coin_rows(count, seed=seed, wrong=(0, 0, wrong, 0))
    return write_csv(folder / f"fresh-{seed}.csv", [dataclasses.replace(row, id=f"{seed} {row.id}") for row in rows])


def test_verify_at_any_time(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs accumulate until they break a promise, which then stays broken; a run without the flag is told of them."""
    _certify(losses, _ORDER, "--delta=0.15")
    capsys.readouterr()
    folder = losses.parent
    asked = ["verify", f"--manifest={folder / 'out'}"]
    statuses = []
    for seed in range(1, 9):
        path = _part(folder, seed, wrong=0.28)
        statuses.append(main([*asked, f"--losses={path}", "--anytime"]))
        together = capsys.readouterr()
        assert f"{seed} run" in together.out
        assert together.err == ""
        assert main([*asked, f"--losses={path}"]) in (0, 3)
        assert (
            "verification.json keeps what earlier runs with --anytime have found. This run is not"
            in capsys.readouterr().err
        )
    assert statuses[0] == 0
    assert statuses[-1] == 3
    assert main([*asked, f"--losses={_part(folder, 9, wrong=0)}", "--anytime"]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "is BROKEN: the fresh losses of 9 runs together prove that the risk exceeds delta" in printed
    assert "such a finding, over all runs with --anytime, those to come as well, would be at most 0.05" in printed
    assert "9 runs with --anytime, 540 losses of a promise at most." in printed


def test_verify_at_any_time_takes_new_examples_alone(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted ids that come again in a growing file are refused, and the state does not change."""
    _certify(losses, _ORDER, "--delta=0.15")
    folder = losses.parent
    state = folder / "elsewhere.json"
    asked = ["verify", f"--manifest={folder / 'out'}", "--anytime", f"--state={state}"]
    first, second = _part(folder, 1), _part(folder, 2)
    assert main([*asked, f"--losses={first}"]) == 0
    before = state.read_bytes()
    capsys.readouterr()
    assert main([*asked, f"--losses={first},{second}"]) == 2
    assert "60 of 120 examples were counted by an earlier run" in capsys.readouterr().err
    assert main([*asked, f"--losses={first}"]) == 2
    assert main([*asked, "--alpha=0.1", f"--losses={second}"]) == 2
    assert "was kept with --alpha=0.05, now it is 0.1" in capsys.readouterr().err
    assert state.read_bytes() == before
    assert not (folder / "out" / "verification.json").exists()
    assert main([*asked, f"--losses={second}"]) == 0
    assert json.loads(state.read_text())["runs"] == 2


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (lambda content: {**content, "runs": 7}, 1, "was changed after it was written: its digest is another"),
        (lambda content: {"schema": "calm-beam/monitor/v2"}, 1, "is not of the form calm-beam/verification/v1"),
        (lambda content: [1], 1, "is not of the form calm-beam/verification/v1"),
        (lambda content: {**content, "manifest": "sha256:0"}, 2, "was kept for another manifest"),
        (lambda content: {**content, "promises": "none"}, 1, "is not as calm-beam writes it"),
    ],
)
def test_a_state_that_cannot_be_used_is_refused(
    change: Any, status: int, message: str, losses: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged state, one of another kind and one of another manifest are named and left unchanged."""
    _certify(losses, _ORDER, "--delta=0.15")
    state = losses.parent / "out" / "verification.json"
    asked = ["verify", f"--manifest={losses.parent / 'out'}", "--anytime"]
    assert main([*asked, f"--losses={_part(losses.parent, 1)}"]) == 0
    content = change(json.loads(state.read_text()))
    if status == 2 or "not as" in message:
        del content["digest"]
        content["digest"] = content_digest(content)
    state.write_text(json.dumps(content))
    before = state.read_bytes()
    assert main([*asked, f"--losses={_part(losses.parent, 2)}"]) == status
    assert message in capsys.readouterr().err
    assert state.read_bytes() == before


def test_a_state_belongs_to_anytime(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--state without --anytime is refused, and a folder that does not exist is named before anything is tested."""
    _certify(losses, _ORDER, "--delta=0.15")
    asked = ["verify", f"--manifest={losses.parent / 'out'}", f"--losses={_part(losses.parent, 1)}"]
    assert main([*asked, "--state=x.json"]) == 2
    assert "--state belongs to --anytime, which is missing." in capsys.readouterr().err
    assert main([*asked, "--anytime", f"--state={losses.parent}/no/x.json"]) == 2
    assert "/no does not exist." in capsys.readouterr().err


def test_verify_of_nothing(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If no setting is safe, verify has nothing to test."""
    _certify(losses, _ORDER, "--delta=0.001")
    capsys.readouterr()
    assert main(["verify", f"--manifest={losses.parent / 'out'}", f"--losses={losses}"]) == 0
    assert "No entry of the manifest found a safe setting" in capsys.readouterr().out


def test_monitor(losses: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses in service are watched by an entry's delta; its state belongs to this entry."""
    _certify(losses, _ORDER, "--delta=0.15,0.3", "--group_key=group")
    capsys.readouterr()
    folder = losses.parent
    stream = folder / "stream.txt"
    stream.write_text("1\n" * 40)
    asked = ["monitor", f"--manifest={folder / 'out'}", f"--losses={stream}", f"--state={folder / 'state.json'}"]
    assert main([*asked, "--delta=0.3", "--group=b"]) == 3
    printed = capsys.readouterr()
    said = printed.out
    assert "these have to be losses of examples of group b alone, under this entry's setting" in printed.err
    assert said.startswith("group b, loss, delta 0.3, epsilon 0.05 (setting ")
    assert "Go back to a safer setting, and certify again." in said
    assert main([*asked, "--delta=0.3"]) == 2
    assert "was kept for another manifest or entry" in capsys.readouterr().err
    assert main(asked) == 2
    assert "2 calibrations have group=null, tail=null. Say which delta" in capsys.readouterr().err
    assert main([*asked, "--metric=rouge_l"]) == 2
    assert "--metric is for manifests of kind thresholds" in capsys.readouterr().err


def _content(path: pathlib.Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_the_same_losses_in_parts(losses: pathlib.Path) -> None:
    """Losses in several files, in another order, give the same manifest but for what names the files and the time."""
    _certify(losses, _ORDER, "--delta=0.15", "--p_value=wsr")
    rows = coin_rows(600)[::-1]
    for part in range(3):
        write_csv(losses.parent / f"part-{part}.csv", rows[part::3])
    _certify(losses.parent / "part-*.csv", _ORDER, "--delta=0.15", "--p_value=wsr", output="parts")
    whole, parts = (_content(losses.parent / name / "manifest.json") for name in ("out", "parts"))
    for content in (whole, parts):
        del content["created"], content["digest"], content["data"]["patterns"]
    assert whole == parts


def _ids(folder: pathlib.Path, count: int) -> pathlib.Path:
    path = folder / "ids.csv"
    path.write_text("id,group,cluster\n" + "".join(f"e{i},{'abc'[i % 3]},c{i // 4}\n" for i in range(count)))
    return path


def _evaluate(folder: pathlib.Path, rows: list[LossRow], *, extra: int = 0) -> None:
    """Writes the losses of the requested examples, and of some others, into a further file."""
    wanted = {*(folder / "out" / "next_ids.txt").read_text().splitlines()}
    known = {row["id"] for path in folder.glob("part-*.csv") for row in csv.DictReader(path.open())}
    others = sorted({row.id for row in rows} - wanted - known)[:extra]
    chosen = [row for row in rows if row.id in {*wanted, *others} - known]
    write_csv(folder / f"part-{len(list(folder.glob('part-*')))}.csv", chosen)


def _watch(folder: pathlib.Path, *flags: str, losses: str = "part-*.csv", output: str = "out") -> int:
    known = [f"--losses={folder / losses}"] if list(folder.glob(losses)) else []
    asked = ["--sequential", f"--ids={folder / 'ids.csv'}", _ORDER, "--delta=0.05,0.15", "--round_examples=40"]
    return main(["certify", *asked, *known, f"--output={folder / output}", *flags])


def test_a_certification_round_by_round(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each call says what to evaluate next until enough is proved; the result does not depend on how losses arrive."""
    rows = coin_rows(800, wrong=(0, 0, 0.05, 0.5))
    _ids(tmp_path, 800)
    stop = ("--stop_at_setting=6bit", "--group_key=group", "--joint")
    assert _watch(tmp_path, *stop, "--verbose") == 0
    first = capsys.readouterr()
    assert first.out == ""
    assert first.err.startswith("plan sha256:")
    assert "Evaluate 40 examples under every setting, add the losses, and repeat the command" in first.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["next_ids.txt", "plan.json", "plans"]
    calls = 0
    while not (tmp_path / "out" / "manifest.json").exists():
        # Losses beyond the request wait for their round.
        _evaluate(tmp_path, rows, extra=30 * (calls % 3))
        assert _watch(tmp_path, *stop) == 0
        calls += 1
    assert calls > 4
    assert not (tmp_path / "out" / "next_ids.txt").exists()
    manifest = read_setting_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.sequential is not None
    assert (manifest.sequential.ended_by, manifest.sequential.of_examples) == ("stop_at_setting", 800)
    assert manifest.data.examples == 40 * manifest.sequential.rounds < 800
    capsys.readouterr()
    # All losses at once, far more than needed, stop at the same look.
    write_csv(tmp_path / "all.csv", rows[::-1])
    assert _watch(tmp_path, *stop, losses="all.csv", output="at_once") == 0
    one, other = (_content(tmp_path / name / "manifest.json") for name in ("out", "at_once"))
    for content in (one, other):
        del content["created"], content["digest"], content["data"]["patterns"]
    assert one == other
    assert (tmp_path / "out" / "risk_table.csv").read_bytes() == (tmp_path / "at_once" / "risk_table.csv").read_bytes()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"ended after round {manifest.sequential.rounds} of 20" in said
    assert "every promise had come to setting 6bit, or to a later one" in said
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "The proof, round by round" in page


def test_what_may_follow_a_stop(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A certification that stopped is finished; another rule can continue it, which is recorded."""
    _ids(tmp_path, 400)
    write_csv(tmp_path / "part-0.csv", coin_rows(400, wrong=(0, 0, 0, 0.5)))
    assert _watch(tmp_path, "--stop_at_setting=8bit") == 0
    stopped = read_setting_manifest(tmp_path / "out" / "manifest.json")
    capsys.readouterr()
    assert _watch(tmp_path, "--stop_at_setting=8bit") == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().err
    assert _watch(tmp_path) == 2
    assert "--resume goes on by this one" in capsys.readouterr().err
    assert _watch(tmp_path, "--resume", "--stop_gain=2%") == 0
    manifest = read_setting_manifest(tmp_path / "out" / "manifest.json")
    assert stopped.sequential is not None
    assert manifest.sequential is not None
    (end,) = manifest.sequential.continues
    assert (end.plan, end.rounds) == (stopped.plan.digest, stopped.sequential.rounds)
    assert manifest.sequential.ended_by == "stop_gain"
    assert "continued by another rule" in " ".join(capsys.readouterr().out.split())


def test_a_certification_goes_on_waiting(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Continued by another rule it asks for more, and its earlier result stays until there is another."""
    _ids(tmp_path, 400)
    rows = coin_rows(400, wrong=(0, 0, 0, 0.5))
    write_csv(tmp_path / "all.csv", rows)
    assert _watch(tmp_path, "--next_rounds=3") == 0
    _evaluate(tmp_path, rows)
    assert _watch(tmp_path, "--stop_at_setting=8bit") == 2
    assert "the rule to stop is part of the plan" in capsys.readouterr().err
    assert _watch(tmp_path, "--stop_at_setting=8bit", "--overwrite") == 0
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    assert _watch(tmp_path, "--resume") == 0
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    assert len((tmp_path / "out" / "next_ids.txt").read_text().splitlines()) == 40
    assert _watch(tmp_path, losses="all.csv") == 0
    manifest = read_setting_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.sequential is not None
    assert (manifest.sequential.ended_by, len(manifest.sequential.continues)) == ("end_of_data", 1)


def test_what_would_void_the_proof(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other ids, tests or orders, losses that were changed or taken away, and a test of all at once are refused."""
    _ids(tmp_path, 200)
    rows = coin_rows(200)
    write_csv(tmp_path / "all.csv", rows)
    assert _watch(tmp_path, "--next_rounds=2") == 0
    _evaluate(tmp_path, rows)
    assert _watch(tmp_path) == 0
    kept = (tmp_path / "out" / "plan.json").read_bytes()
    part = tmp_path / "part-0.csv"
    text = part.read_text()
    capsys.readouterr()
    for flags, said in (
        (("--epsilon=0.1",), "the tests of it cannot be changed"),
        (("--seed=1",), "--seed of it cannot be changed"),
        (("--order=8bit,6bit,3bit,4bit",), "the order of the settings of it cannot be changed"),
        (("--costs=8bit=8,6bit=6,4bit=4,3bit=3",), "the costs of it cannot be changed"),
        (("--round_examples=20",), "--round_examples of it cannot be changed"),
    ):
        assert _watch(tmp_path, *flags) == 2
        assert said in capsys.readouterr().err
    part.write_text(re.sub(r",0\.0,", ",1.0,", text, count=1))
    assert _watch(tmp_path) == 1
    assert re.search("the losses or costs of round [12] are others than they were", capsys.readouterr().err)
    part.write_text("\n".join(text.splitlines()[:-1]) + "\n")
    assert _watch(tmp_path) == 1
    assert "is not whole now: round" in capsys.readouterr().err
    part.write_text(text)
    _ids(tmp_path, 201)
    assert _watch(tmp_path) == 2
    assert "the ids and their number of it cannot be changed" in capsys.readouterr().err
    assert main(["certify", f"--losses={part}", _ORDER, "--delta=0.1", f"--output={tmp_path / 'out'}"]) == 2
    assert "holds a sequential certification. Its losses have been looked at" in capsys.readouterr().err
    assert (tmp_path / "out" / "plan.json").read_bytes() == kept
    plain = ["certify", f"--losses={part}", _ORDER, "--delta=0.1", f"--output={tmp_path / 'out'}", "--overwrite"]
    assert main(plain) == 0
    assert "For the same examples, what follows proves nothing" in " ".join(capsys.readouterr().err.split())
    assert main(plain) == 0
    assert "proves nothing" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ids=ids.csv", "--order=a", "--delta=0.1"), "--ids belongs to --sequential, which is missing"),
        (("--sequential", "--order=a", "--delta=0.1"), "--ids is missing: all examples that may be evaluated"),
        (("--sequential", "--ids=ids.csv", "--order_by=cost", "--delta=0.1"), "--order_by=cost needs --costs here"),
        (("--sequential", "--ids=ids.csv", "--delta=0.1"), "the order of the settings is missing"),
        (
            ("--sequential", "--ids=ids.csv", "--order=a", "--delta=0.1", "--p_value=wsr"),
            "p_value wsr holds for a number of examples that is fixed beforehand",
        ),
        (
            ("--sequential", "--ids=ids.csv", "--baseline=x", "--candidates=y", "--delta=0.1"),
            "--baseline names logs of a whole evaluation",
        ),
        (("--sequential", "--ids=none.csv", "--order=a", "--delta=0.1"), "none.csv: no such file"),
        (("--sequential", "--ids=ids.csv", "--order=a,a", "--delta=0.1"), "it names a setting twice"),
        (
            ("--sequential", "--ids=ids.csv", "--order=a", "--delta=0.1", "--stop_at_setting=b"),
            "is none of the settings",
        ),
        (
            ("--sequential", "--ids=ids.csv", "--order=a", "--delta=0.1", "--costs=b=1"),
            "--costs must name every setting",
        ),
        (
            ("--sequential", "--ids=ids.csv", "--order=a", "--delta=0.1", "--resume"),
            "holds no sequential certification",
        ),
        (("--sequential", "--ids=ids.csv", "--order=a", "--delta=0.1", "--stop_at_cost=nan"), "--stop_at_cost must be"),
        (("--sequential", "--ids=ids.csv", "--order=a", "--delta=0.1", "--group_key=topic"), "has no column topic"),
    ],
)
def test_sequential_flags_that_do_not_go_together(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    """Sequential flags that do not go together are reported, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    _ids(tmp_path, 3)
    assert main(["certify", *flags]) in (1, 2)
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ids.csv"]


def test_a_sequential_certification_is_kept_up(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` tests a sequential certification on fresh losses and `monitor` watches it, as any other."""
    _ids(tmp_path, 200)
    write_csv(tmp_path / "part-0.csv", coin_rows(200, wrong=(0, 0, 0, 0.5)))
    assert _watch(tmp_path, "--stop_at_setting=8bit", "--costs=8bit=8,6bit=6,4bit=4,3bit=3") == 2
    assert "--costs and the column cost both say what settings cost" in capsys.readouterr().err
    assert _watch(tmp_path, "--stop_at_setting=8bit") == 0
    fresh = write_csv(tmp_path / "fresh.csv", coin_rows(300, seed=5, wrong=(0, 0, 0, 0.5)))
    assert main(["verify", f"--manifest={tmp_path / 'out'}", f"--losses={fresh}"]) == 0
    stream = tmp_path / "stream.txt"
    stream.write_text("0\n" * 40)
    state = tmp_path / "state.json"
    asked = ["monitor", f"--manifest={tmp_path / 'out'}", f"--losses={stream}", f"--state={state}", "--delta=0.15"]
    assert main(asked) == 0


_FORMULAS = ("=SUM(1)", "+1+1", "-2", "@A1", "\t=1", "\r=1", "'=1", "''-x", "'quoted'", "＝1", "plain", '"=1,2"')


def test_names_that_are_formulas(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that a spreadsheet would compute is a text in the risk table, and comes back as it was."""
    path = tmp_path / "losses.jsonl"
    rows = [
        {"id": f"e{index}", "setting": name, "loss": 0, "cost": place, "group": _FORMULAS[index % len(_FORMULAS)]}
        for index in range(240)
        for place, name in enumerate(_FORMULAS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    output = tmp_path / "out"
    flags = ["--order_by=cost", "--delta=0.5", "--group_key=group", f"--output={output}"]
    assert main(["certify", f"--losses={path}", *flags]) == 0
    with (output / "risk_table.csv").open(encoding="utf-8", newline="") as file:
        cells = [(row["setting"], row["group"]) for row in csv.DictReader(file)]
    assert not [cell for pair in cells for cell in pair if cell.lstrip("'") == cell and cell[:1] in tuple("=+-@\t\r＝")]
    assert {"'=SUM(1)", "''=1", "'quoted'", "plain"} < {setting for setting, _ in cells}
    read = read_risk_table(output / "risk_table.csv", SettingRow)
    assert {row.setting for row in read} == {row.group for row in read} - {""} == set(_FORMULAS)
    assert main(["report", f"--calibration={output}"]) == 0
    fresh = tmp_path / "fresh.jsonl"
    fresh.write_text(path.read_text(encoding="utf-8").replace('"id": "e', '"id": "f'), encoding="utf-8")
    assert main(["verify", f"--manifest={output}", f"--losses={fresh}"]) == 0
    assert "caution" not in capsys.readouterr().err


def test_names_that_are_too_long(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting or group whose name is a book is refused before anything is written; other columns may hold books."""
    book = "b" * 200_000
    asked = ["certify", f"--losses={tmp_path / 'losses.csv'}", "--delta=0.5", f"--output={tmp_path / 'out'}"]
    for header, row, flags, named in (
        ("id,setting,loss,cost", f"{{0}},{book},0,1", ["--order_by=cost"], "setting 'bbbb"),
        ("id,setting,loss,topic", f"{{0}},a,0,{book}", ["--order=a", "--group_key=topic"], "group 'bbbb"),
    ):
        (tmp_path / "losses.csv").write_text("\n".join([header, *(row.format(number) for number in range(30))]))
        assert main([*asked, *flags]) == 2
        printed = capsys.readouterr().err
        assert named in printed
        assert "its name has 200,000 characters, more than 1,000. Shorten it." in printed
        assert not (tmp_path / "out").exists()
    assert main([*asked, "--order=a"]) == 0


@pytest.mark.parametrize("name", ["plan.json", "risk_table.csv", "report.html", "next_ids.txt", "manifest.json"])
@pytest.mark.parametrize("also", [(), ("--sequential", "--ids={ids}")])
def test_a_folder_in_the_way(
    name: str, also: tuple[str, ...], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in place of an output file is named before any loss is read."""
    (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "ids.txt").write_text("1\n")
    flags = [flag.format(ids=tmp_path / "ids.txt") for flag in also]
    asked = [f"--losses={tmp_path / 'none.csv'}", "--order=a", "--delta=0.1", f"--output={tmp_path / 'out'}"]
    assert main(["certify", *asked, *flags]) == 2
    assert f"{name}: exists and is not a file that can be overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\xff\xfe\x80" * 100, "is not a risk table, which is CSV in UTF-8"),
        (b"\x7fELF\x02\x01\x01" + bytes(300), "is not the risk table of the manifest next to it"),
        (b"group,loss\n\xff,given\n", "is not a risk table, which is CSV in UTF-8"),
        (b"", "is not the risk table of the manifest next to it"),
        (b"group\n" + b"x" * 140_000 + b"\n", "risk_table.csv, line 2: is not a row of a risk table"),
        (b'group,loss\n"given\n', "risk_table.csv, line"),
        (b"group,loss\na,b,c\n", "line 2: is not a row of a risk table, by its number of cells"),
        ("group,loss\n".encode("utf-16"), "is not a risk table, which is CSV in UTF-8"),
    ],
)
def test_a_damaged_risk_table(
    content: bytes, message: str, losses: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A risk table that is not text, or was changed, is named with its line."""
    _certify(losses, _ORDER, "--delta=0.15")
    output = losses.parent / "out"
    (output / "risk_table.csv").write_bytes(content)
    capsys.readouterr()
    assert main(["report", f"--calibration={output}"]) == 1
    assert message in capsys.readouterr().err


_KILLED = """
import os, signal, sys
from calm_beam.launch.certify import run
from calm_beam.launch.cli import main

def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "report":
    run._report = die
else:
    # After the temporary file was written, and before it is the risk table.
    import calm_beam.storage._local as local
    publish_before = local._publish
    local._publish = lambda temporary, target, **named: die() if target.name == sys.argv[1] else publish_before(
        temporary, target, **named)
main(sys.argv[2:])
"""


@pytest.mark.parametrize("moment", ["report", "risk_table.csv", "plan.json"])
def test_a_killed_certification(moment: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second call finishes a killed certification and removes its leftovers."""
    (tmp_path / "ids.txt").write_text("".join(f"e{index}\n" for index in range(600)))
    losses = write_csv(tmp_path / "losses.csv", coin_rows(600))
    asked = ["certify", "--sequential", f"--ids={tmp_path / 'ids.txt'}", f"--losses={losses}", _ORDER, "--delta=0.15"]
    assert main([*asked, f"--output={tmp_path / 'whole'}"]) == 0
    output = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, moment, *asked, f"--output={output}"], check=False, env=environment
    )
    assert killed.returncode == -signal.SIGKILL
    left = {path.name for path in output.iterdir()}
    assert "report.html" not in left
    assert moment == "report" or [name for name in left if name.startswith(f".{moment}.")]
    capsys.readouterr()
    assert main([*asked, f"--output={output}"]) == 0
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {path.name for path in output.iterdir()} == names
    assert "report.html" in names
    assert (output / "risk_table.csv").read_bytes() == (tmp_path / "whole" / "risk_table.csv").read_bytes()
    assert main([*asked, f"--output={output}"]) == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().err
