"""Flags that several commands share, each derived from the option that is declared in `calm_beam.options.groups`."""

import argparse
import dataclasses
from collections.abc import Collection, Sequence

from calm_beam.arithmetic import Arithmetic
from calm_beam.errors import UsageError
from calm_beam.evaluation.device_forecast import DEVICES
from calm_beam.options import Options, option
from calm_beam.options.groups import (
    Chat,
    DataSource,
    Engine,
    ExitGrid,
    Failures,
    Lengths,
    Memory,
    ModelFacts,
    ModelSource,
    OneRule,
    Precision,
    Replacing,
    Spread,
)

from .derived import add_options, unheaded
from .parser import FlagParser

TASK = (ModelSource, Chat, ModelFacts, DataSource, Lengths, Precision, Memory, Engine)
"""Groups that name model and data, and how much of them is decoded at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device(Options):
    """An accelerator that is forecast."""

    device: str | None = option(
        None,
        "accelerator for which the least time of a step is forecast from bytes and operations, by exit layer and "
        "measure; nothing is run there",
        choices=tuple(DEVICES),
    )


def add_decode_flags(parser: FlagParser, *, default_grid_step: float | None) -> None:
    """Adds the flags that say what to decode, and how, as a pipeline.

    Args:
      parser: Where to.
      default_grid_step: Grid without `--thresholds`; None makes one of the two flags required.
    """
    add_task_flags(parser)
    add_exit_flags(parser, default_grid_step=default_grid_step)
    add_options(parser, Failures, Spread, Replacing)


def add_worker_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that say how decoding is spread over workers, which moves no output."""
    add_options(unheaded(group), Spread)


def add_task_flags(parser: FlagParser) -> None:
    """Adds the flags that name model and data, and how much of them is decoded at a time."""
    add_options(parser, *TASK)
    parser.set_defaults(default_seqio_split="validation")


def add_data_flags(group: argparse._ActionsContainer, *, kind: str = "data", split: str = "validation") -> None:
    """Adds the flags that say which data are read, and how.

    Args:
      group: Where to.
      kind: What the data are, in the help of the flags.
      split: The split of a SeqIO task that is read unless another is named.
    """
    named = {"data": f"files with the {kind}: globs, comma-separated", "seqio_split": f"its split; default: {split}"}
    add_options(unheaded(group), DataSource, sentences=named)
    group.set_defaults(default_seqio_split=split)


def add_exit_head_flag(group: argparse._ActionsContainer) -> None:
    """Adds the flags that say what decodes, and in which form the output head decides."""
    add_options(unheaded(group), Engine)


def add_memory_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that say how much is decoded at a time, which moves no output."""
    add_options(unheaded(group), Memory)


def add_exit_flags(parser: FlagParser, *, default_grid_step: float | None) -> None:
    """Adds the flags that say how tokens exit; `default_grid_step` is that of `add_decode_flags`."""
    default = "" if default_grid_step is None else f"; {default_grid_step} without --thresholds"
    add_options(
        parser, OneRule, ExitGrid, sentences={"grid_step": f"grid of its multiples below 1, down to 0{default}"}
    )
    parser.set_defaults(default_grid_step=default_grid_step)


def add_model_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that go with `--checkpoint`."""
    add_options(unheaded(group), ModelFacts)


def arithmetic_of(flags: argparse.Namespace) -> Arithmetic:
    """Returns in which numbers the model is to compute.

    Raises:
      ValueError: If the flags do not go together.
    """
    return Arithmetic(dtype=flags.dtype, matmul_precision=flags.matmul_precision)


def refuse_decoding_flags(
    argv: Sequence[str], generations: str, *, allowed: Collection[str], also: Collection[str] = ()
) -> None:
    """Refuses what would decide how to decode, where nothing is decoded.

    Args:
      argv: All flags.
      generations: What `--generations` names.
      allowed: Those of `add_decode_flags` that mean something for stored generations too.
      also: Others that do not.

    Raises:
      UsageError: If one is there; names it.
    """
    decoding = FlagParser(prog="", add_help=False)
    add_decode_flags(decoding, default_grid_step=None)
    refused = {*decoding._option_string_actions, *also} - {*allowed}
    given = next((name for arg in argv if (name := arg.split("=")[0]) in refused), None)
    if given is not None:
        raise UsageError(
            f"{given} decides what is decoded, and --generations={generations} is decoded already: leave one out."
        )
