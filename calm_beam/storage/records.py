"""Conversion of a manifest's parts to plain JSON values and back.

The type of a field decides how its value is read, written, checked, and described (`schema`): a record;
`tuple[X, ...]`, which is a list in JSON; `Mapping[X, Y]`, an object; `X | None`; and the types of `record_values`,
which restrict numbers and texts.
"""

import functools
import re
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from calm_beam.errors import ManifestError

from .record_values import Check, Truth, shown
from .strict_json import content_digest


class Record:
    """A frozen dataclass that converts to plain JSON values and back, and names the key path of a refused value."""

    # The file's first keys, if their order differs from that of the fields.
    _FIRST: ClassVar[tuple[str, ...]] = ()
    # Further JSON Schema for values that depend on each other; the record checks these when it is constructed.
    SCHEMA_RULES: ClassVar[Mapping[str, Any]] = types.MappingProxyType({})

    @classmethod
    def file_keys(cls) -> list[str]:
        """Returns the record's keys, in the order of the file."""
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        return [*cls._FIRST, *(name for name in names if name not in cls._FIRST)]

    @classmethod
    def optional_keys(cls) -> frozenset[str]:
        """Returns the keys that are omitted when they are None, their default, as earlier writers did."""
        return _optional(cls)  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, value: object, *, at: str = "") -> Self:
        """Returns the record with some plain JSON values.

        Args:
          value: A dict with exactly the record's keys.
          at: The key path of the dict in the manifest, such as "calibrations[0]"; error messages start with it.

        Returns:
          The record, equal to the one whose `to_dict` returned the value.

        Raises:
          ManifestError: If a key is unknown or missing, or a value is of the wrong type, out of range or
            inconsistent with another value.
        """
        given = checked_keys(value, cls.file_keys(), optional=cls.optional_keys(), at=at or cls.__name__)
        kinds = kinds_of(cls)
        arguments = {key: kinds[key].read(item, _join(at, key)) for key, item in given.items()}
        try:
            return cls(**arguments)
        except ManifestError as error:
            # A record knows its own keys; only the caller knows its place in the file.
            raise ManifestError(_join(at, str(error))) from None

    def __post_init__(self) -> None:
        """Checks every field by its type; records with conditions across fields extend it."""
        for key, kind in kinds_of(type(self)).items():
            kind.check(key, getattr(self, key))

    def to_dict(self) -> dict[str, object]:
        """Returns the record as plain JSON values: dicts in the file's order, lists, texts, numbers, booleans, None."""
        kinds = kinds_of(type(self))
        values = {name: kinds[name].write(getattr(self, name)) for name in self.file_keys()}
        optional = self.optional_keys()
        return {key: value for key, value in values.items() if value is not None or key not in optional}


class DigestedRecord(Record):
    """A record that is written with the digest of its content, which is verified when it is read."""

    @classmethod
    def from_dict(cls, value: object, *, at: str = "") -> Self:
        """Returns the record with some plain JSON values, after verifying "digest"."""
        given = checked_keys(value, [*cls.file_keys(), "digest"], optional=cls.optional_keys(), at=at or cls.__name__)
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
        """The digest of the record, computed like the manifest's own: `"sha256:"` and 64 hexadecimal digits."""
        return content_digest(super().to_dict())


def checked_keys(value: object, keys: list[str], *, optional: Collection[str] = (), at: str) -> dict[str, object]:
    """Returns the dict's items in the order of `keys`; refuses any other set of keys.

    Keys in `optional` may be missing, but not null: absent values are not written.
    """
    if not isinstance(value, Mapping):
        raise ManifestError(f"{at} must be a JSON object, got {shown(value)}")
    for key in value:
        if key not in keys:
            raise ManifestError(f"{_join(at, str(key))} is not a key of a manifest; expected {', '.join(keys)}")
    for key in keys:
        if key not in value and key not in optional:
            raise ManifestError(f"{_join(at, key)} is missing")
        if key in optional and key in value and value[key] is None:
            raise ManifestError(f"{_join(at, key)} must not be null: where there is none, the key is left out")
    return {key: value[key] for key in keys if key in value}


