"""Types of the numbers and texts in a manifest, which check them (`_record`)."""

import functools
import sys
from collections.abc import Sequence
from typing import Annotated

from ._checks import check_choice, check_count, check_number, check_share, check_text, check_utc_time

Text = Annotated[str, check_text]
"""At least one character, and such as UTF-8 can hold."""

AnyText = Annotated[str, functools.partial(check_text, empty_allowed=True)]
"""Such as UTF-8 can hold."""

UtcTime = Annotated[str, check_utc_time]
"""Date and time in ISO 8601, in UTC, ending in Z."""

Share = Annotated[float, check_share]
"""In (0, 1)."""

Unit = Annotated[float, functools.partial(check_number, low=0, high=1)]
"""In [0, 1]."""

Signed = Annotated[float, functools.partial(check_number, low=-1, high=1)]
"""In [-1, 1]."""

Finite = Annotated[float, functools.partial(check_number, low=-sys.float_info.max)]
"""Any finite number."""

Layers = Annotated[float, functools.partial(check_number, low=1)]
"""A mean number of layers, at least 1."""

Temperature = Annotated[float, functools.partial(check_number, low=0)]
"""At least 0."""

Cost = Annotated[float, functools.partial(check_number, low=0)]
"""At least 0."""

Count = Annotated[int, functools.partial(check_count, low=0)]
"""An integer of at least 0."""

Positive = Annotated[int, functools.partial(check_count, low=1)]
"""An integer of at least 1."""


def one_of(choices: Sequence[str]) -> functools.partial[None]:
    """Returns the check of a text that must be one of several."""
    return functools.partial(check_choice, choices=tuple(choices))
