"""Sentences about a manifest, for terminals, pages and notebooks."""

from collections.abc import Sequence

from calm_beam.storage.record_values import shown
from calm_beam.text import counted

from ._data import DataRecord, UnseenRecord
from ._entries import Calibration, SettingCalibration
from ._manifest import Manifest, SettingManifest
from ._model import SpeedRecord, threshold_in_words
from ._plan import WORST_NEAR_TIES, EarlierPlan, ParetoPlan
from ._tests import AskedTest


def served_in_words(manifest: Manifest) -> str:
    """Returns a sentence on the entry that the plan says will be served; empty if it does not say."""
    entry = manifest.served
    if entry is None:
        return ""
    group = "" if entry.group is None else f"group {shown(entry.group)}, "
    return f"The plan named the entry that is served before any loss was seen: {group}{entry.promise_in_words()}."


def speeds_in_words(manifest: Manifest) -> tuple[str, ...]:
    """Returns a sentence on the speed of each promise; none if nothing was measured and no promise gave up exits."""
    return tuple(filter(None, (speed_in_words(manifest, place) for place in range(len(manifest.calibrations)))))


def speed_in_words(manifest: Manifest, place: int) -> str:
    """Returns a sentence on the speed of the promise at a place; empty if it was not measured and gave up no exits."""
    entry, measured = manifest.calibrations[place], measured_speeds(manifest, place)
    if not measured and entry.pays is None:
        return ""
    said = ""
    if measured:
        first, *others = measured
        how = "; ".join(
            [
                together_in_batch(first.batch),
                *(f"{other.factor:.2f} {together_in_batch(other.batch)}" for other in others),
            ]
        )
        said = f"{times_as_fast(first.factor)} on the machine that calibrated ({how})"
    if entry.pays is False:
        # Faster by less than the standard error is not enough (`launch.calibrate.speed`).
        is_unclear = "not clearly faster, " if measured and measured[0].factor >= 1 else ""
        why = f"what was proved was {is_unclear}{said}" if said else _why_no_faster(entry, manifest)
        said = f"never exit, since {why}; fine-tuning moves exits down (calm-beam train)"
    else:
        said = f"{said}, at {entry.layers:.2f} of {manifest.model.layers} layers a token"
    return f"{entry.promise_in_words()}: {said}."


def measured_speeds(manifest: Manifest, place: int) -> list[SpeedRecord]:
    """Returns the measured speeds of the promise at a place, each of another batch size."""
    return [speed for speed in manifest.speeds or () if place in speed.calibrations]


def _why_no_faster(entry: Calibration, manifest: Manifest) -> str:
    """Returns a clause why nothing that was proved is faster, where the manifest has no speed of it.

    A static exit at the last layer, or a threshold that no token reaches, is the full model, and always proved. Where
    nothing else was, the failed test that came closest is named.
    """
    if entry.has_proved_exits(manifest.model.layers):
        return "nothing that was proved is faster"
    closest = min((step for step in entry.path if not step.rejected), key=lambda step: step.p_value, default=None)
    if closest is None:
        return "nothing but the full model was proved"
    how = "" if closest.variant is None else f"{closest.variant.in_words()}, "
    level = manifest.level_of(entry)
    return (
        f"nothing but the full model was proved: {how}at threshold {closest.threshold:g}, lost {closest.risk:.4f} "
        f"(p = {p_value_beside(closest.p_value, level)}, tested at {level:.3g})"
    )


def times_as_fast(factor: float) -> str:
    """Returns a speedup as text.

    >>> times_as_fast(1.25)
    '1.25 times as fast as the full model'
    """
    return f"{factor:.2f} times as fast as the full model"


def together_in_batch(batch: int) -> str:
    """Returns how many prompts are decoded together, as text."""
    return "one prompt at a time" if batch == 1 else f"in batches of {batch}"


