"""All our error classes have one base class."""

import importlib
import pkgutil

import pytest

import calm_beam
from calm_beam.errors import CalmBeamError, UsageError, as_usage
from calm_beam.inputs.examples import DataError


def _defined_errors() -> list[type[Exception]]:
    """Returns all public exception classes that modules of the package define."""
    found: list[type[Exception]] = []
    for module in pkgutil.walk_packages(calm_beam.__path__, "calm_beam."):
        if module.name.endswith("__main__"):
            continue
        namespace = vars(importlib.import_module(module.name))
        found += [
            value
            for name, value in namespace.items()
            if isinstance(value, type)
            and issubclass(value, Exception)
            and value.__module__ == module.name
            and not name.startswith("_")
        ]
    return found


def test_all_errors_have_one_base() -> None:
    """With one base class, callers and workers can distinguish our messages from defects."""
    errors = _defined_errors()
    assert DataError in errors
    assert len(errors) > 15
    assert [error.__qualname__ for error in errors if not issubclass(error, CalmBeamError)] == []


@pytest.mark.parametrize("base", [ValueError, CalmBeamError])
def test_built_in_bases_stay(base: type[Exception]) -> None:
    """Callers that catch the fitting built-in class still do."""
    assert issubclass(DataError, base)


def test_one_of_our_errors_is_no_cause_of_another() -> None:
    """A `UsageError` made of another `CalmBeamError` has no second traceback with the same words, only its cause."""
    with pytest.raises(UsageError, match="no such row") as alone, as_usage():
        raise DataError("no such row")
    assert alone.value.__cause__ is None
    assert alone.value.__suppress_context__
    users = KeyError("text")
    with pytest.raises(UsageError, match="no such row") as caused, as_usage():
        raise DataError("no such row") from users
    assert caused.value.__cause__ is users
