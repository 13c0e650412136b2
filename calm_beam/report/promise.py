"""What a manifest entry promises, under which condition, and what a reader has to be warned of; all in words."""

import dataclasses

from calm_beam.calibration.verification import objective_of
from calm_beam.exits.measures import MEASURES, Need
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.manifest import Calibration, Manifest

Parts = tuple[str, ...]
"""A sentence in parts, of which every second one is a number or a word that matters."""

CONDITION = (
    "A promise holds for prompts drawn independently from the distribution that the calibration set was drawn from, "
    "and for the model and the decoding named below. Nothing is assumed about the model or its confidence. Drift, "
    "prompts that repeat in the calibration set alone, or a set that was used for training void it."
)


@dataclasses.dataclass(frozen=True)
class Caution:
    """Something a reader has to know.

    Attributes:
      kind: `void` if it may void a promise, `note` if it explains one.
      text: What it is.
    """

    kind: str
    text: str


def promise_in_words(entry: Calibration, manifest: Manifest) -> Parts:
    """Returns one sentence with all numbers of a promise: threshold, delta, epsilon, examples and layers saved."""
    sure = f"{100 * (1 - entry.epsilon):.6g} %"
    layers = manifest.model.layers
    if entry.threshold is None:
        return (
            "",
            "Never exit",
            ": from ",
            _units(manifest),
            ", no threshold could be proved with probability at least ",
            sure,
            f" to {_harm(entry, verb='cost', scored='let outputs score')} at most ",
            f"{entry.delta:g} {entry.metric}",
            f" {_compared(entry)}. All ",
            f"{layers} layers",
            " run for every token, and nothing is saved.",
        )
    return (
        "With probability at least ",
        sure,
        " over the draw of the ",
        _units(manifest),
        ", exiting at threshold ",
        f"{entry.threshold:g}",
        f" {_harm(entry, verb='costs', scored='lets outputs score')} at most ",
        f"{entry.delta:g} {entry.metric}",
        f" {_compared(entry)}, and saves ",
        f"{1 - entry.layers / layers:.0%}".replace("%", " %"),
        " of the decoder layers: tokens use ",
        f"{entry.layers:.2f} of {layers}",
        " on average.",
    )


def end_in_words(entry: Calibration) -> str:
    """Returns how the test of the grid went, and where it ended."""
    first, last = entry.path[0], entry.path[-1]
    if entry.procedure != "fixed_sequence":
        accepted = sum(step.rejected for step in entry.path)
        chosen = "the lowest of them is chosen" if accepted else "so nothing is chosen"
        return (
            f"{entry.procedure} looked at {len(entry.path)} thresholds, from {first.threshold:g} to "
            f"{last.threshold:g}, and proved {accepted} of them safe; {chosen}."
        )
    if last.rejected:
        return (
            f"Fixed sequence testing went from {first.threshold:g} down to {last.threshold:g} and proved every "
            "threshold safe: the end of the grid."
        )
    return (
        f"Fixed sequence testing went from {first.threshold:g} down and stopped at {last.threshold:g}, the first "
        f"threshold that could not be proved safe: p = {last.p_value:.2g} exceeds ε = {entry.epsilon:g}, measured loss "
        f"{last.risk:.4f}."
    )


def together_in_words(manifest: Manifest) -> str:
    """Returns whether several promises hold together; empty for a single one."""
    entries = len(manifest.calibrations)
    if manifest.plan is not None and manifest.plan.joint_epsilon is not None:
        sure = f"{100 * (1 - manifest.plan.joint_epsilon):.6g} %"
        return f"All {entries} promises of this manifest hold together with probability at least {sure}."
    if entries == 1:
        return ""
    return (
        f"Each of the {entries} promises holds alone. Which of them is served must have been settled before anybody "
        "saw these results: choosing the best of them here voids its guarantee."
    )


def cautions(manifest: Manifest) -> tuple[Caution, ...]:
    """Returns what a reader has to be warned of, the gravest first."""
    data, decode = manifest.data, manifest.decode
    found = []
    measure = MEASURES.get(decode.confidence)
    saves_nothing = measure is not None and measure.needs is Need.LAST_LOGITS
    if saves_nothing or PROPAGATIONS[decode.state_propagation].needs_full_model:
        found.append(
            Caution(
                "void",
                f"Cannot be served: confidence {decode.confidence} with state propagation {decode.state_propagation} "
                "runs every layer for every token. This calibration is for analysis, and its layers are those of the "
                "exits.",
            )
        )
    if data.duplicates:
        found.append(
            Caution(
                "void",
                f"{_count(data.duplicates, 'example repeats a prompt', 'examples repeat prompts')} of the calibration "
                "set. Unless prompts repeat by themselves where the model is served, this voids the guarantee: take "
                "them out and calibrate again.",
            )
        )
    if data.failed:
        found.append(
            Caution(
                "void",
                f"{_count(data.failed, 'example', 'examples')} of {data.examples:,} failed and "
                f"{'counts' if data.failed == 1 else 'count'} with loss 1, the worst there is, at every threshold. The "
                "guarantee holds all the same; that they fail needs an explanation.",
            )
        )
    if manifest.plan is None:
        found.append(
            Caution("void", "The manifest does not say what was planned before any loss was seen: ask who made it.")
        )
    if data.truncated:
        found.append(
            Caution(
                "note",
                f"{_count(data.truncated, 'prompt was', 'prompts were')} cut to {decode.max_input_length} tokens; "
                "serving must cut alike.",
            )
        )
    return tuple(found)


def _harm(entry: Calibration, *, verb: str, scored: str) -> str:
    return f"{verb} in expectation" if entry.consistency == "textual" else f"{scored} worse in expectation by"


def _compared(entry: Calibration) -> str:
    match objective_of(entry).loss:
        case "dissimilarity":
            return "against the full model’s own outputs (textual consistency)"
        case "relu":
            return (
                "than the full model’s against the references, where prompts on which they score better count as no "
                "change (risk consistency)"
            )
    return "than the full model’s against the references (risk consistency)"


def _units(manifest: Manifest) -> str:
    data = manifest.data
    if data.clusters is None:
        return _count(data.examples, "calibration example", "calibration examples")
    return (
        f"{_count(data.clusters, 'calibration cluster', 'calibration clusters')} "
        f"({_count(data.examples, 'example', 'examples')})"
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
