"""Generations on the page: example outputs at all thresholds, and how many tokens exit at each layer.

Texts, and the outputs of a prompt at all thresholds, are packed as short JSON. Neighbouring thresholds share most of an
output. So an output is written as two splices of its neighbour's: of the tokens, and of the exits. A splice names how
much of the beginning and of the end stays, and the part in between. `report.js` has the reader;
`tests/calm_beam/report/unpacking.py` does the same in Python.

Exits are counted by output position and threshold, with the operations that they save.

Pages without a slider show an example as HTML, under one threshold.
"""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from calm_beam.evaluation.flops import DecoderSizes, flops_appendix_b, flops_calm_table, full_model_flops
from calm_beam.inputs.examples import messages_of
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary
from calm_beam.outputs import Generation, Output, open_shard
from calm_beam.text import printable, printable_line, shortened

from .document import shown, with_short_places
from .stored import StoredOutputs

# Longer ones are cut, which the page says of each.
_LONGEST_TEXT = 2_000
_MOST_REFERENCES = 5
# Layers are written by one character: of these, and beyond them by code points from _MORE_LAYERS on.
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
_MORE_LAYERS = 0x100


class Dictionary:
    """Token ids in the order in which they first occur; what is stored of a token is its index here."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def index(self, token: int) -> int:
        """Returns the index of a token, the next free one if it is new."""
        return self._places.setdefault(token, len(self._places))

    def tokens(self) -> tuple[int, ...]:
        """Returns all tokens by index."""
        return tuple(self._places)


def example_values(
    generation: Generation, lanes: Sequence[int], *, dictionary: Dictionary, vocabulary: Vocabulary | None
) -> dict[str, Any]:
    """Returns one example as JSON values.

    Args:
      generation: The example with its outputs.
      lanes: Which of the outputs to show, the full model's being 0.
      dictionary: Takes up the tokens.
      vocabulary: For prompts that were given as token ids; None shows the ids.
    """
    example = generation.example
    prompt = example.input
    if prompt is None:
        ids = example.input_ids or ()
        prompt = vocabulary.decode(ids) if vocabulary else " ".join(map(str, ids))
    elif example.earlier is not None:
        prompt = "\n".join(f"{each['role']}: {each['content']}" for each in messages_of(prompt, example.earlier))
    values: dict[str, Any] = {
        "id": printable_line(shortened(example.id, _LONGEST_TEXT)),
        "prompt": printable(shortened(prompt, _LONGEST_TEXT)),
        "references": [
            printable(shortened(reference, _LONGEST_TEXT)) for reference in example.references[:_MOST_REFERENCES]
        ],
    }
    marks = [
        name for name, holds in (("prompt cut", generation.truncated), ("repeated", generation.duplicate)) if holds
    ]
    if marks:
        values["marks"] = marks
    if generation.failure is not None:
        values["failure"] = printable(with_short_places(shortened(generation.failure, _LONGEST_TEXT)))
    else:
        values["outputs"] = pack_outputs([generation.outputs[lane] for lane in lanes], dictionary)
    return values


def example_html(generation: Generation, lane: int, *, num_layers: int, vocabulary: Vocabulary | None) -> str:
    """Returns one example as HTML: its prompt, an output in the colours of its exit layers, and the full model's.

    Args:
      generation: The example with its outputs.
      lane: Which of the outputs to show, as `example_values` counts them.
      num_layers: Depth of the decoder.
      vocabulary: As `example_values` takes it; None shows outputs as ids.
    """
    values = example_values(generation, (), dictionary=Dictionary(), vocabulary=vocabulary)
    about = f'<p class="id">{shown(values["id"])}</p><p class="prompt" dir="auto">{html.escape(values["prompt"])}</p>'
    if generation.failure is not None:
        return f'<div class="example">{about}<p class="failure">failed: {shown(values["failure"])}</p></div>'
    full, output = generation.outputs[0], generation.outputs[lane]
    layers = output.exit_layers
    mean = f"{sum(layers) / len(layers):.2f} layers a token" if layers else "no token"
    same = "the same" if full.tokens == output.tokens else _tokens_html(full, vocabulary)
    return (
        f'<div class="example">{about}<div class="pair">'
        f'<div><p class="label">with early exits <span>{mean}</span></p>'
        f'<p class="output" dir="auto">{_tokens_html(output, vocabulary, num_layers=num_layers)}</p></div>'
        f'<div><p class="label">full model <span>{num_layers} layers a token</span></p>'
        f'<p class="output" dir="auto">{same}</p></div></div></div>'
    )


def _tokens_html(output: Output, vocabulary: Vocabulary | None, *, num_layers: int | None = None) -> str:
    """Returns the tokens of an output, as `tokenSpans` of the page's script does; coloured if a depth is given."""
    spans: list[str] = []
    pieces = pieces_of(output.tokens, vocabulary)
    for piece, layer, confidence in zip(pieces, output.exit_layers, output.confidences, strict=True):
        text = piece.replace("▁", " ") or " end"
        # A token that is a space alone is seen by its colour; from other tokens the colour leaves out the space.
        inside = text if text == " " else text.removeprefix(" ")
        space = " " if spans and inside != text else ""
        kind, title = "token" if piece else "token eos", ""
        if num_layers is not None:
            kind += f" l{layer} coloured"
            title = f' title="layer {layer} of {num_layers}, confidence {confidence:.3f}"'
        spans.append(f'{space}<span class="{kind}"{title}>{html.escape(inside)}</span>')
    return "".join(spans)


