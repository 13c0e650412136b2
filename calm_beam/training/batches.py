"""Training pairs of a prompt and a target, and padded batches of a few fixed shapes.

Prompts are encoded as in decoding.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.model import ModelConfig, architecture_of
from calm_beam.model.interface import Taught

# A source and a target. In training data: a prompt, and an output without its end token. In batches: the source tokens
# (`Architecture.taught_source`), and an output with its end token.
Pair = tuple[Sequence[int], Sequence[int]]

# Random stream for batches; other draws with the same seed use other streams.
_BATCH_STREAM = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The shape of a batch for pairs up to some length.

    Attributes:
      rows: Pairs in a batch.
      source: Width of the source.
      target: Width of the target.
    """

    rows: int
    source: int
    target: int


def end_pairs(
    pairs: Sequence[Pair],
    config: ModelConfig,
    *,
    max_input_length: int,
    max_target_length: int,
    end_id: int | None = None,
) -> list[Pair]:
    """Returns the pairs in the form of batches: source tokens, and targets cut to length with their end token.

    Args:
      pairs: Prompts encoded as in decoding, with eos, and targets without their end token.
      config: Config of the model to train.
      max_input_length: Most ids of a prompt, at least 1; longer ones are refused, since only their maker can cut them.
      max_target_length: Most ids of a target, its end token included, at least 1.
      end_id: End token of every target; None for the first of the model's end-of-sequence ids.

    Returns:
      One pair of source tokens and target per given pair.

    Raises:
      ValueError: If a prompt is empty or too long; says which. Also if prompts and targets are longer than the model
        has positions.

    >>> from calm_beam.model import T5Config
    >>> t5 = T5Config(vocab_size=9, emb_dim=2, num_heads=1, head_dim=2, mlp_dim=2, num_encoder_layers=1,
    ...     num_decoder_layers=1)
    >>> end_pairs([([5, 6, 1], [8, 7, 4])], t5, max_input_length=3, max_target_length=3)
    [([5, 6, 1], [8, 7, 1])]
    """
    architecture, end = architecture_of(config), config.end_ids[0] if end_id is None else end_id
    ended: list[Pair] = []
    longest_prompt, longest_target = 0, 0
    for index, (prompt, target) in enumerate(pairs):
        if not 0 < len(prompt) <= max_input_length:
            raise ValueError(
                f"pairs[{index}]: its prompt has {len(prompt)} ids, expected 1 to max_input_length={max_input_length}."
            )
        output = [*target[: max_target_length - 1], end]
        longest_prompt, longest_target = max(longest_prompt, len(prompt)), max(longest_target, len(output))
        ended.append((architecture.taught_source(prompt, output), output))
    architecture.check_positions(config, source=longest_prompt, steps=longest_target)
    return ended