def clusters_in_words(manifest: Manifest | SettingManifest) -> str:
    """Returns that delta bounds the loss per cluster, with the loss over examples; empty without clusters."""
    if manifest.data.clusters is None:
        return ""
    measured = [
        f"{entry.risk:.4f} and {entry.example_risk:.4f} (delta {entry.delta:g})"
        for entry in manifest.calibrations
        if entry.risk is not None and entry.example_risk is not None
    ]
    figures = f" Measured per cluster and over examples: {'; '.join(measured)}." if measured else ""
    return (
        "Every cluster weighs the same, however many examples it has: delta bounds the expected loss per cluster. "
        f"Nothing is promised of the mean over examples.{figures}"
    )


def repeats_in_words(manifest: Manifest) -> str:
    """Returns the number of examples that repeat another's input, and when that matters; empty if there are none.

    Repeats that occur in the traffic belong to an independent draw of it. A set without them is a sample of other
    traffic.
    """
    confirming = 0 if manifest.confirmation is None else manifest.confirmation.data.duplicates
    repeats = manifest.data.duplicates + confirming
    if not repeats:
        return ""
    return (
        f"{counted(repeats, 'example repeats', several='examples repeat')} an input. Leave in what repeats by itself "
        "where the model is served: a sample without it is one of other traffic. Copies that were added, such as by "
        "augmenting or joining sets, are no independent draws and void the guarantee: take those out, and no others."
    )


def rounds_in_words(manifest: Manifest | SettingManifest) -> str:
    """Returns how a run ended that was watched round by round; empty for other runs."""
    ended, plan = manifest.sequential, manifest.plan
    if ended is None or plan is None or plan.sequential is None:
        return ""
    before = [
        f"It had stopped after round {end.rounds} before, and was continued by another rule." for end in ended.continues
    ]
    where = (
        f"after the last of {counted(ended.rounds, 'round')}"
        if ended.rounds == ended.of_rounds
        else f"after round {ended.rounds} of {ended.of_rounds}"
    )
    return " ".join(
        [
            f"The tests were looked at after every round of examples, and ended {where}, with "
            f"{manifest.data.examples:,} of {counted(ended.of_examples, 'example')}: "
            f"{plan.sequential.end_in_words(ended.ended_by)}.",
            *before,
        ]
    )


def engine_in_words(manifest: Manifest) -> str:
    """Returns a sentence on the calibrated engine."""
    engine = manifest.engine
    return "Engine: not recorded." if engine is None else f"Engine: {engine.in_words()}."


def near_ties_in_words(manifest: Manifest) -> str:
    """Returns the number of examples decided by a near tie, for each chosen threshold; empty if unknown."""
    counts: dict[str, int] = {}
    for entry in manifest.calibrations:
        step = entry.deciding
        # The examples of groups are among all examples.
        if entry.group is None and step is not None and step.near_ties is not None:
            counts[threshold_in_words(step.threshold, step.variant)] = step.near_ties
    if not counts:
        return ""
    data = manifest.data if manifest.confirmation is None else manifest.confirmation.data
    is_worst = manifest.plan is not None and manifest.plan.near_ties == WORST_NEAR_TIES
    what = "they count with loss 1" if is_worst else "another engine may give these another output"
    each = ", ".join(f"{count:,} at threshold {threshold}" for threshold, count in counts.items())
    return f"Near ties, of {data.examples:,} examples: {each}; {what}."


def confirmation_in_words(entry: Calibration) -> str:
    """Returns the chosen and the confirmed thresholds of an entry; empty if nothing was to be confirmed.

    A p-value has as many digits as show on which side of epsilon it is.
    """
    chosen, steps = entry.chosen, entry.confirmation
    if chosen is None or steps is None:
        return ""
    *_, last = steps
    named, p_value = (
        f"chosen {threshold_in_words(*chosen.tested_as)}",
        p_value_beside(last.p_value, entry.promised_epsilon),
    )
    if last.rejected:
        return f"{named}, confirmed: p = {p_value}"
    at = threshold_in_words(*last.tested_as)
    if len(steps) > 1:
        held = steps[-2]
        return (
            f"{named}, confirmed {threshold_in_words(*held.tested_as)}: p = "
            f"{p_value_beside(held.p_value, entry.promised_epsilon)}, not {at}: p = {p_value}"
        )
    return f"{named}, not confirmed: p = {p_value}{'' if last.tested_as == chosen.tested_as else f' at {at}'}"


