"""The type of confidence measures: a function, and the inputs that it needs.

Users name their own measures as `module:name`, of a function or of a `Measure`.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from calm_beam.errors import CalmBeamError

if TYPE_CHECKING:
    # This module loads JAX, which a manifest's reader must not.
    from calm_beam.exits.decision import DistributionBounds, Summary


class Need(enum.Enum):
    """The inputs of a measure at a layer; decoders and counts depend on this need, never on a measure's name.

    LAYER: The layer's number and the depth alone, so that every exit is known before anything is decoded.
    STATES: The layer's output and its input.
    CLASSIFIER: The score of the exit classifier, which the checkpoint must have.
    LOGITS: The head's logits for the layer's output.
    TOKENS: The tokens predicted here and at the exit layers below.
    LAST_TOKEN: The tokens predicted here and at the last layer: such a measure saves nothing, and cannot be served.
    """

    LAYER = enum.auto()
    STATES = enum.auto()
    CLASSIFIER = enum.auto()
    LOGITS = enum.auto()
    TOKENS = enum.auto()
    LAST_TOKEN = enum.auto()

    @property
    def asks_head(self) -> bool:
        """Whether the output of every exit layer is projected onto the vocabulary."""
        return self in (Need.LOGITS, Need.TOKENS, Need.LAST_TOKEN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """A confidence measure.

    Attributes:
      name: Name in flags and manifests.
      meaning: A short description of its value.
      needs: The inputs of `confidence`.
      confidence: Returns float32 confidences, shape (...), from these inputs:
        LAYER: `(layer, num_layers)`, two ints; returns one number.
        STATES: `(state, below, layer)`: arrays (..., width), without the final norm, and the layer's number, from 1.
        CLASSIFIER: `(score)`: shape (...).
        LOGITS: `(logits)`: shape (..., vocabulary).
        TOKENS: `(token, earlier)`: int32, shape (...) and (..., patience - 1), the nearest layer's first, -1 where
          there was none. Gives the same bits for NumPy and JAX arrays.
        LAST_TOKEN: `(token, last_token)`: int32, each of shape (...). Works on NumPy and JAX arrays.
      of_summary: The same confidence from a `Summary` of the logits and the size of the vocabulary, for LOGITS only:
        with it, packed rows are decided without storing all logits. None if it is not available.
      summary_parts: Names of the parts of a `Summary` that `of_summary` reads, besides `largest` and `token`.
      bounds: The lowest and the highest confidence within `DistributionBounds`, given the size of the vocabulary, for
        LOGITS only: with it, most decisions need no exact head. None if they are not available.
      is_gap: Whether it is the gap of the two most likely tokens, so that 0 means a tie.
      takes_schedule: Whether values are certainties, which can be compared with thresholds that decay over positions.
    """

    name: str
    meaning: str
    needs: Need
    confidence: Callable[..., Any]
    of_summary: "Callable[[Summary, int], Any] | None" = None
    summary_parts: frozenset[str] = frozenset()
    bounds: "Callable[[DistributionBounds, int], tuple[Any, Any]] | None" = None
    is_gap: bool = False
    takes_schedule: bool = True

    @property
    def sees_near_ties(self) -> bool:
        """Whether near ties show in its values, which are then rounded numbers.

        Shares of agreeing layers and numbers of layers are exact: the tokens that they depend on may be near ties,
        which is not detected.
        """
        return self.needs not in (Need.TOKENS, Need.LAYER, Need.LAST_TOKEN)

    def test_operations(self, *, width: int, vocab_size: int) -> int:
        """Returns the floating point operations that one exit test adds to a token's decoding.

        Source: Elbayad et al. (2020), Appendix B: a projection for measures of logits, a product for a classifier;
        comparing states is not counted.
        """
        if self.needs in (Need.LOGITS, Need.TOKENS):
            return 2 * width * vocab_size
        return 2 * width if self.needs is Need.CLASSIFIER else 0


_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)

# The names of a function's parameters determine its inputs.
_FORMS = {("logits",): Need.LOGITS, ("state", "below"): Need.STATES}


class MeasureError(CalmBeamError, ValueError):
    """A user's confidence measure that cannot be used."""


def is_own(name: str) -> bool:
    """Returns whether a name has the form `module:name`; imports nothing."""
    return _NAME.fullmatch(name) is not None


