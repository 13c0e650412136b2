"""The page of a calibration: one HTML file that asks the network for nothing.

Its contents are JSON values: promises and curves, from the manifest and its risk table.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calm_beam.calibration.result import RiskRow
from calm_beam.calibration.verification import promised_thresholds
from calm_beam.evaluation.flops import DecoderSizes, shares_of_operations
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import (
    Calibration,
    DecodeRecord,
    Look,
    Manifest,
    Objective,
    confirming_in_words,
    engine_in_words,
    near_ties_in_words,
    rounds_in_words,
)
from calm_beam.storage import base_name, parent
from calm_beam.text import counted, printable, printable_line, shortened

from .document import (
    LARGEST_PAGE,
    file_text,
    filled,
    framed,
    isolated,
    layer_styles,
    short_place,
    software_fact,
    with_short_places,
)
from .examples import Dictionary, counted_exits, counted_savings, example_values, pieces_of
from .promise import (
    CONDITION,
    cautions,
    confirmation_of_test,
    end_in_words,
    operations_in_words,
    promise_in_words,
    together_in_words,
)
from .stored import Calibrated, ReportError, StoredOutputs

# Of a finer grid the page shows some, evenly chosen: more cannot be selected by finger.
_MOST_THRESHOLDS = 100
# The whole list is in `failures.jsonl`.
_MOST_FAILURES = 50
_LONGEST_REASON = 300
_MOST_LAYERS_NAMED = 12
_LONGEST_TEMPLATE = 200

_NOT_TESTED, _ACCEPTED, _NOT_ACCEPTED = 0, 1, 2


def shown_thresholds(calibrated: Calibrated) -> tuple[int, ...]:
    """Returns the indices of the thresholds that the page shows: of each entry those where something was decided.

    >>> from calm_beam.report.page import evenly
    >>> evenly(10, 4)
    {0, 9, 3, 6}
    """
    thresholds = calibrated.thresholds
    if len(thresholds) <= _MOST_THRESHOLDS:
        return tuple(range(len(thresholds)))
    decided = {entry.threshold for entry in calibrated.manifest.calibrations}
    decided |= {entry.path[-1].threshold for entry in calibrated.manifest.calibrations}
    decided |= {entry.chosen.threshold for entry in calibrated.manifest.calibrations if entry.chosen}
    indices = {index for index, threshold in enumerate(thresholds) if threshold in decided}
    return tuple(sorted(indices | evenly(len(thresholds), _MOST_THRESHOLDS)))


def evenly(count: int, most: int) -> set[int]:
    """Returns `most` indices of `count`, the first and the last among them, as far apart as can be."""
    return {round(index * (count - 1) / (most - 1)) for index in range(most)}


def results(
    calibrated: Calibrated, shown: Sequence[int], *, factors: Sequence[Sequence[float] | None]
) -> dict[str, Any]:
    """Returns what manifest and risk table say.

    Args:
      calibrated: The calibration.
      shown: Places of the thresholds to show.
      factors: For each entry the operations of the full model divided by those with exits, by one or several counts;
        None where nobody counted them.
    """
    manifest = calibrated.manifest
    lines = [[rows[index] for index in shown] for rows in calibrated.table]
    # Risks are the same for all entries of an objective and a group.
    by_objective = dict(zip(map(_measured, manifest.calibrations), lines, strict=True))
    objectives = list(by_objective)
    return {
        "created": manifest.created,
        "model": short_name(manifest.model.uri),
        "numLayers": manifest.model.layers,
        "thresholds": [row.threshold for row in lines[0]],
        "gridSize": len(calibrated.thresholds),
        "planned": len(manifest.plan.thresholds) if manifest.plan else len(calibrated.thresholds),
        "objectives": [
            _objective(objective, rows, group=group, num_layers=manifest.model.layers)
            for (objective, group), rows in by_objective.items()
        ],
        "entries": [
            _entry(entry, rows, manifest=manifest, objective=objectives.index(_measured(entry)), operations=operations)
            for entry, rows, operations in zip(manifest.calibrations, lines, factors, strict=True)
        ],
        "served": manifest.plan.serve if manifest.plan is not None else None,
        "condition": CONDITION,
        "together": together_in_words(manifest),
        "rounds": rounds_in_words(manifest),
        "cautions": [[caution.kind, caution.text] for caution in cautions(manifest)],
        "counts": _counts(manifest),
        "facts": facts(manifest),
        "failures": _failures(calibrated),
    }


def short_name(uri: str) -> str:
    """Returns what a model's folder is called; one that is named by a step alone, with the folder above."""
    name = base_name(uri)
    return printable_line(f"{base_name(parent(uri))}/{name}" if name.startswith("checkpoint_") else name or uri)