def pieces_of(tokens: Iterable[int], vocabulary: Vocabulary | None) -> list[str]:
    """Returns the pieces of tokens, ▁ standing for a space; without a vocabulary their ids, each after a space.

    The end of an output is written as an empty piece.
    """
    if vocabulary is None:
        return ["" if token == EOS_ID else f"▁{token}" for token in tokens]
    return ["" if token in vocabulary.end_ids else printable(vocabulary.piece(token)) for token in tokens]


def pack_outputs(outputs: Sequence[Output], dictionary: Dictionary) -> list[Any]:
    """Returns outputs as JSON values, each as the difference to the one before, the first to an empty one.

    Args:
      outputs: The full model's, then one per threshold.
      dictionary: Takes up the tokens.

    Returns:
      For each output 0 if it equals the one before, else `[tokens, exits]`: `tokens` is 0 or [kept at the beginning,
      kept at the end, list of indices between]; `exits` is 0 or [kept at the beginning, kept at the end, text between],
      three characters a token: its layer, then its confidence in thousandths, 1000 added, rounded down.
    """
    packed: list[Any] = []
    tokens: list[int] = []
    exits: list[str] = []
    for output in outputs:
        next_tokens = [dictionary.index(token) for token in output.tokens]
        next_exits = [
            _layer_digit(layer) + _confidence_digits(confidence)
            for layer, confidence in zip(output.exit_layers, output.confidences, strict=True)
        ]
        of_tokens = _splice(tokens, next_tokens)
        of_exits = _splice(exits, next_exits)
        if of_exits != 0:
            of_exits[2] = "".join(of_exits[2])
        packed.append([of_tokens, of_exits] if of_tokens != 0 or of_exits != 0 else 0)
        tokens, exits = next_tokens, next_exits
    return packed


def _splice(before: Sequence[Any], after: Sequence[Any]) -> Any:
    """Returns how much of the beginning and of the end stays, and what comes between; 0 if all stays."""
    if before == after:
        return 0
    most = min(len(before), len(after))
    head = next((index for index in range(most) if before[index] != after[index]), most)
    most -= head
    tail = next((index for index in range(most) if before[-1 - index] != after[-1 - index]), most)
    return [head, tail, list(after[head : len(after) - tail])]


def _layer_digit(layer: int) -> str:
    return _DIGITS[layer] if layer < len(_DIGITS) else chr(_MORE_LAYERS + layer)


