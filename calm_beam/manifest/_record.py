"""How the parts of a manifest go to plain JSON values and come back, naming the key path of what is refused.

The type of a field says how its value is read and checked: `bool`; a record; `tuple[X, ...]`, which is a list in JSON;
`X | None`; and one of the types of `_values`, which check a number or a text. Values of other types are taken as they
are: the record checks them.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from calm_beam.storage.digest import content_digest

from ._checks import ManifestError, check_bool, shown

SCHEMA = "calm-beam/manifest/v1"


class Record:
    """A frozen dataclass that goes to plain JSON values and comes back, naming the key path of what it refuses."""

    # Keys that a manifest of an earlier writer does not have; None stands for their absence.
    _OPTIONAL: ClassVar[tuple[str, ...]] = ()
    # Keys that come first, in the order of the file, where that is not the order of the fields.
    _FIRST: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def file_keys(cls) -> list[str]:
        """Returns the record's keys, in the order of the file."""
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        return [*cls._FIRST, *(name for name in names if name not in cls._FIRST)]

    @classmethod
    def from_dict(cls, value: object, *, at: str = "") -> Self:
        """Returns the record that plain JSON values describe.

        Args:
          value: A dict with exactly the record's keys.
          at: Where the dict stands in the manifest, such as "calibrations[0]"; error messages start with it.

        Returns:
          The record, which equals the one whose `to_dict` gave the value.

        Raises:
          ManifestError: If a key is unknown or missing, or a value is of the wrong type, out of range or at odds
            with another value.
        """
        given = checked_keys(value, cls.file_keys(), optional=cls._OPTIONAL, at=at or cls.__name__)
        arguments = {key: cls._read(key, item, at=_join(at, key)) for key, item in given.items()}
        try:
            return cls(**arguments)
        except ManifestError as error:
            # A record knows its own keys, only the caller knows where the record stands.
            raise ManifestError(_join(at, str(error))) from None

    @classmethod
    def _read(cls, key: str, value: object, *, at: str) -> object:
        """Returns the field that a JSON value is; extended where the file has another form than the type says."""
        return _kinds(cls)[key].read(value, at)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        """Checks every field alone, by its type; records whose fields must agree extend it."""
        for key, kind in _kinds(type(self)).items():  # type: ignore[arg-type]
            kind.check(key, getattr(self, key))

    def to_dict(self) -> dict[str, object]:
        """Returns the record as plain JSON values: dicts in the file's order, lists, texts, numbers, booleans, None."""
        values = {name: _plain(getattr(self, name)) for name in self.file_keys()}
        return {key: value for key, value in values.items() if value is not None or key not in self._OPTIONAL}


class DigestedRecord(Record):
    """A record that goes to JSON with the digest of its content, and is compared with that when it comes back."""

    @classmethod
    def from_dict(cls, value: object, *, at: str = "") -> Self:
        """Returns the record that plain JSON values describe, "digest" included, having checked that."""
        given = checked_keys(value, [*cls.file_keys(), "digest"], optional=cls._OPTIONAL, at=at or cls.__name__)
        digest = given.pop("digest")
        record = super().from_dict(given, at=at)
        if digest != record.digest:
            raise ManifestError(f"{at}.digest is {shown(digest)}, but that of the {at} is {shown(record.digest)}")
        return record

    def to_dict(self) -> dict[str, object]:
        """Returns the record as plain JSON values, with "digest" last."""
        return {**super().to_dict(), "digest": self.digest}

    @property
    def digest(self) -> str:
        """The digest of the record, computed as the manifest's own: `"sha256:"` and 64 hexadecimal digits."""
        return content_digest(super().to_dict())


