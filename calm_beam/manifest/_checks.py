"""Checks of single manifest values; each names the key, the offending value and what was expected."""

import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime

from calm_beam.errors import CalmBeamError

_UTC_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z")
_LONGEST_SHOWN = 100
_LARGEST_COUNT = 2**31 - 1


class ManifestError(CalmBeamError, ValueError):
    """A manifest that cannot be trusted, or does not hold what was asked of it."""


def shown(value: object) -> str:
    """Returns the value as a reader of the JSON would see it, cut when it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def is_number(value: object) -> bool:
    """Returns whether the value is a JSON number; True and False are not, though Python counts them as ints."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_number(key: str, value: object, *, low: float, high: float | None = None) -> None:
    """Refuses anything but a number in [low, high], or a finite one of at least `low` when `high` is None."""
    # NaN fails every comparison, so it needs no case of its own.
    top = sys.float_info.max if high is None else high
    if not (isinstance(value, int | float) and is_number(value) and low <= value <= top):
        expected = f"a finite number of at least {low}" if high is None else f"a number in [{low}, {high}]"
        raise ManifestError(f"{key} must be {expected}, got {shown(value)}")


def check_share(key: str, value: object) -> None:
    """Refuses anything but a number strictly between 0 and 1."""
    if not (isinstance(value, int | float) and is_number(value) and 0 < value < 1):
        raise ManifestError(f"{key} must be a number in (0, 1), got {shown(value)}")


def check_count(key: str, value: object, *, low: int) -> None:
    """Refuses anything but an integer of at least `low`, and of no more than sums of losses can have terms."""
    if not (isinstance(value, int) and is_number(value) and value >= low):
        raise ManifestError(f"{key} must be an integer of at least {low}, got {shown(value)}")
    if value > _LARGEST_COUNT:
        raise ManifestError(f"{key} must be at most {_LARGEST_COUNT}, got {shown(value)}")


def check_bool(key: str, value: object) -> None:
    """Refuses anything but true and false."""
    if not isinstance(value, bool):
        raise ManifestError(f"{key} must be true or false, got {shown(value)}")


def check_text(key: str, value: object, *, empty_allowed: bool = False) -> None:
    """Refuses anything but a string that UTF-8 can hold, by default of at least one character."""
    if not isinstance(value, str) or not (value or empty_allowed):
        raise ManifestError(f"{key} must be a {'' if empty_allowed else 'non-empty '}string, got {shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # File names that are not UTF-8 reach Python in this form.
        raise ManifestError(f"{key} must be text that UTF-8 can hold, got {value!a}") from None


def check_choice(key: str, value: object, *, choices: Sequence[str]) -> None:
    """Refuses anything but one of the given names."""
    if not isinstance(value, str) or value not in choices:
        raise ManifestError(f"{key} must be one of {', '.join(choices)}, got {shown(value)}")


def check_utc_time(key: str, value: object) -> None:
    """Refuses anything but a real date and time in ISO 8601, in UTC, ending in Z."""
    if isinstance(value, str) and _UTC_TIME.fullmatch(value):
        try:
            datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return
    raise ManifestError(f'{key} must be a UTC time such as "2026-01-31T12:00:00Z", got {shown(value)}')
