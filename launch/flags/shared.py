"""Flags that several commands share, each derived from the option that is declared in `calm_beam.options.groups`."""

import argparse
import dataclasses

from calm_beam.evaluation.device_forecast import DEVICES
from calm_beam.options import Options, option
from calm_beam.options.groups import (
    DataSource,
    Engine,
    Memory,
    ModelFacts,
    Spread,
)

from .derived import add_options, unheaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device(Options):
    """An accelerator that is forecast."""

    device: str | None = option(
        None,
        "accelerator for which the least time of a step is forecast from bytes and operations, by exit layer and "
        "measure; nothing is run there",
        choices=tuple(DEVICES),
    )


def add_worker_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that say how decoding is spread over workers, which moves no output."""
    add_options(unheaded(group), Spread)


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


def add_model_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that go with `--checkpoint`."""
    add_options(unheaded(group), ModelFacts)
