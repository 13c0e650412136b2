"""Functions of Python whose arguments are the options of a request."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from calm_beam.errors import CalmBeamError

from .option import Options, default_of, in_python, options_of

_Arguments = ParamSpec("_Arguments")
_Request = TypeVar("_Request", bound=Options)
_Result = TypeVar("_Result")


def taking(
    request: Callable[_Arguments, _Request],
) -> Callable[[Callable[[_Request], _Result]], Callable[_Arguments, _Result]]:
    """Gives a function of a request the arguments that the request is made of; they are declared there alone.

    Type checkers see the arguments, `help` lists them with their sentences, and errors call options as arguments.

    Args:
      request: The class of requests.
    """

    def decorate(run: Callable[[_Request], _Result]) -> Callable[_Arguments, _Result]:
        kind: Any = request

        @functools.wraps(run)
        def called(*args: _Arguments.args, **given: _Arguments.kwargs) -> _Result:
            given = _by_new_names(kind, given)
            _check_names(run.__name__, kind, given)
            with naming_arguments(kind):
                made = request(*args, **given)
                made.check_given(given)
                return run(made)

        called.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
        called.__doc__ = _with_arguments(run.__doc__ or "", kind)
        return called

    return decorate


@contextlib.contextmanager
def naming_arguments(kind: type[Options]) -> Iterator[None]:
    """Has errors that end the block call options as the arguments of Python that they are."""
    named = dict(options_of(kind))
    try:
        yield
    except CalmBeamError as error:
        # The same error, in the caller's words.
        error.args = tuple(in_python(each, named) if isinstance(each, str) else each for each in error.args)
        raise


def documented(kind: type[_Request]) -> type[_Request]:
    """Lists the options of a class in its docstring, below its other attributes; they are declared elsewhere."""
    before, _, _ = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    kind.__doc__ = _with_arguments(f"{before.rstrip()}\n\n", kind).rstrip()
    return kind


def _by_new_names(kind: type[Options], given: Any) -> Any:
    """Returns arguments by the names that options have now."""
    new_names = {each.old_name: name for name, each in options_of(kind) if each.old_name is not None}
    return {name if new_names.get(name) in given else new_names.get(name, name): value for name, value in given.items()}


def _check_names(function: str, kind: type[Options], given: dict[str, Any]) -> None:
    """Refuses arguments that the function does not have, and asks for those that it needs."""
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        nearest = difflib.get_close_matches(unknown, names, n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise TypeError(f"{function}() has no argument {unknown!r}.{hint}")
    needed = (field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING)
    missing = next((name for name in needed if name not in given), None)
    if missing is not None:
        raise TypeError(f"{function}() needs the argument {missing!r}.")


def _with_arguments(doc: str, kind: type[Options]) -> str:
    """Returns a docstring with every option, and what the class says of fields that are none."""
    said = {name: each.help % {"default": default_of(kind, name)} for name, each in options_of(kind)}
    lines = [
        textwrap.fill(f"{name}: {sentence}", 116, initial_indent="  ", subsequent_indent="    ")
        for name, sentence in said.items()
    ]
    own = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2].rstrip()
    listed = "\n".join(["Args:", *([own] if own else []), *lines])
    before, raises, after = inspect.cleandoc(doc).partition("Raises:\n")
    return f"{before}{listed}\n\n{raises}{after}"