def _measured(entry: Calibration) -> tuple[Objective, str | None]:
    """Returns what an entry's losses are, and of which prompts."""
    return entry.objective, entry.group


def _objective(objective: Objective, rows: Sequence[RiskRow], *, group: str | None, num_layers: int) -> dict[str, Any]:
    return {
        "group": None if group is None else printable_line(group),
        # Of these prompts' tokens; the full model comes first, as everywhere.
        "layers": [num_layers, *(row.layers for row in rows)],
        "consistency": objective.consistency,
        "metric": printable_line(objective.metric),
        "loss": objective.loss,
        "tail": objective.tail,
        "risks": [0, *(row.risk for row in rows)],
    }


def _entry(
    entry: Calibration,
    rows: Sequence[RiskRow],
    *,
    manifest: Manifest,
    objective: int,
    operations: Sequence[float] | None,
) -> dict[str, Any]:
    refused = next((place for place, row in enumerate(rows, start=1) if row.confirmed is False), None)
    chosen = [row.threshold for row in rows].index(entry.threshold) if entry.threshold is not None else None
    return {
        "objective": objective,
        "delta": entry.delta,
        "epsilon": entry.epsilon,
        "procedure": entry.procedure,
        "pValue": entry.p_value,
        # As indices among the lanes, of which the full model's is 0.
        "chosen": 0 if chosen is None else chosen + 1,
        "unconfirmed": refused,
        "threshold": entry.threshold,
        "layers": entry.layers,
        "risk": entry.risk,
        "units": manifest.data.units_of(entry.group),
        "sentence": [printable_line(part) for part in promise_in_words(entry, manifest, factors=operations)],
        "operations": None if operations is None else operations_in_words(operations),
        "end": end_in_words(entry) + confirmation_of_test(entry),
        "pValues": [None, *(float(f"{row.p_value:.5g}") for row in rows)],
        "tests": [_NOT_TESTED, *(_test(row) for row in rows)],
        "looks": None if entry.looks is None else [_look(look) for look in entry.looks],
    }


def _look(look: Look) -> dict[str, Any]:
    return {
        "n": look.n,
        "threshold": look.threshold,
        "layers": look.layers,
        "risk": look.risk,
        "logCapital": look.log_capital,
    }


def _test(row: RiskRow) -> int:
    if not row.tested:
        return _NOT_TESTED
    return _ACCEPTED if row.rejected else _NOT_ACCEPTED


def _counts(manifest: Manifest) -> list[list[Any]]:
    """Returns what was counted: the name for one and for several, the number, and whether it should be looked at."""
    data = manifest.data
    clusters = [["cluster", "clusters", data.clusters, False]] if data.clusters is not None else []
    confirming = []
    if manifest.confirmation is not None:
        confirming = [["example that confirms", "examples that confirm", manifest.confirmation.data.examples, False]]
    return [
        ["example", "examples", data.examples, False],
        *clusters,
        *confirming,
        ["failed, loss 1", "failed, loss 1", data.failed, data.failed > 0],
        ["repeated prompt", "repeated prompts", data.duplicates, data.duplicates > 0],
        ["prompt cut", "prompts cut", data.truncated, data.truncated > 0],
    ]


