"""Confidence measures of the user's: `module:name` of a function, or of a `Measure`."""

import functools
import hashlib
import importlib
import inspect
import pathlib
import re
from collections.abc import Callable, Collection
from typing import Any

from calm_beam.errors import CalmBeamError

from .measure import Measure, Need

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)

# What a function is given is said by the names of its parameters.
_FORMS = {("logits",): Need.LOGITS, ("state", "below"): Need.STATES}


class MeasureError(CalmBeamError, ValueError):
    """A confidence measure of the user's that cannot be used."""


def is_own(name: str) -> bool:
    """Returns whether a name has the form `module:name`; imports nothing."""
    return _NAME.fullmatch(name) is not None


def import_measure(name: str) -> Measure:
    """Returns a measure of the user's. This runs code: only for names that the user gave, never for a manifest's alone.

    Args:
      name: `module:name` of a `Measure`, or of a function with one of these signatures:
        `f(logits)`: shape (..., vocabulary), to confidences, shape (...);
        `f(state, below)`: output and input of a layer, each (..., width), to confidences, shape (...).
        They are traced by JAX, on packed rows and in the served loop: each row must be computed by itself.

    Raises:
      MeasureError: If there is no such module or name, or it is something else.
    """
    assert is_own(name)
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except (Exception, SystemExit) as error:
        raise MeasureError(
            f'confidence "{name}": cannot import module "{module_name}" ({type(error).__name__}: {error}).'
        ) from error
    if found is None:
        raise MeasureError(f'confidence "{name}": module "{module_name}" has no "{attribute}".')
    if isinstance(found, Measure):
        if found.needs is Need.LAST_TOKEN or found.needs is Need.LAYER:
            raise MeasureError(f'confidence "{name}": a measure of your own may not need {found.needs.name}.')
        return found
    try:
        parameters = tuple(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        parameters = ()
    if parameters not in _FORMS:
        raise MeasureError(
            f'confidence "{name}": expected a function of (logits), of (state, below), or a '
            f"calm_beam.exits.measures.Measure; found {type(found).__name__} with parameters {parameters}."
        )
    return Measure(
        name=name,
        meaning=f"by the user's function {name}",
        needs=_FORMS[parameters],
        confidence=functools.partial(_confidence, name, found, len(parameters)),
    )


def _confidence(name: str, function: Callable[..., Any], count: int, *given: Any) -> Any:
    """Returns what a function of the user's makes of its first arguments, of which `given` may have more."""
    import jax.numpy as jnp

    try:
        made = jnp.asarray(function(*given[:count]), jnp.float32)
    except Exception as error:
        raise MeasureError(f'confidence "{name}": failed with {type(error).__name__}: {error}') from error
    expected = given[0].shape[:-1]
    if made.shape != expected:
        raise MeasureError(
            f'confidence "{name}": returned shape {made.shape} for {given[0].shape}, expected {expected}: one number '
            "for each row."
        )
    return made


def check_may_run(recorded: str, *, named: Collection[str | None]) -> None:
    """Refuses a measure that a file names and that is code, unless the caller names the same one.

    To look it up would import a module, so that whoever wrote the file would decide what runs here.

    Args:
      recorded: Name of a measure, as a manifest has it.
      named: Those that the caller named.

    Raises:
      MeasureError: If it is `module:name` and the caller did not name it.
    """
    if is_own(recorded) and recorded not in named:
        raise MeasureError(
            f"confidence {recorded!r} is code that the manifest names, and a manifest does not decide what runs here. "
            f"If you know and trust that code, name it: --confidence={recorded} (confidence= in Python)."
        )


def check_named(recorded: str, named: str | None) -> None:
    """Refuses a measure of a manifest's that the caller contradicts, or has to name and did not.

    Args:
      recorded: Name of a measure, as a manifest has it.
      named: The one that the caller named, if any.

    Raises:
      MeasureError: If the caller named another, or none where the manifest names code.
    """
    if named not in (None, recorded):
        raise MeasureError(f"the manifest is of confidence {recorded!r}, not {named!r}. Name that, or leave it out.")
    check_may_run(recorded, named=(named,))


def source_digest(name: str) -> str:
    """Returns `sha256:` and 64 digits of the file that defines a measure of the user's.

    A manifest names it: with another function of the same name, other tokens would exit.

    Raises:
      MeasureError: If the module has no file.
    """
    import_measure(name)
    module = importlib.import_module(name.partition(":")[0])
    path = getattr(module, "__file__", None)
    if path is None:
        raise MeasureError(f'confidence "{name}": its module has no file, so that nothing could tell it from another.')
    return f"sha256:{hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()}"
