"""What the losses so far show, in words."""

from calm_beam.risk.monitor import RiskMonitor
from calm_beam.text import counted

from .prepare import Watched


def report(monitor: RiskMonitor, entry: Watched) -> str:
    """Returns what a monitor has found of an entry."""
    watched = f"{entry.words}: {counted(monitor.n, 'loss', several='losses')}"
    if monitor.missing:
        watched += f", {monitor.missing} of them missing"
    if monitor.mean_loss is not None:
        watched += f", mean {monitor.mean_loss:.4f}"
    lowest = "-1" if monitor.is_signed else "0"
    if monitor.alarm_at:
        whatever = f", even if each missing one is {lowest}" if monitor.missing else ""
        return (
            f"{watched}.\nALARM at loss {monitor.alarm_at}: the losses show that the risk exceeds delta "
            f"{monitor.delta:g}{whatever}. If it never had, the chance of this would be at most {monitor.alpha:g}. "
            f"{entry.remedy}"
        )
    raised = f"{1 / monitor.alpha:g}"
    if monitor.missing_alarm_at:
        return (
            f"{watched}.\nALARM at loss {monitor.missing_alarm_at}: the risk exceeds delta {monitor.delta:g}, or "
            f"losses are missing. With each missing one counted as 1 the evidence has reached {raised}; with each "
            f"counted as {lowest} it stands at {monitor.capital:.3g}, which does not prove that the risk exceeds "
            "delta. Find out why losses are missing, and test labelled data with calm-beam verify."
        )
    worst = f" ({monitor.worst_capital:.3g} with each missing loss counted as 1)" if monitor.missing else ""
    return f"{watched}.\nNo alarm: the evidence stands at {monitor.capital:.3g}{worst}; {raised} raises it."