def facts(manifest: Manifest) -> list[list[str]]:
    """Returns what the guarantee is about, as pairs of a name and a value."""
    model, decode, data, plan = manifest.model, manifest.decode, manifest.data, manifest.plan
    tau, interval = manifest.shared_by_variants("tau"), manifest.shared_by_variants("exit_interval")
    schedule = decode.schedule if tau is None else f"{decode.schedule}, τ = {tau:g}"
    exits = _exits(decode, num_layers=model.layers)
    if plan is not None and plan.pareto is not None:
        steps = "" if interval in (None, 1) else f", in steps of {interval}"
        exits = f"from the layer of the variant on{steps}"
    near_ties = near_ties_in_words(manifest)
    facts = [
        ["Model", f"{short_place(model.uri)} ({counted(model.layers, 'decoder layer')})"],
        ["Model fingerprint", model.fingerprint],
        ["Confidence", manifest.shared_by_variants("confidence") or "that of the variant"],
        ["Schedule", schedule],
        ["State propagation", decode.state_propagation],
        ["Exits", exits],
        [
            "Lengths",
            f"prompts up to {counted(decode.max_input_length, 'token')}, outputs up to {decode.max_decode_length}",
        ],
        ["Task prefix", repr(decode.task_prefix) if decode.task_prefix else "none"],
        *_chat_facts(manifest),
        ["Precision", decode.precision_in_words()],
        ["Engine", engine_in_words(manifest).removeprefix("Engine: ").removesuffix(".")],
        *([["Near ties", near_ties.removeprefix("Near ties, ").removesuffix(".")]] if near_ties else []),
        ["Calibration set", ", ".join(map(short_place, data.patterns))],
        ["Fingerprint of the set", data.fingerprint],
        ["Manifest", manifest.digest],
    ]
    if manifest.confirmation is not None:
        facts.append(["Confirmed by", confirming_in_words(manifest)])
        facts.append(["Their fingerprint", manifest.confirmation.data.fingerprint])
    if plan is not None:
        facts.append(["Plan", plan.digest])
        if plan.cluster_key is not None:
            facts.append(["Clusters named by", plan.cluster_key])
        if plan.group_key is not None:
            groups = ", ".join(f"{group.name} ({counted(group.examples, 'example')})" for group in data.groups or ())
            facts.append([f"Groups named by {plan.group_key}", groups])
        facts.append(["On failing examples", plan.on_error])
    facts.append([*software_fact(manifest.software)])
    return [[name, printable_line(value)] for name, value in facts]


def _chat_facts(manifest: Manifest) -> list[list[str]]:
    """Returns how texts become chats, and what they begin with, where they do."""
    chat = None if manifest.vocabulary is None else manifest.vocabulary.chat
    if chat is None:
        return [["Chat template", "none"]]
    system = "none" if chat.system is None else repr(chat.system)
    return [["Chat template", shortened(chat.template, _LONGEST_TEMPLATE)], ["System message", system]]


def _exits(decode: DecodeRecord, *, num_layers: int) -> str:
    """Returns after which layers a token may exit."""
    first, step = decode.min_exit_layer, decode.exit_interval
    if first >= num_layers:
        return "after the last layer only"
    if step == 1:
        return "after every layer" if first == 1 else f"after layer {first} and every later one"
    layers = range(first, num_layers, step)
    if len(layers) == 1:
        return f"after layer {first} or the last one"
    named = ", ".join(map(str, layers[:_MOST_LAYERS_NAMED]))
    others = ", and so on in these steps" if len(layers) > _MOST_LAYERS_NAMED else ""
    return f"after layers {named}{others}, or the last one"


def _failures(calibrated: Calibrated) -> list[list[str]]:
    ids = calibrated.manifest.data.failed_ids or ()
    failures = calibrated.failures or tuple((name, "") for name in ids)
    return [
        [printable_line(name[:_LONGEST_REASON]), printable(with_short_places(reason))[:_LONGEST_REASON]]
        for name, reason in failures[:_MOST_FAILURES]
    ]


_SCRIPTS = ("outputs.js", "drawing.js", "charts.js", "examples.js", "report.js")
# Never exit: by neither formula.
_NOTHING = (1.0, 1.0)


def _both_counts(counted: tuple[float, ...], share: float | None) -> tuple[float, ...]:
    """Returns the factors of an entry: the first is that of the terminal, if there is one."""
    return counted if share is None else (1 / share, *counted[1:])


def _factors(
    entries: Sequence[Calibration],
    shares: Sequence[float | None],
    *,
    counted: Mapping[float, tuple[float, ...]] | None,
) -> list[Sequence[float] | None]:
    """Returns for each entry the factors that its sentence is about: that of the terminal, or else those counted."""
    found: list[Sequence[float] | None] = []
    for entry, share in zip(entries, shares, strict=True):
        over_examples = None
        # Counted over the prompts of all groups.
        if counted is not None and entry.threshold is not None and entry.group is None:
            over_examples = counted[entry.threshold]
        found.append(over_examples if share is None else (1 / share,))
    return found


