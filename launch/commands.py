"""The commands, what each does, and where their flags are."""

import importlib
import importlib.util
from typing import Any

from .flags import FlagParser

COMMANDS = {
    "calibrate": "decode a calibration set at every threshold and write the manifest",
    "certify": "prove which settings of a sweep made elsewhere lose at most delta",
    "completion": "print what makes bash, zsh or fish complete commands and flags",
    "convert": "write a model in another layout: native, Hugging Face's or T5X's",
    "decode": "write the outputs of a data set at given thresholds",
    "doctor": "say what is installed here, and whether it works",
    "evaluate": "measure what calibrated thresholds gain and keep, over repeated random splits, and what exits do",
    "generate": "answer prompts under a manifest, skipping layers",
    "inspect": "print what a manifest or a checkpoint holds",
    "monitor": "watch the losses of a model in service, and raise an alarm when they exceed the bound",
    "plan": "say how many examples a calibration needs",
    "report": "build the report of a calibration, one HTML file",
    "serve": "answer prompts over HTTP under a manifest, as OpenAI's interface does",
    "suitability": "say whether a model can exit early at all, before a calibration is paid for",
    "train": "train or fine-tune an early-exit model, or its exit classifier",
    "verify": "test the promises of a manifest on fresh data",
}

# Packages that `calm-beam-serving` leaves out, including parts of calm_beam.
_NOT_FOR_SERVING = ("calm_beam", "apache_beam", "optax", "pyarrow", "scipy")


def command_module(command: str) -> Any:
    """Returns the module of a command: it has `main(argv)` and `flag_parsers()`.

    Importing it imports no other command. Beam and JAX take seconds to import, so it imports them after parsing flags.
    """
    return importlib.import_module(f"calm_beam.launch.{command}")


def is_installed(command: str) -> bool:
    """Returns whether the installed distribution includes a command; imports nothing of it."""
    return importlib.util.find_spec(f"calm_beam.launch.{command}") is not None


def flag_parsers(command: str) -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of a command, the usual one first.

    Raises:
      ModuleNotFoundError: If the installed distribution does not include the command.
    """
    found: tuple[FlagParser, ...] = command_module(command).flag_parsers()
    return found


def left_out(error: ModuleNotFoundError) -> str | None:
    """Returns the missing package if `calm-beam-serving` leaves it out, else None."""
    package = (error.name or "").partition(".")[0]
    if package not in _NOT_FOR_SERVING:
        return None
    return error.name if package == "calm_beam" else package
