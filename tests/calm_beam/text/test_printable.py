"""Text of others, as it is shown on a terminal."""

import sys
import unicodedata

import pytest

from calm_beam.text.printable import printable, printable_line

_DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_no_control_of_a_terminal_is_left() -> None:
    """Of all characters, no control, separator of lines, mark of direction or half of a pair is shown as it is."""
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    for shown, kept in ((printable(everything), "\t\n"), (printable_line(everything), "")):
        left = {character for character in shown if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")}
        assert left == set(kept)
        assert not set(shown) & set(_DIRECTIONS)
        shown.encode("utf-8")


@pytest.mark.parametrize("text", ["", "plain", "été 東京 עברית العربية 👩‍🔬", "[red]brackets[/]", "a\\x1b"])
def test_other_text_stays_as_it_is(text: str) -> None:
    """Letters of every script, joined symbols, brackets and backslashes included."""
    assert printable(text) == printable_line(text) == text


def test_what_is_escaped_can_be_read() -> None:
    """Characters are shown as Python writes them; lines of a text stay lines, a value stays in one."""
    assert printable("a\x1b[31mb\r\x7f\x9b\n\u202ec\ud800") == "a\\x1b[31mb\\r\\x7f\\x9b\n\\u202ec\\ud800"
    assert printable_line("a\nb\tc\u2028") == "a\\nb\\tc\\u2028"