def import_measure(name: str) -> Measure:
    """Returns a user's measure. This runs code: only for names that the user gave, never for a manifest's alone.

    Args:
      name: `module:name` of a `Measure`, or of a function with one of these signatures:
        `f(logits)`: shape (..., vocabulary), to confidences, shape (...);
        `f(state, below)`: output and input of a layer, each (..., width), to confidences, shape (...).
        JAX traces them, on packed rows and in the served loop. A function sees one row at a time, shape (1, ...); the
        `confidence` of a `Measure` sees all, and must compute each independently.

    Raises:
      MeasureError: If there is no such module or name, or it names something else.
    """
    assert is_own(name)
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except (Exception, SystemExit) as error:
        is_absent = isinstance(error, ImportError)
        remedy = " It has to be installed or on the PYTHONPATH, here and on every worker." if is_absent else ""
        raise MeasureError(
            f'confidence "{name}": cannot import module "{module_name}" ({type(error).__name__}: {error}).{remedy}'
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
    """Returns the confidences of a user's function, which takes the first `count` of the arguments.

    The function sees one row at a time, so that the measure is batch-invariant: whether a token exits never depends on
    other prompts of its batch.
    """
    import jax
    import jax.numpy as jnp

    def of_row(*row: Any) -> Any:
        alone = [each[None] for each in row]
        try:
            made = jnp.asarray(function(*alone), jnp.float32)
        except Exception as error:
            raise _failed(name, error) from error
        _check_shape(name, made.shape, alone[0].shape)
        return made[0]

    rows = [jnp.asarray(each) for each in given[:count]]
    shape = rows[0].shape[:-1]
    return jax.vmap(of_row)(*(each.reshape(-1, each.shape[-1]) for each in rows)).reshape(shape)


def _failed(name: str, error: Exception) -> MeasureError:
    """Returns the error for a measure that raised one."""
    import jax

    # Further lines of JAX's messages are about its own functions.
    reason = (str(error).splitlines() or [""])[0].rstrip(".")
    is_traced = isinstance(error, jax.errors.JAXTypeError)
    remedy = " JAX traces the function: compute with jax.numpy, without numpy, float() or if." if is_traced else ""
    return MeasureError(f"{_with_file(name)}: failed with {type(error).__name__}: {reason}.{remedy}")


def _check_shape(name: str, made: tuple[int, ...], given: tuple[int, ...]) -> None:
    """Refuses confidences that are not one number for each row of an array with a shape."""
    if made != given[:-1]:
        raise MeasureError(
            f"{_with_file(name)}: returned shape {made} for {given}, expected {given[:-1]}: one number for each row."
        )


def _with_file(name: str) -> str:
    """Returns the name of a user's measure and its file, as the beginning of a message."""
    path = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    return f'confidence "{name}"' + (f" in {path}" if path else "")


def check_traces(name: str, measure: Measure, *, width: int, vocab_size: int) -> None:
    """Tries a user's measure on two rows of made-up logits or states, before anything is decoded.

    JAX traces it as decoders do, by shapes alone: nothing is compiled, and no device is used.

    Args:
      name: `module:name` of the measure.
      measure: The measure.
      width: Width of the model's states.
      vocab_size: Logits of a row.

    Raises:
      MeasureError: If it fails, or does not give a number for each row; names its file.
    """
    import jax
    import numpy as np

    last = {Need.LOGITS: vocab_size, Need.STATES: width}.get(measure.needs)
    if last is None:
        # Scores and tokens are numbers by themselves.
        return
    rows = jax.ShapeDtypeStruct((2, last), np.float32)
    more = () if measure.needs is Need.LOGITS else (rows, jax.ShapeDtypeStruct((), np.int32))
    try:
        made = jax.eval_shape(measure.confidence, rows, *more)
    except MeasureError:
        raise
    except Exception as error:
        raise _failed(name, error) from error
    _check_shape(name, np.shape(made), rows.shape)


def check_may_run(recorded: str, *, named: Collection[str | None]) -> None:
    """Checks that a recorded measure that is code may run: the caller must have named the same one.

    Looking it up imports a module, so that otherwise the author of the file would decide what runs here.

    Args:
      recorded: Name of the measure in a manifest.
      named: The names that the caller gave.

    Raises:
      MeasureError: If it is `module:name` and the caller did not name it.
    """
    if is_own(recorded) and recorded not in named:
        raise MeasureError(
            f"confidence {recorded!r} is code that the manifest names, and a manifest does not decide what runs here. "
            f"If you know and trust that code, name it: --confidence={recorded} (confidence= in Python)."
        )


def check_named(recorded: str, named: str | None) -> None:
    """Checks that the caller does not contradict a manifest's measure, and names it if it is code.

    Args:
      recorded: Name of the measure in a manifest.
      named: The name that the caller gave, if any.

    Raises:
      MeasureError: If the caller named another, or none where the manifest names code.
    """
    if named not in (None, recorded):
        raise MeasureError(f"the manifest is of confidence {recorded!r}, not {named!r}. Name that, or leave it out.")
    check_may_run(recorded, named=(named,))


def source_digest(name: str) -> str:
    """Returns `sha256:` and 64 digits of the file that defines a user's measure.

    A manifest records the digest: with another function of the same name, other tokens would exit.

    Raises:
      MeasureError: If the module has no file.
    """
    import_measure(name)
    module = importlib.import_module(name.partition(":")[0])
    path = getattr(module, "__file__", None)
    if path is None:
        raise MeasureError(
            f'confidence "{name}": its module has no file, so nothing could distinguish it from another.'
        )
    return f"sha256:{hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()}"
