"""The report of a calibration of several variants: the path that was chosen for every promise, and what was proved."""

import dataclasses
from collections.abc import Iterable, Sequence

from calm_beam.calibration.result import RiskRow
from calm_beam.evaluation.flops import DecoderSizes, shares_of_operations
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import (
    EACH_VARIANT,
    Calibration,
    Manifest,
    confirmation_in_words,
    measured_speeds,
    not_proved_in_words,
    threshold_in_words,
    together_in_batch,
)
from calm_beam.risk.rules import tail_in_words
from calm_beam.text import counted

from .document import Cell, Section, number, table, threshold_cell, time_in_words, words
from .examples import example_html
from .page import facts, short_name
from .plain import Panel, PlainPage, sentence_html, verdict
from .promise import (
    CONDITION,
    PlaceName,
    cautions,
    confirmation_of_test,
    first_shown,
    names_of_places,
    sequence_begins,
    together_in_words,
)
from .stored import Calibrated, StoredOutputs

# A page without a search box is read to its end.
_MOST_OUTPUTS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """A variant and threshold on the path, as the chart takes it."""

    setting: str
    delta: float
    risk: float
    p_value: float
    tested: bool
    rejected: bool
    cost: float


def build_variants_page(
    calibrated: Calibrated,
    stored: StoredOutputs | None = None,
    *,
    vocabulary: Vocabulary | None = None,
    sizes: DecoderSizes | None = None,
    most_examples: int = 0,
    seed: int = 0,
) -> str:
    """Returns the page of a calibration of several variants, of at most `LARGEST_PAGE` bytes.

    Args:
      calibrated: The calibration.
      stored: Outputs of the variant that the first promise (`first_shown`) chose; None shows none.
      vocabulary: That of the model; None shows token ids.
      sizes: Those of the model's decoder; None counts no operations.
      most_examples: The most outputs to show; no page shows more than ten.
      seed: Decides which.

    Raises:
      ReportError: If it would be larger.
    """
    manifest = calibrated.manifest
    assert manifest.plan is not None
    assert manifest.plan.pareto is not None
    name = names_of_places(row.variant for row in calibrated.table[0])
    pairs = list(zip(manifest.calibrations, calibrated.table, strict=True))
    shown_first = first_shown(manifest)
    (first, rows), *others = sorted(pairs, key=lambda pair: pair[0] is not shown_first)
    variants = "; ".join(variant.in_words() for variant in manifest.plan.pareto.variants)
    speeds = "" if manifest.speeds is None else " Speeds: times as fast as the full model, where it was calibrated."
    return PlainPage(
        kind="calibration report",
        title=short_name(manifest.model.uri),
        made=f"{short_name(manifest.model.uri)} · {time_in_words(manifest.created)}",
        promise=sentence_html(first, manifest),
        cautions=[caution.text for caution in cautions(manifest)],
        condition=CONDITION,
        risks="Risk along the path",
        lead=_lead(first, rows, manifest=manifest),
        costs="layers",
        first=_panel(first, rows, name=name),
        together=(together_in_words(manifest) or "The manifest has one promise.") + speeds,
        panels=[_panel(*pair, name=name) for pair in others],
        entries=_entries(manifest, operations=shares_of_operations(manifest, sizes), name=name),
        outputs=None
        if stored is None or first.threshold is None or not most_examples
        else _outputs(first, stored, manifest=manifest, vocabulary=vocabulary, most=most_examples, seed=seed),
        num_layers=manifest.model.layers,
        every="Every variant and threshold under every test",
        numbers=_numbers(calibrated.table, has_chosen=manifest.data.choosing is not None),
        about="What it was calibrated for",
        facts=[("Variants", variants), *((fact, value) for fact, value in facts(manifest))],
        fewer="Calibrate with fewer entries or variants.",
    ).text()


def _outputs(
    entry: Calibration,
    stored: StoredOutputs,
    *,
    manifest: Manifest,
    vocabulary: Vocabulary | None,
    most: int,
    seed: int,
) -> Section:
    """Returns a few outputs under a promise that lets tokens exit, in the colours of their exit layers."""
    layers = manifest.model.layers
    assert entry.threshold is not None
    lane = 1 + stored.job.settings.thresholds.index(entry.threshold)
    sample = list(stored.sample(min(most, _MOST_OUTPUTS), seed=seed))
    how = threshold_in_words(entry.threshold, entry.variant)
    colours = "".join(f'<span class="token l{layer} coloured"> {layer} </span>' for layer in range(1, layers + 1))
    cards = (example_html(each, lane, num_layers=layers, vocabulary=vocabulary) for each in sample)
    return Section(
        title="Some outputs under the first promise",
        lead=f"{counted(len(sample), 'example')} of {stored.examples:,}, drawn by their ids alone, decoded at "
        f"threshold {how}. Every token has the colour of the layer at which it left.",
        content=f'<p class="output">layer {colours}</p>{"".join(cards)}',
    )


def _panel(entry: Calibration, rows: Sequence[RiskRow], *, name: PlaceName) -> Panel:
    path = _path(rows)
    chosen = None if entry.threshold is None else name(entry.threshold, entry.variant)
    return Panel(
        found=chosen or "never exit",
        about=f"{_about(entry)}, δ = {entry.delta:g}, ε = {entry.epsilon:.4g}",
        tested=[
            _Place(
                setting=name(row.threshold, row.variant),
                delta=row.delta,
                risk=row.risk,
                p_value=row.p_value,
                tested=row.tested,
                rejected=row.rejected,
                cost=row.layers,
            )
            for row in path
        ],
        chosen=chosen,
        begins=sequence_begins(entry, [row.variant for row in path]),
    )


