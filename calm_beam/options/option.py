"""Declaring options: each is a field of a frozen dataclass that holds all texts and checks of the option.

Python functions take the options of a request as arguments.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, ParamSpec, TypeVar

from calm_beam.errors import CalmBeamError, UsageError

from .kinds import Kind, text, truth

_KEY = "option"


class OptionError(UsageError):
    """An option has a value that it does not accept, or lacks another option that it needs.

    Attributes:
      name: The option.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"--{name}{reason}")
        self.name = name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of an option.

    Attributes:
      help: The sentence for help, documents and completion, in which `%` is doubled.
      kind: Kind of its values.
      choices: The allowed values; empty for all of its kind.
      metavar: Placeholder of the value in help; None leaves that to the kind.
      belongs_to: Options of which at least one must be given with it, each by its name, or as `name=value`.
      old_name: Its name in the previous release, which flags and Python still accept; no help lists it.
    """

    help: str
    kind: Kind
    choices: tuple[object, ...] = ()
    metavar: str | None = None
    belongs_to: tuple[str, ...] = ()
    old_name: str | None = None


def option(
    default: Any,
    sentence: str,
    *,
    kind: Kind = text,
    choices: Collection[object] = (),
    metavar: str | None = None,
    belongs_to: tuple[str, ...] = (),
    old_name: str | None = None,
) -> Any:
    """Returns the field of an option; arguments as in `Option`. The option is required if its default is MISSING."""
    declared = Option(
        help=sentence,
        kind=kind,
        choices=tuple(choices),
        metavar=metavar,
        belongs_to=belongs_to,
        old_name=old_name,
    )
    return dataclasses.field(default=default, metadata={_KEY: declared})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options, or a request that consists of groups.

    Values are checked one by one when an instance is made, and kept in one form: tuples for lists, texts for paths.

    Attributes:
      SECTION: Heading of the group in help; None if its options are in no group.
      ELSEWHERE: Sentences on arguments that a function does not take, and what does instead, by their names.
    """

    SECTION: ClassVar[str | None] = None
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        declared = dict(options_of(type(self)))
        for name, each in declared.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _taken(name, value, each))
        for name, each in declared.items():
            if each.belongs_to and self.is_given(name) and not any(map(self.has, each.belongs_to)):
                raise OptionError(name, f" belongs to --{each.belongs_to[0]}, which is missing.")

    def check_given(self, names: Collection[str]) -> None:
        """Refuses options that have no meaning with others, whatever their values; requests define which.

        Args:
          names: The options that were given.

        Raises:
          UsageError: If there is one.
        """

    def is_given(self, name: str) -> bool:
        """Returns whether an option has a value other than its default."""
        return bool(getattr(self, name) != default_of(type(self), name))

    def has(self, partner: str) -> bool:
        """Returns whether an option is given; with `name=value`, whether it has that value, or lists it."""
        name, _, wanted = partner.partition("=")
        value = getattr(self, name, None)
        if not wanted:
            return hasattr(self, name) and self.is_given(name)
        return wanted in (value if isinstance(value, tuple) else (value,))


def options_of(group: type[Options]) -> Iterator[tuple[str, Option]]:
    """Yields the options of a group or request, each with its name."""
    for field in dataclasses.fields(group):
        if _KEY in field.metadata:
            yield field.name, field.metadata[_KEY]


def own_options_of(group: type[Options]) -> Iterator[tuple[str, Option]]:
    """Yields the options that a class declares itself, in their order."""
    declared = dict(options_of(group))
    # Redeclared options of a base class come in this class's order.
    yield from ((name, declared[name]) for name in inspect.get_annotations(group) if name in declared)


def switch(sentence: str, *, belongs_to: tuple[str, ...] = ()) -> Any:
    """Returns the field of a flag without a value, False by default; arguments as in `option`."""
    declared = Option(help=sentence, kind=truth, belongs_to=belongs_to)
    return dataclasses.field(default=False, metadata={_KEY: declared})


def again(
    group: type[Options],
    name: str,
    *,
    default: Any = ...,
    sentence: str | None = None,
    belongs_to: tuple[str, ...] | None = None,
) -> Any:
    """Returns the field of an option of another group, with another default or a narrower sense in this request.

    Args:
      group: The group that declares it.
      name: The option.
      default: Its default here; as declared if omitted.
      sentence: Its help here; as declared if omitted.
      belongs_to: Options of which at least one must be given with it; as declared if omitted.
    """
    declared = dict(options_of(group))[name]
    partners = declared.belongs_to if belongs_to is None else belongs_to
    return dataclasses.field(
        default=default_of(group, name) if default is ... else default,
        metadata={_KEY: dataclasses.replace(declared, help=sentence or declared.help, belongs_to=partners)},
    )


def default_of(group: type[Options], name: str) -> Any:
    """Returns the default of an option."""
    return next(field.default for field in dataclasses.fields(group) if field.name == name)


