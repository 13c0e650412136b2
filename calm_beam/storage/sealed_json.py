"""JSON files with a schema name and a checksum."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from calm_beam.errors import CalmBeamError
from calm_beam.storage import open_input, replacing, strict_json
from calm_beam.storage.digest import content_digest


def write_sealed(path: str, content: Mapping[str, Any], *, replaces: str | None = None) -> None:
    """Writes values with their digest, atomically.

    Args:
      path: Where to.
      content: The values, `schema` among them.
      replaces: The `version` that the file must still have, empty for none; None for any.

    Raises:
      FileExistsError: If it has another.
      OSError: If it cannot be written.
    """
    text = json.dumps({**content, "digest": content_digest(content)}, indent=1, ensure_ascii=False) + "\n"
    with replacing(path, replaces=replaces) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_sealed(path: str, *, schema: str, kind: type[CalmBeamError], of: str, again: str) -> dict[str, Any]:
    """Returns the values of a file, its digest among them.

    Args:
      path: The file.
      schema: The form that it must have.
      kind: The exception if the file is missing, damaged or of another form.
      of: The data that the file is about, for messages.
      again: How to make these again, as an imperative.

    Raises:
      CalmBeamError: Of that kind.
    """
    try:
        with open_input(path) as file:
            content = strict_json.loads(file.read())
        if not isinstance(content, dict) or content.get("schema") != schema:
            raise kind(f"{path}: is not of the form {schema}, the only one that this calm-beam knows. {again}.")
        is_unchanged = content.get("digest") == content_digest(content)
    except FileNotFoundError as error:
        raise kind(f"{path}: no such file, so nothing says what the {of} beside it are.") from error
    # Half a surrogate pair, which JSON can write, cannot be hashed as UTF-8.
    except (strict_json.StrictJSONError, UnicodeEncodeError) as error:
        raise kind(f"{path}: {error}.") from error
    if not is_unchanged:
        raise kind(f"{path}: was changed after it was written: its digest is another.")
    return content


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, but: Collection[str] = ()) -> tuple[str, ...]:
    """Returns where nested values differ, each as `NAME is THEIRS there, OURS here`, in order of their names.

    Args:
      ours: The values here.
      theirs: Those there.
      but: Names of what is not told.
    """
    here, there = _flat(ours), _flat(theirs)
    return tuple(
        f"{name} is {there.get(name)!r} there, {here.get(name)!r} here"
        for name in sorted(here | there)
        if name not in but and there.get(name) != here.get(name)
    )


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by names of their own, such as `settings.rule.confidence`."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
