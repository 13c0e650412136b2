"""The page of the Python API."""

import ast
import re

from tests.snippets import ROOT

_PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
_SHOWN = set(re.findall(r"^::: (\S+)$", _PAGE, re.MULTILINE))


def test_all_public_names_are_shown() -> None:
    """Every name at the top of the package is on the page, from where it is defined."""
    stub = ast.parse((ROOT / "calm_beam" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    public = {f"calm_beam.{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert len(public) > 10
    assert public - _SHOWN == set()


def test_all_steps_are_shown() -> None:
    """Every step of a pipeline that docs/python.md lists is on the page."""
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)", text.partition("## `from calm_beam import transforms`")[2], re.MULTILINE)
    assert len(listed) > 10
    assert set(listed) - {name.rpartition(".")[2] for name in _SHOWN} == set()
