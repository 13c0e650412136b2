"""Functions of Python that do what a command does: its options are their arguments, in all that is said, too."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from calm_beam.launch.terminal import said_as, show_details
from calm_beam.options import Options, options_of
from calm_beam.options.call import taking
from calm_beam.options.option import in_python

_Arguments = ParamSpec("_Arguments")
_Request = TypeVar("_Request", bound=Options)
_Result = TypeVar("_Result")


def calling(
    request: Callable[_Arguments, _Request],
) -> Callable[[Callable[[_Request], _Result]], Callable[_Arguments, _Result]]:
    """Gives a function of a request its arguments, as `taking`; what it says while it runs calls options as those.

    Args:
      request: The class of requests.
    """
    kind: Any = request
    named = dict(options_of(kind))

    def decorate(run: Callable[[_Request], _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(run)
        def saying(made: _Request) -> _Result:
            show_details(getattr(made, "verbose", False))
            with said_as(lambda text: in_python(text, named)):
                return run(made)

        return taking(request)(saying)

    return decorate
