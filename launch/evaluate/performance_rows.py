"""Performances as rows of a file and of the terminal."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from .experiment import Cell, estimate_cells, shown

if TYPE_CHECKING:
    from calm_beam.evaluation.performance import Measured, Performance


def performance_row(measured: "Measured") -> dict[str, Cell]:
    """Returns every number of a performance, and what it belongs to: no rule and no threshold is the full model."""
    rule, performance = measured.rule, measured.performance
    return {
        "confidence": rule.confidence if rule else None,
        "state_propagation": rule.state_propagation if rule else None,
        "token_from": rule.token_from if rule else None,
        "threshold": measured.threshold,
        **estimate_cells("layers", performance.layers),
        **estimate_cells("similarity", performance.similarity),
        **estimate_cells("quality", performance.quality),
        **estimate_cells("quality_change", performance.quality_change),
        "prompts": performance.layers.prompts,
    }


def performance_table(title: str, performances: "Mapping[str, Performance]", *, metric: str, num_layers: int) -> Table:
    """Returns a table with one line per name; scores against references only if there are any."""
    table = Table(
        title=f"{title} ({metric})", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column("", overflow="fold")
    has_references = any(performance.quality is not None for performance in performances.values())
    for name in (f"layers\nof {num_layers}", *(["quality", "change"] if has_references else []), "similarity"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, performance in performances.items():
        quality = [shown(performance.quality, with_error=False), shown(performance.quality_change, signed=True)]
        table.add_row(
            name,
            shown(performance.layers, digits=2, with_error=False),
            *(quality if has_references else []),
            shown(performance.similarity),
        )
    return table


MEANING = (
    "Quality: score against the references; change: less the full model's; similarity: score against the full model's "
    "output; ± one standard error."
)
"""What the columns mean, for a note below the table."""
