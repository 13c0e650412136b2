"""The least time of a model's steps on an accelerator, on the terminal."""

import os

from calm_beam.arithmetic import Precision
from calm_beam.checkpoints import load_checkpoint
from calm_beam.errors import UsageError
from calm_beam.evaluation.device_forecast import device_forecast
from calm_beam.launch.flags import as_usage
from calm_beam.launch.terminal import PlainConsole, give
from calm_beam.launch.terminal.device_times import device_times_in_words, device_times_record, device_times_table

from .request import PlanRequest


def plan_device(request: PlanRequest, device: str) -> int:
    """Prints what a step takes on a device at the least; returns the exit status."""
    if request.checkpoint is None:
        raise UsageError(f"--checkpoint is missing: the model whose steps --device={device} is to take.")
    positions, rows = request.positions, request.batch_size
    with as_usage((ValueError, OSError)):
        config = load_checkpoint(os.fspath(request.checkpoint)).config
    forecast = device_forecast(config, device, Precision(dtype=request.dtype), positions=positions, rows=rows)
    console = PlainConsole()
    console.print(device_times_table(forecast))
    for sentence in device_times_in_words(forecast, positions=positions, rows=rows):
        console.say(sentence)
    give(device_times_record(forecast, positions=positions, rows=rows))
    return 0
