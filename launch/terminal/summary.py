"""Tables on the terminal: what a calibration or a certification found."""

import itertools
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from calm_beam.manifest import (
    EACH_VARIANT,
    MANIFEST,
    OF_VARIANTS,
    Calibration,
    Manifest,
    PathEntry,
    SettingCalibration,
    SettingManifest,
    Variant,
    alone_in_words,
    asked_late_in_words,
    clusters_in_words,
    confirmation_in_words,
    confirming_in_words,
    engine_in_words,
    flaws_in_words,
    has_too_few,
    measured_speeds,
    more_may_do_in_words,
    near_ties_in_words,
    plans_in_words,
    repeats_in_words,
    rounds_in_words,
    served_in_words,
    speed_in_words,
    together_in_batch,
    too_few_in_words,
    unseen_in_words,
    without_keys,
)
from calm_beam.risk.rules import split_tail, tail_in_words
from calm_beam.storage import joined
from calm_beam.text import counted, printable_line

from . import PlainConsole
from .lines import PlainTable, tell

if TYPE_CHECKING:
    # Not there where one only serves and inspects.
    from calm_beam.calibration.certification import SettingRow


_OBJECTIVES_PER_TABLE = 3
# Groups or variants whose mean losses are shown after the first; further ones are in the risk table.
_MOST_PARTS = 5


def print_summary(
    manifest: Manifest,
    output: str,
    *,
    seconds: float | None,
    operations: Sequence[float | None] = (),
    remarks: Iterable[str] = (),
    verbose: bool = False,
) -> None:
    """Prints what is promised and what that saves, the chosen thresholds, and what has to be known of them.

    Args:
      manifest: The result.
      output: Directory that holds it and the risk table.
      seconds: How long the command has taken, loading and timing included; None if it had nothing left to do.
      operations: For each entry what decoding takes of the full model's operations; None where nobody counted them.
      remarks: What else there is to say about what was chosen.
      verbose: Whether the mean loss at every threshold is shown too, and how was tested.
    """
    console = PlainConsole()
    console.print(headline(manifest, operations))
    console.print(f"Manifest: {joined(output, MANIFEST)}", soft_wrap=True)
    for line in speed_lines(manifest, said=_said_first(manifest)):
        console.print(line)
    if verbose:
        for table in _all_trade_offs(manifest, output):
            console.print(table)
    console.print(choices_table(manifest, operations))
    lines = _details(manifest) if verbose else ()
    found = (
        *_ways_to_go_on(manifest),
        *confirmation_lines(manifest),
        *remarks,
        *_what_was_counted(manifest, seconds=seconds),
    )
    for line in (*found, *lines):
        console.print(line)


def _said_first(manifest: Manifest) -> Calibration | None:
    """Returns the promise that the headline is about; None if it is about several."""
    return manifest.served or (manifest.calibrations[0] if len(manifest.calibrations) == 1 else None)


def headline(manifest: Manifest, operations: Sequence[float | None] = ()) -> str:
    """Returns what is promised and what that saves in a sentence or two; arguments as of `choices_table`."""
    # Not above: calm-beam-serving, which does without this package, prints the tables.
    from calm_beam.report.promise import promise_in_words

    late = asked_late_in_words(manifest.earlier_plans)
    served = _said_first(manifest)
    if served is not None:
        shares = dict(zip(manifest.calibrations, operations, strict=False))
        share = shares.get(served)
        factors = None if share is None else (1 / share,)
        return printable_line(late + "".join(promise_in_words(served, manifest, factors=factors)))
    promises = counted(len(manifest.calibrations), "promise")
    epsilon = None if manifest.plan is None else manifest.plan.joint_epsilon
    how = "each with" if epsilon is None else "all together with"
    sure = max(map(manifest.stated_error_of, manifest.calibrations))
    probability = f"probability at least {100 * (1 - sure):.6g} %"
    kept = [entry for entry in manifest.calibrations if entry.threshold is not None]
    unpaid = sum(entry.pays is False for entry in manifest.calibrations)
    if not kept:
        what = f"None of {promises} could be proved"
        if unpaid:
            what = f"Nothing that is faster could be proved for any of {promises}"
        return f"{what} with {probability}: every token runs all layers, and nothing is saved."
    others = f" For {counted(unpaid, 'other')}, nothing that is faster was proved." if unpaid else ""
    depth = manifest.model.layers
    least, most = min(entry.layers for entry in kept), max(entry.layers for entry in kept)
    deltas = [entry.delta for entry in kept]
    tolerances = _from_to(f"{min(deltas):g}", f"{max(deltas):g}")
    loss = "loss" if any(entry.objective.tail is not None for entry in kept) else "expected loss"
    return (
        f"{late}{len(kept)} of {promises} proved, {how} {probability}: {loss} at most {tolerances}. At their "
        f"thresholds a token runs {_from_to(f'{least:.2f}', f'{most:.2f}')} of {depth} layers on average: "
        f"{_from_to(f'{1 - most / depth:.0%}', f'{1 - least / depth:.0%}')} fewer.{_speeds_in_words(manifest)}{others}"
    )


