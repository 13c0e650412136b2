"""The report of a certification: one HTML file, of manifest and risk table."""

from collections.abc import Sequence

from calm_beam.calibration.certification import SettingRow
from calm_beam.calibration.result import read_risk_table
from calm_beam.manifest import (
    MANIFEST,
    SettingCalibration,
    SettingManifest,
    SettingStep,
    alone_in_words,
    clusters_in_words,
    more_may_do_in_words,
    not_proved_in_words,
    p_value_beside,
    plans_in_words,
    read_setting_manifest,
    rounds_in_words,
    too_few_in_words,
)
from calm_beam.manifest.files import RISK_TABLE
from calm_beam.storage import joined
from calm_beam.text import counted, printable_line

from .document import (
    Cell,
    Section,
    details,
    isolated,
    number,
    scrolled,
    sentence,
    short_place,
    software_fact,
    table,
    time_in_words,
)
from .plain import Panel, PlainPage, capital_text, proof_chart, verdict
from .stored import ReportError

# Of more, the last of them.
_MOST_LOOKS = 1000
_FILLED = {True: "the setting was proved by then", False: "never here, since nothing was proved"}
_CONDITION = (
    "A promise holds for examples drawn independently from the distribution that the examples of the sweep were drawn "
    "from. Nothing is assumed about what was swept. An order or an entry that was chosen after looking at the losses, "
    "drift, and copies of examples that were added to the sweep void it."
)


def build_setting_page(directory: str) -> str:
    """Returns the page of a certification, of at most `LARGEST_PAGE` bytes.

    Args:
      directory: What the certification was written into.

    Raises:
      ManifestError: If the manifest cannot be trusted.
      ReportError: If the risk table is not that of the manifest, or the page would be larger.
      OSError: If a file is missing or cannot be read.
    """
    manifest = read_setting_manifest(joined(directory, MANIFEST))
    tests = _tests(joined(directory, RISK_TABLE), manifest)
    pairs = zip(manifest.calibrations, tests, strict=True)
    # The first promise that found a setting, as on pages of thresholds.
    (entry, rows), *others = sorted(pairs, key=lambda pair: pair[0].setting is None)
    return PlainPage(
        kind="certification report",
        title=_of_what(manifest),
        made=time_in_words(manifest.created),
        promise=promise_html(entry, manifest),
        cautions=setting_cautions(manifest),
        condition=_CONDITION,
        risks="Risk of every setting",
        lead=_lead(entry, manifest),
        costs="cost",
        first=_panel(entry, rows),
        proof=_proof(entry, manifest),
        together=_together(manifest),
        panels=[_panel(*pair) for pair in others],
        entries=_entries(manifest),
        every="Every setting under every test",
        numbers=_numbers(tests),
        about="What was certified",
        facts=_facts(manifest),
        fewer="Certify with fewer entries.",
    ).text()


def _tests(path: str, manifest: SettingManifest) -> list[tuple[SettingRow, ...]]:
    """Returns for each entry the lines of the risk table, which have to be those of the manifest."""
    try:
        rows = read_risk_table(path, SettingRow)
    except ValueError as error:
        raise ReportError(str(error)) from error
    size = len(manifest.plan.order)
    tests = [rows[start : start + size] for start in range(0, len(rows), size)]
    is_of_manifest = len(rows) == size * len(manifest.calibrations) and all(
        tuple(SettingStep.of(row) for row in of_test if row.tested) == entry.path
        and all((row.group, row.delta, row.tail) == (entry.group or "", entry.delta, entry.tail) for row in of_test)
        for of_test, entry in zip(tests, manifest.calibrations, strict=True)
    )
    if not is_of_manifest:
        raise ReportError(
            f"{path}: is not the risk table of the manifest next to it. Both are written by the same run: restore "
            "them, or certify again."
        )
    return tests


