"""The plot of tokens per second."""

import pathlib

import pytest

from tools.pictures.throughput import Rate, draw, read_rates

_PAGE = pathlib.Path(__file__).parents[3] / "docs" / "measurements.md"


def test_the_page_is_read() -> None:
    """Two shares of the layers are read from the page, for every measure and number of prompts."""
    rates = read_rates(_PAGE)
    assert len(rates) == 2 * len({(rate.measure, rate.prompts) for rate in rates}) == 24
    assert Rate(prompts=8, measure="state", layers=2.0, gain=1.23) in rates


def test_a_page_without_the_table(tmp_path: pathlib.Path) -> None:
    """A page without the table is refused by name."""
    page = tmp_path / "page.md"
    page.write_text("`python -m benchmarks.throughput`\n\nNo table.\n")
    with pytest.raises(ValueError, match=r"page\.md: has no table after 'python -m benchmarks\.throughput'"):
        read_rates(page)


def test_equal_rates_give_equal_plots(tmp_path: pathlib.Path) -> None:
    """The plot's file changes only when the figures do."""
    rates = [
        Rate(prompts=prompts, measure="state", layers=layers, gain=gain)
        for prompts in (1, 8)
        for layers, gain in ((2.0, 1.5), (4.0, 1.2))
    ]
    for name in ("one.svg", "two.svg"):
        draw(rates, path=tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
