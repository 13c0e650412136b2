"""Types of the values in a manifest: each checks a value, and gives the same condition as JSON Schema."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Protocol

from calm_beam.errors import ManifestError
from calm_beam.text import shortened

_LONGEST_SHOWN = 100
_LARGEST_COUNT = 2**31 - 1


def shown(value: object) -> str:
    """Returns the value as the JSON shows it; a long one is cut."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return shortened(text, _LONGEST_SHOWN)


def in_words(value: object) -> str:
    """Returns a value by its own method `in_words` or else as `shown` does; a list of such values with semicolons."""
    if isinstance(value, tuple) and value and all(hasattr(item, "in_words") for item in value):
        return "; ".join(map(in_words, value))
    return str(value.in_words()) if hasattr(value, "in_words") else shown(value)


class Check(Protocol):
    """A condition on a value, used in an `Annotated` type."""

    def __call__(self, key: str, value: object, /) -> None:
        """Raises a ManifestError with the key, the value and the expectation if the value does not fit."""

    def schema(self) -> dict[str, Any]:
        """Returns the condition as JSON Schema."""


@dataclass(frozen=True)
class Number:
    """A finite number of at least `low` and at most `high`.

    Attributes:
      low: Lower bound.
      high: Upper bound; None for none.
      above: Whether the lower bound itself is excluded.
      below: Whether the upper bound itself is excluded.
    """

    low: float
    high: float | None = None
    above: bool = False
    below: bool = False

    def __call__(self, key: str, value: object, /) -> None:
        """Refuses any other value."""
        top = sys.float_info.max if self.high is None else self.high
        # NaN fails every comparison, so it needs no case of its own.
        fits = isinstance(value, int | float) and self.low <= value <= top
        if not fits or isinstance(value, bool) or (self.above and value == self.low) or (self.below and value == top):
            interval = f"number in {'[('[self.above]}{self.low}, {self.high}{'])'[self.below]}"
            bounds = f"finite number of at least {self.low}" if self.high is None else interval
            raise ManifestError(f"{key} must be a {bounds}, got {shown(value)}")

    def schema(self) -> dict[str, Any]:
        """Returns a number with its bounds, without those that all JSON numbers have."""
        bounds: dict[str, Any] = {"type": "number"}
        if self.low != -sys.float_info.max:
            bounds["exclusiveMinimum" if self.above else "minimum"] = self.low
        if self.high is not None:
            bounds["exclusiveMaximum" if self.below else "maximum"] = self.high
        return bounds


@dataclass(frozen=True)
class AtLeast:
    """An integer of at least `low`, and at most the largest number of terms in a sum of losses."""

    low: int

    def __call__(self, key: str, value: object, /) -> None:
        """Refuses any other value."""
        if not (isinstance(value, int) and not isinstance(value, bool) and value >= self.low):
            raise ManifestError(f"{key} must be an integer of at least {self.low}, got {shown(value)}")
        if value > _LARGEST_COUNT:
            raise ManifestError(f"{key} must be at most {_LARGEST_COUNT}, got {shown(value)}")

    def schema(self) -> dict[str, Any]:
        """Returns an integer with its bounds."""
        return {"type": "integer", "minimum": self.low, "maximum": _LARGEST_COUNT}


