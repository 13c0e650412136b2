"""What a certification found, as tables on the terminal."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from calm_beam.manifest import (
    SettingCalibration,
    SettingManifest,
    clusters_in_words,
    plans_in_words,
    rounds_in_words,
)
from calm_beam.text import counted, printable_line

from . import PlainConsole
from .tables import PlainTable

if TYPE_CHECKING:
    # Not there where one only serves and inspects.
    from calm_beam.calibration.settings import SettingRow

_TESTS_PER_TABLE = 4


def print_certification(manifest: SettingManifest, rows: "Sequence[Sequence[SettingRow]]") -> None:
    """Prints the risk of every setting, the chosen settings, and what they promise."""
    console = PlainConsole()
    console.print(headline_of_settings(manifest))
    for table in _risk_tables(rows):
        console.print(table)
    print_choices(console, manifest)
    if plans := plans_in_words(manifest.earlier_plans, of="losses"):
        console.print(plans)
    console.print(printable_line(manifest.guarantee))


def print_choices(console: Console, manifest: SettingManifest) -> None:
    """Prints the chosen settings, their tests, and what rounds and clusters say of them."""
    console.print(_choices(manifest))
    console.print(_tests(manifest))
    if rounds := rounds_in_words(manifest):
        console.print(printable_line(rounds))
    if per_cluster := clusters_in_words(manifest):
        console.print(per_cluster)


def headline_of_settings(manifest: SettingManifest) -> str:
    """Returns what was proved of which settings, in a sentence."""
    entries = manifest.calibrations
    kept = [entry for entry in entries if entry.setting is not None]
    joint = manifest.plan.joint_epsilon
    sure = 1 - (joint or max(map(manifest.error_of, entries)))
    how = "with" if len(entries) == 1 else "each with" if joint is None else "all together with"
    probability = f"{how} probability at least {100 * sure:.6g} %"
    if not kept:
        return f"No setting could be proved safe, {probability}."
    named = "; ".join(
        f"{'' if entry.group is None else f'group {entry.group}: '}{entry.setting} loses at most {entry.delta:g}"
        for entry in kept
    )
    if len(entries) == 1:
        return printable_line(f"Proved, {probability}: {named}.")
    return printable_line(f"{len(kept)} of {counted(len(entries), 'promise')} proved, {probability}: {named}.")


def _risk_tables(rows: "Sequence[Sequence[SettingRow]]") -> list[Table]:
    """Returns tables of risks, one line a setting; a column for each group and loss, whatever delta and epsilon."""
    by_loss = {(of_test[0].group, of_test[0].tail): of_test for of_test in reversed(rows)}
    columns = list(reversed(by_loss.items()))
    tables: list[Table] = []
    for start in range(0, len(columns), _TESTS_PER_TABLE):
        part = columns[start : start + _TESTS_PER_TABLE]
        table = PlainTable("Mean loss by setting")
        table.add_column("setting", overflow="fold")
        has_costs = any(row.cost is not None for row in rows[0])
        if has_costs:
            table.add_numbers("cost")
        for (group, tail), _ in part:
            name = printable_line(group) or "all"
            table.add_column(name if tail is None else f"{name}\nshare > {tail:g}", justify="right", overflow="fold")
        for lines in zip(*(of_test for _, of_test in part), strict=True):
            table.add_row(
                printable_line(lines[0].setting),
                *((_cost(lines[0].cost),) if has_costs else ()),
                *(f"{row.risk:.4f}" for row in lines),
            )
        tables.append(table)
    return tables


def _choices(manifest: SettingManifest) -> Table:
    """Returns the table of chosen settings, one line per calibration."""
    title = "Last setting proved to lose at most delta"
    errors = set(map(manifest.error_of, manifest.calibrations))
    if len(errors) == 1:
        title += f" (probability {100 * (1 - min(errors)):.6g} %)"
    table = PlainTable(title, caption_justify="left")
    if any(entry.tail is not None for entry in manifest.calibrations):
        table.caption = "> is about the share of examples that lose more: delta and mean loss are shares."
    table.add_column("group", overflow="fold")
    table.add_column("loss", no_wrap=True)
    table.add_numbers(delta_heading(errors))
    table.add_column("setting", overflow="fold")
    for name in ("cost", "mean\nloss" if manifest.data.clusters is None else "loss per\ncluster", "first not\nproved"):
        table.add_column(name, justify="right", overflow="fold")
    for entry in manifest.calibrations:
        table.add_row(
            "all" if entry.group is None else printable_line(entry.group),
            loss_in_words(entry),
            delta_in_words(entry.delta, manifest.error_of(entry), of=errors),
            "none is safe" if entry.setting is None else printable_line(entry.setting),
            _cost(entry.cost),
            "" if entry.risk is None else f"{entry.risk:.4f}",
            _end_of_test(entry),
        )
    return table


def delta_heading(errors: Collection[float]) -> str:
    """Returns the head of the column of `delta_in_words`; `errors` are all that the column may have."""
    return "delta" if len(errors) == 1 else "delta\nepsilon"


def delta_in_words(delta: float, error: float, *, of: Collection[float]) -> str:
    """Returns a tolerance, with the chance that it is exceeded unless that is the same of all, which are in `of`."""
    return f"{delta:g}" if len(of) == 1 else f"{delta:g}\n{error:g}"


def loss_in_words(entry: SettingCalibration) -> str:
    """Returns which loss an entry is about."""
    return entry.loss if entry.tail is None else f"{entry.loss} > {entry.tail:g}"


def _tests(manifest: SettingManifest) -> str:
    """Returns how settings were tested."""
    tests = dict.fromkeys(f"{loss_in_words(entry)} by {entry.p_value}" for entry in manifest.calibrations)
    procedures = dict.fromkeys(entry.procedure for entry in manifest.calibrations)
    order = ", ".join(map(printable_line, manifest.plan.order))
    return f"Tests: {'; '.join(tests)}. Procedure: {', '.join(procedures)}. Order: {order}."


def _cost(cost: float | None) -> str:
    return "" if cost is None else f"{cost:g}"


def _end_of_test(entry: SettingCalibration) -> str:
    """Returns the setting at which testing ended, and its p-value if that was too high."""
    last = entry.path[-1]
    if entry.procedure != "fixed_sequence" or last.rejected:
        return "end of order"
    return f"{printable_line(last.setting)} (p = {last.p_value:.2g})"
