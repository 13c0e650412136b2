"""The least time of a model's steps on an accelerator, on the terminal."""

import argparse

from calm_beam.arithmetic import Arithmetic
from calm_beam.checkpoints import load_checkpoint
from calm_beam.evaluation.device_forecast import device_forecast
from calm_beam.launch.flags import UsageError, as_usage
from calm_beam.launch.terminal import PlainConsole
from calm_beam.launch.terminal.device_times import device_times_in_words, device_times_table

from .flags import COST_FLAGS, POWER_FLAGS

# A prompt of 128 tokens, and 64 of its output.
_POSITIONS = 192


def plan_device(flags: argparse.Namespace) -> int:
    """Prints what a step takes on a device at the least; returns the exit status."""
    for name in ("pilot", "delta", "epsilon", *POWER_FLAGS, *COST_FLAGS, "output"):
        if getattr(flags, name) is not None:
            raise UsageError(
                f"--{name} is about examples, or the cost of a run, and --device={flags.device} about the time of a "
                "model's steps: ask one after the other."
            )
    if flags.checkpoint is None:
        raise UsageError(f"--checkpoint is missing: the model whose steps --device={flags.device} is to take.")
    positions, rows = flags.positions or _POSITIONS, flags.batch_size or 1
    with as_usage((ValueError, OSError)):
        config = load_checkpoint(flags.checkpoint).config
    arithmetic = Arithmetic(dtype=flags.dtype or "float32")
    forecast = device_forecast(config, flags.device, arithmetic, positions=positions, rows=rows)
    console = PlainConsole()
    console.print(device_times_table(forecast))
    for sentence in device_times_in_words(forecast, positions=positions, rows=rows):
        console.say(sentence)
    return 0
