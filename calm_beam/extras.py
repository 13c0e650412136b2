"""Optional modules and packages: imported when they are used, and their extra is named if they are missing."""

import importlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from calm_beam.errors import CalmBeamError


class MissingExtraError(CalmBeamError, ValueError):
    """A package is needed that the plain installation of calm-beam does not include."""


def how_to_install(extra: str) -> str:
    """Returns the commands that install an extra of calm-beam, from the package index and from a checkout."""
    return f"pip install 'calm-beam[{extra}]' (in a checkout: pip install '.[{extra}]')"


def imported(module: str, *, extra: str, needed_for: str) -> Any:
    """Returns an optional module.

    Args:
      module: Its name.
      extra: The extra of calm-beam that installs it.
      needed_for: What cannot be done without it, for the message.

    Raises:
      MissingExtraError: If the module cannot be imported; the message says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{needed_for} needs {module} ({error}): {how_to_install(extra)}, here and on every worker."
        ) from error


def on_first_use(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package that imports names when they are first used (PEP 562).

    Args:
      package: Its name.
      homes: The names that the package takes from each of its modules, by module. Type checkers need them as imports
        too.
    """

    def imported_name(name: str) -> Any:
        for home, names in homes.items():
            if name in names:
                return getattr(importlib.import_module(f".{home}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return imported_name


_tensorflow_lock = threading.Lock()


def tensorflow_on_cpu(*, extra: str, needed_for: str) -> Any:
    """Returns TensorFlow, and keeps it from using any accelerator in this process.

    At its first operation TensorFlow takes nearly all memory of every GPU that it sees, and would leave none for JAX.

    Args:
      extra: The extra of calm-beam that installs TensorFlow, as in `imported`.
      needed_for: What cannot be done without TensorFlow, for the message.

    Raises:
      MissingExtraError: If it is not installed, or has already used a GPU in this process.
    """
    with _tensorflow_lock:
        # TensorFlow logs a greeting at every import, once in every worker; errors still show.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        tensorflow = imported("tensorflow", extra=extra, needed_for=needed_for)
        try:
            tensorflow.config.set_visible_devices([], "GPU")
        except RuntimeError as error:
            # TensorFlow fixes its devices at its first operation.
            if tensorflow.config.get_visible_devices("GPU"):
                raise MissingExtraError(
                    f"{needed_for} needs TensorFlow on the CPU, but this process has begun to use it on a GPU: call "
                    'tensorflow.config.set_visible_devices([], "GPU") before its first operation.'
                ) from error
        return tensorflow
