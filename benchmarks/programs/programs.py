"""All programs of a model."""

from collections.abc import Iterator, Sequence
from typing import Any

from calm_beam.exits.rule import ExitRule
from calm_beam.model import ModelConfig
from calm_beam.precision import Precision

from .learning import learning
from .loops import loops, served
from .models import learner
from .placement import Placement
from .program import Program
from .steps import Steps


def programs(config: ModelConfig, precision: Precision, *, devices: Sequence[Any]) -> Iterator[Program]:
    """Yields every program that a model has devices run.

    Args:
      config: Of the model; it learns as a narrow one.
      precision: In which it computes.
      devices: One, or as many as share the model; they may be described only.
    """
    placement = Placement(devices, config)
    yield from Steps(config, precision, placement).all()
    yield from loops(config, precision, placement)
    yield from learning(narrow := learner(config), precision, Placement(devices, narrow))


def large_programs(config: ModelConfig, precision: Precision, *, devices: Sequence[Any]) -> Iterator[Program]:
    """Yields the largest programs of a model in its real size: single prompts with few exits and many, and prefill.

    Args:
      config: Of the model.
      precision: In which it computes.
      devices: As of `programs`.
    """
    placement = Placement(devices, config)
    for interval in (6, 1):
        rule = ExitRule(min_exit_layer=interval, exit_interval=interval)
        yield served(config, precision, placement, rule=rule, steps=64, source=128)
    yield Steps(config, precision, placement).admit(rows=16, source=128)
