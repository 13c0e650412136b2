"""The report of a certification: its texts, its policy, and its layout on a phone."""

import dataclasses
import html
import pathlib
import re

import pytest

from calm_beam.calibration.certification import entries_of, setting_manifest, setting_rows
from calm_beam.calibration.loss_table import LossTable
from calm_beam.calibration.publish import EarlierResult, publish
from calm_beam.inputs.losses.tables import LossRow
from calm_beam.launch.cli import main
from calm_beam.manifest import read_setting_manifest
from calm_beam.report import ReportError, build_setting_page
from calm_beam.report.document import source_hash
from calm_beam.report.settings import promise_html
from tests.calm_beam.inputs.losses.builders import ORDER, coin_rows
from tests.calm_beam.report.accessibility import violations
from tests.calm_beam.report.browser import EVIL, PHONE, in_a_browser, opened, started_browser
from tests.calm_beam.report.pages import ParsedPage
from tests.plans import all_tests, build_setting_plan


def _write(folder: pathlib.Path, rows: list[LossRow], *, order: tuple[str, ...] = ORDER, delta: float = 0.2) -> str:
    folder.mkdir()
    sweep = LossTable.of(dataclasses.replace(row, cluster=None) for row in rows)
    groups = sorted(set(sweep.groups or ()))
    tests = all_tests(groups=groups, deltas=(delta,), epsilons=(0.04,), tails=(0.5,), joint=True)
    plan = build_setting_plan(tests, order, joint_epsilon=0.04, group_key="group" if groups else None)
    found = setting_rows(sweep, plan, costs=sweep.costs)
    manifest = setting_manifest(
        sweep,
        plan,
        entries=entries_of(plan, found),
        costs=sweep.costs,
        patterns=["/home/ada/secret/losses.csv"],
        software={"a": "1"},
    )
    publish(
        str(folder),
        manifest,
        rows=[row for of_test in found for row in of_test],
        failures=(),
        earlier=EarlierResult(),
    )
    return str(folder)


def test_what_the_page_says(tmp_path: pathlib.Path) -> None:
    """The page has promise, entries, numbers and order, but no local path; only our own script may run."""
    page = build_setting_page(_write(tmp_path / "out", coin_rows(600)))
    text = re.sub(r"<[^>]+>", "", page)
    promise = "at least 96\u00a0% over the draw of the 600 examples, setting 4bit loses in expectation at most 0.2"
    assert promise in text
    assert "of 8 promises proved. With probability at least 96\u00a0%, all that were proved hold." in text
    assert "one for all examples together may be broken for some of the groups." in text
    assert page.count('<figure class="panel">') == 7
    assert re.search(r'id="made">\d{4}-\d\d-\d\d \d\d:\d\d UTC<', page), "as on other pages"
    assert "<dt>Order</dt><dd><bdi>8bit, 6bit, 4bit, 3bit</bdi></dd>" in page
    assert "secret/losses.csv" in text
    # With the slash, since a digest may contain the name.
    assert "ada/" not in text
    assert page.count("<script") == 1
    assert f"script-src {source_hash(ParsedPage(page).texts['script'][0])};" in page
    assert "default-src 'none'" in page


def test_why_no_more_was_proved(tmp_path: pathlib.Path) -> None:
    """A promise's card says by what p-value its test ended; without costs no table has a column of them."""
    rows = [dataclasses.replace(row, cost=None) for row in coin_rows(600)]
    folder = _write(tmp_path / "out", rows)
    manifest = read_setting_manifest(pathlib.Path(folder) / "manifest.json")
    page = build_setting_page(folder)
    cards = [
        html.unescape(re.sub(r"<[^>]+>", "", card)).replace("\u00a0", " ")
        for card in page.split('<figure class="panel">')[1:]
    ]
    # The first promise has the large chart.
    for entry, card in zip(manifest.calibrations[1:], cards, strict=True):
        assert (f"{entry.path[-1].setting}: p = " in card) == (not entry.path[-1].rejected)
    assert any(f"> ε = {manifest.calibrations[0].path_level:.4g}" in card for card in cards)
    assert ">cost<" not in page
    assert ">cost<" in build_setting_page(_write(tmp_path / "costs", coin_rows(600)))


def test_whom_a_promise_is_about(tmp_path: pathlib.Path) -> None:
    """A group's promise names the group, whether it found a setting or not."""
    _write(tmp_path / "out", coin_rows(600))
    manifest = read_setting_manifest(tmp_path / "out" / "manifest.json")
    whole, of_group, *_ = (re.sub(r"<[^>]+>", "", promise_html(entry, manifest)) for entry in manifest.calibrations)
    assert whole.startswith("With probability at least 96\u00a0% over the draw of the 600 examples, setting")
    assert of_group.startswith(
        "For examples of group a, with probability at least 96\u00a0% over the draw of the 200 examples of the group"
    )
    _write(tmp_path / "none", coin_rows(60), delta=0.001)
    manifest = read_setting_manifest(tmp_path / "none" / "manifest.json")
    none = re.sub(r"<[^>]+>", "", promise_html(manifest.calibrations[1], manifest))
    assert none.startswith("For examples of group a, no setting was proved safe: from 20 examples of the group, none ")