def _path(rows: Iterable[RiskRow]) -> list[RiskRow]:
    return sorted((row for row in rows if row.place is not None), key=lambda row: row.place or 0)


def _lead(entry: Calibration, rows: Sequence[RiskRow], *, manifest: Manifest) -> str:
    if entry.procedure == EACH_VARIANT:
        return _lead_of_each(entry, rows, manifest=manifest)
    data, last = manifest.data, entry.path[-1]
    unit = data.unit.removesuffix("s")
    on_path = len(_path(rows))
    accepted = sum(step.rejected for step in entry.path)
    ended = (
        "to its end" if last.rejected else f"up to the first that {not_proved_in_words(last.p_value, entry.epsilon)}"
    )
    return (
        f"{counted(data.choosing or 0, unit)}, drawn by a hash, chose a path of {counted(on_path, 'place')} among "
        f"{len(rows)} pairs of variant and threshold, the safest first, by p-values and layers. The other "
        f"{counted(data.units_of(None) or 0, unit)}, whose risks and layers are shown, tested {len(entry.path)} of "
        f"them, {ended}; {accepted} {'was' if accepted == 1 else 'were'} proved safe. Tested by {entry.p_value}."
        f"{confirmation_of_test(entry)} {_NAMES}"
    )


_NAMES = (
    "Names: threshold and, where they differ, measure, τ, ≥ the first layer that may exit and / the distance to the "
    "next one."
)


def _lead_of_each(entry: Calibration, rows: Sequence[RiskRow], *, manifest: Manifest) -> str:
    """Returns how every variant was tested by itself."""
    data = manifest.data
    variants = len({row.variant for row in rows})
    accepted = sum(step.rejected for step in entry.path)
    return (
        f"Each of {variants} variants was tested by itself by {counted(data.units, data.unit.removesuffix('s'))}, from "
        f"the safest threshold down to the first that could not be proved safe at ε / {variants} = "
        f"{entry.epsilon / variants:.4g}; {len(entry.path)} of {len(rows)} pairs of variant and threshold were tested, "
        f"and {accepted} {'was' if accepted == 1 else 'were'} proved safe. The variants are in the order of what a "
        f"token costs at their last safe threshold; the promised one is last. Tested by {entry.p_value}."
        f"{confirmation_of_test(entry)} {_NAMES}"
    )


def _about(entry: Calibration) -> str:
    loss = " (relu)" if entry.known_loss == "relu" else ""
    return f"{entry.consistency}{loss}{tail_in_words(entry.known_loss)}, {entry.metric}"


def _entries(manifest: Manifest, *, operations: Sequence[float | None], name: PlaceName) -> str:
    layers = manifest.model.layers
    counts = any(share is not None for share in operations)
    batches = list(dict.fromkeys(speed.batch for speed in manifest.speeds or ()))
    has_tests = len({entry.p_value for entry in manifest.calibrations}) > 1
    names = (
        "promise",
        "δ",
        "ε",
        "threshold",
        "layers",
        "layers saved",
        *(["operations"] if counts else []),
        *(f"speed, {together_in_batch(batch)}" for batch in batches),
        "risk",
        *(["tested by"] if has_tests else []),
        "tested",
        "first not proved",
        *(["confirmation"] if manifest.confirmation is not None else []),
    )
    rows: list[tuple[str | Cell, ...]] = []
    for place, (entry, share) in enumerate(zip(manifest.calibrations, operations, strict=True)):
        factors = {speed.batch: speed.factor for speed in measured_speeds(manifest, place)}
        last = entry.path[-1]
        at = "none: end of path"
        if not last.rejected and last.variant is not None:
            at = name(last.threshold, last.variant)
        rows.append(
            (
                _about(entry),
                number(entry.delta, "g"),
                number(entry.promised_epsilon),
                threshold_cell(entry.threshold)
                if entry.threshold is None
                else Cell(name(entry.threshold, entry.variant), entry.threshold),
                number(entry.layers, ".2f"),
                number(1 - entry.layers / layers, ".0%"),
                *(["" if share is None else number(share - 1, "+.0%")] if counts else []),
                *(number(factors[batch], ".2f") if batch in factors else "" for batch in batches),
                number(entry.risk, ".4f"),
                *([entry.p_value] if has_tests else []),
                number(len(entry.path), "d"),
                words(at),
                *([confirmation_in_words(entry)] if manifest.confirmation is not None else []),
            )
        )
    return table(names, rows, label="Table of all promises")


def _numbers(tests: Iterable[Sequence[RiskRow]], *, has_chosen: bool) -> str:
    names = (
        "promise",
        "δ",
        "variant",
        "threshold",
        "place on the path",
        "n",
        "risk",
        "p",
        "result",
        "layers",
        *(["p of the part that chose", "their layers"] if has_chosen else []),
    )
    rows: list[tuple[str | Cell, ...]] = [
        (
            f"{row.consistency}{tail_in_words(row.loss)}, {row.metric}",
            number(row.delta, "g"),
            "" if row.variant is None else row.variant.in_words(),
            number(row.threshold, "g"),
            number(row.place, "d"),
            number(row.n, ",d"),
            number(row.risk, ".4f"),
            number(row.p_value, ".3g"),
            verdict(row),
            number(row.layers, ".2f"),
            *([number(row.choosing_p_value, ".3g"), number(row.choosing_layers, ".2f")] if has_chosen else []),
        )
        for rows_of_test in tests
        for row in rows_of_test
    ]
    return table(names, rows, label="Table of all numbers")
