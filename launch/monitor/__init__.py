"""`calm-beam monitor`: watches the losses of a model in service, and raises an alarm when they show a broken bound.

    calm-beam monitor --manifest=calibration --losses=losses.txt --state=monitor.json --alpha=0.05

One loss per line, measured on served prompts as the calibration measured it: a number, the word `missing` for a loss
that could not be measured, or a row that `calm_beam.serving.LossProbe` wrote, whose loss is missing if it has a
`failure`. With `--losses=-` they are taken from standard input as they come, and the command ends at an alarm.
`--state` keeps what was learnt from one call to the next: give every loss once.

There are two alarms, and each is right in what it says but with a chance of alpha:

* the risk exceeds delta (status 3). Missing losses count as the lowest loss there is.
* the risk exceeds delta, or losses are missing (status 4). Missing losses count as 1. If labels never come, this alarm
  tells just that. With `--state`, another call goes on until the first alarm.

As long as the expected next loss, given all losses before it, is at most delta, the chance that the first alarm is ever
raised is at most alpha, however long the stream is and however often it is looked at. Independent prompts whose risk is
at most delta are such a stream. Losses that come in clusters, such as questions on one text, are not:
give the mean loss of each cluster, as the calibration with `--cluster_key` took it. Which prompts are measured must not
depend on their losses.

Exit status: 0 no alarm, 1 failure, 2 bad usage, 3 the risk exceeds delta, 4 it does or losses are missing,
130 interrupted (with `--losses=-`, after the state was kept).
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parsed, request_parser
from calm_beam.launch.flags.results import with_result

from .command import watch
from .request import MonitorRequest

_ESSENTIALS = ("--manifest", "--losses", "--alpha", "--state", "--delta", "--consistency", "--metric")


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (with_result(request_parser("monitor", MonitorRequest, doc=__doc__, essentials=_ESSENTIALS)),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    return watch(parsed(MonitorRequest, argv, parser=parser))
