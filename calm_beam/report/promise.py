"""Texts about a manifest entry: its promise, the promise's condition, and warnings for readers."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from calm_beam.exits.measures import MEASURES, Need
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.manifest import (
    EACH_VARIANT,
    Calibration,
    DataRecord,
    Manifest,
    Variant,
    clusters_in_words,
    not_proved_in_words,
    p_value_beside,
    plans_in_words,
    repeats_in_words,
    served_in_words,
    threshold_in_words,
    times_as_fast,
    together_in_batch,
    too_few_in_words,
    unseen_in_words,
)
from calm_beam.risk.rules import split_tail
from calm_beam.text import counted

Sentence = tuple[str, ...]
"""A sentence in parts, of which every second one is a number or a word that matters."""

CONDITION = (
    "A promise holds for prompts drawn independently from the distribution that the calibration set was drawn from, "
    "and for the model and the decoding named below. Nothing is assumed about the model or its confidence. Drift, "
    "copies of prompts that were added to the calibration set, or a set that was used for training void it."
)

_AS_MANY = "as many"


@dataclasses.dataclass(frozen=True)
class Caution:
    """Something a reader has to know.

    Attributes:
      kind: `void` if it may void a promise, `note` if it explains one.
      text: What it is.
    """

    kind: str
    text: str


def promise_in_words(entry: Calibration, manifest: Manifest, *, factors: Sequence[float] | None = None) -> Sentence:
    """Returns a promise with all its numbers: threshold, delta, epsilon, examples, layers saved and operations.

    Args:
      entry: The promise.
      manifest: It is from there.
      factors: The operations of the full model divided by those with exits, by one or several ways of counting; None
        if nobody counted them.
    """
    sure = f"{100 * (1 - manifest.stated_error_of(entry)):.6g} %"
    # The parts before the words of either sentence, where it is about a group.
    whose: Sentence = () if entry.group is None else ("For prompts of group ", entry.group)
    layers = manifest.model.layers
    per_cluster = "" if manifest.data.clusters is None else " per cluster"
    if entry.threshold is None:
        why = ", no threshold could be proved with probability at least "
        if entry.confirmation is not None and entry.chosen is not None:
            (failed,), chosen = entry.confirmation, entry.chosen
            safer = "" if failed.threshold == chosen.threshold else f" not even at {failed.threshold:g}"
            why = (
                f", threshold {chosen.threshold:g} was chosen, which {failed.n:,} others could not confirm{safer} (p = "
                f"{p_value_beside(failed.p_value, entry.promised_epsilon)}), with probability at least "
            )
        if entry.pays is False:
            why = ", nothing that is faster than the full model could be proved with probability at least "
        return (
            *whose,
            ", " if whose else "",
            "never exit" if whose else "Never exit",
            ": from ",
            _units(manifest, entry.group),
            why,
            sure,
            *_bounded(
                entry,
                before=" to",
                costs="cost",
                lets="let",
                after=f". {'Its only' if layers == 1 else 'All'} ",
                per_cluster=per_cluster,
            ),
            "layer" if layers == 1 else f"{layers} layers",
            f" {'runs' if layers == 1 else 'run'} for every token, and nothing is saved.",
        )
    entries = manifest.calibrations
    measured = [each for each in manifest.speeds or () if entry in (entries[place] for place in each.calibrations)]
    operations: Sentence = (" on average.",)
    if factors is not None:
        operations = (
            " on average. Exit tests included, the decoder does ",
            f"{operations_in_words(factors)} operations",
            f" {'as' if operations_in_words(factors) == _AS_MANY else 'than'} the full model.",
        )
    elif not measured:
        operations = (" on average. The operations that this saves were not counted.",)
    if measured:
        first, *others = measured
        also = "".join(f"; {other.factor:.2f} {together_in_batch(other.batch)}" for other in others)
        *before, last = operations
        operations = (
            *before,
            f"{last} On the machine that calibrated, it was ",
            times_as_fast(first.factor),
            f", {together_in_batch(first.batch)}{also}.",
        )
    return (
        *whose,
        ", with probability at least " if whose else "With probability at least ",
        sure,
        " over the draw of the ",
        _units(manifest, entry.group) if entry.confirmation is None else _confirming(manifest, entry),
        ", exiting at threshold ",
        threshold_in_words(entry.threshold, entry.variant),
        *_bounded(entry, before="", costs="costs", lets="lets", after=", and saves ", per_cluster=per_cluster),
        f"{1 - entry.layers / layers:.0%}".replace("%", " %"),
        " of the decoder layers: tokens use ",
        f"{entry.layers:.2f} of {layers}",
        *operations,
    )


def operations_in_words(factors: Sequence[float]) -> str:
    """Returns how many more or fewer operations there are with exits than without, over all ways of counting.

    Args:
      factors: The operations of the full model divided by those with exits, at least one.

    >>> operations_in_words([0.8, 0.95]), operations_in_words([1.4, 0.99]), operations_in_words([1.4])
    ('5 % to 25 % more', '29 % fewer to 1 % more', '29 % fewer')
    """
    changes = sorted({round(100 / factor - 100) for factor in factors})
    low, high = changes[0], changes[-1]
    if low == high == 0:
        return _AS_MANY
    if low < 0 < high:
        return f"{-low} % fewer to {high} % more"
    ends = sorted({abs(low), abs(high)})
    return f"{' to '.join(f'{end} %' for end in ends)} {'fewer' if low < 0 else 'more'}"


def end_in_words(entry: Calibration) -> str:
    """Returns how the test of the grid went, and where it ended."""
    first, last = entry.path[0], entry.path[-1]
    tested = len(entry.path)
    if entry.procedure != "fixed_sequence":
        accepted = sum(step.rejected for step in entry.path)
        if tested == 1:
            found = "proved it safe" if accepted else "could not prove it safe, so nothing is chosen"
            return f"{entry.procedure} looked at one threshold, {first.threshold:g}, and {found}."
        chosen = {0: "nothing is chosen", 1: "it is chosen"}.get(accepted, "the lowest of them is chosen")
        return (
            f"{entry.procedure} looked at {tested} thresholds, from {first.threshold:g} to {last.threshold:g}, and "
            f"proved {accepted or 'none'} of them safe; {chosen}."
        )
    if last.rejected:
        if tested == 1:
            return f"Fixed sequence testing proved the only threshold, {first.threshold:g}, safe: the end of the grid."
        return (
            f"Fixed sequence testing went from {first.threshold:g} down to {last.threshold:g} and proved every "
            "threshold safe: the end of the grid."
        )
    why = (
        f"{not_proved_in_words(last.p_value, entry.path_level)}, "
        f"measured {'loss' if entry.objective.tail is None else 'share'} {last.risk:.4f}."
    )
    if tested == 1:
        return f"Fixed sequence testing stopped at its first threshold, {first.threshold:g}, which {why}"
    return (
        f"Fixed sequence testing went from {first.threshold:g} down and stopped at {last.threshold:g}, the first "
        f"threshold that {why}"
    )


def confirmation_of_test(entry: Calibration) -> str:
    """Returns what examples that chose nothing said of the threshold that was chosen; empty where none were asked."""
    chosen, steps = entry.chosen, entry.confirmation
    if chosen is None or steps is None:
        return ""
    *before, last = steps
    words = f"The chosen threshold, {threshold_in_words(*chosen.tested_as)}, was"
    by = f"by examples that chose nothing, n = {last.n:,}, decoded as it is served"
    p_value = p_value_beside(last.p_value, entry.promised_epsilon)
    if last.rejected:
        return f" {words} confirmed {by}: p = {p_value}."
    at = "" if last.tested_as == chosen.tested_as else f" at {threshold_in_words(*last.tested_as)}"
    failed = f" {words} not confirmed {by}: p = {p_value}{at} exceeds ε = {entry.promised_epsilon:g}"
    if not before:
        return f"{failed}, so nothing is promised."
    held = before[-1]
    return (
        f"{failed}. A safer one, {threshold_in_words(*held.tested_as)}, was confirmed before it: p = "
        f"{p_value_beside(held.p_value, entry.promised_epsilon)}."
    )


# Gives a threshold and its variant a short name.
PlaceName = Callable[[float, Variant | None], str]


def names_of_places(variants: Iterable[Variant | None]) -> PlaceName:
    """Returns a function that names a threshold and its variant by the fields in which the given variants differ.

    >>> name = names_of_places([Variant(min_exit_layer=2), Variant(min_exit_layer=4)])
    >>> name(0.5, Variant(min_exit_layer=4)), names_of_places([None])(0.5, None)
    ('0.5 ≥4', '0.5')
    """
    all_variants = [variant for variant in set(variants) if variant is not None]
    has_measures, has_taus, has_layers, has_steps = (
        len({getattr(variant, field) for variant in all_variants}) > 1
        for field in ("confidence", "tau", "min_exit_layer", "exit_interval")
    )

    def name(threshold: float, variant: Variant | None) -> str:
        if variant is None:
            return f"{threshold:g}"
        measure = f" {variant.confidence}" if has_measures else ""
        tau = f" τ{variant.tau:g}" if has_taus else ""
        first = f" ≥{variant.min_exit_layer}" if has_layers else ""
        return f"{threshold:g}{measure}{tau}{first}" + (f" /{variant.exit_interval}" if has_steps else "")

    return name


def sequence_begins(entry: Calibration, variants: Sequence[Variant | None]) -> list[int]:
    """Returns the indices at which a sequence of tests begins, given the variants of an entry's path in its order."""
    changes = [index for index in range(1, len(variants)) if variants[index] != variants[index - 1]]
    # Tested by itself, each variant has a sequence of its own.
    return [0, *(changes if entry.procedure == EACH_VARIANT else ())]