def _confidence_digits(confidence: float) -> str:
    # Down, so that what is shown never reaches a threshold that was missed; the little that is added is what a
    # threshold such as 0.95 loses as a float32.
    thousandths = math.floor(1000 * min(max(confidence, -1.0), 1.0) + 1e-3) + 1000
    high, low = divmod(thousandths, len(_DIGITS))
    return _DIGITS[high] + _DIGITS[low]


_MOST_COLUMNS = 64
_ROWS_AT_A_TIME = 2048


def counted_exits(stored: StoredOutputs, lanes: Sequence[int], *, num_layers: int) -> dict[str, Any]:
    """Returns exit layers by position as JSON values.

    Args:
      stored: The generations.
      lanes: Which outputs, the full model's being 0.
      num_layers: Decoder depth.

    Returns:
      `width`, the positions of one column; `tokens`, for each lane and column the tokens of every layer; `cut`, for
      each lane the outputs cut at the `longest` length; and `outputs`, the examples that have some.
    """
    counts = ExitCounts.zero(lanes=len(lanes), num_layers=num_layers)
    for path in stored.paths:
        counts = counts.merge(
            count_exits(
                path,
                lanes,
                num_layers=num_layers,
                max_decode_length=stored.job.settings.max_decode_length,
                end_ids=stored.job.end_ids,
            )
        )
    width = max(1, -(-counts.tokens.shape[1] // _MOST_COLUMNS))
    return {
        "width": width,
        "tokens": _in_columns(counts.tokens, width).tolist(),
        "cut": counts.cut.tolist(),
        "longest": stored.job.settings.max_decode_length,
        "outputs": counts.outputs,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitCounts:
    """Counts over some examples.

    Attributes:
      tokens: int64, shape (lanes, positions, layers). Tokens that exited at a layer; the full model's lane is first.
      cut: int64, shape (lanes,). Outputs that ended at the longest length allowed, without a token that ends one.
      outputs: Examples that have outputs: all but those that failed.
    """

    tokens: np.ndarray
    cut: np.ndarray
    outputs: int

    @classmethod
    def zero(cls, *, lanes: int, num_layers: int) -> Self:
        """Returns the counts of no examples."""
        return cls(tokens=np.zeros((lanes, 0, num_layers), np.int64), cut=np.zeros(lanes, np.int64), outputs=0)

    def merge(self, other: Self) -> Self:
        """Returns the counts of both sets together."""
        longest = max(self.tokens.shape[1], other.tokens.shape[1])
        return dataclasses.replace(
            self,
            tokens=_lengthened(self.tokens, longest) + _lengthened(other.tokens, longest),
            cut=self.cut + other.cut,
            outputs=self.outputs + other.outputs,
        )


def count_exits(
    path: str, lanes: Sequence[int], *, num_layers: int, max_decode_length: int, end_ids: Sequence[int]
) -> ExitCounts:
    """Returns the counts of one shard.

    Args:
      path: A file of `write_generations`.
      lanes: Which of the outputs of every example to count, the full model's being 0.
      num_layers: Decoder depth.
      max_decode_length: Most tokens of an output.
      end_ids: Token ids of which each ends an output.
    """
    counts = ExitCounts.zero(lanes=len(lanes), num_layers=num_layers)
    with open_shard(path) as file:
        for batch in file.iter_batches(_ROWS_AT_A_TIME, columns=["outputs"], use_threads=False):
            counts = counts.merge(
                _count(
                    batch.column(0),
                    lanes,
                    num_layers=num_layers,
                    max_decode_length=max_decode_length,
                    end_ids=end_ids,
                )
            )
    return counts


def counted_savings(
    generations: Iterable[Generation],
    thresholds: Sequence[float],
    *,
    stored: StoredOutputs,
    sizes: DecoderSizes,
    vocabulary: Vocabulary | None,
) -> tuple[int, dict[float, tuple[float, ...]]]:
    """Returns the factors by which operations fall.

    Args:
      generations: The examples to count.
      thresholds: Where to count; each was decoded.
      stored: Where they come from.
      sizes: Of the decoder.
      vocabulary: Needed where prompts are text.

    Returns:
      How many examples were counted, and for each threshold the operations of the full model for the same tokens
      divided by those with exits, by `flops_appendix_b` and by `flops_calm_table`.
    """
    job = stored.job
    lanes = [1 + job.settings.thresholds.index(threshold) for threshold in thresholds]
    full = [0] * len(lanes)
    early = [[0, 0] for _ in lanes]
    examples = 0
    for generation in generations:
        if generation.failure is not None:
            continue
        examples += 1
        prompt = encode_prompt(
            generation.example, vocabulary, settings=job.settings, vocab_size=sizes.vocab_size, on_long=job.on_long
        )
        length = len(prompt.ids)
        for index, lane in enumerate(lanes):
            exits = generation.outputs[lane].exit_layers
            full[index] += int(full_model_flops(len(exits), sizes, source_length=length).sum())
            for count, formula in enumerate((flops_appendix_b, flops_calm_table)):
                spent = formula(exits, sizes, source_length=length, rule=job.settings.rule)
                early[index][count] += int(spent.sum())
    # Without a single token nothing is saved.
    factors = [
        tuple(whole / spent if spent else 1.0 for spent in both) for whole, both in zip(full, early, strict=True)
    ]
    return examples, dict(zip(thresholds, factors, strict=True))


def _in_columns(tokens: np.ndarray, width: int) -> np.ndarray:
    """Returns the counts of so many positions together."""
    lanes, positions, layers = tokens.shape
    padded = np.pad(tokens, ((0, 0), (0, -positions % width), (0, 0)))
    sums: np.ndarray = padded.reshape(lanes, -1, width, layers).sum(axis=2)
    return sums


def _count(
    column: Any, lanes: Sequence[int], *, num_layers: int, max_decode_length: int, end_ids: Sequence[int]
) -> ExitCounts:
    """Returns the counts of a column of lists of outputs; failed examples have empty lists."""
    import pyarrow.compute

    stored = np.asarray(pyarrow.compute.list_value_length(column))
    decoded = stored[stored > 0]
    outputs = column.flatten()
    if not len(outputs):
        return ExitCounts.zero(lanes=len(lanes), num_layers=num_layers)
    # Lane of each output, as its index among those asked for; -1 for the others.
    indices = np.full(decoded.max(), -1)
    indices[list(lanes)] = np.arange(len(lanes))
    lane = indices[np.concatenate([np.arange(length) for length in decoded])]

    layers = pyarrow.compute.struct_field(outputs, "exit_layers")
    lengths = np.asarray(pyarrow.compute.list_value_length(layers))
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    lane_of_token = np.repeat(lane, lengths)
    wanted = lane_of_token >= 0
    shape = (len(lanes), int(lengths.max(initial=0)), num_layers)
    index = np.ravel_multi_index(
        (lane_of_token[wanted], positions[wanted], np.asarray(layers.flatten())[wanted] - 1), shape
    )
    tokens = np.asarray(pyarrow.compute.struct_field(outputs, "tokens").flatten())
    # An output without tokens has no last one, and was not cut: it is not long enough.
    last = tokens[np.maximum(starts + lengths - 1, 0)] if len(tokens) else lengths
    is_cut = (lengths >= max_decode_length) & ~np.isin(last, end_ids) & (lane >= 0)
    return ExitCounts(
        tokens=np.bincount(index, minlength=int(np.prod(shape))).reshape(shape),
        cut=np.bincount(lane[is_cut], minlength=len(lanes)),
        outputs=len(decoded),
    )


def _lengthened(tokens: np.ndarray, longest: int) -> np.ndarray:
    return np.pad(tokens, ((0, 0), (0, longest - tokens.shape[1]), (0, 0)))
