"""Manifests and answers as notebooks show them: HTML without scripts, in the colours of the notebook's own theme."""

import dataclasses
import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from calm_beam.manifest import Calibration, Manifest, SettingCalibration, SettingManifest
from calm_beam.text import counted, printable_line

from .document import details, file_text, layer_styles, shown
from .page import facts
from .plain import sentence_html, setting_chart
from .promise import CONDITION, cautions, first_shown, names_of_places, sequence_begins, together_in_words
from .settings import promise_html as setting_promise_html
from .settings import setting_cautions

if TYPE_CHECKING:
    from calm_beam.serving import Answer

# Of more entries, and longer answers, the beginning is shown: a notebook keeps its outputs.
_MOST_ENTRIES = 50
_MOST_TOKENS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """A step of an entry's path, as `setting_chart.Tested` has it."""

    setting: str
    delta: float
    risk: float
    p_value: float
    rejected: bool
    tested: bool = True
    cost: float | None = None


def manifest_html(manifest: Manifest) -> str:
    """Returns a manifest's first promise as text, the test behind it as a drawing, and a table of all promises."""
    first = first_shown(manifest)
    name = names_of_places(step.variant for step in first.path)
    steps = [
        _Step(
            setting=name(step.threshold, step.variant),
            delta=first.delta,
            risk=step.risk,
            p_value=step.p_value,
            rejected=step.rejected,
        )
        for step in first.path
    ]
    begins = sequence_begins(first, [step.variant for step in first.path])
    chosen = None if first.threshold is None else name(first.threshold, first.variant)
    rows = (
        (
            "all" if entry.group is None else printable_line(entry.group),
            f"{entry.objective.consistency_in_words()}, {printable_line(entry.metric)}",
            f"{entry.delta:g}",
            f"{manifest.error_of(entry):.4g}",
            _exit_in_words(entry),
            f"{entry.layers:.2f} of {manifest.model.layers}",
            f"{entry.risk:.4f}",
        )
        for entry in manifest.calibrations[:_MOST_ENTRIES]
    )
    return _shown(
        f"calm-beam manifest: {counted(len(manifest.calibrations), 'promise')}",
        sentence_html(first, manifest),
        _drawn(steps, chosen=chosen, what="thresholds", begins=begins),
        "".join(f"<p class='caution'>{html.escape(caution.text)}</p>" for caution in cautions(manifest)),
        _table(("group", "loss", "δ", "ε", "exits", "layers", "risk"), rows, of=len(manifest.calibrations)),
        _paragraph(together_in_words(manifest)),
        _paragraph(CONDITION),
        details("Model, decoding and data", _facts(manifest)),
    )


def setting_manifest_html(manifest: SettingManifest) -> str:
    """Returns the same of a manifest of kind settings, of the first promise that found a setting."""
    first = next((entry for entry in manifest.calibrations if entry.setting is not None), manifest.calibrations[0])
    steps = [
        _Step(setting=step.setting, delta=first.delta, risk=step.risk, p_value=step.p_value, rejected=step.rejected)
        for step in first.path
    ]
    rows = (
        (
            "all" if entry.group is None else printable_line(entry.group),
            _setting_loss(entry),
            f"{entry.delta:g}",
            f"{manifest.error_of(entry):.4g}",
            "none" if entry.setting is None else printable_line(entry.setting),
            "" if entry.cost is None else f"{entry.cost:g}",
            "" if entry.risk is None else f"{entry.risk:.4f}",
        )
        for entry in manifest.calibrations[:_MOST_ENTRIES]
    )
    return _shown(
        f"calm-beam certification: {counted(len(manifest.calibrations), 'promise')}",
        setting_promise_html(first, manifest),
        _drawn(steps, chosen=first.setting, what="settings"),
        "".join(f"<p class='caution'>{html.escape(text)}</p>" for text in setting_cautions(manifest)),
        _table(("group", "loss", "δ", "ε", "setting", "cost", "risk"), rows, of=len(manifest.calibrations)),
        _paragraph(manifest.guarantee),
    )


