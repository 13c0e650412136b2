"""What `calm-beam suitability` does once its flags are parsed: measure, and tell what was found."""

from rich.table import Table

from calm_beam.evaluation.suitability import Suitability
from calm_beam.launch.terminal import PlainConsole, give, tell
from calm_beam.launch.terminal.device_times import device_times_in_words, device_times_table
from calm_beam.launch.terminal.tables import PlainTable

from .job import Here, OnDevice, measure
from .request import SuitabilityRequest

_LARGEST_PERPLEXITY_IN_FULL = 1e6


def tell_suitability(request: SuitabilityRequest) -> int:
    """Measures, and tells what was found; returns the exit status of the command."""
    measured = measure(request)
    found, console = measured.found, PlainConsole()
    console.print(_table(found))
    console.print(
        f"The oracle exits at the first layer that agrees with the last: layer {found.first_agreement:.2f} on average; "
        f"from layer {found.settled:.2f} on, nothing changes any more."
    )
    console.print(_forecasts(found))
    console.print(found.verdict)
    if found.advice:
        console.print(found.advice)
    if measured.on_device is not None:
        _tell_device_times(measured.on_device, found, console=console)
    if measured.here is not None:
        console.say(_fastest_here(measured.here, found))
    console.print(
        f"{measured.sample} One pass over the full model's outputs: a forecast, no promise. Where it decides anything, "
        "calibrate on other prompts."
    )
    if measured.next is not None:
        # No figure above has a part in it, so that these prompts may calibrate.
        tell(f"Next:\n  {measured.next}")
    if measured.output is not None:
        console.print(f"File: {measured.output}", soft_wrap=True)
    give(measured.record())
    return 0


def _fastest_here(here: Here, found: Suitability) -> str:
    """Returns which choice of exits is fastest on this machine by what was measured, in a sentence."""
    best = max(range(len(here.gains)), key=here.gains.__getitem__)
    if here.gains[best] <= 1:
        return (
            "Measured here, one prompt at a time, none of these choices is forecast to be faster than the full model: "
            "tests take longer than the layers that they save. A calibration also tries measures with cheaper tests."
        )
    chosen = found.exits[best]
    return (
        f"Measured here, one prompt at a time, softmax exits with {chosen.flags} are forecast to be fastest, at "
        f"{chosen.layers:.2f} layers a token: {here.gains[best]:.2f} times as fast as the full model."
    )


def _tell_device_times(on_device: OnDevice, found: Suitability, *, console: PlainConsole) -> None:
    """Prints what steps take on a device at the least, and which exits are fastest there."""
    console.print(device_times_table(on_device.forecast))
    for sentence in device_times_in_words(on_device.forecast, positions=on_device.positions, rows=1):
        console.say(sentence)
    best = max(range(len(on_device.gains)), key=on_device.gains.__getitem__)
    chosen = found.exits[best]
    console.say(
        f"Of the choices above, softmax exits with {chosen.flags} are forecast to be fastest there, at "
        f"{chosen.layers:.2f} layers a token: {on_device.gains[best]:.2f} times as fast as the full model, one prompt "
        "at a time."
    )


def _table(found: Suitability) -> Table:
    table = PlainTable("Layers on the full model's outputs")
    table.add_numbers("decoder\nlayer", "agrees with\nthe last layer", "perplexity")
    for layer, (agreement, perplexity) in enumerate(zip(found.agreement, found.perplexity, strict=True), start=1):
        table.add_row(str(layer), f"{agreement:.1%}", _in_few_digits(perplexity))
    return table


def _in_few_digits(perplexity: float) -> str:
    """Returns a perplexity; one of untrained layers, which may have dozens of digits, by its power of ten.

    >>> _in_few_digits(1234.567), _in_few_digits(2.5e17)
    ('1,234.57', '2.5e+17')
    """
    return f"{perplexity:,.2f}" if perplexity <= _LARGEST_PERPLEXITY_IN_FULL else f"{perplexity:.1e}"


def _forecasts(found: Suitability) -> Table:
    table = PlainTable(f"Softmax exits that keep {found.agreeing:.0%} of the tokens")
    table.add_numbers(
        "lowest layer\nthat may exit", "distance\nto the next", "threshold", "layers\na token", "operations"
    )
    for each in found.exits:
        threshold = "never exit" if each.threshold is None else f"{each.threshold:.2f}"
        table.add_row(
            str(each.min_exit_layer), str(each.exit_interval), threshold, f"{each.layers:.2f}", f"{each.work:.0%}"
        )
    return table
