"""The least times of real models' steps on four accelerators, as the table of docs/accelerators.md.

python -m benchmarks.device_times
"""

import sys
from collections.abc import Iterator

from benchmarks.programs.models import LARGE_MODELS
from calm_beam.evaluation.device_forecast import device_forecast
from calm_beam.exits.rule import ExitRule
from calm_beam.precision import Precision

_DEVICES = ("v5e", "v6e", "h100", "l4")
# A prompt of 128 tokens and 64 of its output.
_POSITIONS = 192
_SOFTMAX, _STATE = ExitRule(), ExitRule(confidence="state")


def table() -> Iterator[str]:
    """Yields the lines of the table, in Markdown."""
    yield (
        "| model, layers | device | full model, µs | head's share | softmax at every layer: pays up to layer "
        "| and never left | softmax at a quarter of the layers alone: gain, must leave | state, left there: gain |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, config in LARGE_MODELS.items():
        for device in _DEVICES:
            found = device_forecast(config, device, Precision(dtype="bfloat16"), positions=_POSITIONS)
            depth = found.parts.layers
            quarter = round(depth / 4)
            alone = ExitRule(min_exit_layer=quarter, exit_interval=depth)
            yield (
                f"| {name}, {depth} | {found.device.name} | {1e6 * found.full_seconds():,.0f} "
                f"| {found.head_share():.0%} | {found.pays_up_to(_SOFTMAX)} "
                f"| {1 / found.gain(depth, _SOFTMAX):.1f} times the time | {found.gain(quarter, alone):.2f} at layer "
                f"{quarter}, {found.needed_share(quarter, _SOFTMAX):.0%} | {found.gain(quarter, _STATE):.2f} |"
            )


def main() -> int:
    """Prints the table."""
    for line in table():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
