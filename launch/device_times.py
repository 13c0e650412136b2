"""The forecast of the least time of a step on an accelerator: the option for the device, tables and sentences.

All printed text says that it is a forecast.
"""

import dataclasses
from typing import Any

from rich.table import Table

from calm_beam.evaluation.device_forecast import DEVICES, DeviceForecast
from calm_beam.exits.measures import MEASURES, Need
from calm_beam.exits.rule import ExitRule
from calm_beam.options import Options, option
from calm_beam.text import counted

from .terminal.lines import PlainTable

# Deeper models show this many of their layers.
_MOST_SHOWN = 12
_ASKS, _ASKS_NOT = ExitRule(), ExitRule(confidence="state")

NOTE = (
    "A forecast from bytes and operations: nothing was run. A step cannot take less; what it takes more differs from "
    "program to program, so that the ratios are no promise either."
)


def device_times_table(found: DeviceForecast) -> Table:
    """Returns the least time of a step by exit layer and kind of measure."""
    title = f"Least time of a step on {found.device.name}, in microseconds (gain over the full model)"
    table = PlainTable(title)
    table.add_numbers(
        "exit\nlayer",
        "head asked\nat every\nlayer\nto there",
        "head asked\nthere alone",
        "share that\nmust leave\nthere\nto pay",
        "head not\nasked (state\nand others)",
    )
    for layer in _shown(found.parts.layers):
        alone = ExitRule(min_exit_layer=layer, exit_interval=found.parts.layers)
        table.add_row(
            str(layer),
            _time(found, layer, _ASKS),
            _time(found, layer, alone),
            _share(found.needed_share(layer, _ASKS)),
            _time(found, layer, _ASKS_NOT),
        )
    last = found.parts.layers
    table.add_row(str(last), _time(found, last, _ASKS), "", "", _time(found, last, _ASKS_NOT))
    return table


def device_times_in_words(found: DeviceForecast, *, positions: int, rows: int) -> list[str]:
    """Returns sentences: how long the full model takes, and at which layers each measure can pay off.

    Args:
      found: The forecast.
      positions: Tokens that each row attends to.
      rows: Prompts that take a step together.
    """
    depth = found.parts.layers
    never = found.exit_seconds(depth, _ASKS) / found.full_seconds()
    return [
        f"The full model takes at least {_microseconds(found.full_seconds())} microseconds a step there "
        f"({found.precision.dtype}, {counted(rows, 'prompt')} at a time, {positions:,} positions), the output head "
        f"{found.head_share():.0%} of it.",
        f"Measures that ask the head ({_named(asks_head=True)}), asked at every layer: {_paying(found, _ASKS)} A token "
        f"that never leaves takes {never:.1f} times as long as by the full model.",
        f"Measures that do not ({_named(asks_head=False)}): {_paying(found, _ASKS_NOT)}",
        NOTE,
    ]


def device_times_record(found: DeviceForecast, *, positions: int, rows: int) -> dict[str, Any]:
    """Returns the forecast as numbers for a JSON file; `device_times_in_words` describes the arguments."""
    layers = range(1, found.parts.layers + 1)
    return {
        "device": found.device.name,
        "dtype": found.precision.dtype,
        "positions": positions,
        "rows": rows,
        "full_microseconds": 1e6 * found.full_seconds(),
        "head_share": found.head_share(),
        "microseconds_by_exit_layer": {
            kind: [1e6 * found.exit_seconds(layer, rule) for layer in layers]
            for kind, rule in (("head_asked_at_every_layer", _ASKS), ("head_not_asked", _ASKS_NOT))
        },
        "pays_up_to_layer": {
            "head_asked_at_every_layer": found.pays_up_to(_ASKS),
            "head_not_asked": found.pays_up_to(_ASKS_NOT),
        },
        "note": NOTE,
    }


def _shown(depth: int) -> list[int]:
    """Returns the layers below the last: all of them, or evenly spaced ones."""
    count = min(depth - 1, _MOST_SHOWN)
    return sorted({1 + round(index * (depth - 2) / max(1, count - 1)) for index in range(count)})


def _time(found: DeviceForecast, layer: int, rule: ExitRule) -> str:
    return f"{_microseconds(found.exit_seconds(layer, rule))} ({found.gain(layer, rule):.2f})"


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}" if seconds > 1e-4 else f"{1e6 * seconds:.1f}"


def _share(share: float) -> str:
    return f"{share:.0%}" if share <= 1 else "cannot pay"


def _named(*, asks_head: bool) -> str:
    served = [each for each in MEASURES.values() if each.needs is not Need.LAST_TOKEN]
    return ", ".join(each.name for each in served if each.needs.asks_head == asks_head)


def _paying(found: DeviceForecast, rule: ExitRule) -> str:
    highest, depth = found.pays_up_to(rule), found.parts.layers
    if highest is None:
        return "they cannot pay at any layer."
    if highest == 1:
        return "they can pay only where tokens leave at layer 1."
    return f"they can pay where tokens leave at layer {highest} of {depth} or below."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device(Options):
    """An accelerator that is forecast."""

    device: str | None = option(
        None,
        "accelerator for which the least time of a step is forecast from bytes and operations, by exit layer and "
        "measure; nothing is run there",
        choices=tuple(DEVICES),
    )