def first_shown(manifest: Manifest) -> Calibration:
    """Returns the promise that is shown first: the served one, else the first that lets anything exit, else the first.

    In the manifest's order, as on pages with scripts.
    """
    exiting = (entry for entry in manifest.calibrations if entry.threshold is not None)
    return manifest.served or next(exiting, manifest.calibrations[0])


def together_in_words(manifest: Manifest) -> str:
    """Returns whether several promises hold together; empty for a single one."""
    entries = len(manifest.calibrations)
    if entries == 1:
        return ""
    of_groups = ""
    if manifest.data.groups is not None:
        of_groups = (
            " A promise for a group is about prompts drawn from that group alone; one for all prompts together may be "
            "broken for some of the groups."
        )
    if manifest.plan is not None and manifest.plan.joint_epsilon is not None:
        sure = f"{100 * (1 - manifest.plan.joint_epsilon):.6g} %"
        return f"All {entries} promises of this manifest hold together with probability at least {sure}.{of_groups}"
    if served := served_in_words(manifest):
        return f"Each of the {entries} promises holds alone. {served}{of_groups}"
    return (
        f"Each of the {entries} promises holds alone. Which of them is served must have been settled before anyone "
        f"saw these results: choosing the best of them here voids its guarantee.{of_groups}"
    )