class Kind:
    """How values of a type are read from JSON, written, checked and described; by default unchanged and unchecked."""

    @property
    def record(self) -> type[Record] | None:
        """The type of record that values are or contain; None for numbers, texts and the like."""
        return None

    def read(self, value: object, at: str, /) -> object:
        """Returns the value for a JSON value; `at` is its key path."""
        return value

    def write(self, value: Any, /) -> object:
        """Returns the JSON value for a value."""
        return value

    def check(self, key: str, value: Any, /) -> None:
        """Refuses a value that is not of the type."""

    def schema(self) -> dict[str, Any]:
        """Returns the JSON Schema of values; for a record, a reference to its definition."""
        return {}


ALONE_IF_ONE = object()
"""Marks, in an `Annotated` type, a list whose single item is written to JSON without a list."""


def kinds_of(cls: type[Record]) -> dict[str, Kind]:
    """Returns the kind of each field of a record."""
    return _kinds(cls)  # type: ignore[arg-type]


@functools.cache
def _optional(cls: type[Any]) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls) if f.default is None)


@functools.cache
def _kinds(cls: type[Any]) -> dict[str, Kind]:
    hints, given = get_type_hints(cls, include_extras=True), _type_arguments(cls)
    return {f.name: _kind(hints[f.name], given) for f in fields(cls)}


def _type_arguments(cls: type) -> dict[Any, Any]:
    """Returns the values of the type variables of the generic records that a record extends."""
    found: dict[Any, Any] = {}
    for base in cls.__mro__:
        for made in getattr(base, "__orig_bases__", ()):
            generic = get_origin(made)
            if generic is not None and generic is not Generic:
                found.update(zip(generic.__parameters__, get_args(made), strict=True))
    return found


def _kind(hint: Any, given: Mapping[Any, Any]) -> Kind:
    """Returns the kind of a type; `given` has the values of type variables."""
    hint = given.get(hint, hint) if isinstance(hint, TypeVar) else hint
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, *checks = arguments
        kind = _kind(base, given)
        if isinstance(kind, _ListOf) and checks == [ALONE_IF_ONE]:
            return _AloneOrListed(kind)
        return _Checked(kind, checks)
    if origin in (Union, types.UnionType):
        (other,) = (each for each in arguments if each is not type(None))
        return OrNone(_kind(other, given))
    if origin is tuple:
        return _ListOf(_kind(arguments[0], given))
    if origin is Mapping:
        return _ObjectOf(_kind(arguments[0], given), _kind(arguments[1], given))
    if isinstance(hint, type) and issubclass(hint, Record):
        return _RecordOf(hint)
    return _Checked(Kind(), [Truth()]) if hint is bool else Kind()


@dataclass(frozen=True)
class _Wrapped(Kind):
    """Values of another kind, with further conditions."""

    kind: Kind

    @property
    def record(self) -> type[Record] | None:
        """The other kind's type of record."""
        return self.kind.record

    def read(self, value: object, at: str, /) -> object:
        return self.kind.read(value, at)

    def write(self, value: Any, /) -> object:
        return self.kind.write(value)

    def check(self, key: str, value: Any, /) -> None:
        self.kind.check(key, value)

    def schema(self) -> dict[str, Any]:
        return self.kind.schema()


@dataclass(frozen=True)
class _Checked(_Wrapped):
    """Values of a kind that must pass further checks."""

    checks: Sequence[Check]

    def check(self, key: str, value: Any, /) -> None:
        self.kind.check(key, value)
        for check in self.checks:
            check(key, value)

    def schema(self) -> dict[str, Any]:
        said = self.kind.schema()
        for check in self.checks:
            said = {**said, **check.schema()}
        return said