def build_page(
    calibrated: Calibrated,
    stored: StoredOutputs | None,
    *,
    vocabulary: Vocabulary | None,
    sizes: DecoderSizes | None,
    speedups: Mapping[float, float] | None = None,
    most_examples: int,
    seed: int,
    remarks: Sequence[str] = (),
) -> str:
    """Returns the page, of at most `LARGEST_PAGE` bytes: of the sample as many examples are shown as fit.

    Args:
      calibrated: What was calibrated.
      stored: The generations; None shows no outputs.
      vocabulary: That of the model; None shows token ids.
      sizes: Those of its decoder; None counts no operations.
      speedups: Where they were measured, how many times faster than the full model it is, by threshold.
      most_examples: Size of the sample.
      seed: Decides the sample.
      remarks: What could not be shown, and why.

    Raises:
      ReportError: If it would be larger even without examples.
    """
    indices = shown_thresholds(calibrated)
    entries = calibrated.manifest.calibrations
    sample = list(stored.sample(most_examples, seed=seed)) if stored else []
    examples, factors = 0, None
    if stored and sizes is not None:
        examples, factors = counted_savings(
            sample, promised_thresholds(entries), stored=stored, sizes=sizes, vocabulary=vocabulary
        )
        # None of the examples that were drawn has an output: there is nothing to divide.
        factors = factors if examples else None
    shares = shares_of_operations(calibrated.manifest, sizes)
    content = results(calibrated, indices, factors=_factors(entries, shares, counted=factors))
    content["remarks"] = [printable(with_short_places(remark)) for remark in remarks]
    content["speedups"] = [_speedup(entry, speedups) for entry in entries] if speedups else None
    content |= {"exits": None, "savings": None, "sample": None, "pieces": [], "examples": []}
    if factors is not None:
        content["savings"] = {
            "examples": examples,
            # Else both counts are over the examples.
            "byMeanLayers": any(share is not None for share in shares),
            "flops": [
                _NOTHING if entry.threshold is None else _both_counts(factors[entry.threshold], share)
                for entry, share in zip(entries, shares, strict=True)
            ],
        }
    if stored is None:
        return _checked(_assembled(content))
    grid = stored.job.settings.thresholds
    lanes = [0, *(1 + grid.index(calibrated.thresholds[index]) for index in indices)]
    content["exits"] = counted_exits(stored, lanes, num_layers=calibrated.manifest.model.layers)
    content["sample"] = {
        "shown": most_examples,
        "lookedAt": stored.looked_at,
        "all": stored.examples,
        "seed": seed,
        "hasPieces": vocabulary is not None,
    }
    # Its own numbers are no longer than those it was measured with.
    room = LARGEST_PAGE - len(_checked(_assembled(content)).encode())
    dictionary = Dictionary()
    known = 0
    for generation in sample:
        values = example_values(generation, lanes, dictionary=dictionary, vocabulary=vocabulary)
        new = pieces_of(dictionary.tokens()[known:], vocabulary)
        room -= _size(values) + sum(map(_size, new))
        if room < 0:
            break
        known += len(new)
        content["examples"].append(values)
        content["pieces"].extend(new)
    content["sample"]["shown"] = len(content["examples"])
    return _checked(_assembled(content))


def _speedup(entry: Calibration, speedups: Mapping[float, float]) -> float | None:
    return 1.0 if entry.threshold is None else speedups.get(entry.threshold)


def _checked(page: str) -> str:
    size = len(page.encode())
    if size > LARGEST_PAGE:
        raise ReportError(
            f"the report would have {size:,} bytes without a single example, and {LARGEST_PAGE:,} are the most. "
            "Calibrate with fewer entries."
        )
    return page


def _assembled(content: dict[str, Any]) -> str:
    """Returns the whole page."""
    return framed(
        filled(file_text("template.html"), {"promises": _promises(content["entries"])}),
        kind="calibration report",
        title=content["model"],
        # The script says it, with the model's name.
        made="",
        style=layer_styles(content["numLayers"]),
        scripts=_SCRIPTS,
        data=f'<script type="application/json" id="data">{_json(content)}</script>\n',
    )


def _promises(entries: Iterable[dict[str, Any]]) -> str:
    """Returns the promises for readers without scripts."""
    sentences = (
        "".join(isolated(part) if index % 2 else part for index, part in enumerate(entry["sentence"]))
        for entry in entries
    )
    return "\n".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)


def _json(content: Any) -> str:
    """Returns JSON in which nothing can end or begin an element of HTML."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # These characters occur in strings only, where they may be escaped like this.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _size(value: Any) -> int:
    """Returns the bytes of a value in a list."""
    return len(_json(value).encode()) + 1
