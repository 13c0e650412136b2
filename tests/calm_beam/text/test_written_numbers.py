"""Numbers that people write in files and flags."""

import math

import pytest

from calm_beam.launch.flags import FlagParser, UsageError, numbers, share, whole_number
from calm_beam.text.written_numbers import written_float, written_int

_NO_NUMBERS = (
    *("", " ", "1_0", "1_0e-1_0", "0_1", "٠.١", "１", "0x1", "1e", "e1", "1e1.5", ".", "+-1", "1,5", "1 0", "−1"),
    *("\u00a01", "1\u2003", "1\0", "½", "1e٣", "true", "infinit", "nan0", "1j", "0b1", "1f", "--1", "1d3"),
)


@pytest.mark.parametrize("text", _NO_NUMBERS)
def test_what_is_no_number(text: str) -> None:
    """Underscores, other scripts' digits and blanks, and all that other languages would not read, are refused."""
    with pytest.raises(ValueError, match="not a number"):
        written_float(text)
    with pytest.raises(ValueError, match="not a whole number"):
        written_int(text)


def test_what_is_a_number() -> None:
    """Decimal numbers are read as Python reads them, blanks of ASCII around them aside."""
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
    """Every type of flag that reads numbers refuses what only Python reads, in groups too."""
    parser = FlagParser(prog="x")
    parser.add_argument("--here", type=kind)
    parser.add_argument_group("group").add_argument("--there", type=kind)
    for flag in ("--here", "--there"):
        with pytest.raises(UsageError, match=f"argument {flag}: "):
            parser.parse_args([f"{flag}={text}"])