def choose_shapes(pairs: Sequence[Pair], *, batch_tokens: int, num_shapes: int) -> tuple[BatchShape, ...]:
    """Returns the batch shapes, from narrow to wide, that pad the given pairs least.

    A pair belongs to the first shape that its longer side fits. All shapes have about `batch_tokens` tokens on the
    wider side. Fewer shapes need fewer compilations.

    Args:
      pairs: At least one, each side at least one id long.
      batch_tokens: Tokens of a batch on its wider side, padding included; a batch has at least one pair.
      num_shapes: Most shapes to use, at least 1.

    Returns:
      At most `num_shapes` shapes; both widths never fall from one to the next, and every pair fits the last.
    """
    lengths = np.array([(len(source), len(target)) for source, target in pairs])
    longer = lengths.max(axis=1)
    shapes = []
    for width in _least_padding(longer, num_shapes):
        # Includes narrower pairs, since leftovers of their shape fill the last batch of a wider one.
        source, target = (int(side) for side in lengths[longer <= width].max(axis=0))
        shapes.append(BatchShape(rows=max(1, batch_tokens // max(source, target)), source=source, target=target))
    return tuple(shapes)


def make_batches(
    pairs: Sequence[Pair], shapes: Sequence[BatchShape], *, generator: np.random.Generator | None = None
) -> Iterator[Taught]:
    """Yields batches that hold every pair exactly once.

    Pairs that do not fill a batch of their shape move on to the next wider shape, so at most one batch is not full.

    Args:
      pairs: Pairs from `end_pairs`; each fits one of the shapes.
      shapes: Shapes from `choose_shapes`, for at least these pairs.
      generator: Shuffles pairs and batches; None keeps their order within each shape.

    Yields:
      Batches of the given shapes; all except at most one are full.
    """
    for shape, indices in _epoch(pairs, shapes, generator=generator):
        yield pad_batch([pairs[index] for index in indices], shape)


def numbered_batches(
    pairs: Sequence[Pair], shapes: Sequence[BatchShape], *, seed: int, after: int = 0
) -> Iterator[tuple[int, Taught]]:
    """Yields the number of each training step, from 1, and its batch, endlessly: one shuffled epoch after the other.

    A batch is a function of seed and step only, so a run can resume at any step.

    Args:
      pairs: Pairs from `end_pairs`; at least one.
      shapes: Shapes from `choose_shapes`, for at least these pairs.
      seed: Decides the order, at least 0.
      after: Number of finished steps; the first batch is that of the next one.
    """
    batches_per_epoch = count_batches(pairs, shapes)
    for epoch in itertools.count(after // batches_per_epoch):
        batches = _epoch(pairs, shapes, generator=np.random.default_rng((seed, _BATCH_STREAM, epoch)))
        for step, (shape, indices) in enumerate(batches, start=epoch * batches_per_epoch + 1):
            if step > after:
                yield step, pad_batch([pairs[index] for index in indices], shape)


def count_batches(pairs: Sequence[Pair], shapes: Sequence[BatchShape]) -> int:
    """Returns the number of batches in an epoch, the same for all epochs; arguments as in `make_batches`."""
    # Which shape a pair belongs to does not depend on the order.
    return len(_epoch(pairs, shapes, generator=None))


def pad_batch(pairs: Sequence[Pair], shape: BatchShape) -> Taught:
    """Returns a batch of at most `shape.rows` pairs, end tokens included, padded with 0 to the shape; host arrays."""
    sources = np.zeros((shape.rows, shape.source), np.int32)
    targets = np.zeros((shape.rows, shape.target), np.int32)
    lengths = np.zeros((2, shape.rows), np.int32)
    for row, (source, target) in enumerate(pairs):
        sources[row, : len(source)] = source
        targets[row, : len(target)] = target
        lengths[:, row] = len(source), len(target)
    return Taught(source_tokens=sources, source_lengths=lengths[0], targets=targets, target_lengths=lengths[1])


def _epoch(
    pairs: Sequence[Pair], shapes: Sequence[BatchShape], *, generator: np.random.Generator | None
) -> list[tuple[BatchShape, list[int]]]:
    """Returns the batches of an epoch: the shape of each, and the indices of its pairs."""
    order = np.arange(len(pairs)) if generator is None else generator.permutation(len(pairs))
    by_shape: list[list[int]] = [[] for _ in shapes]
    widths = [max(shape.source, shape.target) for shape in shapes]
    for index in order:
        source, target = pairs[index]
        by_shape[int(np.searchsorted(widths, max(len(source), len(target))))].append(index)
    planned: list[tuple[BatchShape, list[int]]] = []
    left: list[int] = []
    for shape, indices in zip(shapes, by_shape, strict=True):
        waiting = left + indices
        full = len(waiting) // shape.rows * shape.rows
        planned += [(shape, waiting[start : start + shape.rows]) for start in range(0, full, shape.rows)]
        left = waiting[full:]
    if left:
        planned.append((shapes[-1], left))
    if generator is not None:
        planned = [planned[position] for position in generator.permutation(len(planned))]
    return planned


def _least_padding(lengths: np.ndarray, num_widths: int) -> list[int]:
    """Returns at most `num_widths` increasing widths that minimise the sum, over lengths, of the width each fits."""
    distinct, counts = np.unique(lengths, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    # best[n] is the least cost of the n shortest distinct lengths with the widths so far; cuts say where the last of
    # these widths begins.
    best = np.where(np.arange(len(distinct) + 1) == 0, 0.0, np.inf)
    cuts = []
    for _ in range(min(num_widths, len(distinct))):
        # [n, start]: lengths start..n-1 share the width distinct[n-1]
        cost = best[None, :] + np.concatenate([[0], distinct])[:, None] * (below[:, None] - below[None, :])
        cost[np.triu_indices(len(best), k=1)] = np.inf
        cuts.append(cost.argmin(axis=1))
        best = cost.min(axis=1)
    widths, end = [], len(distinct)
    for cut in reversed(cuts):
        if end:
            widths.append(int(distinct[end - 1]))
            end = int(cut[end])
    return widths[::-1]


def end_of_targets(vocabulary: Vocabulary, model: ModelConfig) -> int:
    """Returns the end token of targets: the vocabulary's own, if it is one of the model's end-of-sequence ids."""
    return next((index for index in vocabulary.end_ids if index in model.end_ids), model.end_ids[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedPairs:
    """Prompts encoded as in decoding, targets without their end token, and how many prompts were cut."""

    pairs: list[Pair]
    cut: int


def encoded_pairs(
    task_prefix: str,
    vocabulary: Vocabulary,
    *,
    rows: Sequence[Example],
    validation_rows: Sequence[Example],
    max_input_length: int,
    vocab_size: int,
) -> tuple[EncodedPairs, EncodedPairs]:
    """Returns training pairs, one for each reference of a row, and validation pairs with the first reference only.

    Args:
      task_prefix: Text before every input.
      vocabulary: Turns texts into ids.
      rows: Rows from `read_rows`.
      validation_rows: Rows from `read_rows`; may be empty.
      max_input_length: Most ids of a prompt.
      vocab_size: Number of ids that the model knows.

    Raises:
      UsageError: If a prompt cannot be encoded, or is too long and cannot be cut; names its row.
    """
    settings = DecodeSettings(
        # Only the settings that affect prompts are used.
        rule=ExitRule(),
        thresholds=(1.0,),
        max_decode_length=1,
        max_input_length=max_input_length,
        task_prefix=task_prefix,
    )

    def encoded(examples: Sequence[Example], references: slice) -> EncodedPairs:
        pairs: list[Pair] = []
        cut = 0
        for row in examples:
            try:
                prompt = encode_prompt(row, vocabulary, settings=settings, vocab_size=vocab_size, on_long="truncate")
            except DataError as error:
                raise UsageError(str(error)) from error
            pairs += [(prompt.ids, vocabulary.encode(reference)) for reference in row.references[references]]
            cut += prompt.truncated * len(row.references[references])
        return EncodedPairs(pairs=pairs, cut=cut)

    return encoded(rows, slice(None)), encoded(validation_rows, slice(1))