def test_a_proved_promise_opens_the_page(tmp_path: pathlib.Path) -> None:
    """If the first entry found no setting and another one did, that one is shown first."""
    rows = [dataclasses.replace(row, loss=1.0) for row in coin_rows(600) if row.group == "a"]
    rows += [dataclasses.replace(row, loss=0.0) for row in coin_rows(600) if row.group == "b"]
    folder = _write(tmp_path / "out", rows)
    manifest = read_setting_manifest(pathlib.Path(folder) / "manifest.json")
    assert manifest.calibrations[0].setting is None
    text = re.sub(r"<[^>]+>", "", build_setting_page(folder))
    opening = text[text.index("What is guaranteed") :][:200]
    assert "For examples of group b, with probability at least" in opening


def test_no_setting_is_safe(tmp_path: pathlib.Path) -> None:
    """Without a safe setting, the page says so, and what could not be shown."""
    page = build_setting_page(_write(tmp_path / "out", coin_rows(60), delta=0.001))
    assert "<strong><bdi>No setting</bdi></strong> was proved safe: from 60 examples, none was proved" in page
    text = " ".join(re.sub(r"<[^>]+>", "", page).split())
    assert "none was proved, with probability at least 96 %, to lose in expectation at most 0.001." in text
    assert re.search(r"fixed_sequence tested only \S+, which could not be proved safe", text)


def test_capital_beyond_what_floats_hold(tmp_path: pathlib.Path) -> None:
    """A very large capital is shown as a power of ten, and many rounds are drawn without marks."""
    ids = [f"e{index}" for index in range(40_000)]
    (tmp_path / "ids.txt").write_text("\n".join(ids))
    losses = "".join(f"{name},a,0\n{name},b,1\n" for name in ids)
    (tmp_path / "losses.csv").write_text(f"id,setting,loss\n{losses}")
    flags = ["--sequential", f"--ids={tmp_path / 'ids.txt'}", "--order=a,b", "--delta=0.05"]
    flags.append(f"--output={tmp_path / 'out'}")
    assert main(["certify", f"--losses={tmp_path / 'losses.csv'}", "--round_examples=500", *flags]) == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("The proof, round by round") == 1
    assert re.search(r"<bdi>1e\d{3}</bdi>", page)


def test_another_table_is_refused(tmp_path: pathlib.Path) -> None:
    """A risk table of another run, or a damaged one, is refused."""
    one = pathlib.Path(_write(tmp_path / "one", coin_rows(300)))
    other = pathlib.Path(_write(tmp_path / "other", coin_rows(300, seed=1)))
    (one / "risk_table.csv").write_bytes((other / "risk_table.csv").read_bytes())
    with pytest.raises(ReportError, match="is not the risk table of the manifest next to it"):
        build_setting_page(str(one))
    (one / "risk_table.csv").write_text((other / "risk_table.csv").read_text().replace("true", "maybe"))
    with pytest.raises(ReportError, match="is not a row of a risk table"):
        build_setting_page(str(one))


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report` builds the page again, and takes no flags of models."""
    folder = _write(tmp_path / "out", coin_rows(60))
    assert main(["report", f"--calibration={folder}"]) == 0
    assert capsys.readouterr().out == f"Report: {folder}/report.html\n"
    assert "certification report" in pathlib.Path(folder, "report.html").read_text()
    assert main(["report", f"--calibration={folder}", "--checkpoint=model"]) == 2
    assert "is a certification, which has no model" in capsys.readouterr().err


@in_a_browser
def test_axe_finds_nothing(tmp_path: pathlib.Path) -> None:
    """Axe finds no violation, neither with groups and tails, nor with rounds."""
    path = tmp_path / "page.html"
    path.write_text(build_setting_page(_write(tmp_path / "out", coin_rows(600))), encoding="utf-8")
    (tmp_path / "ids.txt").write_text("".join(f"e{index}\n" for index in range(300)))
    losses = "".join(f"e{index},a,0\ne{index},b,{int(index % 9 == 0)}\n" for index in range(300))
    (tmp_path / "losses.csv").write_text(f"id,setting,loss\n{losses}")
    flags = [f"--ids={tmp_path / 'ids.txt'}", "--order=a,b", "--delta=0.05", f"--output={tmp_path / 'rounds'}"]
    assert main(["certify", "--sequential", f"--losses={tmp_path / 'losses.csv'}", *flags]) == 0
    rounds = tmp_path / "rounds" / "report.html"
    assert "The proof, round by round" in rounds.read_text(encoding="utf-8")
    with started_browser() as browser:
        assert violations(browser, path) == violations(browser, rounds) == []


@in_a_browser
@pytest.mark.parametrize("form", [{}, PHONE])
def test_names_of_others(tmp_path: pathlib.Path, form: dict[str, object]) -> None:
    """With any names of settings and groups, nothing runs, nothing is requested, and nothing overflows."""
    names = (EVIL, "\u202eright to left", "x" * 200)
    rows = [
        LossRow(str(index), name, float(index % 50 == 0), 3.0 - place, EVIL)
        for index in range(200)
        for place, name in enumerate(names)
    ]
    path = tmp_path / "page.html"
    path.write_text(build_setting_page(_write(tmp_path / "out", rows, order=names)), encoding="utf-8")
    with started_browser() as browser, opened(browser, path, **form) as seen:
        assert "broken out" not in seen.page.title()
        width = seen.page.evaluate("document.documentElement.scrollWidth")
        assert width <= seen.page.viewport_size["width"]
