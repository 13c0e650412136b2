"""Numbers and texts as people write and read them."""

import math
import sys
import unicodedata

import pytest

from calm_beam.launch.flags import FlagParser, UsageError
from calm_beam.options.kinds import numbers, share, whole_number
from calm_beam.text import counted, printable, printable_line, written_float, written_int


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 losses"), (1, "1 loss"), (2, "2 losses"), (1000, "1,000 losses"), (-1, "-1 losses")]
)
def test_only_one_is_one(number: int, words: str) -> None:
    """One thing is in the singular, any other number of them in the plural."""
    assert counted(number, "loss", several="losses") == words


def test_the_plural_of_most_words_is_known() -> None:
    """Without a plural, words take an s."""
    assert (counted(1, "measure"), counted(3, "measure")) == ("1 measure", "3 measures")


_NO_NUMBERS = (
    *("", " ", "1_0", "1_0e-1_0", "0_1", "٠.١", "１", "0x1", "1e", "e1", "1e1.5", ".", "+-1", "1,5", "1 0", "−1"),
    *("\u00a01", "1\u2003", "1\0", "½", "1e٣", "true", "infinit", "nan0", "1j", "0b1", "1f", "--1", "1d3"),
)


@pytest.mark.parametrize("text", _NO_NUMBERS)
def test_what_is_no_number(text: str) -> None:
    """Underscores, digits and spaces of other scripts, and other forms that only Python reads, are refused."""
    with pytest.raises(ValueError, match="not a number"):
        written_float(text)
    with pytest.raises(ValueError, match="not a whole number"):
        written_int(text)


def test_what_is_a_number() -> None:
    """Decimal numbers are read as in Python, with ASCII spaces around them."""
    texts = ("0", "-0.0", "+1", ".5", "5.", "1e-3", "1E+3", " 0.25\r\n", "\t7", "00.1", "1e-400")
    for text in texts:
        assert written_float(text) == float(text)
    assert [written_float(text) for text in ("inf", "-Infinity", "1e400")] == [math.inf, -math.inf, math.inf]
    assert math.isnan(written_float("NaN"))
    assert [written_int(text) for text in ("7", "-12", "+3 ", "007")] == [7, -12, 3, 7]
    for text in ("1.0", "1e6", "9" * 5000):
        with pytest.raises(ValueError, match=r"not a whole number|Exceeds the limit"):
            written_int(text)


@pytest.mark.parametrize("kind", [float, int, numbers, share, whole_number(0)])
@pytest.mark.parametrize("text", ["1_0e-1_0", "0_1", "٠", "١%", "1_0"])
def test_flags_read_numbers_strictly(kind: type, text: str) -> None:
    """Every numeric type of flag refuses numbers that only Python reads, in groups too."""
    parser = FlagParser(prog="x")
    parser.add_argument("--here", type=kind)
    parser.add_argument_group("group").add_argument("--there", type=kind)
    for flag in ("--here", "--there"):
        with pytest.raises(UsageError, match=f"argument {flag}: "):
            parser.parse_args([f"{flag}={text}"])


_DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_no_control_of_a_terminal_is_left() -> None:
    """Every control, line separator, direction mark and half of a surrogate pair is escaped."""
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    for shown, kept in ((printable(everything), "\t\n"), (printable_line(everything), "")):
        left = {character for character in shown if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")}
        assert left == set(kept)
        assert not set(shown) & set(_DIRECTIONS)
        shown.encode("utf-8")


@pytest.mark.parametrize("text", ["", "plain", "été 東京 עברית العربية 👩‍🔬", "[red]brackets[/]", "a\\x1b"])
def test_other_text_stays_as_it_is(text: str) -> None:
    """Letters of every script, joined symbols, brackets and backslashes are unchanged."""
    assert printable(text) == printable_line(text) == text


def test_what_is_escaped_can_be_read() -> None:
    """Characters are escaped as in Python; lines of a text stay lines, a value stays on one."""
    assert printable("a\x1b[31mb\r\x7f\x9b\n\u202ec\ud800") == "a\\x1b[31mb\\r\\x7f\\x9b\n\\u202ec\\ud800"
    assert printable_line("a\nb\tc\u2028") == "a\\nb\\tc\\u2028"
