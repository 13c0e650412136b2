"""Values of features, which name neither texts nor lists, as rows have them."""

from collections.abc import Iterable, Sequence
from typing import Any

from calm_beam.inputs.examples import DataError


def as_texts(values: Iterable[bytes], name: str, *, where: str) -> list[str]:
    """Returns bytes as texts.

    Raises:
      DataError: If they are not UTF-8; names the feature.
    """
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {name} is not UTF-8 ({error}).") from error


def single(values: Sequence[Any], name: str, *, where: str) -> Any:
    """Returns the only value of a feature.

    Raises:
      DataError: If it has none or several; names the feature.
    """
    if len(values) != 1:
        raise DataError(f"{where}: {name} must have one value, got {len(values)}.")
    return values[0]
