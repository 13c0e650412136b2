"""The pages of `calm-beam evaluate`'s experiments are accessible and fit a phone."""

import html
import pathlib
import re

import pytest

from calm_beam.launch.cli import main
from tests.calm_beam.report.accessibility import violations
from tests.calm_beam.report.browser import in_a_browser, started_browser
from tests.pipelines import id_rows, write_model, write_rows

_SHORT = ("--max_input_length=32", "--max_decode_length=6", "--batch_size=4", "--metric=token_f1")
_SCORES = ["layers", "layers ±", "similarity", "similarity ±", "quality", "quality ±"]
_CHANGES = ["quality change", "quality change ±", "prompts"]
_EXPERIMENTS = {
    "propagation": (
        ("--thresholds=0.5",),
        ["confidence", "state propagation", "token from", "threshold", *_SCORES, *_CHANGES],
    ),
    "sensitivity": (
        ("--positions=0-2",),
        ["kind", "position", "similarity", "similarity ±", "replaced", "prompts"],
    ),
    # Every row has the state propagation and the token layer of the flags.
    "tradeoff": (
        ("--thresholds=0.5,0", "--confidence=softmax"),
        ["confidence", "threshold", *_SCORES, *_CHANGES],
    ),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The page of each experiment, of a tiny random model."""
    folder = tmp_path_factory.mktemp("pages")
    model, data = write_model(folder / "model"), write_rows(folder / "rows.jsonl", id_rows(4))
    task = [f"--checkpoint={model}", f"--data={data}", f"--output={folder / 'out'}", *_SHORT]
    for name, (flags, _) in _EXPERIMENTS.items():
        assert main(["evaluate", f"--experiment={name}", *task, *flags]) == 0
    return {name: folder / "out" / f"{name}.html" for name in _EXPERIMENTS}


@pytest.mark.parametrize("name", _EXPERIMENTS)
def test_columns_tell_rows_apart(pages: dict[str, pathlib.Path], name: str) -> None:
    """A table has the columns of its CSV, except those in which every row has the same value."""
    heads = re.findall('<th scope="col">(.*?)</th>', pages[name].read_text(encoding="utf-8"))
    assert [html.unescape(head) for head in heads] == _EXPERIMENTS[name][1]


@in_a_browser
@pytest.mark.parametrize("name", _EXPERIMENTS)
def test_axe_finds_nothing(pages: dict[str, pathlib.Path], name: str) -> None:
    """Axe finds no accessibility problem on each page."""
    with started_browser() as browser:
        assert violations(browser, pages[name]) == []
