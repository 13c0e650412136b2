"""JSON as RFC 8259 has it, without the silences of Python's parser. Standard library only: manifests are read by it."""

import collections
import json
import math
from typing import Any

from calm_beam.errors import CalmBeamError
from calm_beam.text import shortened

# Far more than any file of calm-beam has, and few enough to walk or print the value without exhausting the stack.
_MOST_LEVELS = 100
_LONGEST_SHOWN = 100


class StrictJSONError(CalmBeamError, ValueError):
    """A text that is not JSON, or that two readers could read in two ways; says what is wrong, not in which file."""


def loads(text: str | bytes, *, constants_allowed: bool = False) -> Any:
    """Returns the value that a JSON text holds.

    Args:
      text: The text, or its UTF-8 bytes, which may begin with a byte order mark.
      constants_allowed: Whether NaN, Infinity and numbers too large for a float are read as Python reads them: for
        files of other tools, which may have them in unused places.

    Returns:
      The value, as `json.loads` returns it.

    Raises:
      StrictJSONError: If the text is not UTF-8 or not JSON, an object names a key twice (at any depth), it is
        nested deeper than 100 levels, or a number is none that JSON knows or too large. The message is a phrase
        without a full stop, to be put after the file's name.

    >>> loads('{"delta": 0.1, "delta": 0.5}')
    Traceback (most recent call last):
    calm_beam.storage.strict_json.StrictJSONError: key "delta" occurs twice in the same object
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        if constants_allowed:
            value = json.loads(decoded, object_pairs_hook=_without_duplicates)
        else:
            value = json.loads(
                decoded,
                object_pairs_hook=_without_duplicates,
                parse_constant=_refuse_constant,
                parse_float=_finite_float,
            )
    except StrictJSONError:
        raise
    except UnicodeDecodeError as error:
        raise StrictJSONError(f"not UTF-8 text: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise StrictJSONError(f"not JSON: {error}") from None
    # Counting characters is fast; most texts need no walk.
    if decoded.count("[") + decoded.count("{") > _MOST_LEVELS:
        _check_depth(value)
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        # Python would take the last one; another reader may take the first.
        repeated = next(key for key, count in collections.Counter(key for key, _ in pairs).items() if count > 1)
        raise StrictJSONError(f"key {shortened(json.dumps(repeated), _LONGEST_SHOWN)} occurs twice in the same object")
    return result


def _refuse_constant(name: str) -> None:
    raise StrictJSONError(f"not JSON: {name} is not a number that JSON allows")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise StrictJSONError(f"the number {shortened(digits, _LONGEST_SHOWN)} is too large for a 64-bit float")
    return value


def _check_depth(value: Any) -> None:
    """Refuses what is nested too deeply, level by level, so that no stack is needed."""
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> StrictJSONError:
    return StrictJSONError(f"not JSON that we read: nested deeper than {_MOST_LEVELS} levels")
