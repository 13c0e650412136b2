"""How many arguments functions take where options travel as requests."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_MOST = 8
_ROOMS = ("launch", "calm_beam/options")


def _long_lists(source: str) -> Iterator[str]:
    """Yields the names of functions that take more arguments than eight, besides the instance."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if len([each for each in arguments if each.arg not in ("self", "cls")]) > _MOST:
                yield node.name


@pytest.mark.parametrize("room", _ROOMS)
def test_no_function_takes_more_than_eight(room: str) -> None:
    """What would take more takes a request, or a part of one."""
    modules = sorted((_ROOT / room).rglob("*.py"))
    assert len(modules) > 2
    found = {path.name: [*_long_lists(path.read_text(encoding="utf-8"))] for path in modules}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_a_long_list_would_be_seen() -> None:
    """The check above fails for nine arguments, and not for eight and the instance."""
    assert [*_long_lists("def long(a, b, c, d, *, e, f, g, h, i): ...")] == ["long"]
    assert [*_long_lists("class A:\n    def short(self, a, b, c, d, *, e, f, g, h): ...")] == []