def answer_html(answer: "Answer") -> str:
    """Returns an answer's text, and a cell for each of its tokens in the colour of the layer at which it left.

    A cell has the token's text above the layer; of an answer that was sent, whose vocabulary is not there, the layer.
    """
    used, full = answer.layers_used, answer.num_layers * len(answer.tokens)
    saved = f"{answer.layers_saved / full:.0%}".replace("%", " %") if full else "nothing"
    texts = [_token_html(text) for text in answer.token_texts or ()] or [""] * len(answer.tokens)
    pairs = zip(texts, answer.tokens, answer.exit_layers, answer.confidences, strict=True)
    cells = "".join(
        f"<span class='token l{layer}' title='token {token}: layer {layer} of {answer.num_layers}, "
        f"confidence {confidence:.3f}'>{text}{layer}</span>"
        for text, token, layer, confidence in list(pairs)[:_MOST_TOKENS]
    )
    more = max(len(answer.tokens) - _MOST_TOKENS, 0)
    notes = [f"{counted(len(answer.tokens), 'token')}, {used:,} of {full:,} layers run, {saved} saved."]
    if more:
        notes.append(f"{counted(more, 'more token')} {'is' if more == 1 else 'are'} not shown.")
    if answer.truncated:
        notes.append("The prompt was cut.")
    return _shown(
        "calm-beam answer",
        f"<p class='text'>{shown(answer.text)}</p>",
        f"<p class='tokens' role='img' aria-label='{_layers_in_words(answer.exit_layers)}'>{cells}</p>",
        _paragraph(f"The layer at which each token left, of {answer.num_layers}. {' '.join(notes)}"),
        style=_layer_styles(answer.num_layers),
    )


def _token_html(text: str) -> str:
    """Returns the text of a token; one that is a part of a letter only has none."""
    return f"<span class='piece'>{shown(text.replace(chr(10), '⏎') or '·')}</span>"


def _shown(label: str, *parts: str, style: str = "") -> str:
    css = file_text("notebook.css") + style
    inside = f"<style>{css}</style>{''.join(parts)}"
    return f"<div class='calm-beam' role='group' aria-label='{html.escape(label)}'>{inside}</div>"


def _layer_styles(num_layers: int) -> str:
    """Returns the style sheet of the layers' colours, which moves nothing else of the notebook."""
    return "\n".join(f".calm-beam {line}" for line in layer_styles(num_layers).splitlines())


def _layers_in_words(layers: Sequence[int]) -> str:
    return f"Exit layers: {', '.join(map(str, layers[:_MOST_TOKENS]))}"


def _exit_in_words(entry: Calibration) -> str:
    if entry.threshold is None:
        return "never"
    return f"at {entry.threshold:g}" + ("" if entry.variant is None else f", {entry.variant.in_words()}")


def _setting_loss(entry: SettingCalibration) -> str:
    return printable_line(entry.loss) + ("" if entry.tail is None else f" > {entry.tail:g}")


def _drawn(steps: Sequence[_Step], *, chosen: str | None, what: str, begins: Sequence[int] = (0,)) -> str:
    chart = setting_chart(steps, chosen=chosen, width=560, height=180, is_large=True, begins=begins)
    if len(begins) > 1:
        each = f"{len(begins)} variants, each until one could not be proved safe (×)"
        return f"<figure>{chart}<figcaption>Risk of the {what} that were tested: {each}.</figcaption></figure>"
    ended = "to the end" if steps[-1].rejected else "until one could not be proved safe (×)"
    ends = f"{shown(steps[0].setting)} to {shown(steps[-1].setting)}" if len(steps) > 1 else shown(steps[0].setting)
    return f"<figure>{chart}<figcaption>Risk of the {what} that were tested, {ends}, {ended}.</figcaption></figure>"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], *, of: int) -> str:
    head = "".join(f"<th scope='col'>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    more = of - _MOST_ENTRIES
    rest = _paragraph(f"{counted(more, 'more promise')} not shown.") if more > 0 else ""
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"
    return details("All promises" if of > 1 else "The promise as a table", whole)


def _facts(manifest: Manifest) -> str:
    rows = (
        f"<tr><th scope='row'>{html.escape(name)}</th><td>{shown(value)}</td></tr>" for name, value in facts(manifest)
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>" if text else ""
