"""Results of repeated splits as files: every trial and the whole set as Parquet, summaries by column."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from calm_beam.manifest import PlannedTest
from calm_beam.risk.counts import binomial_interval
from calm_beam.storage import open_input, replacing

from .outcomes import GridRow, SplitResults, Spread, Summary, TrialOutcome

_TEXT, _WHOLE, _REAL = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
_SPEC = {"consistency": _TEXT, "metric": _TEXT, "loss": _TEXT, "delta": _REAL, "epsilon": _REAL, "p_value": _TEXT}
_TRIALS = pyarrow.schema(
    {
        "measure": _TEXT,
        **_SPEC,
        "procedure": _TEXT,
        "trial": _WHOLE,
        "threshold": _REAL,
        "n_calibration": _WHOLE,
        "n_test": _WHOLE,
        "test_risk": _REAL,
        "excess_p_value": _REAL,
        "layers": _REAL,
        "flops_appendix_b": _REAL,
        "flops_calm_table": _REAL,
        "bleu": _REAL,
        "full_bleu": _REAL,
    }
)
_GRID = pyarrow.schema(
    {
        "measure": _TEXT,
        "threshold": _REAL,
        "consistency": _TEXT,
        "metric": _TEXT,
        "loss": _TEXT,
        "n": _WHOLE,
        "risk": _REAL,
        "layers": _REAL,
        "flops_appendix_b": _REAL,
        "flops_calm_table": _REAL,
        "bleu": _REAL,
        "cut": _WHOLE,
        "examples": _WHOLE,
        "repeated": _WHOLE,
        "failed": _WHOLE,
    }
)


_OF_SPEC = ("consistency", "metric", "loss", "delta", "epsilon", "p_value", "procedure")


def write_trials(path: str, outcomes: Sequence[TrialOutcome]) -> None:
    """Writes every trial as one row; the file appears whole or not at all."""
    _write(path, [trial_row(outcome) for outcome in outcomes], schema=_TRIALS)


def read_trials(path: str) -> list[TrialOutcome]:
    """Returns what `write_trials` wrote."""
    outcomes = []
    for row in _read(path):
        spec = PlannedTest(**{name: row.pop(name) for name in _OF_SPEC})
        outcomes.append(TrialOutcome(spec=spec, **row))
    return outcomes


def trial_row(outcome: TrialOutcome) -> dict[str, Any]:
    """Returns a trial by column."""
    row = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome) if field.name != "spec"}
    return {**row, **spec_columns(outcome.spec)}


def spec_columns(spec: PlannedTest) -> dict[str, Any]:
    """Returns what was asked for by column."""
    return {name: getattr(spec, name) for name in _OF_SPEC}


def summary_row(summary: Summary, results: SplitResults) -> dict[str, Any]:
    """Returns every number of a summary by column; its speedup is one of the results."""
    low, high = binomial_interval(summary.exceeding, summary.trials)
    speedup = results.speedup(summary)
    return {
        "measure": summary.measure,
        **spec_columns(summary.spec),
        "trials": summary.trials,
        "threshold": summary.threshold,
        "never": summary.never,
        **_spread_columns("test_risk", summary.test_risk),
        "exceeding": summary.exceeding,
        "exceeding_share": summary.exceeding / summary.trials,
        "exceeding_low": low,
        "exceeding_high": high,
        "proved_broken": summary.proved_broken,
        **_spread_columns("layers", summary.layers),
        **_spread_columns("flops_appendix_b", summary.flops_appendix_b),
        **_spread_columns("flops_calm_table", summary.flops_calm_table),
        "speedup": speedup and speedup.factor.mean,
        "speedup_standard_error": speedup and speedup.factor.standard_error,
        **_spread_columns("bleu", summary.bleu),
        **_spread_columns("full_bleu", summary.full_bleu),
    }


def write_grid(path: str, rows: Sequence[GridRow]) -> None:
    """Writes the whole set's numbers; the file appears whole or not at all."""
    _write(path, [dataclasses.asdict(row) for row in rows], schema=_GRID)


def read_grid(path: str) -> list[GridRow]:
    """Returns what `write_grid` wrote."""
    return [GridRow(**row) for row in _read(path)]


def _spread_columns(name: str, spread: Spread | None) -> dict[str, Any]:
    mean, std = (None, None) if spread is None else (spread.mean, spread.std)
    return {name: mean, f"{name}_std": std}


def _write(path: str, rows: list[dict[str, Any]], *, schema: pyarrow.Schema) -> None:
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), temporary, compression="zstd")


def _read(path: str) -> list[dict[str, Any]]:
    with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw, pre_buffer=False) as file:
        # A thread of Arrow's that lets go of Python's memory while the interpreter ends aborts the process.
        rows: list[dict[str, Any]] = file.read(use_threads=False).to_pylist()
    return rows