def listed(value: object) -> tuple:  # type: ignore[type-arg]
    """Returns the values of a list option, which requests keep as tuples; empty if it was left open."""
    assert value is None or isinstance(value, tuple), "lists are kept as tuples"
    return value or ()


def shared(request: Any, group: type[Any]) -> dict[str, Any]:
    """Returns those fields of a request that another class has too, by name."""
    names = {field.name for field in dataclasses.fields(group)}
    return {field.name: getattr(request, field.name) for field in dataclasses.fields(request) if field.name in names}


def _taken(name: str, value: Any, declared: Option) -> Any:
    try:
        found = declared.kind.taken(value)
    except ValueError as error:
        raise OptionError(name, f": {error}.") from error
    for each in (found if isinstance(found, tuple) else (found,)) if declared.choices else ():
        if each not in declared.choices:
            shown = ", ".join(map(repr, declared.choices))
            raise OptionError(name, f": invalid choice: {each!r} (choose from {shown}).")
    return found


# A comma or colon within a value is a part of it; one before a space ends it.
_NAMED = re.compile(r"--(\w+)(?:=((?:[^\s,;:()'\"]|[,:](?=\S))*[^\s,;:.()'\"]))?")

# A remark in messages about flags, for callers whose messages are not translated.
_HINT = re.compile(r" \(\w+=(?:\.\.\.)? in Python\)")


def in_python(message: str, options: Mapping[str, Option]) -> str:
    """Returns a message in which options are named as Python arguments instead of flags.

    Args:
      message: A message that names options as `--name` or `--name=value`.
      options: The options that are arguments; other flags stay as they are.

    >>> named = {"size": Option(help="how large", kind=text), "milk": Option(help="with it", kind=truth)}
    >>> in_python("--size=x belongs to --milk.", named)
    "size='x' belongs to milk=True."
    """

    def named(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name not in options:
            return found[0]
        if value is None:
            return f"{name}=True" if options[name].kind is truth else name
        return f"{name}={value}" if re.fullmatch(r"[-+.\de]+|None", value) else f"{name}={value!r}"

    return _NAMED.sub(named, _HINT.sub("", message))


_Arguments = ParamSpec("_Arguments")
_Request = TypeVar("_Request", bound=Options)
_Result = TypeVar("_Result")


def taking(
    request: Callable[_Arguments, _Request],
) -> Callable[[Callable[[_Request], _Result]], Callable[_Arguments, _Result]]:
    """Gives a function of a request the request's options as arguments; they are declared only there.

    Type checkers see the arguments, `help` lists them with their sentences, and errors name options as arguments.

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

        returned = inspect.signature(run).return_annotation
        called.__signature__ = inspect.signature(kind).replace(return_annotation=returned)  # type: ignore[attr-defined]
        called.__doc__ = _with_arguments(run.__doc__ or "", kind)
        return called

    return decorate


@contextlib.contextmanager
def naming_arguments(kind: type[Options]) -> Iterator[None]:
    """Makes errors that leave the block name options as Python arguments."""
    named = dict(options_of(kind))
    try:
        yield
    except CalmBeamError as error:
        # The same error, in the caller's words.
        error.args = tuple(in_python(each, named) if isinstance(each, str) else each for each in error.args)
        raise


def documented(kind: type[_Request]) -> type[_Request]:
    """Lists the options of a class in its docstring, after its other attributes; they are declared elsewhere."""
    before, _, _ = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    kind.__doc__ = _with_arguments(f"{before.rstrip()}\n\n", kind).rstrip()
    return kind


def _by_new_names(kind: type[Options], given: Any) -> Any:
    """Returns arguments by the current names of options."""
    new_names = {each.old_name: name for name, each in options_of(kind) if each.old_name is not None}
    return {name if new_names.get(name) in given else new_names.get(name, name): value for name, value in given.items()}


def _check_names(function: str, kind: type[Options], given: dict[str, Any]) -> None:
    """Refuses arguments that the function does not have, and missing ones that it needs."""
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        nearest = difflib.get_close_matches(unknown, names, n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        hint = f" {kind.ELSEWHERE[unknown]}" if unknown in kind.ELSEWHERE else hint
        raise TypeError(f"{function}() has no argument {unknown!r}.{hint}")
    needed = (field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING)
    missing = next((name for name in needed if name not in given), None)
    if missing is not None:
        raise TypeError(f"{function}() needs the argument {missing!r}.")


def _with_arguments(doc: str, kind: type[Options]) -> str:
    """Returns a docstring with every option, and the class's descriptions of its other fields."""
    said = {name: each.help % {"default": default_of(kind, name)} for name, each in options_of(kind)}
    lines = [
        textwrap.fill(f"{name}: {sentence}", 116, initial_indent="  ", subsequent_indent="    ")
        for name, sentence in said.items()
    ]
    own = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2].rstrip()
    listed = "\n".join(["Args:", *([own] if own else []), *lines])
    before, raises, after = inspect.cleandoc(doc).partition("Raises:\n")
    return f"{before}{listed}\n\n{raises}{after}"
