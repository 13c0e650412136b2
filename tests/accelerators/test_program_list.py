"""The list of programs has every function that is compiled for a device. This test needs no compiler."""

import ast
import functools
import pathlib
from typing import Any

import jax
import pytest

import calm_beam
from benchmarks.programs import LARGE_MODELS, MODELS, Program, large_programs, programs
from calm_beam.precision import Precision

_PACKAGE = pathlib.Path(calm_beam.__file__).parent
# Arrays of one type and shape for every program.
_BFLOAT16 = Precision(dtype="bfloat16")


def _is_jit(decorator: ast.expr) -> bool:
    if isinstance(decorator, ast.Call):
        return any(_is_jit(part) for part in (decorator.func, *decorator.args[:1]))
    return ast.unparse(decorator) in ("jax.jit", "compiled")


def _compiled_functions() -> set[tuple[str, str]]:
    """Returns module and name of every function that `jax.jit` or `compiled` decorates."""
    return {
        (".".join(("calm_beam", *path.relative_to(_PACKAGE).with_suffix("").parts)), function.name)
        for path in _PACKAGE.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and any(map(_is_jit, function.decorator_list))
    }


@functools.cache
def _listed(model: str) -> list[Program]:
    return list(programs(MODELS[model], _BFLOAT16, devices=jax.local_devices()[:1]))


def test_every_compiled_function_is_listed() -> None:
    """A compiled step that is missing from the list is named here."""
    listed: set[Any] = {
        (program.function.__wrapped__.__module__, program.function.__wrapped__.__name__) for program in _listed("Llama")
    }
    assert len(_compiled_functions()) > 20
    # Certified heads are native code, for CPUs.
    assert _compiled_functions() - listed == {("calm_beam.decoding.xla.steps", "certify_rows")}


@pytest.mark.parametrize("model", list(MODELS))
def test_names_tell_programs_apart(model: str) -> None:
    """No two programs of a model have the same name, by which they are chosen and shown in tables."""
    names = [program.name for program in _listed(model)]
    assert len(set(names)) == len(names) >= 30


def test_what_is_given_away_is_given_away() -> None:
    """The buffers that a program is listed as writing into are those that its function donates, and no others."""
    for program in _listed("T5"):
        with program.placement.running():
            traced = program.function.trace(*program.arguments, **program.options)
        _, options = traced.args_info
        given = {name for name, tree in options.items() if any(leaf.donated for leaf in jax.tree.leaves(tree))}
        assert given == set(program.donated), program.name


def test_large_models_have_their_largest_programs() -> None:
    """T5-large's served loop, with exits at some layers or all, and its prefill are listed; each head has a sum."""
    some, every, admit = large_programs(LARGE_MODELS["T5-large"], _BFLOAT16, devices=jax.local_devices()[:1])
    assert (some.conditionals, every.conditionals) == (3, 23)
    assert admit.donated_bytes > 24 * 2 * 16 * 16 * 128 * 64 * 2