def promise_html(entry: SettingCalibration, manifest: SettingManifest) -> str:
    """Returns a promise with all its numbers, in a sentence."""
    units = _units(entry, manifest)
    # The parts before the words of either sentence, where it is about a group.
    whose = () if entry.group is None else ("For examples of group ", entry.group)
    sure = f"{100 * (1 - manifest.stated_error_of(entry)):.6g} %"
    per_cluster = "" if manifest.data.clusters is None else "per cluster "
    verb = "lose"
    bound: tuple[str, ...] = (f" {per_cluster}in expectation at most ", f"{entry.delta:g}")
    if entry.tail is not None:
        lose = f" of examples {per_cluster}lose more than "
        verb = "make"
        bound = (" at most ", f"{100 * entry.delta:.6g} %", lose, f"{entry.tail:g}")
    if entry.setting is None:
        why = f" was proved safe: from {units}, none was proved, with probability at least "
        none = (*whose, ", ", "no setting") if whose else ("", "No setting")
        return sentence(*none, why, sure, f", to {verb}{bound[0]}", *bound[1:], ".", warns=True)
    cost = () if entry.cost is None else (", at cost ", f"{entry.cost:g}")
    drawn = f" over the draw of the {units}, setting "
    begin = (*whose, ", with probability at least ") if whose else ("With probability at least ",)
    return sentence(*begin, sure, drawn, entry.setting, f" {verb}s{bound[0]}", *bound[1:], *cost, ".")


def setting_cautions(manifest: SettingManifest) -> tuple[str, ...]:
    """Returns what a reader has to know before the promises."""
    found = (
        plans_in_words(manifest.earlier_plans, of="losses"),
        clusters_in_words(manifest),
        too_few_in_words(manifest.calibrations, manifest.data.units),
    )
    return tuple(text for text in found if text)


def _units(entry: SettingCalibration, manifest: SettingManifest) -> str:
    n = manifest.data.units_of(entry.group) or 0
    group = "" if entry.group is None else " of the group"
    return f"{counted(n, 'example' if manifest.data.clusters is None else 'cluster')}{group}"


def _of_what(manifest: SettingManifest) -> str:
    plan = manifest.plan
    return plan.task or plan.metric or short_place(manifest.data.patterns[0] if manifest.data.patterns else "a sweep")


def _lead(entry: SettingCalibration, manifest: SettingManifest) -> str:
    kind = "Mean loss" if entry.tail is None else f"Share of examples that lose more than {entry.tail:g}"
    if manifest.plan.baseline is not None:
        kind += f", compared with {isolated(manifest.plan.baseline)},"
    first, last = entry.path[0], entry.path[-1]
    went = f"{entry.procedure} went from {isolated(first.setting)} to {isolated(last.setting)}"
    if first is last:
        went = f"{entry.procedure} tested only {isolated(first.setting)}"
    if entry.procedure == "fixed_sequence" and not last.rejected:
        went += f", which {not_proved_in_words(last.p_value, entry.path_level)}"
    # The page opens with an entry that found a setting if there is one; the others follow further down.
    more = " ".join(more_may_do_in_words(entry, manifest).split())
    return f"{kind} in testing order, the safest setting first. {went}. Tested by {entry.p_value}. {more}".rstrip()


def _proof(entry: SettingCalibration, manifest: SettingManifest) -> Section | None:
    """Returns the section about rounds; None where all examples were looked at once."""
    if entry.looks is None:
        return None
    followed = entry.path[0].setting if entry.setting is None else entry.setting
    lead = (
        f"{rounds_in_words(manifest)} Capital is what a bettor against “the risk of {isolated(followed)} "
        "exceeds δ” would have made of 1. If that were true, it would come to 1 / ε with probability at most ε, so a "
        f"capital of 1 / ε proves the setting, at whatever round. Filled: {_FILLED[entry.setting is not None]}."
    )
    numbers = table(
        ("round", "counted", "proved", "cost", "risk", "capital"),
        [
            (
                Cell(str(place), place),
                number(look.n, ",d"),
                "nothing" if look.setting is None else look.setting,
                number(look.cost, "g"),
                number(look.risk, ".4f"),
                Cell(capital_text(look), look.log_capital),
            )
            for place, look in enumerate(entry.looks[-_MOST_LOOKS:], start=max(1, len(entry.looks) - _MOST_LOOKS + 1))
        ],
        label="Table of all rounds",
    )
    chart = scrolled(proof_chart(entry), label="Drawing of the proof", kind="wide")
    return Section(
        title="The proof, round by round",
        lead=printable_line(lead),
        content=chart + details("All numbers", numbers),
    )