def checked_keys(value: object, keys: list[str], *, optional: Sequence[str] = (), at: str) -> dict[str, object]:
    """Returns the dict's items in the order of `keys`, refusing any other set of keys.

    Keys in `optional` may be missing, but not null: what is not there is not written.
    """
    if not isinstance(value, Mapping):
        raise ManifestError(f"{at} must be a JSON object, got {shown(value)}")
    for key in value:
        if key not in keys:
            raise ManifestError(f"{_join(at, str(key))} is not a key of {SCHEMA}; expected {', '.join(keys)}")
    for key in keys:
        if key not in value and key not in optional:
            raise ManifestError(f"{_join(at, key)} is missing")
        if key in optional and key in value and value[key] is None:
            raise ManifestError(f"{_join(at, key)} must not be null: where there is none, the key is left out")
    return {key: value[key] for key in keys if key in value}


def _checked_list(value: object, *, at: str) -> list[object]:
    """Returns the list, refusing anything else."""
    if not isinstance(value, list):
        raise ManifestError(f"{at} must be a list, got {shown(value)}")
    return value


@dataclass(frozen=True)
class _Kind:
    """How values of a type are made of JSON, given the value and where it stands, and checked, given key and value."""

    read: Callable[[object, str], object]
    check: Callable[[str, object], None]


@functools.cache
def _kinds(cls: type[Any]) -> dict[str, _Kind]:
    """Returns how each field of a record is read and checked."""
    hints, given = get_type_hints(cls, include_extras=True), _type_arguments(cls)
    return {f.name: _kind(hints[f.name], given) for f in fields(cls)}


def _type_arguments(cls: type) -> dict[Any, Any]:
    """Returns what stands for the type variables of the generic records that a record extends."""
    found: dict[Any, Any] = {}
    for base in cls.__mro__:
        for made in getattr(base, "__orig_bases__", ()):
            generic = get_origin(made)
            if generic is not None and generic is not Generic:
                found.update(zip(generic.__parameters__, get_args(made), strict=True))
    return found


def _kind(hint: Any, given: Mapping[Any, Any]) -> _Kind:
    """Returns how values of a type are read and checked, given what stands for type variables."""
    hint = given.get(hint, hint) if isinstance(hint, TypeVar) else hint
    if get_origin(hint) is Annotated:
        base, *checks = get_args(hint)
        return _all_of(_kind(base, given), checks)
    if get_origin(hint) in (Union, types.UnionType):
        (other,) = (each for each in get_args(hint) if each is not type(None))
        return _or_none(_kind(other, given))
    if get_origin(hint) is tuple:
        return _list_of(_kind(get_args(hint)[0], given))
    if isinstance(hint, type) and issubclass(hint, Record):
        return _Kind(lambda value, at: hint.from_dict(value, at=at), functools.partial(_check_record, kind=hint))
    return _Kind(lambda value, _: value, check_bool if hint is bool else lambda *_: None)


def _all_of(kind: _Kind, checks: Sequence[Callable[[str, object], None]]) -> _Kind:
    def check(key: str, value: object) -> None:
        for each in (kind.check, *checks):
            each(key, value)

    return _Kind(kind.read, check)


def _or_none(kind: _Kind) -> _Kind:
    return _Kind(
        lambda value, at: None if value is None else kind.read(value, at),
        lambda key, value: None if value is None else kind.check(key, value),
    )


def _list_of(kind: _Kind) -> _Kind:
    def check(key: str, value: object) -> None:
        if not isinstance(value, tuple):
            raise ManifestError(f"{key} must be a tuple, got {shown(value)}")
        for index, item in enumerate(value):
            kind.check(f"{key}[{index}]", item)

    return _Kind(
        lambda value, at: tuple(kind.read(item, f"{at}[{i}]") for i, item in enumerate(_checked_list(value, at=at))),
        check,
    )


def _check_record(key: str, value: object, *, kind: type) -> None:
    """Refuses anything but a record of this kind, which has then checked itself."""
    if not isinstance(value, kind):
        raise ManifestError(f"{key} must be a {kind.__name__}, got {shown(value)}")


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _plain(value: object) -> object:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))
    return value
