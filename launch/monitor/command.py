"""What `calm-beam monitor` does once its flags are parsed: take in the losses, and tell what they show."""

import io
import sys

from calm_beam.errors import CalmBeamError
from calm_beam.launch.terminal import give, tell
from calm_beam.launch.terminal.interrupts import INTERRUPTED
from calm_beam.serving.watched import MonitorError, read_losses, shown_in_words
from calm_beam.storage import open_input

from .prepare import prepare
from .request import STREAM, MonitorRequest
from .session import Session

ALARM = 3
MISSING_ALARM = 4


def watch(request: MonitorRequest) -> int:
    """Holds losses against a promise, tells what they show, and returns the exit status of the command."""
    watched = prepare(request)
    session = Session(watched, request)
    try:
        if request.losses == STREAM:
            session.follow(read_losses(sys.stdin, "standard input", watched=watched))
        else:
            with open_input(request.losses) as raw, io.TextIOWrapper(raw, "utf-8", errors="surrogateescape") as file:
                session.take(list(read_losses(file, request.losses, watched=watched)))
    except KeyboardInterrupt:
        tell(shown_in_words(session.monitor, watched))
        return INTERRUPTED
    except CalmBeamError:
        raise
    except ValueError as error:
        raise MonitorError(str(error)) from error
    monitor = session.monitor
    tell(shown_in_words(monitor, watched))
    give(
        {
            "promise": watched.promise,
            "losses": monitor.n,
            "missing": monitor.missing,
            "mean_loss": monitor.mean_loss,
            "alpha": monitor.alpha,
            "capital": monitor.capital,
            "worst_capital": monitor.worst_capital,
            "alarm_at": monitor.alarm_at,
            "missing_alarm_at": monitor.missing_alarm_at,
        }
    )
    if session.monitor.alarm_at:
        return ALARM
    return MISSING_ALARM if session.monitor.missing_alarm_at else 0
