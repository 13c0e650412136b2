"""Colours of layers are distinguishable, and text on them is readable."""

import itertools

import pytest

from calm_beam.report.document import SERIES, contrast, layer_colours, layer_styles, series_styles


@pytest.mark.parametrize("num_layers", [1, 2, 6, 8, 12, 24, 48])
def test_texts_can_be_read_on_every_colour(num_layers: int) -> None:
    """The contrast of text and background is at least WCAG's 4.5 on both pages."""
    for colour in layer_colours(num_layers):
        assert contrast(colour.light, colour.light_ink) >= 4.5
        assert contrast(colour.dark, colour.dark_ink) >= 4.5


@pytest.mark.parametrize("num_layers", [2, 6, 8, 12, 24])
def test_lightness_alone_orders_the_layers(num_layers: int) -> None:
    """Later layers are ever darker on a light page and ever lighter on a dark one, so hues are not needed."""
    colours = layer_colours(num_layers)
    for below, above in itertools.pairwise(colours):
        assert contrast(below.light, "#000000") > contrast(above.light, "#000000")
        assert contrast(below.dark, "#000000") < contrast(above.dark, "#000000")


def test_hues_have_one_order_on_both_pages() -> None:
    """The first layers are yellow and the last ones blue, on a light page and on a dark one."""
    for pick in (lambda colour: colour.light, lambda colour: colour.dark):
        first, *_, last = (tuple(int(pick(each)[at : at + 2], 16) for at in (1, 3, 5)) for each in layer_colours(8))
        assert first[0] > first[1] > first[2]
        assert last[2] > last[1] > last[0]


def test_contrast_of_known_colours() -> None:
    """Black on white has the largest contrast, 21; a colour on itself has 1; #777777 on white has 4.48."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#4ba3b3", "#4ba3b3") == 1
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_ends_of_the_scale() -> None:
    """The first and the last layer have the colours at the ends, for any number of layers."""
    for num_layers in (2, 5, 24):
        colours = layer_colours(num_layers)
        assert (colours[0].light, colours[-1].light) == ("#fdf1c2", "#2a2f72")
        assert (colours[0].dark, colours[-1].dark) == ("#4d431c", "#d3dcff")


def test_every_layer_has_a_class() -> None:
    """The style sheet names each layer from 1 on."""
    styles = layer_styles(3)
    assert [line.partition("{")[0] for line in styles.splitlines()] == [".l1", ".l2", ".l3"]
    assert "light-dark(#fdf1c2,#4d431c)" in styles


def test_lines_can_be_seen_on_every_page() -> None:
    """Every colour of a line has WCAG's contrast of graphics, 3, on the page and on what is raised from it."""
    for light, dark in SERIES:
        assert min(contrast(light, page) for page in ("#fbfbf8", "#ffffff")) >= 3
        assert min(contrast(dark, page) for page in ("#13151a", "#1b1e25")) >= 3
    assert len({light for light, _ in SERIES}) == len({dark for _, dark in SERIES}) == len(SERIES)
    assert series_styles().count("--series:light-dark(") == len(SERIES)
