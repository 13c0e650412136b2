"""The public names of `calm_beam.serving`."""

import ast
import inspect

import pytest

from calm_beam import serving


def test_every_name_is_found() -> None:
    """Each name in the stub is there, whether it is loaded at once or later; no other is."""
    parsed = ast.walk(ast.parse(inspect.getsource(serving)))
    names = {alias.name for node in parsed if isinstance(node, ast.ImportFrom) and node.level for alias in node.names}
    assert {name: getattr(serving, name).__name__ for name in names} == {name: name for name in names}
    assert len(names) == 17
    with pytest.raises(AttributeError, match="no attribute 'Generater'"):
        getattr(serving, "Generater")  # noqa: B009 - so that type checkers do not find it first
