"""What the experiments of `calm-beam evaluate` have in common: what each is asked, and what it answers."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.evaluation.estimates import Estimate

if TYPE_CHECKING:
    from calm_beam.evaluation.performance import Measured, Variant
    from calm_beam.evaluation.task import Task
    from calm_beam.outputs.prepared import PreparedSweep
    from calm_beam.report.line_chart import LineChart

Cell = str | int | float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What an experiment found.

    Attributes:
      rows: Every number, one mapping from column to value a line, all with the same columns.
      tables: What the terminal shows of them.
      notes: How to read the tables, a sentence or two.
      headline: What a page says first: parts of a sentence, of which every second one is a number that matters.
      charts: What is drawn of them.
    """

    rows: Sequence[Mapping[str, Cell]]
    tables: Sequence[Table]
    notes: str
    headline: Sequence[str]
    charts: "Sequence[LineChart]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedExperiment:
    """An experiment whose flags have been found good.

    Attributes:
      measure: Decodes every prompt once and scores it; calls its second argument after every prompt.
    """

    measure: "Callable[[Task, Callable[[], None]], Findings]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedSweeps:
    """An experiment that sweeps ways of exiting, on any workers, and whose flags have been found good.

    Attributes:
      variants: The ways of exiting, each of which decodes every prompt once.
      findings: Returns what is found, given the task and the performance of the full model and of all variants.
    """

    variants: "tuple[Variant, ...]"
    findings: "Callable[[Task, Sequence[Measured]], Findings]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment of the command.

    Attributes:
      settings: Returns what determines the outputs, from the flags; raises ValueError for a wrong value.
      prepare: Returns what will be measured, given the model; raises ValueError for what does not fit it.
    """

    settings: Callable[[argparse.Namespace], DecodeSettings]
    prepare: "Callable[[argparse.Namespace, PreparedSweep], PreparedExperiment | PreparedSweeps]"


def estimate_cells(name: str, estimate: Estimate | None) -> dict[str, Cell]:
    """Returns an estimate as two columns; both empty for None."""
    mean, error = (None, None) if estimate is None else (estimate.mean, estimate.standard_error)
    return {name: mean, f"{name}_standard_error": error}


def shown(estimate: Estimate | None, *, digits: int = 4, signed: bool = False, with_error: bool = True) -> str:
    """Returns an estimate and its standard error for a table, as in `0.3824 ± 0.0031`; nothing for None."""
    if estimate is None:
        return ""
    mean = f"{estimate.mean:{'+' if signed else ''}.{digits}f}"
    if not with_error or estimate.standard_error is None:
        return mean
    return f"{mean} ± {estimate.standard_error:.{digits}f}"
