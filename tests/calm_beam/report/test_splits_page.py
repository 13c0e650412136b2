"""The page of repeated splits."""

import dataclasses
import html
import pathlib
import re
from typing import Any

import pytest

from calm_beam.evaluation.outcomes import Spread
from calm_beam.evaluation.performance import Estimate
from calm_beam.evaluation.serving_speed import Speedup
from calm_beam.report import splits_page as page_module
from calm_beam.report.splits_page import splits_page
from tests.calm_beam.report.accessibility import violations
from tests.calm_beam.report.browser import in_a_browser, started_browser
from tests.calm_beam.report.split_results import (
    MEASURES,
    PROVENANCE,
    SPECS,
    grid_rows,
    split_results,
    split_summaries,
    trial_outcomes,
)
from tests.plans import all_specs


def _page(**changes: Any) -> str:
    return splits_page(PROVENANCE, split_results(**changes))


def _text(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def _table(page: str, label: str) -> list[list[str]]:
    """Returns the texts of a table's cells, its head first."""
    (content,) = re.findall(rf'aria-label="{label}" tabindex="0"><table class="sortable">(.*?)</table>', page, re.S)
    rows = re.findall(r"<tr>(.*?)</tr>", content, re.S)
    return [[_text(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)] for row in rows]


def test_every_measure_has_its_lines() -> None:
    """One table row for each loss, tolerance and measure; two drawings for each test, one for each loss's trade-off."""
    page = _page()
    head, *rows = _table(page, "Table of tolerances")
    assert len(rows) == len(MEASURES) * len(SPECS)
    assert head[:6] == ["loss", "δ", "measure", "threshold", "layers of 8", "layers saved"]
    assert {row[2] for row in rows} == set(MEASURES)
    assert page.count("<svg viewBox") == 2 * 2 + 2
    assert "static layers" in page
    assert "oracle" in page
    assert "In 3 random splits of 10 examples, 6 measures chose thresholds on about 80% of them" in _text(page)
    # Both tolerances of 0.1, one trial of three: 0.11.
    assert "It lost more than δ in at most 1 of 3 trials" in _text(page)


def test_what_each_trial_chose() -> None:
    """Each line has how many trials chose each threshold, which add up to all; every trial has a row."""
    page = _page()
    head, *rows = _table(page, "Table of choices")
    assert head == ["loss", "δ", "measure", "never exit", "λ 0.9", "λ 0.8"]
    assert {tuple(row[3:]) for row in rows} == {("1", "1", "1")}
    _, *every = _table(page, "Table of all trials")
    assert len(every) == 3 * len(MEASURES) * len(SPECS)
    assert [row[4] for row in every[:3]] == ["0.9", "0.8", "never exit"]
    assert [row[6] for row in every[:3]] == ["0.0500", "0.1100 > δ", "0.0000"]


def test_more_than_a_page_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many trials the first are listed, and the page says where all are; many choices have no table."""
    monkeypatch.setattr(page_module, "_MOST_ROWS", 7)
    monkeypatch.setattr(page_module, "_MOST_CHOICES", 2)
    page = _page()
    assert len(_table(page, "Table of all trials")) == 1 + 7
    assert f"The page lists 7 of {3 * len(MEASURES) * len(SPECS)}: all are in splits_trials.parquet." in page
    assert f"The page lists 7 of {len(grid_rows())}: all are in splits_grid.csv." in page
    assert "Table of choices" not in page


def test_lines_name_their_test_where_there_are_several() -> None:
    """With one test for each loss it is above the drawings alone; with two, in every line too."""
    assert _table(_page(), "Table of tolerances")[0][-1] == "risk > δ"
    more = all_specs(
        consistencies=("textual",), metrics=("token_f1",), deltas=(0.1,), epsilons=(0.1,), p_value="hoeffding"
    )
    both = trial_outcomes(specs=(*SPECS, *more))
    summaries = split_summaries(specs=(*SPECS, *more))
    page = _page(curves=summaries, table=summaries, trials=both)
    head, *rows = _table(page, "Table of tolerances")
    assert head[-1] == "test"
    assert "hoeffding, fixed_sequence, ε = 0.1" in {row[-1] for row in rows}
    assert _table(page, "Table of choices")[0][-1] == "test"
    assert page.count('<h3 class="subject">') == 3


def test_a_weaker_test_than_that_of_a_calibration_is_said() -> None:
    """A page of hoeffding_bentkus says that the default of a calibration is stronger; one of another test does not."""
    said = {}
    for name in ("hoeffding_bentkus", "hoeffding"):
        specs = all_specs(
            consistencies=("textual",), metrics=("token_f1",), deltas=(0.1,), epsilons=(0.1,), p_value=name
        )
        summaries = split_summaries(specs=specs)
        page = _page(curves=summaries, table=summaries, trials=trial_outcomes(specs=specs))
        said[name] = "star_bets, the default of a calibration" in _text(page)
    assert said == {"hoeffding_bentkus": True, "hoeffding": False}


def test_speedups_are_shown_where_they_were_measured() -> None:
    """A line that never exits is as fast as the full model; others have the speed measured at their threshold."""
    assert "speedup" not in _table(_page(), "Table of tolerances")[0]
    summaries = split_summaries(measures=("softmax",))
    never = dataclasses.replace(summaries[1], threshold=None)
    factor = Speedup(
        factor=Estimate(mean=1.25, standard_error=None, prompts=3), seconds=0.8, full_seconds=1.0, prompts=3
    )
    page = _page(table=[summaries[0], never], speedups={("softmax", summaries[0].threshold): factor})
    head, *rows = _table(page, "Table of tolerances")
    assert [row[head.index("speedup")] for row in rows] == ["×1.25", "×1.00"]


def test_operations_are_a_change_against_the_full_model() -> None:
    """Reductions by factors of 1.5 and 1.2 are a third and a sixth fewer operations, below heads as text."""
    head, *rows = _table(_page(), "Table of tolerances")
    at = head.index("operations")
    assert head[at + 1] == "as in Table 2"
    assert {tuple(row[at : at + 2]) for row in rows} == {("−33%", "−17%")}


def test_the_page_is_made_again_alike_and_tells_no_places() -> None:
    """Equal results give equal bytes, without local folders; the sentence of a broken result is marked."""
    page = _page()
    assert page == _page()
    assert "ada" not in page
    assert "…/secret/rows.jsonl" in page
    assert 'class="sentence"' in page
    broken = [dataclasses.replace(summary, proved_broken=1) for summary in split_summaries()]
    assert 'class="sentence never"' in _page(table=broken)


@in_a_browser
def test_no_column_is_cut_on_a_desktop(tmp_path: pathlib.Path) -> None:
    """With all columns and names of the usual length, the table fits a window of 1280 pixels."""
    bleu = Spread(mean=33.1, std=1.0)
    table = [dataclasses.replace(summary, bleu=bleu, full_bleu=bleu) for summary in split_summaries()]
    factor = Speedup(
        factor=Estimate(mean=1.25, standard_error=None, prompts=3), seconds=0.8, full_seconds=1.0, prompts=3
    )
    page = _page(table=table, speedups={(summary.measure, summary.threshold): factor for summary in table})
    path = tmp_path / "page.html"
    path.write_text(page.replace("risk, token_f1", "risk (relu), rouge_l_unicode"), encoding="utf-8")
    with started_browser() as browser:
        seen = browser.new_page(viewport={"width": 1280, "height": 900})
        seen.goto(path.as_uri())
        frame = seen.get_by_role("region", name="Table of tolerances", exact=True)
        assert frame.evaluate("(it) => it.scrollWidth - it.clientWidth") == 0


@in_a_browser
def test_axe_finds_nothing(tmp_path: pathlib.Path) -> None:
    """Axe finds no violation on the page."""
    path = tmp_path / "page.html"
    path.write_text(_page(), encoding="utf-8")
    with started_browser() as browser:
        assert violations(browser, path) == []
