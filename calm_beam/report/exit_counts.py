"""How many tokens exit at each layer, by output position and threshold, and what that saves in operations."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from calm_beam.evaluation.flops import DecoderSizes, flops_appendix_b, flops_calm_table, full_model_flops
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.outputs import Generation, open_shard

from .stored import StoredOutputs

_MOST_COLUMNS = 64
_ROWS_AT_A_TIME = 2048


def counted_exits(stored: StoredOutputs, lanes: Sequence[int], *, num_layers: int) -> dict[str, Any]:
    """Returns exit layers by position as JSON values.

    Args:
      stored: The generations.
      lanes: Which outputs, the full model's being 0.
      num_layers: Decoder depth.

    Returns:
      `width`, the positions that stand in one column; `tokens`, for each lane and column the tokens of every layer;
      `cut`, for each lane the outputs cut at the `longest` length; and `outputs`, the examples that have some.
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
