"""Ambiguous JSON is refused."""

import json
import re

import pytest

from calm_beam.storage import strict_json
from calm_beam.storage.strict_json import StrictJSONError


@pytest.mark.parametrize("value", [None, 1, -0.5, "\u00e9", [], {"a": [{"b": [1, "2", None]}]}, [[]] * 500])
def test_what_is_json_is_read(value: object) -> None:
    """A value reads back from its text, as text and as bytes, with and without a byte order mark."""
    text = json.dumps(value)
    assert strict_json.loads(text) == value
    assert strict_json.loads(text.encode()) == value
    assert strict_json.loads(text.encode("utf-8-sig")) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("{} {}", "not JSON: Extra data: line 1 column 4 (char 3)"),
        (b"\xff{}", "not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 text: "),
        ("[NaN]", "not JSON: NaN is not a number that JSON allows"),
        ('{"a": -Infinity}', "not JSON: -Infinity is not a number that JSON allows"),
        ("1e400", "the number 1e400 is too large for a 64-bit float"),
        ("9" * 5000, "not JSON: Exceeds the limit"),
        ('{"a": 1, "b": 2, "a": 1}', 'key "a" occurs twice in the same object'),
        ('{"a": [{"b": {"c": 1, "\\u0063": 2}}]}', 'key "c" occurs twice in the same object'),
        ('{"\\u001b[31m": 1, "\\u001b[31m": 1}', 'key "\\u001b[31m" occurs twice in the same object'),
    ],
)
def test_what_is_not_is_refused(text: str | bytes, message: str) -> None:
    """The message has the error in characters that are safe on any terminal."""
    with pytest.raises(StrictJSONError, match=f"^{re.escape(message)}"):
        strict_json.loads(text)


@pytest.mark.parametrize("form", ["[{}]", '{{"a": {}}}'])
def test_deep_nesting_is_refused(form: str) -> None:
    """A hundred levels are read, one more is not, and a hundred thousand do not end the process."""
    text = "1"
    for _ in range(100):
        text = form.format(text)
    assert strict_json.loads(text)
    for deep in (form.format(text), "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000):
        with pytest.raises(StrictJSONError, match="nested deeper than 100 levels"):
            strict_json.loads(deep)


def test_constants_may_be_allowed() -> None:
    """Foreign files may hold constants that JSON lacks, but no repeated key."""
    assert strict_json.loads("[Infinity, 1e400]", constants_allowed=True) == [float("inf"), float("inf")]
    with pytest.raises(StrictJSONError, match="occurs twice"):
        strict_json.loads('{"a": NaN, "a": NaN}', constants_allowed=True)
