"""Type hints that Beam reads."""

import importlib
import logging
import pkgutil

import apache_beam as beam
import pytest

from calm_beam import transforms


class _Bare(beam.DoFn):
    def process(self, element: int) -> list[int | beam.pvalue.TaggedOutput]:
        return [element]


def _warnings(kind: type[beam.DoFn], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        # Beam reads the hints of a bound method; no state is needed.
        object.__new__(kind).default_type_hints()
    return [record.getMessage() for record in caplog.records]


def _kinds() -> list[type[beam.DoFn]]:
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.iter_modules(transforms.__path__, "calm_beam.transforms.")
    ]
    values = (value for module in modules for value in vars(module).values())
    return [value for value in values if isinstance(value, type) and issubclass(value, beam.DoFn)]


def test_beam_warns_of_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    """Beam takes the hints of every step without a warning, which it gives about a bare TaggedOutput."""
    assert any("TaggedOutput" in each for each in _warnings(_Bare, caplog))
    assert len(_kinds()) > 5
    assert [text for kind in _kinds() for text in _warnings(kind, caplog)] == []