@dataclass(frozen=True)
class Truth:
    """True or false."""

    def __call__(self, key: str, value: object, /) -> None:
        """Refuses any other value."""
        if not isinstance(value, bool):
            raise ManifestError(f"{key} must be true or false, got {shown(value)}")

    def schema(self) -> dict[str, Any]:
        """Returns a boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class String:
    """A UTF-8 string, not empty unless `empty_allowed`, that matches `form` if there is one."""

    empty_allowed: bool = False
    form: str | None = None

    def __call__(self, key: str, value: object, /) -> None:
        """Refuses any other value."""
        if not isinstance(value, str) or not (value or self.empty_allowed):
            raise ManifestError(
                f"{key} must be a {'' if self.empty_allowed else 'non-empty '}string, got {shown(value)}"
            )
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            # Python represents file names that are not UTF-8 in this form.
            raise ManifestError(f"{key} must be text that UTF-8 can hold, got {value!a}") from None
        if self.form is not None and not re.fullmatch(self.form, value):
            raise ManifestError(f"{key} must be of the form {self.form}, got {shown(value)}")

    def schema(self) -> dict[str, Any]:
        """Returns a string with its minimum length, or its form."""
        if self.form is not None:
            return {"type": "string", "pattern": f"^{self.form}$"}
        return {"type": "string"} if self.empty_allowed else {"type": "string", "minLength": 1}


@dataclass(frozen=True)
class OneOf:
    """One of several names."""

    choices: Sequence[str]

    def __call__(self, key: str, value: object, /) -> None:
        """Refuses any other value."""
        if not isinstance(value, str) or value not in self.choices:
            raise ManifestError(f"{key} must be one of {', '.join(self.choices)}, got {shown(value)}")

    def schema(self) -> dict[str, Any]:
        """Returns the names."""
        return {"enum": list(self.choices)}


@dataclass(frozen=True)
class UtcMoment:
    """A real date and time in ISO 8601, in UTC, ending in Z."""

    _FORM = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z"

    def __call__(self, key: str, value: object, /) -> None:
        """Refuses any other value."""
        if isinstance(value, str) and re.fullmatch(self._FORM, value):
            try:
                datetime.fromisoformat(value)
            except ValueError:
                pass
            else:
                return
        raise ManifestError(f'{key} must be a UTC time such as "2026-01-31T12:00:00Z", got {shown(value)}')

    def schema(self) -> dict[str, Any]:
        """Returns a string of that form."""
        return {"type": "string", "format": "date-time", "pattern": f"^{self._FORM}$"}


@dataclass(frozen=True)
class Items:
    """A list of at least `low` and at most `high` items.

    Attributes:
      low: Minimum length.
      must: The rest of the error message after "must" for a list that does not fit.
      high: Maximum length; None for none.
      unique: Whether all items must differ.
    """

    low: int
    must: str
    high: int | None = None
    unique: bool = False

    def __call__(self, key: str, value: Sequence[Any], /) -> None:
        """Refuses any other list."""
        fits = self.low <= len(value) and (self.high is None or len(value) <= self.high)
        if not fits or (self.unique and len(set(value)) != len(value)):
            raise ManifestError(f"{key} must {self.must}, got {in_words(value)}")

    def schema(self) -> dict[str, Any]:
        """Returns the bounds on the length, and whether items must differ."""
        high = {} if self.high is None else {"maxItems": self.high}
        return {"minItems": self.low, **high, **({"uniqueItems": True} if self.unique else {})}


Text = Annotated[str, String()]
"""A UTF-8 string of at least one character."""

AnyText = Annotated[str, String(empty_allowed=True)]
"""A UTF-8 string."""

UtcTime = Annotated[str, UtcMoment()]
"""Date and time in ISO 8601, in UTC, ending in Z."""

Share = Annotated[float, Number(0, 1, above=True, below=True)]
"""In (0, 1)."""

Unit = Annotated[float, Number(0, 1)]
"""In [0, 1]."""

Signed = Annotated[float, Number(-1, 1)]
"""In [-1, 1]."""

Finite = Annotated[float, Number(-sys.float_info.max)]
"""Any finite number."""

Layers = Annotated[float, Number(1)]
"""A mean number of layers, at least 1."""

Temperature = Annotated[float, Number(0)]
"""At least 0."""

Cost = Annotated[float, Number(0)]
"""At least 0."""

Count = Annotated[int, AtLeast(0)]
"""An integer of at least 0."""

Positive = Annotated[int, AtLeast(1)]
"""An integer of at least 1."""
