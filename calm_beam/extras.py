"""What only some need: modules and packages, imported when they are used, with their extra named if it is missing."""

import importlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from calm_beam.errors import CalmBeamError


class MissingExtraError(CalmBeamError, ValueError):
    """A package is needed that the plain installation of calm-beam does not bring."""


def imported(module: str, *, extra: str, needed_for: str) -> Any:
    """Returns an optional module.

    Args:
      module: Its name.
      extra: The extra of calm-beam that installs it.
      needed_for: What cannot be done without it, for the message.

    Raises:
      MissingExtraError: If it cannot be imported; says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{needed_for} needs {module} ({error}): pip install 'calm-beam[{extra}]', here and on every worker."
        ) from error


def on_first_use(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package by which names are imported when they are first used (PEP 562).

    Args:
      package: Its name.
      homes: By module of the package, the names that it takes from there. Type checkers need the same as imports.
    """

    def imported_name(name: str) -> Any:
        for home, names in homes.items():
            if name in names:
                return getattr(importlib.import_module(f".{home}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return imported_name


_tensorflow_lock = threading.Lock()


def tensorflow_on_cpu(*, extra: str, needed_for: str) -> Any:
    """Returns TensorFlow, which from then on uses no accelerator in this process.

    By default it takes nearly all memory of every GPU that it sees, at its first operation; JAX would find none left.

    Args:
      extra: As in `imported`.
      needed_for: As in `imported`.

    Raises:
      MissingExtraError: If it is not installed, or if it has been using a GPU in this process before.
    """
    with _tensorflow_lock:
        # Its greeting at every import, once in every worker; errors still show.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        tensorflow = imported("tensorflow", extra=extra, needed_for=needed_for)
        try:
            tensorflow.config.set_visible_devices([], "GPU")
        except RuntimeError as error:
            # Its devices are settled at its first operation.
            if tensorflow.config.get_visible_devices("GPU"):
                raise MissingExtraError(
                    f"{needed_for} needs TensorFlow on the CPU, but this process has begun to use it on a GPU: call "
                    'tensorflow.config.set_visible_devices([], "GPU") before its first operation.'
                ) from error
        return tensorflow
