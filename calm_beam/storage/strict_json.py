"""Strict JSON (RFC 8259), which refuses what Python's parser silently accepts, and JSON files with schema and checksum.

The digest shows whether a manifest's content was changed after writing. It catches accidents and edits by hand. It does
not stop an attacker, who can recompute it. Standard library only, since this reads manifests.
"""

import collections
import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from calm_beam.errors import CalmBeamError
from calm_beam.storage import open_input, replacing
from calm_beam.text import shortened

# Far more than any file of calm-beam has, and few enough to walk or print the value without exhausting the stack.
_MOST_LEVELS = 100
_LONGEST_SHOWN = 100


class StrictJSONError(CalmBeamError, ValueError):
    """A text that is not JSON, or that two readers could read differently; says what is wrong, not in which file."""


def loads(text: str | bytes, *, constants_allowed: bool = False) -> Any:
    """Returns the value of a JSON text.

    Args:
      text: The text, or its UTF-8 bytes, which may begin with a byte order mark.
      constants_allowed: Whether NaN, Infinity and numbers too large for a float are read as Python reads them: for
        files of other tools, which may have them in unused places.

    Returns:
      The value, as `json.loads` returns it.

    Raises:
      StrictJSONError: If the text is not UTF-8 or not JSON, an object has a key twice (at any depth), it is
        nested deeper than 100 levels, or a number is not a JSON number or too large. The message is a phrase
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
    """Refuses values that are nested too deeply; goes level by level, so that it needs no stack."""
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


def content_digest(content: Mapping[str, object]) -> str:
    """Returns the digest of a manifest's content, `"sha256:"` and 64 hexadecimal digits.

    Hashes the JSON without the key "digest", keys sorted at every level, separators "," and ":", UTF-8 unescaped.

    Args:
      content: The manifest as plain JSON values. A key "digest", if there is one, is left out.

    Returns:
      The digest as a string of 71 characters, independent of the order of keys and the indentation of the file.

    Raises:
      ValueError: If a number is NaN or infinite, or a string has half a surrogate pair.
      TypeError: If a value cannot be written as JSON.

    >>> content_digest({"b": 1, "a": "é", "digest": "anything"})
    'sha256:aa58fba8483623bed37c1b02edfccbdd9a53123837c20bfa4cb4049993a2872e'
    """
    hashed = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()


def write_sealed(path: str, content: Mapping[str, Any], *, replaces: str | None = None) -> None:
    """Writes values with their digest, atomically.

    Args:
      path: The file to write.
      content: The values, including `schema`.
      replaces: The `version` that the file must still have, empty for none; None for any.

    Raises:
      FileExistsError: If it has another version.
      OSError: If it cannot be written.
    """
    text = json.dumps({**content, "digest": content_digest(content)}, indent=1, ensure_ascii=False) + "\n"
    with replacing(path, replaces=replaces) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_sealed(path: str, *, schema: str, kind: type[CalmBeamError], of: str, again: str) -> dict[str, Any]:
    """Returns the values of a file, including its digest.

    Args:
      path: The file.
      schema: The schema that it must have.
      kind: The exception if the file is missing, damaged or of another schema.
      of: Noun for the data that the file is about, for messages.
      again: How to make these again, as an imperative, for messages.

    Raises:
      CalmBeamError: Of class `kind`, as described there.
    """
    try:
        with open_input(path) as file:
            content = loads(file.read())
        if not isinstance(content, dict) or content.get("schema") != schema:
            raise kind(f"{path}: is not of the form {schema}, the only one that this calm-beam knows. {again}.")
        is_unchanged = content.get("digest") == content_digest(content)
    except FileNotFoundError as error:
        raise kind(f"{path}: no such file, so nothing identifies the {of} next to it.") from error
    # JSON can write half a surrogate pair, which cannot be hashed as UTF-8.
    except (StrictJSONError, UnicodeEncodeError) as error:
        raise kind(f"{path}: {error}.") from error
    if not is_unchanged:
        raise kind(f"{path}: was changed after it was written: its digest is another.")
    return content


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, but: Collection[str] = ()) -> tuple[str, ...]:
    """Returns how nested values differ, each as `NAME is THEIRS there, OURS here`, in order of their names.

    Args:
      ours: The values here.
      theirs: The values there.
      but: Names to leave out.
    """
    here, there = _flat(ours), _flat(theirs)
    return tuple(
        f"{name} is {there.get(name)!r} there, {here.get(name)!r} here"
        for name in sorted(here | there)
        if name not in but and there.get(name) != here.get(name)
    )


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values as a flat mapping, by names such as `settings.rule.confidence`."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
