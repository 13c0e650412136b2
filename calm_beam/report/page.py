"""The page: one HTML file that asks the network for nothing."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calm_beam.calibration.verification import promised_thresholds
from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import Calibration
from calm_beam.text import printable

from .contents import results, shown_thresholds
from .document import LARGEST_PAGE, file_text, filled, framed
from .elements import isolated, with_short_places
from .examples import Dictionary, example_values, pieces_of
from .exit_counts import counted_exits, counted_savings
from .palette import layer_styles
from .stored import Calibrated, ReportError, StoredOutputs

_SCRIPTS = ("outputs.js", "drawing.js", "charts.js", "examples.js", "report.js")
# Never exit: by neither formula.
_NOTHING = (1.0, 1.0)


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
    content = results(calibrated, indices, factors=factors)
    content["remarks"] = [printable(with_short_places(remark)) for remark in remarks]
    content["speedups"] = [_speedup(entry, speedups) for entry in entries] if speedups else None
    content |= {"exits": None, "savings": None, "sample": None, "pieces": [], "examples": []}
    if factors is not None:
        content["savings"] = {
            "examples": examples,
            "flops": [factors[entry.threshold] if entry.threshold is not None else _NOTHING for entry in entries],
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
    # These stand in strings only, where they may be written so.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _size(value: Any) -> int:
    """Returns the bytes of a value in a list."""
    return len(_json(value).encode()) + 1