def _speeds_in_words(manifest: Manifest) -> str:
    """Returns a sentence on the range of measured speeds; empty if nothing was measured."""
    factors: dict[int, list[float]] = {}
    for speed in manifest.speeds or ():
        factors.setdefault(speed.batch, []).append(speed.factor)
    if not factors:
        return ""
    (first, among), *others = factors.items()
    more = [f"{_range_of(these)} {together_in_batch(batch)}" for batch, these in others]
    slower = ""
    if min(map(min, factors.values())) < 1:
        slower = "; below 1 is slower"
        if min(among) >= 1 and first == 1:
            slower += " (--objective=throughput chooses for batches)"
    return (
        f" On the machine that calibrated, {_range_of(among)} times as fast as the full model "
        f"{', '.join([together_in_batch(first), *more])}{slower}."
    )


def _range_of(factors: Sequence[float]) -> str:
    return _from_to(f"{min(factors):.2f}", f"{max(factors):.2f}")


def _from_to(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


# Thresholds that are safer than the first of usual grids.
_SAFER = (0.9999, 0.999, 0.99)


def _ways_to_go_on(manifest: Manifest) -> Iterator[str]:
    """Yields what to do about promises of which not even the safest threshold could be proved."""
    entries = [
        entry for entry in manifest.calibrations if entry.threshold is None and _begins_with_failure(entry, manifest)
    ]
    if not entries:
        return
    are_short = [has_too_few(entry, manifest.data.units, manifest.pareto) for entry in entries]
    if all(are_short):
        # Nothing else can help, and another line names how many are needed.
        return
    tested = [step for entry in entries for step in _steps_of_grid(entry, manifest)]
    first = max(step.threshold for step in tested)
    safer = [threshold for threshold in _SAFER if threshold > first]
    ways = []
    if any(are_short) or any(step.risk < entry.delta for entry in entries for step in _steps_of_grid(entry, manifest)):
        ways.append("more examples")
    if safer:
        grid = ",".join(f"{threshold:g}" for threshold in (*safer[-2:], first))
        ways.append(f"thresholds nearer to 1, such as --thresholds={grid}")
    ways.append("fine-tuning (calm-beam train)")
    promises = len(manifest.calibrations)
    which = "" if promises == 1 else f" for {len(entries)} of {counted(promises, 'promise')}"
    yield (
        f"Not even the safest threshold, {first:g}, could be proved{which}. What may help, on fresh examples: "
        f"{'; '.join(ways)}."
    )


def _begins_with_failure(entry: Calibration, manifest: Manifest) -> bool:
    """Returns whether every test of a promise failed at its first threshold; full depth is no exit."""
    steps = _steps_of_grid(entry, manifest)
    # A failed confirmation, and proved thresholds that do not pay, have other remedies.
    is_first = bool(steps) and not any(step.rejected for step in steps)
    return is_first and entry.chosen is None and not entry.has_proved_exits(manifest.model.layers)


def _steps_of_grid(entry: Calibration, manifest: Manifest) -> list[PathEntry]:
    """Returns the tests of an entry but those of static exits, whose thresholds are layers."""
    own = manifest.decode.confidence
    return [
        step for step in entry.path if (own if step.variant is None else step.variant.confidence or own) != "static"
    ]


def _all_trade_offs(manifest: Manifest, output: str) -> Iterator[Table | str]:
    """Yields the risk table of a run, in tables of a terminal's width, each of a group or a variant."""
    from calm_beam.calibration.result import read_cells
    from calm_beam.manifest.files import RISK_TABLE

    rows = [cells for _, cells in read_cells(joined(output, RISK_TABLE))]
    by_part: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_part.setdefault(_of_part(row), []).append(row)
    for of_part, rows_of_part in itertools.islice(by_part.items(), 1 + _MOST_PARTS):
        yield from _trade_offs(rows_of_part, manifest.model.layers, of_part=of_part)
    if (more := len(by_part) - 1 - _MOST_PARTS) > 0:
        kind = "group" if manifest.data.groups is not None else "variant"
        yield f"Mean losses of {counted(more, f'more {kind}')}: {RISK_TABLE}."


def _what_was_counted(manifest: Manifest, *, seconds: float | None) -> Iterator[str]:
    """Yields on which examples was tested, and what has to be known of them."""
    data = manifest.data
    if rounds := rounds_in_words(manifest):
        yield rounds
    clusters = "" if data.clusters is None else f" in {counted(data.clusters, 'cluster')}"
    took = "" if seconds is None else f" in {seconds:.0f} s"
    has_flaws = data.duplicates or data.truncated or data.failed
    flaws = flaws_in_words(data) if has_flaws else "none repeated, cut or failed"
    yield f"{counted(data.examples, 'example')}{clusters or groups_in_words(manifest)}{took}; {flaws}."
    for line in (unseen_in_words(data.unseen or ()), confirming_in_words(manifest)):
        if line:
            yield printable_line(line)
    confirmed = manifest.confirmation.data if manifest.confirmation is not None else None
    if data.failed or (confirmed and confirmed.failed):
        yield "Failed examples count with loss 1 at every threshold."
    if repeats := repeats_in_words(manifest):
        yield repeats
    if per_cluster := clusters_in_words(manifest):
        yield per_cluster
    if plans := plans_in_words(manifest.earlier_plans):
        yield plans
    if too_few := too_few_in_words(manifest.calibrations, data.units, manifest.pareto):
        yield too_few
    if served := served_in_words(manifest):
        yield printable_line(served)


def _details(manifest: Manifest) -> Iterator[str]:
    """Yields how was tested and by what decoded, and the promise word for word."""
    yield tests_in_words(manifest)
    yield printable_line(engine_in_words(manifest))
    if near_ties := near_ties_in_words(manifest):
        yield near_ties
    yield printable_line(without_keys(manifest.guarantee))


def _of_part(row: dict[str, str]) -> str:
    """Returns the words for the group or the variant that a row is about; nothing where there is one of both."""
    # Columns that say nothing are not there.
    if row.get("min_exit_layer"):
        variant = Variant(
            tau=float(row["tau"]) if row["tau"] else None,
            min_exit_layer=int(row["min_exit_layer"]),
            confidence=row.get("confidence") or None,
            exit_interval=int(row["exit_interval"]) if row.get("exit_interval") else None,
        )
        return f", {variant.in_words()}"
    group = row.get("group")
    return f", group {printable_line(group)}" if group else ""


def _trade_offs(rows: list[dict[str, str]], num_layers: int, *, of_part: str) -> Iterator[Table]:
    """Yields tables of layers and risks, each of so many objectives that it fits into 80 columns."""
    title = f"Mean loss at every threshold{of_part}"
    objectives = list(dict.fromkeys(_objective(row) for row in rows))
    for start in range(0, len(objectives), _OBJECTIVES_PER_TABLE):
        some = objectives[start : start + _OBJECTIVES_PER_TABLE]
        yield _trade_off(rows, some, num_layers=num_layers, title=title)


def _objective(row: dict[str, str]) -> tuple[str, str, str]:
    return row["consistency"], row["metric"], row["loss"]


def _trade_off(
    rows: list[dict[str, str]], objectives: list[tuple[str, str, str]], *, num_layers: int, title: str
) -> Table:
    """Returns the table of layers and the risks of some objectives, one line per threshold."""
    table = PlainTable(title)
    table.add_numbers("threshold", f"layers\nof {num_layers}")
    for consistency, metric, loss in objectives:
        # Names of imported metrics may be long.
        name = f"{consistency}{tail_in_words(loss)}\n{printable_line(metric)}"
        table.add_column(name, justify="right", overflow="fold")
    risks: dict[str, dict[tuple[str, str, str], str]] = {}
    layers: dict[str, str] = {}
    for row in rows:
        risks.setdefault(row["threshold"], {})[_objective(row)] = row["risk"]
        layers[row["threshold"]] = row["layers"]
    for threshold, by_objective in risks.items():
        cells = [f"{float(by_objective[objective]):.4f}" for objective in objectives]
        table.add_row(f"{float(threshold):g}", f"{float(layers[threshold]):.2f}", *cells)
    return table


def groups_in_words(manifest: Manifest) -> str:
    """Returns that the examples are of several groups, to be put behind their number; nothing where they are not."""
    groups = manifest.data.groups
    return "" if groups is None else f" of {counted(len(groups), 'group')}"


def choices_table(manifest: Manifest, operations: Sequence[float | None] = ()) -> Table:
    """Returns the table of chosen thresholds, one line per calibration.

    Values that all of them share are printed once, above or below.

    Args:
      manifest: Of the calibrations.
      operations: For each of them what decoding takes of the full model's operations; None where nobody counted them.
    """
    entries = manifest.calibrations
    has_variants = any(entry.procedure in OF_VARIANTS for entry in entries)
    naming = _Naming(manifest)
    what = "Cheapest variant and threshold" if has_variants else "Lowest threshold"
    sure = "1 - epsilon" if naming.has_epsilons else f"{100 * (1 - manifest.stated_error_of(entries[0])):.6g} %"
    table = PlainTable(f"{what} with expected loss <= delta (probability {sure})", caption_justify="left")
    # A line for each entry has to fit into 80 columns.
    table.collapse_padding = True
    counts = any(share is not None for share in operations)
    levels = [manifest.level_of(entry) for entry in entries]
    notes = list(_level_notes(manifest, levels))
    ways = _ways_in_letters(entries)
    exits = "; ".join(f"{letter} {variant.in_words()}" for variant, letter in ways.items())
    described = [f"Exits: {exits}."] if ways else []
    table.caption = " ".join([*described, *_captions(manifest, counts_operations=counts), *notes])
    naming.add_columns(table)
    for name in (
        "threshold",
        f"layers\nof {manifest.model.layers}",
        "layers\nsaved",
        *(("oper-\nations",) if counts else ()),
        "mean\nloss" if manifest.data.clusters is None else "loss per\ncluster",
        "first not\nproved",
    ):
        # Words give way where a terminal is narrow; numbers that are cut would be other numbers.
        is_words = name == "threshold" or (has_variants and name.startswith("first"))
        table.add_column(name, justify="right", no_wrap=not is_words, overflow="fold" if is_words else "ellipsis")
    for entry, share, level in itertools.zip_longest(entries, operations, levels):
        saved = 1 - entry.layers / manifest.model.layers
        table.add_row(
            *naming.cells(entry),
            _chosen(entry, ways),
            f"{entry.layers:.2f}",
            f"{saved:.0%}",
            *((_change_in_words(share, entry),) if counts else ()),
            f"{entry.risk:.4f}",
            _end_of_test(entry, ways=ways, level=level if notes and len(set(levels)) > 1 else None),
        )
    return table


class _Naming:
    """The columns that tell the promises of a manifest apart; a metric or an epsilon that all share has none.

    Attributes:
      has_epsilons: Whether the promises have several epsilons.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Looks for what the promises share."""
        self._manifest = manifest
        self._has_groups = manifest.data.groups is not None
        self._has_metrics = len({entry.metric for entry in manifest.calibrations}) > 1
        self.has_epsilons = len(set(map(manifest.stated_error_of, manifest.calibrations))) > 1

    def add_columns(self, table: Table) -> None:
        """Adds the columns to a table that has none yet."""
        name = "consistency\nmetric" if self._has_metrics else "consis-\ntency"
        table.add_column(f"group\n{name}" if self._has_groups else name, overflow="fold")
        table.add_column("delta\nepsilon" if self.has_epsilons else "delta", justify="right", no_wrap=True)

    def cells(self, entry: Calibration) -> tuple[str, str]:
        """Returns the cells of a promise."""
        whose = ("all prompts\n" if entry.group is None else group_line(entry)) if self._has_groups else ""
        metric = f"\n{printable_line(entry.metric)}" if self._has_metrics else ""
        epsilon = f"\n{self._manifest.error_of(entry):g}" if self.has_epsilons else ""
        return f"{whose}{entry.objective.consistency_in_words()}{metric}", f"{entry.delta:g}{epsilon}"


def _captions(manifest: Manifest, *, counts_operations: bool) -> Iterator[str]:
    """Yields notes that apply to all lines of the table."""
    metrics = dict.fromkeys(entry.metric for entry in manifest.calibrations)
    if len(metrics) == 1:
        yield f"Metric: {printable_line(next(iter(metrics)))}."
    if counts_operations:
        yield "Operations are compared with the full model's, exit tests included."
    if any(entry.objective.tail is not None for entry in manifest.calibrations):
        yield "> is about the share of outputs that lose more: delta and mean loss are shares."


def _level_notes(manifest: Manifest, levels: Sequence[float]) -> Iterator[str]:
    """Yields at which levels was tested, if not at the epsilon of the promises: without it, p-values look small."""
    plan = manifest.plan
    joint = None if plan is None else plan.joint_epsilon
    promised = list(map(manifest.stated_error_of, manifest.calibrations))
    if all(level >= epsilon for level, epsilon in zip(levels, promised, strict=True)):
        return
    sharing = []
    if plan is not None and plan.pareto is not None and plan.pareto.procedure == EACH_VARIANT:
        sharing.append(counted(len(plan.pareto.variants), "variant"))
    if joint is not None:
        sharing.append(counted(len(levels), "promise"))
    tested = _from_to(f"{min(levels):.3g}", f"{max(levels):.3g}")
    epsilon = _from_to(f"{min(promised):g}", f"{max(promised):g}")
    yield f"Tested at {tested}: {' of '.join(sharing)} share epsilon {epsilon}."


def _change_in_words(share: float | None, entry: Calibration) -> str:
    """Returns how many operations more or fewer there are than those of the full model."""
    if share is None:
        return "0%" if entry.threshold is None else ""
    return f"{share - 1:+.0%}"


def _chosen(entry: Calibration, ways: Mapping[Variant, str]) -> str:
    """Returns the lines of a table's cell that say which threshold is promised."""
    if entry.threshold is not None:
        return _in_letters(entry.threshold, entry.variant, ways)
    if entry.pays is False:
        return "never exit\nnothing pays"
    return "never exit" if entry.confirmation is None else "never exit\nnot confirmed"


def _ways_in_letters(entries: Sequence[Calibration]) -> dict[Variant, str]:
    """Returns the letter of each variant that was chosen or ended a test: below a table, each is described once."""
    found = dict.fromkeys(
        variant for entry in entries for variant in (entry.variant, entry.path[-1].variant) if variant is not None
    )
    return {variant: string.ascii_lowercase[place % 26] * (1 + place // 26) for place, variant in enumerate(found)}


def _in_letters(threshold: float, variant: Variant | None, ways: Mapping[Variant, str]) -> str:
    """Returns a threshold with the letter of its variant, if there is one."""
    return f"{threshold:g}" if variant is None else f"{threshold:g} {ways[variant]}"


def group_line(entry: Calibration) -> str:
    """Returns the line of a table's cell that names the group of an entry; nothing for one about all prompts."""
    return "" if entry.group is None else f"{printable_line(entry.group)}\n"


def variant_lines(variant: Variant | None) -> str:
    """Returns the lines of a table's cell that name a variant, to be put below its threshold; nothing for None."""
    return "" if variant is None else "\n" + variant.in_words().replace(", ", "\n").replace(" in steps", "\nin steps")


def tests_in_words(manifest: Manifest) -> str:
    """Returns which losses were tested, and how."""
    kinds = dict.fromkeys((entry.consistency, entry.loss, entry.p_value) for entry in manifest.calibrations)
    tests = "; ".join(
        f"{consistency} by {p_value}{'' if loss is None else f' of {_losses_in_words(loss)}'}"
        for consistency, loss, p_value in kinds
    )
    return f"Tests: {tests}. Procedure: {', '.join(dict.fromkeys(e.procedure for e in manifest.calibrations))}."


def _losses_in_words(name: str) -> str:
    loss, above = split_tail(name)
    return f"{loss} losses" if above is None else f"{loss} losses above {above:g}"


def confirmation_lines(manifest: Manifest) -> list[str]:
    """Returns for each entry what was chosen, and whether that was confirmed; none where nothing was to be."""
    lines = []
    for entry in manifest.calibrations:
        if words := confirmation_in_words(entry):
            group = "" if entry.group is None else f"group {printable_line(entry.group)}, "
            promise = f"{entry.objective.consistency_in_words()} {printable_line(entry.metric)}"
            lines.append(f"{group}{promise}, delta {entry.delta:g}, epsilon {entry.promised_epsilon:g}: {words}")
    return lines


def speed_lines(manifest: Manifest, *, said: Calibration | None = None) -> list[str | Table]:
    """Returns how fast promises have been: a sentence on each, or a table of several; none if nothing was measured.

    Args:
      manifest: Of the promises.
      said: A promise whose speed the headline gives; it has no sentence unless that is why it never exits.
    """
    places = range(len(manifest.calibrations))
    measured = [place for place in places if measured_speeds(manifest, place)]
    in_table = measured if len(measured) > 1 else []
    sentences = (
        speed_in_words(manifest, place)
        for place in places
        if place not in in_table
        and (manifest.calibrations[place] != said or manifest.calibrations[place].pays is False)
    )
    return [*([_speed_table(manifest, in_table)] if in_table else []), *map(printable_line, filter(None, sentences))]


def _speed_table(manifest: Manifest, places: Sequence[int]) -> Table:
    """Returns the speeds of the promises at some places, one line each."""
    batches = list(dict.fromkeys(speed.batch for speed in manifest.speeds or ()))
    table = PlainTable("Times as fast as the full model, on the machine that calibrated", caption_justify="left")
    naming = _Naming(manifest)
    naming.add_columns(table)
    table.add_numbers(*(together_in_batch(batch).replace(" ", "\n", 1) for batch in batches))
    table.add_numbers(f"layers\nof {manifest.model.layers}")
    for place in places:
        entry = manifest.calibrations[place]
        factors = {speed.batch: f"{speed.factor:.2f}" for speed in measured_speeds(manifest, place)}
        layers = "never exit" if entry.pays is False else f"{entry.layers:.2f}"
        table.add_row(*naming.cells(entry), *(factors.get(batch, "") for batch in batches), layers)
    if any(manifest.calibrations[place].pays is False for place in places):
        table.caption = (
            "Never exit: what was proved was not clearly faster. Fine-tuning moves exits down (calm-beam train)."
        )
    return table


def _end_of_test(entry: Calibration, *, ways: Mapping[Variant, str], level: float | None) -> str:
    """Returns the threshold at which testing ended, and its p-value if that was too high; other tests see the grid.

    `level` is what the p-value was compared with, or None not to print it; `ways` are those of `_ways_in_letters`.
    """
    last = entry.path[-1]
    if entry.procedure not in ("fixed_sequence", *OF_VARIANTS):
        return "end of grid"
    if last.rejected:
        return "end of grid" if last.variant is None else "end of path"
    compared = "" if level is None else f" > {level:.3g}"
    # The chosen threshold has the same letter in this row already.
    variant = None if last.variant == entry.variant else last.variant
    return f"{_in_letters(last.threshold, variant, ways)} (p = {last.p_value:.2g}{compared})"


_TESTS_PER_TABLE = 4
# A headline with more settings is no sentence any more.
_MOST_NAMED = 3
# Nobody gave the losses of outputs: they are computed here, as those of textual consistency elsewhere.
_OF_OUTPUTS = "dissimilarity"


def print_certification(
    manifest: SettingManifest,
    rows: "Sequence[Sequence[SettingRow]]",
    *,
    output: str,
    baseline: tuple[str, float | None] | None = None,
) -> None:
    """Prints the risk of every setting, the chosen settings, and what they promise.

    Args:
      manifest: The result.
      rows: The outcome of every test for every setting.
      output: Directory that holds the manifest.
      baseline: Name of the setting that losses are relative to, and its cost if known; None if there is none.
    """
    console = PlainConsole()
    console.print(headline_of_settings(manifest))
    console.print(f"Manifest: {joined(output, MANIFEST)}", soft_wrap=True)
    if manifest.decoder is not None and manifest.decoder.failed:
        console.print(f"{counted(manifest.decoder.failed, 'example')} without an answer count with loss 1.")
    for table in _risk_tables(rows, baseline=baseline):
        console.print(table)
    print_choices(console, manifest)
    if plans := plans_in_words(manifest.earlier_plans, of="losses"):
        console.print(plans)
    for entry in manifest.calibrations:
        if more := more_may_do_in_words(entry, manifest):
            tell(more)
    console.print(printable_line(without_keys(manifest.guarantee)))


def print_choices(console: Console, manifest: SettingManifest) -> None:
    """Prints the chosen settings, their tests, and what rounds and clusters say of them."""
    console.print(_choices(manifest))
    console.print(_tests(manifest))
    if rounds := rounds_in_words(manifest):
        console.print(printable_line(rounds))
    if per_cluster := clusters_in_words(manifest):
        console.print(per_cluster)
    if too_few := too_few_in_words(manifest.calibrations, manifest.data.units):
        console.print(too_few)
    if manifest.plan.joint_epsilon is None and len(manifest.calibrations) > 1:
        console.print(alone_in_words(len(manifest.calibrations)))


def headline_of_settings(manifest: SettingManifest) -> str:
    """Returns what was proved of which settings, in a sentence."""
    entries = manifest.calibrations
    kept = [entry for entry in entries if entry.setting is not None]
    joint = manifest.plan.joint_epsilon
    sure = 1 - max(map(manifest.stated_error_of, entries))
    how = "with" if len(entries) == 1 else "each with" if joint is None else "all together with"
    probability = f"probability at least {100 * sure:.6g} %"
    if not kept:
        return f"No setting could be proved safe with {probability}."
    named = "; ".join(map(_bound_of_setting, kept))
    if len(kept) > _MOST_NAMED:
        named = "the table has their settings"
    late = asked_late_in_words(manifest.earlier_plans, of="losses")
    if len(entries) == 1:
        return printable_line(f"{late}Proved, {how} {probability}: {named}.")
    return printable_line(
        f"{late}{len(kept)} of {counted(len(entries), 'promise')} proved, {how} {probability}: {named}."
    )


def _bound_of_setting(entry: SettingCalibration) -> str:
    """Returns which risk of a proved setting is bounded, and by what."""
    whose = "" if entry.group is None else f"group {entry.group}: "
    risk = "expected loss" if entry.tail is None else f"share of losses above {entry.tail:g}"
    return f"{whose}{risk} of {entry.setting} at most {entry.delta:g}"


def _risk_tables(rows: "Sequence[Sequence[SettingRow]]", *, baseline: tuple[str, float | None] | None) -> list[Table]:
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
            name = printable_line(group) or ("all" if len(columns) > 1 else "mean loss")
            table.add_column(name if tail is None else f"{name}\nshare > {tail:g}", justify="right", overflow="fold")
        if baseline is not None:
            name, cost = baseline
            # Against itself it loses nothing.
            table.add_row(
                f"{printable_line(name)} (baseline)", *((_cost(cost),) if has_costs else ()), *(["0"] * len(part))
            )
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
    title, joint = "Last setting proved to lose at most delta", manifest.plan.joint_epsilon
    errors = set(map(manifest.stated_error_of, manifest.calibrations))
    if len(errors) == 1:
        together = "" if joint is None else "all together with "
        title += f" ({together}probability {100 * (1 - min(errors)):.6g} %)"
    table = PlainTable(title, caption_justify="left")
    captions = []
    if any(entry.tail is not None for entry in manifest.calibrations):
        captions.append("> is about the share of examples that lose more: delta and mean loss are shares.")
    groups = ("group",) * any(entry.group is not None for entry in manifest.calibrations)
    for name in groups:
        table.add_column(name, overflow="fold")
    losses = [_shown_loss(entry, manifest) for entry in manifest.calibrations]
    # A loss that all entries share stands below the table.
    has_losses = len(set(losses)) > 1
    if has_losses:
        table.add_column("loss", no_wrap=True)
    else:
        captions.append(f"Loss: {losses[0]}.")
    table.caption = " ".join(captions)
    table.add_numbers(delta_heading(errors))
    table.add_column("setting", overflow="fold")
    costs = ("cost",) * any(entry.cost is not None for entry in manifest.calibrations)
    mean = "mean\nloss" if manifest.data.clusters is None else "loss per\ncluster"
    # Of a joint promise every entry has a share of epsilon, which others may have raised.
    levels = ("tested at\nepsilon",) * (joint is not None)
    for name in (*levels, *costs, mean, "first not\nproved"):
        table.add_column(name, justify="right", overflow="fold")
    for entry, loss in zip(manifest.calibrations, losses, strict=True):
        table.add_row(
            *("all" if entry.group is None else printable_line(entry.group) for _ in groups),
            *([loss] if has_losses else []),
            delta_in_words(entry.delta, manifest.error_of(entry), of=errors),
            "none is safe" if entry.setting is None else printable_line(entry.setting),
            *(f"{entry.path_level:.4g}" for _ in levels),
            *(_cost(entry.cost) for _ in costs),
            "" if entry.risk is None else f"{entry.risk:.4f}",
            _end_of_order(entry),
        )
    return table


def _shown_loss(entry: SettingCalibration, manifest: SettingManifest) -> str:
    """Returns which loss an entry is about, as the table of choices says it."""
    loss = loss_in_words(entry)
    return loss if manifest.decoder is None else loss.replace("given", _OF_OUTPUTS)


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
    tests = dict.fromkeys(f"{entry.p_value} of {_tested_losses(entry, manifest)}" for entry in manifest.calibrations)
    procedures = dict.fromkeys(entry.procedure for entry in manifest.calibrations)
    order = ", ".join(map(printable_line, manifest.plan.order))
    return f"Tests: {'; '.join(tests)}. Procedure: {', '.join(procedures)}. Order: {order}."


def _tested_losses(entry: SettingCalibration, manifest: SettingManifest) -> str:
    """Returns what the losses of an entry are, which the manifest calls `given` unless they are differences."""
    if entry.loss != "given":
        losses = f"{entry.loss} losses"
    elif manifest.decoder is None:
        losses = "the given losses"
    else:
        losses = f"{_OF_OUTPUTS} losses"
    return losses if entry.tail is None else f"{losses} above {entry.tail:g}"


def _cost(cost: float | None) -> str:
    return "" if cost is None else f"{cost:g}"


def _end_of_order(entry: SettingCalibration) -> str:
    """Returns the setting at which testing ended, and its p-value if that was too high."""
    last = entry.path[-1]
    if entry.procedure != "fixed_sequence" or last.rejected:
        return "end of order"
    return f"{printable_line(last.setting)} (p = {last.p_value:.2g})"