def flaws_in_words(data: DataRecord) -> str:
    """Returns a clause on how many inputs were repeated, prompts cut and examples failed."""
    return (
        f"{counted(data.duplicates, 'repeated input')}, {counted(data.truncated, 'prompt')} cut, {data.failed} failed"
    )


def confirming_in_words(manifest: Manifest) -> str:
    """Returns a sentence on the examples that confirmed thresholds, and their decoder; empty if none did."""
    found = manifest.confirmation
    if found is None:
        return ""
    data = found.data
    clusters = "" if data.clusters is None else f" in {counted(data.clusters, 'cluster')}"
    return (
        f"{counted(data.examples, 'other example')}{clusters}, which chose nothing, tested what was chosen, decoded by "
        f"the {found.decoder} decoder that serves (exit head {found.exit_head}, {found.dtype}); "
        f"{flaws_in_words(data)}."
        f"{' ' * bool(data.unseen)}{unseen_in_words(data.unseen or ())}"
    )


def p_value_beside(p_value: float, epsilon: float) -> str:
    """Returns a p-value with the fewest digits, at least two, that show on which side of epsilon it is.

    >>> p_value_beside(0.05002, 0.05), p_value_beside(0.049996, 0.05), p_value_beside(0.3123, 0.05)
    ('0.05002', '0.05', '0.31')
    """
    written = (f"{p_value:.{digits}g}" for digits in range(2, 18))
    # A text equal to epsilon does not count as above it.
    right = (text for text in written if (float(text) > epsilon) == (p_value > epsilon))
    return next(right, repr(p_value))


def not_proved_in_words(p_value: float, epsilon: float) -> str:
    """Returns the reason why a test failed.

    >>> not_proved_in_words(0.3123, 0.05)
    'could not be proved safe: p = 0.31 exceeds ε = 0.05'
    """
    return f"could not be proved safe: p = {p_value_beside(p_value, epsilon)} exceeds ε = {epsilon:g}"


def alone_in_words(entries: int) -> str:
    """Returns that the promise to use must be settled before the results are seen, if each holds alone."""
    return (
        f"Each promise holds alone. Which of the {entries} is used must have been settled before anyone saw these "
        "results: choosing the best of them here voids its guarantee."
    )


def more_may_do_in_words(entry: SettingCalibration, manifest: SettingManifest) -> str:
    """Returns for an entry without a setting what may help: more losses, or a safer setting; empty if it has one."""
    last = entry.path[-1]
    if entry.setting is not None or entry.procedure != "fixed_sequence":
        return ""
    group = "" if entry.group is None else f"group {shown(entry.group)}, "
    loss = f"{group}{shown(last.setting)}: its mean loss {last.risk:.4f} is"
    if last.risk >= entry.delta:
        return (
            f"{loss} not below delta {entry.delta:g}. "
            "Begin with a safer setting, or ask for a larger delta, on fresh examples."
        )
    of = "example" if manifest.data.clusters is None else "cluster"
    return (
        f"{loss} below delta {entry.delta:g}, but "
        f"p = {p_value_beside(last.p_value, entry.path_level)} exceeds {entry.path_level:.4g}. More {of}s may "
        "prove it, if all of them are fresh. This says how many are likely to do:\n"
        f"  {plan_command(entry, risk=last.risk, level=entry.path_level)}"
    )


def plan_command(test: AskedTest, *, risk: float, level: float) -> str:
    """Returns the command that says how many examples are likely to prove a promise.

    Args:
      test: The promise.
      risk: The guess of its risk.
      level: What p-values are compared with.
    """
    # Of signed losses a mean may be negative, for which there is no power to compute without losses.
    guess = max(0.0, risk)
    return (
        f"calm-beam plan --delta={test.delta:g} --epsilon={level:.4g} --risk_guess={guess:.4g} --p_value={test.p_value}"
    )


