"""How the parts of a manifest go to plain JSON values and come back, naming the key path of what is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import ClassVar, Self, TypeVar

from calm_beam.storage.digest import content_digest

from ._checks import ManifestError, shown

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
        arguments = {key: cls._from_json(key, item, at=_join(at, key)) for key, item in given.items()}
        try:
            return cls(**arguments)
        except ManifestError as error:
            # A record knows its own keys, only the caller knows where the record stands.
            raise ManifestError(_join(at, str(error))) from None

    @classmethod
    def _from_json(cls, key: str, value: object, *, at: str) -> object:
        """Turns a JSON value into the field's value; records with nested records or lists extend it."""
        return value

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


_R = TypeVar("_R", bound=Record)


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


def checked_list(value: object, *, at: str) -> list[object]:
    """Returns the list, refusing anything else."""
    if not isinstance(value, list):
        raise ManifestError(f"{at} must be a list, got {shown(value)}")
    return value


def records_from_json(kind: type[_R], value: object, *, at: str) -> tuple[_R, ...]:
    """Returns the records that a JSON list describes."""
    return tuple(kind.from_dict(item, at=f"{at}[{i}]") for i, item in enumerate(checked_list(value, at=at)))


def check_tuple(key: str, value: object, *, of: type = object) -> None:
    """Refuses anything but a tuple whose items are of one kind."""
    if not isinstance(value, tuple):
        raise ManifestError(f"{key} must be a tuple, got {shown(value)}")
    for index, item in enumerate(value):
        check_record(f"{key}[{index}]", item, kind=of)


def check_record(key: str, value: object, *, kind: type) -> None:
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