def cautions(manifest: Manifest) -> tuple[Caution, ...]:
    """Returns what a reader has to be warned of, the gravest first."""
    data, decode = manifest.data, manifest.decode
    found = []
    measure = MEASURES.get(decode.confidence)
    saves_nothing = measure is not None and measure.needs is Need.LAST_TOKEN
    if saves_nothing or PROPAGATIONS[decode.state_propagation].needs_full_model:
        found.append(
            Caution(
                "void",
                f"Cannot be served: confidence {decode.confidence} with state propagation {decode.state_propagation} "
                "runs every layer for every token. This calibration is for analysis, and its layers are those of the "
                "exits.",
            )
        )
    confirming = None if manifest.confirmation is None else manifest.confirmation.data
    if repeats := repeats_in_words(manifest):
        found.append(Caution("void", repeats))
    if data.failed or (confirming and confirming.failed):
        failed, examples = data.failed, data.examples
        if confirming is not None:
            failed, examples = failed + confirming.failed, examples + confirming.examples
        found.append(
            Caution(
                "void",
                f"{counted(failed, 'example')} of {examples:,} failed and "
                f"{'counts' if failed == 1 else 'count'} with loss 1, the worst there is, at every threshold. The "
                "guarantee holds all the same; that they fail needs an explanation.",
            )
        )
    if words := plans_in_words(manifest.earlier_plans):
        found.append(Caution("void", words))
    if manifest.plan is None:
        found.append(
            Caution("void", "The manifest does not say what was planned before any loss was seen: ask who made it.")
        )
    return (*found, *(Caution("note", words) for words in _notes(manifest)))


