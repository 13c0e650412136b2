"""Names of packages that are imported on first use."""

import ast
import importlib
import pathlib

import pytest

_PACKAGES = ["calm_beam.checkpoints", "calm_beam.inputs", "calm_beam.serving"]


@pytest.mark.parametrize("package", _PACKAGES)
def test_type_checkers_are_told_of_the_same_names(package: str) -> None:
    """Every name imported for type checkers alone comes from the same module when it is used."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    (for_types,) = (
        node
        for node in ast.parse(pathlib.Path(module.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    found = {
        alias.name: importlib.import_module(f"{package}.{node.module}")
        for node in for_types.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert found
    for name, home in found.items():
        assert getattr(module, name) is getattr(home, name)


@pytest.mark.parametrize("package", _PACKAGES)
def test_other_names_are_not_there(package: str) -> None:
    """An unknown name is missing as from any module."""
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        _ = module.no_such_name
