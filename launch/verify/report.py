"""The result of a test of promises, of either kind of manifest: its values, and what `calm-beam verify` prints of them.

With `--anytime`, what runs find together is kept next to the manifest, or where `--state` says.
"""

import dataclasses
import os
from typing import Any

from calm_beam.calibration.anytime import AnytimeEvidence, CarriedState
from calm_beam.calibration.verification import FreshLosses, Verdict
from calm_beam.launch.flags.shared_options import check_parent
from calm_beam.launch.terminal import PlainConsole, give, say, tell
from calm_beam.launch.terminal.lines import PlainTable
from calm_beam.launch.terminal.summary import delta_heading, delta_in_words, group_line, loss_in_words, variant_lines
from calm_beam.manifest import Calibration, Manifest, SettingCalibration, SettingManifest, unseen_in_words
from calm_beam.risk.rules import tail_in_words
from calm_beam.storage import exists, joined, parent
from calm_beam.text import counted, printable_line

from .request import STATE, Promises


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of a test of promises.

    Attributes:
      manifest: Whose promises they are.
      alpha: Chance of calling any of them broken that is kept.
      verdicts: On every promise that was tested; none where none is made.
      evidence: Of all runs, where they count together.
    """

    manifest: Manifest | SettingManifest
    alpha: float
    verdicts: tuple[Verdict[Any], ...] = ()
    evidence: AnytimeEvidence | None = None

    @property
    def is_broken(self) -> bool:
        """Whether a promise is proved broken."""
        return any(verdict.is_broken for verdict in self.verdicts)

    def __str__(self) -> str:
        """Returns the verdicts, a line for each promise that was tested."""
        tested = f"{counted(len(self.verdicts), 'promise')} tested at level {self.alpha:g}:"
        lines = (f"  {each.entry}; now {each.risk:.4f}: {_verdict_in_words(each)}" for each in self.verdicts)
        return "\n".join([tested, *lines])


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedThresholds(Verified):
    """The findings from fresh outputs of a model.

    Attributes:
      metrics: Those whose entries were asked for; None for all.
      fresh: The losses, of each way of decoding; none where there was nothing to test.
      others: Promises of other metrics, which were not tested.
    """

    manifest: Manifest
    verdicts: tuple[Verdict[Calibration], ...] = ()
    metrics: tuple[str, ...] | None = None
    fresh: tuple[FreshLosses, ...] = ()
    others: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedSettings(Verified):
    """The findings from fresh losses or scores.

    Attributes:
      examples: How many there were; 0 where there was nothing to test.
    """

    manifest: SettingManifest
    verdicts: tuple[Verdict[SettingCalibration], ...] = ()
    examples: int = 0


BROKEN = 3
"""Exit status if a promise is broken."""

_P_VALUES = "p-values: a small one of kept proves the promise again, a small one of broken proves it broken."


def tell_thresholds(done: VerifiedThresholds) -> int:
    """Tells what fresh outputs have said, and returns the exit status of the command."""
    if not done.fresh:
        of_them = "" if done.metrics is None else f" of {', '.join(done.metrics)}"
        tell(f"Every entry of the manifest{of_them} says never exit: there is nothing that could be broken.")
        _give(done)
        return 0
    console = PlainConsole()
    epsilons = {verdict.entry.epsilon for verdict in done.verdicts}
    metrics = {verdict.entry.metric for verdict in done.verdicts}
    is_one = len(metrics) == 1
    caption = f"Metric: {printable_line(metrics.pop())}. {_P_VALUES}" if is_one else _P_VALUES
    status = _conclude(done, console)
    table = PlainTable("The manifest's entries on fresh data", caption=caption, caption_justify="left")
    table.add_column("consis-\ntency" if is_one else "consistency\nmetric", overflow="fold")
    table.add_numbers(delta_heading(epsilons), "threshold", "risk", "p-values", "verdict")
    for verdict in done.verdicts:
        entry = verdict.entry
        table.add_row(
            f"{group_line(entry)}"
            f"{entry.consistency}{' (relu)' if entry.known_loss == 'relu' else ''}{tail_in_words(entry.known_loss)}"
            + ("" if is_one else f"\n{printable_line(entry.metric)}"),
            delta_in_words(entry.delta, entry.epsilon, of=epsilons),
            f"{entry.threshold:g}{variant_lines(entry.variant)}",
            *_found(verdict),
        )
    console.print(table)
    console.print(_examples_in_words(done))
    for each in done.fresh:
        if each.unseen:
            console.print(printable_line(unseen_in_words([found.record() for found in each.unseen])))
    if done.others:
        others = done.others
        console.print(f"{counted(others, 'promise')} of other metrics {'was' if others == 1 else 'were'} not tested.")
    return status


def tell_settings(done: VerifiedSettings) -> int:
    """Tells what fresh losses or scores have said, and returns the exit status of the command."""
    if not done.examples:
        tell("No entry of the manifest found a safe setting: there is nothing that could be broken.")
        _give(done)
        return 0
    console = PlainConsole()
    status = _conclude(done, console)
    epsilons = {verdict.entry.epsilon for verdict in done.verdicts}
    table = PlainTable("The manifest's entries on fresh losses", caption=_P_VALUES, caption_justify="left")
    table.add_column("group\nloss", overflow="fold")
    table.add_column("setting", overflow="fold")
    table.add_numbers(delta_heading(epsilons), "risk", "p-values", "verdict")
    for verdict in done.verdicts:
        entry = verdict.entry
        table.add_row(
            f"{'all' if entry.group is None else printable_line(entry.group)}\n{loss_in_words(entry)}",
            printable_line(entry.setting or ""),
            delta_in_words(entry.delta, entry.epsilon, of=epsilons),
            *_found(verdict),
        )
    console.print(table)
    none = len(done.manifest.calibrations) - len(done.verdicts)
    console.print(f"{counted(done.examples, 'fresh example')}; {none} of the manifest's entries found no safe setting.")
    return status


def _found(verdict: Verdict[Any]) -> tuple[str, str, str]:
    """Returns what was found out about a promise, as the cells of a table."""
    return (
        f"then {verdict.entry.risk:.4f}\nnow {verdict.risk:.4f}",
        f"kept {verdict.p_value:.2g}\nbroken {verdict.excess_p_value:.2g}",
        _verdict_in_words(verdict),
    )


def _verdict_in_words(verdict: Verdict[Any]) -> str:
    if verdict.is_broken:
        return "BROKEN"
    return "proved again" if verdict.is_proved_again else "not contradicted"


def _examples_in_words(done: VerifiedThresholds) -> str:
    """Returns how much was decoded, what failed, and which entries need no test."""
    losses, manifest = done.fresh[0], done.manifest
    is_clustered = manifest.plan is not None and manifest.plan.cluster_key is not None
    units = counted(len(losses.table), "cluster") if is_clustered else counted(losses.examples, "example")
    if manifest.confirmation is not None:
        units += ", decoded by the decoder that serves"
    failed = max(each.failed for each in done.fresh)
    never = sum(entry.threshold is None for entry in manifest.calibrations)
    return f"{units}, {failed} failed; {never} of the manifest's entries {'says' if never == 1 else 'say'} never exit."


def _conclude(done: Verified, console: PlainConsole) -> int:
    """Prints how many promises are broken, or proved again, and returns the exit status."""
    verdicts, evidence = done.verdicts, done.evidence
    _give(done)
    runs = "" if evidence is None else f" of {counted(evidence.runs, 'run')} together"
    scope = "" if evidence is None else ", over all runs with --anytime, those to come as well,"
    broken = sum(verdict.is_broken for verdict in verdicts)
    if broken:
        again = "Certify" if isinstance(done, VerifiedSettings) else "Calibrate"
        console.print(
            f"{broken} of {counted(len(verdicts), 'promise')} {'is' if broken == 1 else 'are'} BROKEN: the fresh "
            f"losses{runs} prove that the risk exceeds delta. If all were kept, the chance of such a finding{scope} "
            f"would be at most {done.alpha:g}. {again} again."
        )
    else:
        proved = sum(verdict.is_proved_again for verdict in verdicts)
        console.print(
            f"No promise is found broken at level {done.alpha:g}{scope.removesuffix(',')}; {proved} of {len(verdicts)} "
            f"{'is' if proved == 1 else 'are'} proved again, each "
            "at its own epsilon."
        )
    if evidence is not None:
        units = max(of_promise.n for of_promise in evidence.promises)
        console.print(f"{counted(evidence.runs, 'run')} with --anytime, {units} losses of a promise at most.")
    return BROKEN if done.is_broken else 0


def _give(done: Verified) -> None:
    """Gives the result to other programs."""
    calibrations = done.manifest.calibrations
    verdicts = [
        {
            "calibration": calibrations.index(verdict.entry),
            # Without the tests that led there, and the thresholds that a schedule computes.
            **{name: value for name, value in verdict.entry.to_dict().items() if not isinstance(value, list)},
            "risk": verdict.risk,
            "risk_then": verdict.entry.risk,
            "p_proved": verdict.p_value,
            "p_broken": verdict.excess_p_value,
            "is_proved_again": verdict.is_proved_again,
            "is_broken": verdict.is_broken,
        }
        for verdict in done.verdicts
    ]
    give({"manifest": done.manifest.digest, "alpha": done.alpha, "is_broken": done.is_broken, "verdicts": verdicts})


def take_up(request: Promises, path: str, *, manifest: str, promises: int) -> CarriedState | None:
    """Returns the state to go on with; None for a run by itself, and then says if there is a state.

    Args:
      request: Says whether runs count together, and where that is kept.
      path: Of the manifest.
      manifest: Its digest.
      promises: How many of its entries promise something.

    Raises:
      StateError: As `CarriedState`.
      UsageError: As `CarriedState`.
    """
    beside = joined(parent(path), STATE)
    if request.anytime:
        place = beside if request.state is None else os.fspath(request.state)
        check_parent("--state", place)
        return CarriedState(place, manifest=manifest, promises=promises, alpha=request.alpha)
    if exists(beside):
        say(
            f"{beside} keeps what earlier runs with --anytime have found. This run is not among them, and its alpha is "
            "for itself alone: of many such runs, more than a share alpha calls a promise broken that is kept"
        )
    return None