def unseen_in_words(records: Sequence[UnseenRecord]) -> str:
    """Returns a sentence for each finding of texts that metrics did not see; empty if there is none.

    >>> print(unseen_in_words([UnseenRecord(metric="token_f1", no_token=3, few_letters=0)]))
    token_f1 saw no token of two different texts in 3 examples: they score 0.
    """
    sentences = []
    for record in records:
        if record.no_token:
            sentences.append(
                f"{record.metric} saw no token of two different texts in {counted(record.no_token, 'example')}: they "
                "score 0."
            )
        if record.few_letters:
            sentences.append(
                f"{record.metric} drops more than half of the letters of a text in "
                f"{counted(record.few_letters, 'example')}."
            )
    return " ".join(sentences)


def least_units(test: AskedTest, pareto: ParetoPlan | None = None) -> int:
    """Returns the least number of units with which a promise can be proved, even if none of them loses anything.

    Args:
      test: The promise.
      pareto: How several variants are tested, if there are some.
    """
    return test.least_units(level=test.epsilon) if pareto is None else pareto.least_units(test)


def has_too_few(test: AskedTest, units: int, pareto: ParetoPlan | None = None) -> bool:
    """Returns whether so many units cannot prove a promise, even if none of them loses anything."""
    return least_units(test, pareto) > units


def too_few_in_words(tests: Sequence[AskedTest], units: int, pareto: ParetoPlan | None = None) -> str:
    """Returns a sentence on the promises that so few units cannot prove; empty if there are enough for each.

    Args:
      tests: The promises.
      units: Number of examples, or of clusters if these are the independent units.
      pareto: How several variants are tested, if there are some.
    """
    wanting = [test for test in tests if has_too_few(test, units, pareto)]
    if not wanting:
        return ""
    hardest = max(wanting, key=lambda test: least_units(test, pareto))
    which = "The promise" if len(tests) == 1 else f"{len(wanting)} of {len(tests)} promises"
    of_variants = ""
    if pareto is not None:
        share = pareto.choosing_share
        of_variants = (
            f", which {len(pareto.variants)} variants share,"
            if share is None
            else f", where {share:.0%} of them choose,"
        )
    return (
        f"{which} cannot be proved by {units:,} examples, even if none of them loses anything: delta {hardest.delta:g} "
        f"at epsilon {hardest.epsilon:g}{of_variants} takes at least {least_units(hardest, pareto):,}, and more with "
        "every loss. calm-beam plan says how many are likely to do."
    )


def plans_in_words(earlier: Sequence[EarlierPlan] | None, *, of: str = "outputs") -> str:
    """Returns how many plans preceded a manifest's plan on the same outputs, and how that affects its promises.

    Args:
      earlier: The earlier plans, as the manifest records them.
      of: What the plans were about: `outputs`, or `losses`.

    Returns:
      Two or three sentences; empty for the first plan.
    """
    if not earlier:
        return ""
    which = f"This is the {ordinal(len(earlier) + 1)} plan on these {of}, by the list next to them."
    shown = sum(each.answered for each in earlier)
    if not shown:
        what = "the earlier one" if len(earlier) == 1 else "an earlier one"
        return f"{which} No result of {what} was shown, so the promises stand."
    seen = "The result of an earlier one was" if shown == 1 else f"Results of {shown} earlier ones were"
    return (
        f"{which} {seen} shown before. Unless this plan was settled before that, or all of its examples are new, "
        "epsilon does not bound the chance that a promise here is wrong."
    )


def asked_late_in_words(earlier: Sequence[EarlierPlan] | None, *, of: str = "outputs") -> str:
    """Returns a sentence to begin a result with if earlier results were shown before it was asked; else empty."""
    if not answered_before(earlier):
        return ""
    return f"Asked after an earlier result on these {of} was shown, so that the probability may not hold. "


def answered_before(earlier: Sequence[EarlierPlan] | None) -> bool:
    """Returns whether a result of an earlier plan was shown, so that epsilon may bound nothing (`plans_in_words`)."""
    return any(each.answered for each in earlier or ())


def ordinal(number: int) -> str:
    """Returns a number as an English ordinal.

    >>> [ordinal(number) for number in (1, 2, 3, 4, 11, 22, 113)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd', '113th']
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 < number % 100 < 14 else ending}"