def _notes(manifest: Manifest) -> Iterator[str]:
    """Yields what a reader should know that voids nothing."""
    parts = [manifest.data, *([] if manifest.confirmation is None else [manifest.confirmation.data])]
    if words := clusters_in_words(manifest):
        yield words
    if truncated := sum(part.truncated for part in parts):
        yield (
            f"{counted(truncated, 'prompt was', several='prompts were')} cut to "
            f"{counted(manifest.decode.max_input_length, 'token')}; serving must cut alike."
        )
    if words := too_few_in_words(manifest.calibrations, manifest.data.units, manifest.pareto):
        yield words
    yield from (unseen_in_words(part.unseen) for part in parts if part.unseen)


def _bounded(entry: Calibration, *, before: str, costs: str, lets: str, after: str, per_cluster: str) -> Sentence:
    """Returns what an entry bounds, in three parts: up to the number, the number, and what follows it.

    Args:
      entry: The promise.
      before: What the first part begins with.
      costs: The verb, of what exits cost.
      lets: The verb, of what exits let outputs do.
      after: What the last part ends with.
      per_cluster: Words for it where clusters are what is counted; else empty.
    """
    of_references = " than the full model’s against the references"
    as_no_change = ", where prompts on which they score better count as no change"
    loss, above = split_tail(entry.known_loss)
    if above is not None:
        lose = {
            "dissimilarity": f"{per_cluster} lose more than {above:g} {entry.metric} against the full model’s own "
            "outputs (textual consistency)",
            "relu": f"{per_cluster} score more than {above:g} {entry.metric} worse{of_references} (risk consistency)",
        }
        return f"{before} {lets} at most ", f"{100 * entry.delta:.6g} % of outputs", lose[loss] + after
    number = f"{entry.delta:g} {entry.metric}"
    match loss:
        case "dissimilarity":
            compared = " against the full model’s own outputs (textual consistency)"
            return f"{before} {costs}{per_cluster} in expectation at most ", number, compared + after
        case "relu":
            compared = f"{of_references}{as_no_change} (risk consistency)"
        case _:
            compared = f"{of_references} (risk consistency)"
    return f"{before} {lets} outputs score worse{per_cluster} in expectation by at most ", number, compared + after


def _confirming(manifest: Manifest, entry: Calibration) -> str:
    """Returns on whose draw a promise rests that was confirmed."""
    assert manifest.confirmation is not None
    data = manifest.confirmation.data
    if entry.group is not None:
        return f"{counted(data.units_of(entry.group) or 0, 'example')} of the group that confirmed it"
    return f"{_counted_units(data, kind='')} that confirmed it"


def _units(manifest: Manifest, group: str | None) -> str:
    data = manifest.data
    if group is not None:
        return f"{counted(data.units_of(group) or 0, 'calibration example')} of the group"
    of_tested = "" if data.choosing is None else f", of which {data.choosing:,} chose what the others test"
    return f"{_counted_units(data, kind='calibration ')}{of_tested}"


def _counted_units(data: DataRecord, *, kind: str) -> str:
    if data.clusters is None:
        return counted(data.examples, f"{kind}example")
    return f"{counted(data.clusters, f'{kind}cluster')} ({counted(data.examples, 'example')})"