def _together(manifest: SettingManifest) -> str:
    entries = len(manifest.calibrations)
    joint = manifest.plan.joint_epsilon
    if entries == 1:
        return "The manifest has one promise."
    of_groups = ""
    if manifest.data.groups:
        of_groups = (
            " A promise for a group is about examples drawn from that group alone; one for all examples together may "
            "be broken for some of the groups."
        )
    proved = sum(entry.setting is not None for entry in manifest.calibrations)
    found = f"{proved} of {entries} promises proved."
    if joint is not None:
        return f"{found} With probability at least {100 * (1 - joint):.6g} %, all that were proved hold.{of_groups}"
    return f"{found} {alone_in_words(entries)}{of_groups}"


def _panel(entry: SettingCalibration, rows: Sequence[SettingRow]) -> Panel:
    found = "none is safe" if entry.setting is None else isolated(entry.setting)
    last = entry.path[-1]
    why, level = "", entry.path_level
    if entry.procedure == "fixed_sequence" and not last.rejected:
        why = f"{isolated(last.setting)}: p = {p_value_beside(last.p_value, level)} > ε = {level:.4g}"
    return Panel(found=found, about=_about(entry), why=why, tested=rows, chosen=entry.setting)


def _about(entry: SettingCalibration) -> str:
    return f"{_group(entry)}, δ = {entry.delta:g}, ε = {entry.epsilon:.4g}"


def _group(entry: SettingCalibration) -> str:
    group = "all examples" if entry.group is None else isolated(entry.group)
    return group if entry.tail is None else f"{group}, share that loses more than {entry.tail:g}"


def _entries(manifest: SettingManifest) -> str:
    # Without costs there is no column of them.
    costs = ("cost",) * any(entry.cost is not None for entry in manifest.calibrations)
    names = ("promise", "setting", *costs, "risk", "δ", "ε", "p-value", "first not proved")
    rows: list[Sequence[str | Cell]] = []
    for entry in manifest.calibrations:
        last = entry.path[-1]
        failed = "none: end of order" if last.rejected or entry.procedure != "fixed_sequence" else last.setting
        rows.append(
            (
                _group(entry),
                "none is safe" if entry.setting is None else entry.setting,
                *(number(entry.cost, "g") for _ in costs),
                number(entry.risk, ".4f"),
                number(entry.delta, "g"),
                number(entry.promised_epsilon),
                entry.p_value,
                failed,
            )
        )
    return table(names, rows, label="Table of all promises")


def _numbers(tests: Sequence[Sequence[SettingRow]]) -> str:
    costs = ("cost",) * any(row.cost is not None for of_test in tests for row in of_test)
    names = ("group", "share above", "δ", "setting", "n", "risk", "p", "result", *costs)
    rows: list[Sequence[str | Cell]] = [
        (
            row.group or "all examples",
            number(row.tail, "g"),
            number(row.delta, "g"),
            row.setting,
            number(row.n, ",d"),
            number(row.risk, ".4f"),
            number(row.p_value, ".3g"),
            verdict(row),
            *(number(row.cost, "g") for _ in costs),
        )
        for of_test in tests
        for row in of_test
    ]
    return table(names, rows, label="Table of all numbers")


def _facts(manifest: SettingManifest) -> list[tuple[str, str]]:
    data, plan = manifest.data, manifest.plan
    clusters = "" if data.clusters is None else f" in {counted(data.clusters, 'cluster')}"
    facts = [
        ("Examples", f"{data.examples:,}{clusters}"),
        ("Losses of", ", ".join(map(short_place, data.patterns))),
    ]
    if plan.baseline is not None:
        facts.append(("Baseline", short_place(plan.baseline)))
    better = None if plan.direction is None else f"a {plan.direction} score"
    for name, value in (
        ("Task", plan.task),
        ("Metric", plan.metric),
        ("Better", better),
        ("Consistency", plan.consistency),
        ("Decoded elsewhere, by", None if manifest.decoder is None else manifest.decoder.name),
        ("Without an answer", None if manifest.decoder is None else f"{manifest.decoder.failed:,}"),
        ("Groups by", plan.group_key),
    ):
        if value is not None:
            facts.append((name, value))
    if plan.cluster_key is not None:
        facts.append(("Clusters by", plan.cluster_key))
    return [
        *facts,
        ("Order", ", ".join(plan.order)),
        ("Fingerprint of the losses", data.fingerprint),
        ("Plan", plan.digest),
        ("Manifest", manifest.digest),
        software_fact(manifest.software),
    ]
