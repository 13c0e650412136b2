"""Functions take few arguments: values that belong together are one argument."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_MOST = 8
# Exempt: functions whose arguments Python callers name one by one, and a step whose arguments are program arrays.
_MAY_TAKE_MORE = {
    "calm_beam/calibration/confirmation.py": ["confirmed_calibration"],
    "calm_beam/calibration/pareto.py": ["pareto_calibration"],
    "calm_beam/decoding/decoder.py": ["Decoder.__init__"],
    "calm_beam/decoding/early_exit.py": ["EarlyExitDecoder.__init__"],
    "calm_beam/decoding/xla/steps.py": ["run_layer"],
    "calm_beam/serving/generator.py": ["Generator.__init__", "Generator.from_manifest"],
    "calm_beam/training/train.py": ["train"],
    "transforms/early_exit.py": ["EarlyExitModelHandler.__init__"],
}


def _long_lists(source: str) -> Iterator[str]:
    """Yields the names of functions that take more than eight arguments, not counting the instance."""
    yield from _long_lists_in(ast.parse(source), within="")


def _long_lists_in(node: ast.AST, *, within: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{within}{child.name}."
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = (*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs)
            if len([each for each in arguments if each.arg not in ("self", "cls")]) > _MOST:
                yield f"{within}{child.name}"
        yield from _long_lists_in(child, within=inside)


@pytest.mark.parametrize("floor", ["calm_beam", "transforms", "launch"])
def test_no_function_takes_more_than_eight(floor: str) -> None:
    """No function takes more than eight arguments; few are exempt, by name."""
    links = {path for path in (_ROOT / floor).iterdir() if path.is_symlink()}
    modules = [path for path in sorted((_ROOT / floor).rglob("*.py")) if not links & set(path.parents)]
    assert len(modules) > 10
    found = {path.relative_to(_ROOT).as_posix(): [*_long_lists(path.read_text(encoding="utf-8"))] for path in modules}
    exempt = {path: names for path, names in _MAY_TAKE_MORE.items() if path.startswith(f"{floor}/")}
    assert {path: names for path, names in found.items() if names} == exempt


def test_a_long_list_would_be_seen() -> None:
    """The check above fails for nine arguments, and not for eight and the instance."""
    assert [*_long_lists("def long(a, b, c, d, *, e, f, g, h, i): ...")] == ["long"]
    assert [*_long_lists("class A:\n    def f(self, a, b, c, d, *, e, f, g, h, i): ...")] == ["A.f"]
    assert [*_long_lists("class A:\n    def short(self, a, b, c, d, *, e, f, g, h): ...")] == []