@dataclass(frozen=True)
class OrNone(_Wrapped):
    """Values of a kind, or None."""

    def read(self, value: object, at: str, /) -> object:
        """Returns None for null, and otherwise the kind's value."""
        return None if value is None else self.kind.read(value, at)

    def write(self, value: Any, /) -> object:
        """Returns null for None, and otherwise the kind's JSON value."""
        return None if value is None else self.kind.write(value)

    def check(self, key: str, value: Any, /) -> None:
        """Refuses values that the kind refuses, except None."""
        if value is not None:
            self.kind.check(key, value)

    def schema(self) -> dict[str, Any]:
        """Returns the kind's schema, or null."""
        return {"anyOf": [self.kind.schema(), {"type": "null"}]}


@dataclass(frozen=True)
class _ListOf(_Wrapped):
    """Tuples of values of a kind, which are lists in JSON."""

    def read(self, value: object, at: str, /) -> object:
        if not isinstance(value, list):
            raise ManifestError(f"{at} must be a list, got {shown(value)}")
        return tuple(self.kind.read(item, f"{at}[{index}]") for index, item in enumerate(value))

    def write(self, value: Any, /) -> object:
        return [self.kind.write(item) for item in value]

    def check(self, key: str, value: Any, /) -> None:
        if not isinstance(value, tuple):
            raise ManifestError(f"{key} must be a tuple, got {shown(value)}")
        for index, item in enumerate(value):
            self.kind.check(f"{key}[{index}]", item)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.kind.schema()}


@dataclass(frozen=True)
class _AloneOrListed(_Wrapped):
    """Tuples of a kind; a single item is written to JSON without a list, as early writers did."""

    kind: _ListOf

    def read(self, value: object, at: str, /) -> object:
        if not isinstance(value, list):
            return (self.kind.kind.read(value, at),)
        if len(value) == 1:
            raise ManifestError(f"{at} must be the test itself where there is one, got a list of it")
        return self.kind.read(value, at)

    def write(self, value: Any, /) -> object:
        return self.kind.kind.write(value[0]) if len(value) == 1 else self.kind.write(value)

    def schema(self) -> dict[str, Any]:
        listed = self.kind.schema()
        return {"anyOf": [listed["items"], {**listed, "minItems": 2}]}


@dataclass(frozen=True)
class _ObjectOf(Kind):
    """Mappings from names to values, which are objects in JSON with any keys, sorted."""

    name: Kind
    value: Kind

    def write(self, value: Any, /) -> object:
        return dict(sorted(value.items()))

    def check(self, key: str, value: Any, /) -> None:
        if not isinstance(value, Mapping):
            raise ManifestError(f"{key} must be a JSON object, got {shown(value)}")
        for name, item in value.items():
            self.name.check(f"a name in {key}", name)
            self.value.check(f"{key}[{shown(name)}]", item)

    def schema(self) -> dict[str, Any]:
        names = self.name.schema()
        return {"type": "object", "propertyNames": names, "additionalProperties": self.value.schema()}


@dataclass(frozen=True)
class _RecordOf(Kind):
    """Records, which check themselves when they are constructed."""

    of: type[Record]

    @property
    def record(self) -> type[Record]:
        """The type of these records."""
        return self.of

    def read(self, value: object, at: str, /) -> object:
        return self.of.from_dict(value, at=at)

    def write(self, value: Any, /) -> object:
        return value.to_dict()

    def check(self, key: str, value: Any, /) -> None:
        if not isinstance(value, self.of):
            raise ManifestError(f"{key} must be a {self.of.__name__}, got {shown(value)}")

    def schema(self) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{definition_name(self.of)}"}


def definition_name(record: type[Record]) -> str:
    """Returns the name of a record's definition in a JSON Schema: `path_entry` for `PathEntry`."""
    name = record.__name__.removesuffix("Record")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key
